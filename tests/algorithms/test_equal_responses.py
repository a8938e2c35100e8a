"""Which responses are equal: recorded responses and episodes are compared by their tokens. Samples are
compared by their text if the oracle reads text."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import ALPHABET, World
from fixtures import oat as oat_command
from pyarrow import parquet

import oat
from oat.environments.base import Turn
from oat.errors import ConfigError, ContractError, OatWarning
from oat.explore.base import NoExploration
from oat.ledger.reader import Reader
from oat.reports.accounts import _write_parquet, export_answers
from oat.testing import FakeOracle, check_oracle
from oat.types import UNASKED, Group, Key, Message, Prompt, Segment, Trajectory

TEMPLATE = """{% for m in messages %}{% if m.role == 'assistant' %}={% endif %}{{ m.reasoning_content }}\
{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{{ eos_token }}{% endfor %}\
{% if add_generation_prompt %}={% endif %}"""


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def call(name: str) -> dict[str, Any]:
    return said("", tool_calls=[{"type": "function", "function": {"name": name, "arguments": {}}}])


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


PAIRS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "tool calls": ([call("a")], [call("b")]),
    "reasoning": ([said("1", reasoning_content="a")], [said("1", reasoning_content="b")]),
    "an earlier turn": ([said("a"), asked("1+1="), said("1")], [said("b"), asked("1+1="), said("1")]),
    "what the tool said": ([call("a"), asked("2"), said("1")], [call("a"), asked("3"), said("1")]),
}


@pytest.fixture
def trained(world: World, tmp_path: Path) -> Callable[..., tuple[Path, oat.Trainer]]:
    """Return a function that trains DPO for two steps and returns the run directory."""

    def train(prompts: Any, oracle: Any, **sampling: Any) -> tuple[Path, oat.Trainer]:
        (tmp_path / "chat.jinja").write_text(TEMPLATE)
        tree = world.tree(
            "dpo",
            tmp_path,
            {"evaluation": None, "sampling": None, "stop.max_steps": 2, "tracking.keep_trajectories": True},
        )
        del tree["run_dir"]
        tree |= {
            "prompts": prompts,
            "oracle": oracle,
            "render": {"template": str(tmp_path / "chat.jinja")},
            **sampling,
        }
        trainer = oat.Trainer(**tree, run_dir=tmp_path / "run", quiet=True)
        trainer.train()
        return tmp_path / "run", trainer

    return train


@pytest.mark.parametrize("differ", PAIRS)
def test_recorded_pairs_that_differ_anywhere_are_learned_from(
    trained: Callable[..., tuple[Path, oat.Trainer]], differ: str
) -> None:
    chosen, rejected = PAIRS[differ]
    records = [
        {"prompt": [asked(f"{number}+1=")], "chosen": chosen, "rejected": rejected} for number in range(8)
    ]
    _, trainer = trained(records, "recorded")
    assert [(row["rows/trained"], row["answers/tied_frac"]) for row in trainer.metrics[1:]] == [
        (8.0, 0.0)
    ] * 2
    assert trainer.metrics[2]["loss/total"] < trainer.metrics[1]["loss/total"]


class FirstTurnCounts:
    """An environment that rewards the first response of two."""

    def reset(self, prompt: Prompt, generator: np.random.Generator) -> dict[str, Any]:
        return {"turns": 0}

    def step(self, state: dict[str, Any], response: str) -> Turn:
        turns = state["turns"] + 1
        return Turn(
            {"turns": turns},
            asked_again() if turns == 1 else None,
            float(ALPHABET.find(response)) if turns == 1 else 0.0,
        )


def asked_again() -> Message:
    return Message("user", "1+1=")


def test_episodes_with_equal_last_texts_are_told_apart_by_their_rewards(
    trained: Callable[..., tuple[Path, oat.Trainer]],
) -> None:
    sampling = {"max_new_tokens": 1, "environment": FirstTurnCounts}
    prompts = [{"prompt": [asked(f"{number % 10}+{number // 10}=")]} for number in range(64)]
    run, _ = trained(prompts, "environment", sampling=sampling, algorithm={"name": "dpo", "prompts": 64})
    store, found = Reader(run / "ledger.sqlite"), 0
    for row, _, label in store.answers(store.taken("train", 0)):
        first, second = store.groups("train", 0, 0)[row.member].trajectories
        if first.text == second.text and first.reward != second.reward:
            assert label == (0 if first.reward > second.reward else 1)
            found += 1
        if np.array_equal(first.ids, second.ids):
            assert row.question.oracle == UNASKED
    assert found > 0


def exported(run: Path, out: Path, layout: str = "preference") -> list[dict[str, Any]]:
    count, _ = export_answers(run, out, layout)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == count
    return rows


def test_recorded_responses_are_exported_whole(
    trained: Callable[..., tuple[Path, oat.Trainer]], tmp_path: Path
) -> None:
    """A run on recorded pairs exports records that equal its data. Another run can train on them."""
    records = [
        {"prompt": [asked(f"{number}+1=")], "chosen": c, "rejected": r}
        for number, (c, r) in enumerate(PAIRS.values())
    ] * 2
    run, _ = trained(records, "recorded")
    rows = exported(run, tmp_path / "pairs.jsonl")
    assert sorted(json.dumps(row, sort_keys=True) for row in rows) == sorted(
        json.dumps(record, sort_keys=True) for record in records
    )


def test_what_parquet_has_no_type_for_is_refused(
    trained: Callable[..., tuple[Path, oat.Trainer]], tmp_path: Path
) -> None:
    run, _ = trained(
        [
            {"prompt": [asked(f"{number}+1=")], "chosen": [call("a")], "rejected": [call("b")]}
            for number in range(8)
        ],
        "recorded",
    )
    assert oat_command("ledger", run, "--export", tmp_path / "pairs.parquet") == 2
    assert oat_command("ledger", run, "--export", tmp_path / "pairs.jsonl") == 0
    assert not [file.name for file in tmp_path.iterdir() if "parquet" in file.name]


@pytest.mark.parametrize(
    ("calls", "is_written"),
    [
        ([{"x": 1}, {"x": 2}], True),
        (["{}", "{}"], True),
        (["{}", {"x": 1}], False),
        ([{"x": 1}, {"y": 1}], False),
        ([{"x": 1}, {"x": 0.5}], False),
        ([{}, {}], False),
    ],
)
def test_parquet_holds_what_was_given_or_nothing(tmp_path: Path, calls: list[Any], is_written: bool) -> None:
    rows = [
        {"prompt": [asked("1"), said("", tool_calls=[{"name": "f", "arguments": arguments}])], "score": 1.0}
        for arguments in calls
    ]
    out = tmp_path / "rows.parquet"
    if is_written:
        _write_parquet(rows, out, out)
        found = parquet.read_table(out).to_pylist()
        assert [row["prompt"][1]["tool_calls"] for row in found] == [
            row["prompt"][1]["tool_calls"] for row in rows
        ]
    else:
        with pytest.raises(
            ConfigError,
            match=(
                r"rows.parquet: a field of the messages, such as `tool_calls`, has no one type .* write "
                r".jsonl"
            ),
        ):
            _write_parquet(rows, out, out)
        assert not [*tmp_path.iterdir()]


class SometimesTwice(FirstTurnCounts):
    """Asks again only if the first response is a digit."""

    def step(self, state: dict[str, Any], response: str) -> Turn:
        turn = super().step(state, response)
        return turn if response.isdigit() else Turn(turn.state, None, turn.reward)


@pytest.mark.sample("scored", seconds=0.3)
@pytest.mark.parametrize("layout", ["preference", "scored"])
def test_episodes_of_several_turns_are_left_out_of_exports_and_counted(
    trained: Callable[..., tuple[Path, oat.Trainer]], tmp_path: Path, layout: str
) -> None:
    sampling = {"max_new_tokens": 1, "environment": SometimesTwice}
    prompts = [{"prompt": [asked(f"{number % 10}+{number // 10}=")]} for number in range(32)]
    algorithm = {"name": "dpo" if layout == "preference" else "grpo", "prompts": 32, "samples": 2}
    run, _ = trained(prompts, "environment", sampling=sampling, algorithm=algorithm)
    store = Reader(run / "ledger.sqlite")
    whole = 0
    others = 0
    for row, answer, label in store.answers(
        [asked for step in (0, 1) for asked in store.taken("train", step)]
    ):
        group = store.groups("train", row.question.key.step, 0)[row.member]
        is_whole = all(len(trajectory.segments) == 2 for trajectory in group.trajectories)
        others += not is_whole
        whole += is_whole * (len(answer.values) if layout == "scored" else label is not None)
    assert min(whole, others) > 0
    with pytest.warns(OatWarning, match=f"^{others} answers about episodes of an environment are left out"):
        rows = exported(run, tmp_path / "rows.jsonl", layout)
    assert len(rows) == whole


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def choose(
    first: tuple[str, np.ndarray], second: tuple[str, np.ndarray], slot: str, *, reads_text: bool
) -> str:
    rows = [
        (Segment("context", ids(1)), Segment("model", response, mask=response > 0))
        for _, response in (first, second)
    ]
    texts = (first[0], second[0])
    group = Group(
        Prompt(1, 0, (Message("user", "p"),)),
        tuple(Trajectory(slot, row, "stop", text) for row, text in zip(rows, texts, strict=True)),
    )
    return NoExploration("compare", reads_text=reads_text).ask(group, Key("train", 0, 0, 0)).oracle


@pytest.mark.parametrize(
    ("slot", "reads_text", "second", "oracle"),
    [
        ("sampler", True, ("a", ids(2, 3)), UNASKED),
        ("sampler", True, ("b", ids(2)), ""),
        ("sampler", False, ("a", ids(2, 3)), ""),
        ("sampler", False, ("a", ids(2)), UNASKED),
        ("recorded", True, ("a", ids(2, 3)), ""),
        ("recorded", False, ("a ", ids(2)), UNASKED),
    ],
)
def test_who_sees_the_tokens(
    slot: str, reads_text: bool, second: tuple[str, np.ndarray], oracle: str
) -> None:
    assert choose(("a", ids(2)), second, slot, reads_text=reads_text) == oracle


def test_a_step_without_a_pair_that_is_asked_is_said_once(
    trained: Callable[..., tuple[Path, oat.Trainer]],
) -> None:
    records = [
        {"prompt": [asked(f"{number}+1=")], "chosen": [said("a")], "rejected": [said("a")]}
        for number in range(8)
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, trainer = trained(records, "recorded")
    assert [str(each.message)[:47] for each in caught if each.category is OatWarning] == [
        "step 1: nobody was asked about any of 4 pairs, "
    ]
    assert trainer.metrics[1]["answers/tied_frac"] == 1.0


def test_a_function_of_ids_that_says_nothing_of_it_is_found() -> None:
    class OfTokens(FakeOracle):
        def __init__(self) -> None:
            super().__init__(lambda question: [float(sum(each)) for each in question.ids])

    with pytest.raises(ContractError, match="of other tokens"):
        check_oracle(OfTokens())
