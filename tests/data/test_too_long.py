"""Recorded data that are too long are left out, or cut by a named rule. The first pass and the actor
agree."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import World, checked, oat, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.config.load import load_config
from oat.data.fit import TooLong
from oat.data.prompts import Prompts, Source
from oat.errors import DataError
from oat.models.loading import load_tokenizer
from oat.rollout.recorded import RecordedActor
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.types import Trajectory

PAIR = ("chosen", "rejected")
CHAT = (
    "{% for m in messages %}{{ 'a' if m.role == 'user' else 'b' }}{{ m.content }}{{ eos_token }}{% endfor %}"
)
CHAT += "{% if add_generation_prompt %}b{% endif %}"


@pytest.fixture(scope="module")
def plain(world: World) -> Renderer:
    return Renderer(load_tokenizer(str(world.folder / "model")), template=None)


@pytest.fixture
def chat(world: World, tmp_path: Path) -> Renderer:
    (tmp_path / "chat.jinja").write_text(CHAT, encoding="utf-8")
    return Renderer(load_tokenizer(str(world.folder / "model")), template=str(tmp_path / "chat.jinja"))


def read(
    records: list[Any], renderer: Renderer, rule: TooLong, responses: tuple[str, ...] = PAIR, **limits: int
) -> tuple[Prompts, list[Any]]:
    """Return the prompts of records, and the rows that the actor makes of them, by group."""
    prompts = Prompts([Source(records)], renderer, Seeds(0), responses=responses, too_long=rule, **limits)  # type: ignore[arg-type]
    groups = RecordedActor(prompts.fit, responses).sample(prompts.all(), {}, ())
    return prompts, [group.trajectories for group in groups]


def seen(renderer: Renderer, rows: tuple[Trajectory, ...]) -> list[tuple[str, str, str, str]]:
    """Return of each row the context, the learned text, the finish reason, and the response's text."""
    found = []
    for row in rows:
        context, learned = (renderer.decode(row.ids[mask]) for mask in (~row.trained, row.trained))
        found.append((context, learned, row.finish_reason, row.text))
    return found


def test_the_start_of_a_prompt_is_cut(plain: Renderer) -> None:
    """A row of 17 tokens (12 of the prompt, 4 of the response, <eos>) may have 14, so the prompt loses its
    first three. Both responses follow the same nine tokens."""
    record = {"prompt": "123456789012", "chosen": "abab", "rejected": "b"}
    prompts, (rows,) = read([record], plain, "cut_prompt_start", max_tokens=14)
    assert seen(plain, rows) == [
        ("456789012", "abab<eos>", "stop", "abab"),
        ("456789012", "b<eos>", "stop", "b"),
    ]
    assert (prompts.cut, prompts.dropped, prompts.longest) == (1, 0, 14)
    prompts, (rows,) = read([record], plain, "cut_prompt_start", max_tokens=17)
    assert seen(plain, rows)[1] == ("123456789012", "b<eos>", "stop", "b")
    assert prompts.cut == 0


def test_the_end_of_a_response_is_cut(plain: Renderer) -> None:
    """A response that is cut has no end of text and counts as truncated. The shorter response keeps its
    end."""
    record = {"prompt": "1234", "chosen": "ababab", "rejected": "ab"}
    prompts, (rows,) = read([record], plain, "cut_response_end", max_tokens=7)
    assert seen(plain, rows) == [("1234", "aba", "length", "aba"), ("1234", "ab<eos>", "stop", "ab")]
    assert (prompts.cut, prompts.dropped, prompts.longest) == (1, 0, 7)
    prompts, (rows,) = read([record], plain, "cut_response_end", max_tokens=10)
    assert seen(plain, rows)[0] == ("1234", "ababab", "length", "ababab"), "without its end alone"
    assert read([record], plain, "cut_response_end", max_tokens=11)[0].cut == 0


@pytest.mark.parametrize(
    ("rule", "kept", "dropped"),
    [
        ("cut_prompt_start", {"prompt": "12345678", "chosen": "abab"}, {"chosen": "ababab"}),
        ("cut_response_end", {"prompt": "123456"}, {}),
    ],
)
def test_what_no_cut_makes_room_for_is_left_out(
    plain: Renderer, rule: TooLong, kept: dict[str, str], dropped: dict[str, str]
) -> None:
    """A record is left out if no cut makes it fit into seven tokens. At least one token of the prompt, and
    one learned token of each response, must remain."""
    too_long = {"prompt": "1234567", "chosen": "ab", "rejected": "b", **dropped}
    prompts, (rows,) = read([too_long, {"chosen": "ab", "rejected": "b", **kept}], plain, rule, max_tokens=7)
    assert (prompts.size, prompts.dropped, prompts.cut) == (1, 1, 1)
    assert max(len(row.ids) for row in rows) == 7
    why = (
        "1 of 2 prompts with their longest response are longer than 7 tokens and left out, since "
        f"prompts.too_long: {rule} makes no room for them"
    )
    assert prompts.notes[1:] == (
        f"records: {why}",
        (
            "records: 1 of 2 prompts with their longest response are longer than 7 tokens and cut "
            f"(prompts.too_long: {rule})"
        ),
    )
    with pytest.raises(
        DataError,
        match=(
            f"all 1 prompts with .* longer than 7 tokens, and prompts.too_long: {rule} makes no room for any"
        ),
    ):
        read([too_long], plain, rule, max_tokens=7)


