"""Supervised learning of conversations: which tokens of a file of `messages` are learned, and how
conversations are packed into passes."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import World, oat, write_jsonl

from oat.data.fit import Fit
from oat.data.formats import Layout
from oat.data.prompts import PromptSet, Source
from oat.learner.models import LanguageModel
from oat.models.attention import Packed
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_lm, load_tokenizer
from oat.rollout.recorded import RecordedActor
from oat.text.renderer import Renderer
from oat.types import Trajectory

EXTENDS = """{% for message in messages %}{{ 'a' if message.role == 'user' else 'b' }}\
{{ message.content }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}b{% endif %}"""
REWRITES = EXTENDS.replace(
    "message.content }}", "message.content if loop.last else message.content.replace('=', '') }}"
)
"""A template that removes a character from earlier messages."""


def said(*texts: str, **fields: Any) -> list[dict[str, Any]]:
    """Return alternating messages, the user first. `fields` are further fields of the assistant's first
    message."""
    messages: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)
    ]
    return [messages[0], {**messages[1], **fields}, *messages[2:]]


def recorded(world: World, tmp_path: Path, *records: dict[str, Any]) -> tuple[Renderer, list[Trajectory]]:
    """Return the renderer, and the trajectories that `sft` gets from a file of records."""
    template = tmp_path / "chat.jinja"
    template.write_text(EXTENDS, encoding="utf-8")
    renderer = Renderer(load_tokenizer(str(world.folder / "model")), template=str(template))
    layout = Layout(responses=("completion",))
    prompts = PromptSet(Source(write_jsonl(tmp_path / "chats.jsonl", list(records))), layout)
    groups = RecordedActor(Fit(renderer), layout.responses).sample(list(prompts), {"sampler": 1}, ())
    return renderer, [row for group in groups for row in group.trajectories]


@pytest.mark.inventory(14)
@pytest.mark.parametrize("form", ["messages", "prompt and completion", "sharegpt"])
def test_every_turn_of_the_assistant_is_learned(world: World, tmp_path: Path, form: str) -> None:
    messages = said("1+1", "2", "+3", "5", "+4", "9")
    record: dict[str, Any] = {"messages": messages}
    if form == "prompt and completion":
        record = {"prompt": messages[:1], "completion": messages[1:]}
    if form == "sharegpt":
        names = {"user": "human", "assistant": "gpt"}
        record = {
            "conversations": [
                {"from": names[message["role"]], "value": message["content"]} for message in messages
            ]
        }
    renderer, (row,) = recorded(world, tmp_path, record)
    assert renderer.decode(row.ids) == "a1+1<eos>b2<eos>a+3<eos>b5<eos>a+4<eos>b9<eos>"
    assert [renderer.decode(segment.ids) for segment in row.segments] == [
        "a1+1<eos>b",
        "2<eos>",
        "a+3<eos>b",
        "5<eos>",
        "a+4<eos>b",
        "9<eos>",
    ]
    assert row.trained.tolist() == [
        number % 2 == 1 for number, segment in enumerate(row.segments) for _ in segment.ids
    ]


def test_weights_take_turns_out(world: World, tmp_path: Path) -> None:
    messages = said("1+1", "2", "+3", "5", "+4", "9")
    for weights, learned in (
        ((0, 1, 1), "5<eos>9<eos>"),
        ((1, 0, 1), "2<eos>9<eos>"),
        ((1, 1, 0), "2<eos>5<eos>"),
        ((0, 0, 1), "9<eos>"),
    ):
        weighted = [
            {**m, "weight": weights[n // 2]} if m["role"] == "assistant" else m
            for n, m in enumerate(messages)
        ]
        renderer, (row,) = recorded(world, tmp_path, {"messages": weighted})
        assert renderer.decode(row.ids) == "a1+1<eos>b2<eos>a+3<eos>b5<eos>a+4<eos>b9<eos>"
        assert renderer.decode(row.ids[row.trained]) == learned, weights


def config(
    world: World, tmp_path: Path, template: str, records: list[dict[str, Any]], **changes: Any
) -> Path:
    (tmp_path / "chat.jinja").write_text(template, encoding="utf-8")
    prompts = {"path": str(write_jsonl(tmp_path / "chats.jsonl", records)), "shuffle": False}
    common = {
        "prompts": prompts,
        "algorithm": {"name": "sft", "prompts": 4},
        "oracle.name": "recorded",
        "evaluation": None,
        "stop.max_steps": 1,
    }
    return world.config(
        "sft", tmp_path, {**common, "render.template": str(tmp_path / "chat.jinja"), **changes}
    )


def test_a_template_that_rewrites_history_is_refused_where_that_changes_a_turn(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A template that changes earlier turns is refused. `oat check` and `oat train` name the first record in
    which it changes a learned turn. Records that it leaves unchanged are learned, and so is a last message
    alone."""
    same, other = {"messages": said("1+1", "2", "+3", "5=")}, {"messages": said("1+9", "1=0", "+3", "13")}
    file = config(world, tmp_path, REWRITES, [same, other] * 2)
    for command in ("check", "train"):
        assert oat(command, file) == 2
        words = capsys.readouterr().err
        assert (
            "chats.jsonl:2: field 'completion': the response cannot be rendered: the chat template "
            "rewrites history"
        ) in words
        assert (
            "behind 'a1+9<eos>b1' it writes '0<eos>a+3<eos>b13<eos>' in the whole conversation, and "
            "'=0<eos>a+3<eos>b13<eos>' when"
        ) in words
        assert "choose a template that only adds" in words
    only_last = {"messages": said("1", "1=0", "3", "13", weight=0)}
    assert oat("train", config(world, tmp_path, REWRITES, [same, only_last] * 2)) == 0
    row = json.loads((tmp_path / "sft" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[1])
    assert (row["rows/trained"], row["response/length"]) == (2, 4), (
        "2, 5= and two ends; 13 and its end; each record once"
    )


@pytest.mark.inventory(14)
def test_conversations_are_packed(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations are packed into passes without padding, each from position 0. A pass holds as many of
    them as `micro_batch_tokens` allows."""
    passes: list[tuple[list[int], int]] = []
    hidden = CausalLM.hidden

    def watched(
        lm: CausalLM,
        input_ids: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        layout: Packed | None = None,
        also: object = None,
    ) -> torch.Tensor:
        if layout is not None and positions is not None and torch.is_grad_enabled():
            lengths = [span.stop - span.start for span in layout.spans]
            assert positions[0].tolist() == [place for length in lengths for place in range(length)]
            assert all(span.prefix is None for span in layout.spans)
            passes.append((lengths, input_ids.numel()))
        return hidden(lm, input_ids, positions=positions, layout=layout)

    records = [
        {"messages": said(f"{number}+" + "1" * (number % 7), "2" * (1 + number % 5), "=", str(number))}
        for number in range(40)
    ]
    file = config(
        world,
        tmp_path,
        EXTENDS,
        records,
        **{"algorithm.prompts": 40, "learner.micro_batch_size": None, "learner.micro_batch_tokens": 64},
    )
    monkeypatch.setattr(CausalLM, "hidden", watched)
    assert oat("train", file) == 0
    _, rows = recorded(world, tmp_path, *records)
    assert [length for lengths, _ in passes for length in lengths] == [len(row.ids) for row in rows]
    assert all(sum(lengths) == numel <= 64 for lengths, numel in passes)
    assert all(sum(one) + other[0] > 64 for (one, _), (other, _) in pairwise(passes))
    assert len(passes) < 20


@pytest.mark.inventory(14)
def test_neighbours_in_a_pass_are_invisible(world: World, tmp_path: Path) -> None:
    """The log-probabilities of rows in one pass equal those of each row alone. A token that only another row
    has gets a gradient of exactly zero."""
    renderer, (one, other) = recorded(
        world, tmp_path, {"messages": said("1+1", "2", "+3", "5")}, {"messages": said("7", "8", "9", "6")}
    )
    lm = load_lm(str(world.folder / "model"))
    model = LanguageModel(lm, num_tokens=renderer.num_tokens)
    together = model.outputs([other, one], {}, {"raw"})["raw"]
    alone = [model.outputs([row], {}, {"raw"})["raw"] for row in (other, one)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)
    table = lm.module.get_input_embeddings().weight
    (gradient,) = torch.autograd.grad(together[len(alone[0]) :].sum(), table)
    only_other = np.setdiff1d(other.ids, one.ids)
    assert len(only_other) == 4
    assert not gradient[torch.from_numpy(only_other)].any()
    assert gradient[torch.from_numpy(np.unique(one.ids[:-1]))].any(dim=1).all()
