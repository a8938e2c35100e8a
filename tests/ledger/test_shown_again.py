"""A reward function that may look at the group is shown every response of every group, in each step anew.
Each one is a query. A run that was begun before, or that says so, shows equal responses once."""

import collections
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import World, forked, kill_at, logged, make_group, make_questions, named, oat

from oat.commands.digest import digest_run
from oat.errors import ConfigError
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.oracles.callables import CallableOracle
from oat.oracles.preferences import Preferences
from oat.reports.accounts import accounts
from oat.types import Price
from oat.types.questions import Budget

RARITY = """
import collections


def rarity(prompts, completions, **columns):
    seen = collections.Counter(zip(prompts, completions))
    return [1.0 / seen[pair] for pair in zip(prompts, completions)]


async def late(prompts, completions, **columns):
    return rarity(prompts, completions)
"""
MANY_EQUAL = {
    "algorithm.prompts": 2,
    "sampling.max_new_tokens": 1,
    "prompts.max_prompts": 2,
    "stop.max_steps": 3,
    "checkpoint.every": 1,
    "evaluation": None,
}


def rarity(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    seen = collections.Counter(zip(prompts, completions, strict=True))
    return [1.0 / seen[pair] for pair in zip(prompts, completions, strict=True)]


def test_equal_responses_are_shown_and_counted_in_each_step(opened: Callable[..., Ledger]) -> None:
    oracle = CallableOracle(rarity, "rarity")
    with closing(opened(oracle, budgets={"train": Budget(queries=9)})) as ledger:
        for step in range(3):
            groups = [make_group(0, "a", "b", "a", "a")]
            asked = make_questions(groups, "score", step, oracle="o")
            assert oracle.price(asked[0]) == ledger.price(asked) == Price(4)
            ledger.ask(step, 0, groups, asked)
            (item,) = ledger.take_feedback(step, 1).items
            third = pytest.approx(1 / 3)
            is_paid = step < 2
            assert item.answer.values == ((third, 1.0, third, third) if is_paid else (0.5,) * 4)
            assert set(item.answer.marks) == {"ok" if is_paid else "unpaid"}
        assert ledger.committed("train") == Price(8)


def test_pairs_that_it_scores_are_known_again(opened: Callable[..., Ledger]) -> None:
    calls = []

    def counted(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        calls.append([*completions])
        return rarity(prompts, completions)

    with closing(opened(Preferences(CallableOracle(counted, "rarity")))) as ledger:
        for step, pair in enumerate((("a", "b"), ("b", "a"))):
            groups = [make_group(0, *pair)]
            ledger.ask(step, 0, groups, make_questions(groups, "compare", step, oracle="o"))
            assert ledger.take_feedback(step, 1).items[0].answer.marks == ("tie",)
    assert calls == [["a", "b"]]


def trained(world: World, folder: Path, changes: Mapping[str, Any]) -> Path:
    """Write the configuration of a run that asks a function about the group, and return its file."""
    (world.folder / "rarity.py").write_text(RARITY, encoding="utf-8")
    folder.mkdir()
    name = {"oracle.name": f"{world.folder / 'rarity.py'}:rarity"}
    return world.config("grpo", folder, {**MANY_EQUAL, **name, **changes})


@pytest.mark.sample("async", seconds=3.0)
@pytest.mark.parametrize(
    ("changes", "place", "call"),
    [
        ({}, "answers are recorded", 2),
        pytest.param(
            {"oracle.name": "{folder}/rarity.py:late"},
            "oat.ledger.outstanding:Outstanding.submit",
            2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "async"],
)
def test_a_killed_run_is_shown_the_same_groups(
    world: World, tmp_path: Path, changes: dict[str, Any], place: str, call: int
) -> None:
    changes = {
        name: value.format(folder=world.folder) if isinstance(value, str) else value
        for name, value in changes.items()
    }
    unbroken, killed = (trained(world, tmp_path / name, changes) for name in ("unbroken", "killed"))
    log = tmp_path / "log"
    assert oat("train", unbroken) == 0
    assert forked(lambda: kill_at(*named(place), call) or oat("train", killed), log) < 0
    assert logged(log, "train", killed) == 0, log.read_text()
    runs = [file.with_suffix("") for file in (unbroken, killed)]
    assert digest_run(runs[0]) == digest_run(runs[1])
    for run in runs:
        with closing(Store(run / "ledger.sqlite")) as store:
            taken = [row for step in range(3) for row in store.taken("train", step)]
            for row in taken:
                texts = row.question.candidates
                assert list(store.answer(row)[0].values) == pytest.approx(rarity(["p"] * len(texts), texts))
            assert any(len({*row.question.candidates}) < len(row.question.candidates) for row in taken)
            (train,) = accounts(store)
    assert (train.queries, train.cached) == (3 * 2 * 3, 0)


def test_a_run_that_was_begun_before_goes_on_as_it_began(world: World, tmp_path: Path) -> None:
    """Its configuration lacks the setting. It shows equal responses once, like a run with
    `oracle.whole_groups: false`, and says so once."""
    unbroken = trained(world, tmp_path / "unbroken", {"oracle.whole_groups": False})
    begun = trained(world, tmp_path / "begun", {})
    assert oat("train", unbroken) == 0
    assert oat("train", begun, "--stop.max_steps", 1, "--oracle.whole_groups", "false") == 0
    run = begun.with_suffix("")
    stored = yaml.safe_load((run / "config.yaml").read_text())
    assert stored["oracle"].pop("whole_groups") is False
    (run / "config.yaml").write_text(yaml.safe_dump(stored))
    (entry,) = json.loads((run / "environment.json").read_text())
    entry.pop("changes")
    (run / "environment.json").write_text(json.dumps([entry]))
    said = []
    for steps in (2, 3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert oat("train", begun, "--stop.max_steps", steps) == 0
        said.append(sum("oracle.whole_groups: false" in str(each.message) for each in caught))
    assert said == [1, 0]
    assert digest_run(run) == digest_run(unbroken.with_suffix(""))
    with closing(Store(run / "ledger.sqlite")) as store:
        (train,) = accounts(store)
    assert train.queries < 3 * 2 * 3
    assert oat("train", begun, "--stop.max_steps", 4, "--oracle.whole_groups", "true") != 0


def test_a_new_run_records_what_it_shows(world: World, tmp_path: Path) -> None:
    config = trained(world, tmp_path / "new", {"stop.max_steps": 1})
    assert oat("train", config) == 0
    assert (
        yaml.safe_load((config.with_suffix("") / "config.yaml").read_text())["oracle"]["whole_groups"] is True
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"oracle.repeats": 2}, "oracle.repeats is 2"),
        ({"oracle.name": "exact_match", "oracle.whole_groups": False}, "nothing reads oracle.whole_groups"),
        ({"oracle.name": "exact_match", "oracle.whole_groups": True}, "nothing reads oracle.whole_groups"),
    ],
)
def test_what_contradicts_it_is_refused(
    world: World, tmp_path: Path, changes: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = trained(world, tmp_path / "wrong", changes)
    assert oat("check", config) == ConfigError.exit_code
    assert words in capsys.readouterr().err
