"""Supervised fine-tuning, on recorded demonstrations and on the policy's own accepted samples."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import World, make_group, make_questions, oat, write_jsonl

from oat.algorithms.supervised import SFT, SFTConfig
from oat.errors import ConfigError
from oat.learner.batching import view_of
from oat.learner.reduction import Reduction
from oat.types import Answer, Batch, Feedback, Item, Mark, Segment


def item(number: int, samples: list[tuple[str, float]], marks: tuple[Mark, ...] | None = None) -> Item:
    """Return scored samples of a prompt whose only id is its number. Responses of equal length have equal
    ids."""
    group = make_group(number, *(text for text, _ in samples))
    context = Segment("context", np.array([number], dtype=np.int32))
    group = replace(
        group,
        trajectories=tuple(replace(row, segments=(context, *row.segments[1:])) for row in group.trajectories),
    )
    (question,) = make_questions([group], "score", 0, oracle="o")
    answer = Answer(
        question.key, tuple(score for _, score in samples), marks or ("ok",) * len(samples), len(samples)
    )
    return Item(group, question, answer, None)


def forward(*_: Any) -> dict[str, torch.Tensor]:
    raise AssertionError("SFT reads no model in prepare")


def prepared(*items: Item, **options: Any) -> tuple[SFT, Batch]:
    algorithm = SFT(SFTConfig(prompts=len(items), **options))
    return algorithm, algorithm.prepare(Feedback(0, items, 9), forward, np.random.default_rng(0))


def loss_and_gradient(algorithm: SFT, batch: Batch, logps: list[float]) -> tuple[float, list[float]]:
    raw, view = torch.tensor(logps, dtype=torch.float64, requires_grad=True), view_of(batch)
    loss = algorithm.losses({"policy": {"raw": raw}}, view)["loss/sft"]
    total = loss.coef * Reduction(batch)(loss, view, view.group_of_N, first=True)
    total.backward()
    assert raw.grad is not None
    return total.item(), raw.grad.tolist()


HAND = {
    # Rows of 2 and 1 tokens of one prompt, of 3 of another: -1 -2 | -3 | -4 -5 -6.
    "sequence": ((1.5 + 3 + 5) / 3, [-1 / 6, -1 / 6, -1 / 3, *[-1 / 9] * 3]),
    "token": (21 / 6, [-1 / 6] * 6),
    "prompt": ((2 + 5) / 2, [-1 / 6] * 6),
}


@pytest.mark.parametrize("reduction", HAND)
def test_loss_by_hand(reduction: str) -> None:
    algorithm, batch = prepared(
        item(0, [("ab", 0.0), ("c", 0.0)]), item(1, [("abc", 0.0)]), reduction=reduction
    )
    loss, gradient = loss_and_gradient(algorithm, batch, [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    expected, slopes = HAND[reduction]
    assert loss == pytest.approx(expected)
    assert gradient == pytest.approx(slopes)
    loss, gradient = loss_and_gradient(algorithm, batch, [-1e4] * 6)
    assert loss == pytest.approx(1e4)
    assert gradient == pytest.approx(slopes)


def slow(samples: list[tuple[int, list[float]]], reduction: str) -> float:
    """Return the loss of (prompt, log-probabilities of tokens) pairs, computed with lists."""
    prompts = sorted({prompt for prompt, _ in samples})
    parts = {
        "sequence": [logps for _, logps in samples],
        "token": [[x for _, logps in samples for x in logps]],
        "prompt": [[x for prompt, logps in samples if prompt == wanted for x in logps] for wanted in prompts],
    }[reduction]
    return -sum(sum(part) / len(part) for part in parts) / len(parts)


@pytest.mark.parametrize("reduction", HAND)
def test_equals_plain_python(reduction: str) -> None:
    generator = np.random.default_rng(2)
    words = ["a", "abcd", "ab", "abcdefg", "abc", "abcde"]
    items = [
        item(0, [(words[0], 1), (words[1], 0), (words[2], 1)]),
        item(1, [(words[3], 0)]),
        item(2, [(words[4], 1), (words[5], 1)]),
    ]
    algorithm, batch = prepared(*items, threshold=1.0, reduction=reduction)
    kept = [(0, words[0]), (0, words[2]), (2, words[4]), (2, words[5])]
    assert [row.text for row in batch.rows] == [word for _, word in kept]
    logps = [generator.normal(-2, 1, len(word)).tolist() for _, word in kept]
    expected = slow([(prompt, values) for (prompt, _), values in zip(kept, logps, strict=True)], reduction)
    assert loss_and_gradient(algorithm, batch, [x for values in logps for x in values])[0] == pytest.approx(
        expected
    )


@pytest.mark.inventory(15)
def test_only_accepted_unique_responses_are_learned() -> None:
    first = item(0, [("good", 1.0), ("bad", 0.4), ("good", 1.0), ("better", 2.0)])
    second = item(1, [("lost", 3.0), ("gone", 3.0), ("good", 0.5)], marks=("failed", "abstain", "ok"))
    third = item(2, [("poor", 0.1), ("worst", 0.0)])
    _, batch = prepared(first, second, third, threshold=0.5)
    assert [row.text for row in batch.rows] == ["good", "better", "good"]
    assert batch.group_of_N.tolist() == [0, 0, 1]
    found = {
        name: batch.metrics[name]
        for name in ("sft/accepted_frac", "sft/solved_frac", "sft/duplicates", "rows/trained")
    }
    assert found == {
        "sft/accepted_frac": pytest.approx(4 / 9),
        "sft/solved_frac": pytest.approx(2 / 3),
        "sft/duplicates": 1.0,
        "rows/trained": 3.0,
    }


def test_the_same_response_to_two_records_of_one_prompt_is_learned_once() -> None:
    one, other = item(4, [("good", 1.0)]), item(4, [("good", 1.0), ("fine by me", 1.0)])
    _, batch = prepared(one, other)
    assert [row.text for row in batch.rows] == ["good", "fine by me"]
    assert batch.group_of_N.tolist() == [0, 1]
    assert batch.metrics["sft/duplicates"] == 1.0


@pytest.mark.inventory(15)
def test_a_step_without_a_good_response_is_an_empty_batch() -> None:
    _, batch = prepared(item(0, [("bad", 0.0), ("worse", -1.0)]), threshold=0.5)
    assert (batch.size, batch.metrics["rows/trained"], batch.metrics["sft/solved_frac"]) == (0, 0.0, 0.0)


@pytest.mark.inventory(15)
def test_over_a_run_a_response_is_learned_once() -> None:
    """With `duplicates: run`, a prompt's response is learned once per run, as in RFT's data set. A response
    that was rejected may be accepted later. The objective's state keeps the learned responses over a
    restart."""

    def learned(algorithm: SFT, *items: Item) -> tuple[list[str], float]:
        batch = algorithm.prepare(Feedback(0, items, 9), forward, np.random.default_rng(0))
        return [row.text for row in batch.rows], batch.metrics["sft/duplicates"]

    config = SFTConfig(prompts=1, samples=3, threshold=0.5, duplicates="run")
    algorithm = SFT(config)
    assert learned(algorithm, item(0, [("a", 1.0), ("bc", 1.0), ("def", 0.0)])) == (["a", "bc"], 0.0)
    again = SFT(config)
    again.load_state(algorithm.state)
    for one in (algorithm, again):
        assert learned(one, item(0, [("a", 2.0), ("def", 1.0), ("a", 1.0)]), item(1, [("a", 1.0)])) == (
            ["def", "a"],
            2.0,
        )
        assert learned(one, item(0, [("a", 1.0), ("bc", 1.0), ("def", 0.9)])) == ([], 3.0)
    assert algorithm.state["learned"].tolist() == again.state["learned"].tolist()
    assert len(algorithm.state["learned"]) == 4
    every_step = SFT(SFTConfig(prompts=1, samples=1, threshold=0.5))
    assert [learned(every_step, item(0, [("a", 1.0)])) for _ in range(2)] == [(["a"], 0.0)] * 2
    assert every_step.state == {}


def test_without_a_threshold_no_score_is_read() -> None:
    _, batch = prepared(item(0, [("a", float("nan")), ("bc", -9.0), ("", 1.0)], marks=("failed", "ok", "ok")))
    assert [row.text for row in batch.rows] == ["a", "bc"]


def test_settings_out_of_range() -> None:
    with pytest.raises(ConfigError, match="samples is 0"):
        SFTConfig(prompts=1, samples=0)
    for threshold in (math.nan, math.inf, -math.inf):
        with pytest.raises(ConfigError, match=f"threshold is {threshold}"):
            SFTConfig(prompts=1, threshold=threshold)
    with pytest.raises(ConfigError, match=r"duplicates is run, and there is no algorithm\.threshold"):
        SFTConfig(prompts=1, duplicates="run")


def rows_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


CHAT = """{% for message in messages %}{{ 'a' if message.role == 'user' else 'b' }}\
{{ message.content }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}b{% endif %}"""
RECORDED = {
    "oracle.name": "recorded",
    "evaluation": None,
    "stop.max_steps": 30,
    "learner.learning_rate": 0.02,
    "prompts.reference_key": None,
}


@pytest.mark.sample("chat", seconds=2.5)
@pytest.mark.inventory(14)
@pytest.mark.parametrize("kind", ["plain", "chat"])
def test_learns_twenty_demonstrations_by_heart(world: World, tmp_path: Path, kind: str) -> None:
    # no answer is 0, which is an end of the tiny model's
    answers = [(f"{a}+{b}=", str((a + b) % 10)) for a in range(1, 6) for b in range(4)]
    records: list[dict[str, Any]] = [{"prompt": question, "answer": answer} for question, answer in answers]
    if kind == "chat":
        first, again = {"role": "assistant", "content": "2"}, {"role": "user", "content": "9+9="}
        for record in records:
            record["prompt"] = [{"role": "user", "content": record["prompt"]}]
            record["answer"] = [first, again, {"role": "assistant", "content": record["answer"]}]
    write_jsonl(tmp_path / "data.jsonl", records)
    changes = {**RECORDED, "prompts.path": str(tmp_path / "data.jsonl"), "prompts.responses": ["answer"]}
    (tmp_path / "chat.jinja").write_text(CHAT)
    changes |= {
        "algorithm": {"name": "sft", "prompts": 20},
        "render.template": str(tmp_path / "chat.jinja") if kind == "chat" else None,
    }
    assert oat("train", world.config("sft", tmp_path, changes)) == 0
    rows = rows_of(tmp_path / "sft")[1:]
    assert rows[-1]["loss/sft"] < 0.5 * rows[0]["loss/sft"]
    assert {row["rows/trained"] for row in rows} == {20.0}
    # Of each assistant turn a digit and the end; nothing of the user's turn between them.
    assert {row["response/length"] for row in rows} == {4.0 if kind == "chat" else 2.0}


def test_of_recorded_pairs_a_threshold_keeps_the_chosen(world: World, tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "pairs.jsonl", [{"prompt": f"{a}+1=", "chosen": "1", "rejected": "22"} for a in range(4)]
    )
    changes = {
        **RECORDED,
        "prompts.path": str(tmp_path / "pairs.jsonl"),
        "prompts.responses": ["chosen", "rejected"],
        "stop.max_steps": 1,
    }
    changes["algorithm"] = {"name": "sft", "prompts": 4, "threshold": 1.0}
    assert oat("train", world.config("sft", tmp_path, changes)) == 0
    row = rows_of(tmp_path / "sft")[1]
    assert (row["rows/trained"], row["sft/accepted_frac"]) == (4.0, 0.5)


@pytest.mark.inventory(15)
def test_samples_of_the_start_are_learned_once_each(world: World, tmp_path: Path) -> None:
    """RFT: the sampler keeps its first weights, so greedy samples are equal in both epochs. The second epoch
    learns nothing."""
    changes = {
        "algorithm": {"name": "sft", "prompts": 4, "threshold": -99.0, "duplicates": "run"},
        "evaluation": None,
    }
    records = write_jsonl(
        tmp_path / "data.jsonl", [{"prompt": f"{number}+1=", "answer": "1"} for number in range(4)]
    )
    changes |= {
        "learner.sync_every": 99,
        "prompts.path": str(records),
        "prompts.epochs": 2,
        "sampling.temperature": 0.0,
    }
    assert oat("train", world.config("sft", tmp_path, changes)) == 0
    first, second = rows_of(tmp_path / "sft")[1:]
    assert (first["rows/trained"], first["sft/duplicates"], first["weights/version"]) == (4.0, 0.0, 0)
    assert (second["rows/trained"], second["sft/duplicates"], second["optim/steps"]) == (0.0, 4.0, 1)


@pytest.mark.inventory(15)
def test_a_run_goes_on_after_steps_without_a_good_response(world: World, tmp_path: Path) -> None:
    """No response reaches the threshold of 99. The run ends normally with a row per step, and the weights
    stay the same."""
    assert oat("train", world.config("sft", tmp_path, {"algorithm.threshold": 99.0, "evaluation": None})) == 0
    rows = rows_of(tmp_path / "sft")[1:]
    assert [row["rows/trained"] for row in rows] == [0.0] * 4
    assert all("loss/sft" not in row for row in rows)
    assert rows[-1]["optim/steps"] == 0