def test_the_smaller_of_both_limits_counts(plain: Renderer) -> None:
    record = {"prompt": "123456789012", "chosen": "abab", "rejected": "b"}
    for limits in ({"room": 14}, {"room": 14, "max_tokens": 20}, {"room": 20, "max_tokens": 14}):
        assert read([record], plain, "cut_prompt_start", **limits)[0].longest == 14
    with pytest.raises(DataError, match="cut them"):
        read([record], plain, "leave_out", room=14)


def test_a_chat_loses_its_opening_and_a_conversation_its_last_turns(chat: Renderer) -> None:
    record: dict[str, Any] = {
        "prompt": [{"role": "user", "content": "123456"}],
        "chosen": "7",
        "rejected": "8",
    }
    _, (rows,) = read([record], chat, "cut_prompt_start", max_tokens=7)
    assert seen(chat, rows)[0] == ("456<eos>b", "7<eos>", "stop", "7")
    turns = [{"role": ("user", "assistant")[turn % 2], "content": str(turn) * 3} for turn in range(4)]
    whole = "a000<eos>b111<eos>a222<eos>b333<eos>"
    for most, text in ((18, "33"), (13, "111"), (8, "11")):
        _, (rows,) = read([{"messages": turns}], chat, "cut_response_end", ("completion",), max_tokens=most)
        (row,) = rows
        assert chat.decode(row.ids) == "".join(_tokens(whole)[:most])
        assert (row.finish_reason, row.text) == ("length", text)


def _tokens(text: str) -> list[str]:
    found = []
    while text:
        size = len("<eos>") if text.startswith("<eos>") else 1
        found.append(text[:size])
        text = text[size:]
    return found


def test_a_text_without_a_prompt_has_only_an_end(plain: Renderer) -> None:
    texts = [{"text": "12345678"}, {"text": "12"}]
    prompts, (long, _) = read(texts, plain, "cut_response_end", ("completion",), max_tokens=5)
    assert seen(plain, long) == [("1", "2345", "length", "12345")]
    assert prompts.cut == 1
    prompts, (_,) = read(texts, plain, "cut_prompt_start", ("completion",), max_tokens=5)
    assert (prompts.dropped, prompts.cut) == (1, 0)


RECORDS = st.lists(st.tuples(*[st.text("12ab", min_size=1, max_size=9)] * 3), min_size=1, max_size=6)


@pytest.mark.parametrize("rule", ["leave_out", "cut_prompt_start", "cut_response_end"])
@given(texts=RECORDS, most=st.integers(2, 20))
@settings(max_examples=60, deadline=None)
def test_the_first_pass_and_the_actor_agree(
    plain: Renderer, rule: TooLong, texts: list[tuple[str, str, str]], most: int
) -> None:
    """The first pass and the actor find the same length of the longest row and the same number of cut
    records. Every record that fits, or fits after a cut, is there."""
    records = [dict(zip(("prompt", *PAIR), each, strict=True)) for each in texts]
    over = [max(len(a), len(b)) + len(prompt) + 1 - most for prompt, a, b in texts]
    fits = {"leave_out": [False] * len(texts)}
    fits["cut_prompt_start"] = [over[number] < len(prompt) for number, (prompt, *_) in enumerate(texts)]
    fits["cut_response_end"] = [len(prompt) < most for prompt, *_ in texts]
    kept = [number for number in range(len(texts)) if over[number] <= 0 or fits[rule][number]]
    if not kept:
        with pytest.raises(DataError, match="are longer than"):
            read(records, plain, rule, max_tokens=most)
        return
    prompts, groups = read(records, plain, rule, max_tokens=most)
    assert [prompt.row - 1 for prompt in prompts.all()] == kept
    assert prompts.longest == max(len(row.ids) for rows in groups for row in rows) <= most
    assert prompts.cut == sum(over[number] > 0 for number in kept)
    for number, rows in zip(kept, groups, strict=True):
        prompt, *responses = texts[number]
        contexts = [plain.decode(row.ids[~row.trained]) for row in rows]
        assert contexts[0] == contexts[1], "both responses of a pair have the same prompt"
        assert prompt.endswith(contexts[0])
        for row, text in zip(rows, responses, strict=True):
            assert (row.finish_reason == "stop") == (plain.decode(row.ids[-1:]) == "<eos>")
            assert text.startswith(row.text)
            assert row.trained.any()


LONG = [{"prompt": "1" * size, "chosen": "2" * 4, "rejected": "3"} for size in (4, 70, 80, 5)]
COUNTS = (("pairs", "2 of 4"), ("held_out", "1 of 3"))
HELD_OUT = [{"prompt": "1" * size, "chosen": "2" * 4, "rejected": "3"} for size in (4, 90, 6)]


def offline(world: World, tmp_path: Path, name: str = "dpo", **changes: Any) -> Path:
    write_jsonl(tmp_path / "pairs.jsonl", LONG)
    write_jsonl(tmp_path / "held_out.jsonl", HELD_OUT)
    only: dict[str, Any] = {
        "prompts.path": str(tmp_path / "pairs.jsonl"),
        "oracle": {"name": "recorded"},
        "sampling": None,
        "stop.max_steps": 2,
    }
    only |= {
        "prompts.reference_key": None,
        "evaluation": {"pairs": str(tmp_path / "held_out.jsonl"), "every": 1},
    }
    return world.config(name, tmp_path, {**only, **changes})


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_cuts_and_counts(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with a context of 64 tokens cuts its records by the named rule and reports their number. Held-out
    pairs are cut by the same rule."""
    config = offline(world, tmp_path)
    assert oat("train", config) == 2
    assert (
        "(2 of 4 records are too long); drop longer ones (prompts.max_tokens: 64), cut them "
        "(prompts.too_long)"
    ) in capsys.readouterr().err
    flag = ("--prompts.too_long", "cut_prompt_start")
    notes = [
        (
            f"{tmp_path / name}.jsonl: {of} prompts with their longest response are longer than 64 tokens "
            "and "
            "cut"
        )
        for name, of in COUNTS
    ]
    for command in ("check", "train"):
        assert oat(command, config, *flag) == 0
        said = "".join(capsys.readouterr())
        assert [said.count(note) for note in notes] == [1, 1]
    said, _ = checked(capsys, config, *flag)
    assert (said["prompts"], said["longest prompt with its response"]) == (4, 64)
    first, *others = rows(tmp_path / "dpo")
    assert (first["prompts/cut"], first["prompts/dropped"]) == (3, 0)
    assert first["eval/pairs/count"] == 3
    assert not any("prompts/cut" in row for row in others)


def test_a_cut_response_is_a_truncated_one(world: World, tmp_path: Path) -> None:
    records = [{"prompt": "1", "completion": "2" * size} for size in (4, 80)] * 2
    data = write_jsonl(tmp_path / "sft.jsonl", records)
    changes = {
        "prompts": {"path": str(data), "too_long": "cut_response_end", "max_tokens": 20, "shuffle": False},
        "evaluation": None,
    }
    changes["algorithm"] = {"name": "sft", "prompts": 4}
    assert oat("train", offline(world, tmp_path, **changes)) == 0
    _, row, _ = rows(tmp_path / "dpo")
    assert row["response/truncated_frac"] == 0.5
    assert row["response/tokens"] == 2 * (5 + 19)


@pytest.mark.slow(
    instead="test_a_run_cuts_and_counts, and test_a_run_from_before_the_rule_goes_on", seconds=0.9
)
def test_a_run_goes_on_by_the_rule_that_it_began_with(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = offline(world, tmp_path)
    assert oat("train", config, "--prompts.too_long", "cut_prompt_start") == 0
    assert oat("train", config, "--prompts.too_long", "cut_response_end", "--stop.max_steps", 3) == 2
    assert 'prompts.too_long: "cut_prompt_start" -> "cut_response_end"' in capsys.readouterr().err


def test_a_run_from_before_the_rule_goes_on(world: World, tmp_path: Path) -> None:
    """A run of an earlier version, whose config.yaml has no field `too_long`, can be continued."""
    config = offline(world, tmp_path, **{"prompts.max_tokens": 64})
    assert oat("train", config) == 0
    stored = tmp_path / "dpo" / "config.yaml"
    tree = yaml.safe_load(stored.read_text())
    assert tree["prompts"].pop("too_long") == "leave_out"
    stored.write_text(yaml.safe_dump(tree, sort_keys=False))
    assert load_config(stored)[0].prompts.too_long == "leave_out"
    assert oat("train", config, "--stop.max_steps", 3) == 0
    assert [row["step"] for row in rows(tmp_path / "dpo")] == [0, 1, 2, 3]


def test_nothing_is_cut_that_is_sampled(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without recorded data, `prompts.too_long` has no effect and is refused. With held-out pairs only the
    pairs are cut, and no training prompt."""
    assert oat("check", world.config("dpo", tmp_path, {"prompts.too_long": "cut_prompt_start"})) == 2
    assert "nothing reads prompts.too_long" in capsys.readouterr().err
    write_jsonl(tmp_path / "held_out.jsonl", HELD_OUT)
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "1" * 70, "answer": "1"}] * 4)
    changes = {
        "prompts.too_long": "cut_prompt_start",
        "evaluation": {"pairs": str(tmp_path / "held_out.jsonl"), "every": 1},
    }
    assert oat("check", world.config("dpo", tmp_path, changes)) == 0
    assert (
        "held_out.jsonl: 1 of 3 prompts with their longest response are longer than 64 tokens and cut"
        in capsys.readouterr().out
    )
    assert oat("check", world.config("dpo", tmp_path, {**changes, "prompts.path": str(data)})) == 2
    assert "prompts.jsonl:1: the prompt has 70 tokens" in capsys.readouterr().err
