"""A user's explorer or callback that raises, returns or leaves behind values that a run cannot use."""

import asyncio
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import World, forked, oat
from trainers import lines

from oat import Trainer
from oat.commands.digest import digest_run
from oat.errors import ContractError, OatWarning
from oat.explore.base import NoExploration, Round
from oat.explore.find_rule import call_rule, find_rule
from oat.resolve.explorers import GuardedExplorer
from oat.testing.samples import make_group
from oat.types import ENSEMBLE, Key, Plan, Question

modes: list[Any] = []
PLAN = Plan(3, {"sampler": 2}, 3)
Change = Callable[[list[Any], list[Any], list[Question]], Any]
"""A function of a hostile explorer: it gets the groups, the keys and the questions of a sound explorer."""


class Mine(NoExploration):
    def __init__(self, change: Change, widens: Callable[[Plan], Any] = lambda plan: plan):
        super().__init__("compare")
        self.change, self.widens = change, widens

    def choose(self, round: Any) -> Any:
        return self.change(round.groups, round.keys, super().choose(round))

    def widen(self, plan: Plan) -> Any:
        return self.widens(plan)


def ask(change: Change) -> list[Question]:
    generator = np.random.default_rng(0)
    groups = [make_group(number, PLAN.samples, generator) for number in range(PLAN.prompts)]
    keys = [Key("train", 4, 0, number) for number in range(PLAN.prompts)]
    round = Round(groups, keys, {}, [], 0, generator)
    return GuardedExplorer(Mine(change), "compare", "mine.py:Mine").choose(round)


def each(**changes: Any) -> Change:
    return lambda groups, keys, good: [replace(question, **changes) for question in good]


def overwriting(groups: Any, keys: Any, good: Any) -> Any:
    groups[1].trajectories[0].segments[-1].ids[:] = 1
    return good


def inferring(groups: Any, keys: Any, good: Any) -> Any:
    modes.append(torch.inference_mode())
    modes[0].__enter__()
    return good


class NoEqual:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equal")

    __hash__ = object.__hash__


REFUSED: dict[str, tuple[Change, str]] = {
    "None": (lambda *_: None, "choose returned None; return a list of questions"),
    "a number": (lambda *_: 3, "choose returned 3"),
    "a set": (lambda groups, keys, good: {question.key for question in good}, r"choose returned \{"),
    "a dict": (lambda groups, keys, good: dict(enumerate(good)), r"choose returned \{"),
    "strings": (lambda *_: ["a"], r"choose returned \['a'\]"),
    "each twice": (
        lambda groups, keys, good: good + good,
        "asks more than one question with the key train/4/0/0/0",
    ),
    "another key": (
        lambda groups, keys, good: [replace(good[0], key=replace(keys[0], step=77))],
        "the key train/77/0/0/0, which it was not given",
    ),
    "a key of lists": (
        lambda groups, keys, good: [replace(good[0], key=replace(keys[0], step=[]))],
        "choose returned what cannot be looked at: it raised TypeError",
    ),
    "out of range": (each(picks=(0, 99)), r"picks \(0, 99\) of 2 responses"),
    "from the end": (each(picks=(0, -1)), r"picks \(0, -1\) of 2 responses"),
    "halves": (each(picks=(0.0, 1.0)), r"picks \(0\.0, 1\.0\)"),
    "numpy's": (each(picks=tuple(np.arange(2))), "pick places from 0 to 1, as plain int"),
    "nothing picked": (each(picks=(), candidates=()), "picks"),
    "one": (
        lambda groups, keys, good: [Question.about(groups[0], keys[0], "compare", (1,))],
        "compares 1 responses; pick 2",
    ),
    "other texts": (
        each(candidates=("bogus", "other")),
        r"has the candidates \('bogus', 'other'\), and its picks are",
    ),
    "no prompt": (each(messages=()), "speaks of another prompt than its group"),
    "another column": (each(columns={"level": NoEqual()}), "it raised RuntimeError: no equal"),
    "another reference": (each(reference="5"), "speaks of another prompt"),
    "another kind": (each(kind="score"), "is of the kind 'score', and 'compare' is wanted"),
    "for no ensemble": (each(oracle=ENSEMBLE), "is for the ensemble; put 'ensemble' in `needs`"),
    "short features": (each(features=np.zeros((1, 4), dtype=np.float32)), r"has features of shape \(1, 4\)"),
    "features that are none": (each(features=np.float32(1)), r"has features of shape \(\)"),
    "overwritten tokens": (overwriting, "changed the tokens that it was given"),
    "inference mode": (inferring, "left torch in another state"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_none_of_its_questions_is_refused(what: str) -> None:
    change, said = REFUSED[what]
    try:
        with pytest.raises(ContractError, match=said) as error:
            ask(change)
    finally:
        for mode in modes:
            mode.__exit__(None, None, None)
        modes.clear()
    assert "mine.py:Mine" in str(error.value)
    assert len(str(error.value)) < 3000


@pytest.mark.parametrize(
    "error", [ValueError("no"), GeneratorExit(), asyncio.CancelledError(), SystemExit(0)], ids=repr
)
def test_what_it_raises_passes_through(error: BaseException) -> None:
    """An exception of an explorer passes through, so its developer sees the traceback. The command line turns
    it into one message."""

    def change(*_: Any) -> Any:
        raise error

    with pytest.raises(type(error)) as found:
        ask(change)
    assert found.value is error


@pytest.mark.parametrize(
    "change",
    [
        lambda groups, keys, good: tuple(good),
        lambda groups, keys, good: (question for question in good),
        lambda groups, keys, good: groups.clear() or keys.clear() or good,
        lambda groups, keys, good: [torch.set_grad_enabled(False)] and good,
        lambda groups, keys, good: torch.set_default_dtype(torch.float64) or good,
        lambda groups, keys, good: signal.signal(signal.SIGINT, signal.SIG_IGN) and good,
    ],
    ids=["a tuple", "a generator", "emptied lists", "no gradients", "float64", "deaf"],
)
@pytest.mark.filterwarnings("ignore:mine.py:oat.errors.OatWarning")
def test_what_is_taken(change: Change) -> None:
    assert ask(change) == ask(lambda groups, keys, good: good)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def test_fewer_questions_than_groups_are_sound() -> None:
    assert ask(lambda *_: []) == []
    assert [question.key.occurrence for question in ask(lambda groups, keys, good: good[::-1])] == [2, 1, 0]


@pytest.mark.parametrize(
    "plan",
    [None, "x", replace(PLAN, prompts=0), replace(PLAN, prompts=1.5), replace(PLAN, samples={"sampler": -1})],
)
def test_a_plan_that_is_none_is_refused(plan: Any) -> None:
    with pytest.raises(ContractError, match=re.escape("explorer mine.py:Mine: widen returned")):
        GuardedExplorer(Mine(lambda *_: [], lambda given: plan), "compare", "mine.py:Mine").widen(PLAN)


@pytest.mark.parametrize("needs", [None, "sampler", frozenset({"critic"}), ["sampler"]])
def test_needs_that_no_actor_has_are_refused(needs: Any) -> None:
    explorer = Mine(lambda *_: [])
    explorer.needs = needs
    with pytest.raises(ContractError, match=r"explorer mine\.py:Mine: needs is"):
        GuardedExplorer(explorer, "compare", "mine.py:Mine")


SOURCE = """
from oat.explore.base import NoExploration

class Mine(NoExploration):
    def choose(self, *given):
        found = super().choose(*given)
        {body}
"""


@pytest.mark.sample("raise SystemExit(0)*", seconds=0.5)
@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("raise SystemExit(0)", 1, "line 7 of mine.py raised SystemExit: 0; mend it"),
        (
            "return found + found",
            1,
            (
                "explorer {file}:Mine: choose asks more than one question with the key train/0/0/0/0; ask "
                "one "
                "a group"
            ),
        ),
        ("return [q.picks for q in found]", 1, "explorer {file}:Mine: choose returned [("),
    ],
)
def test_a_run_ends_with_one_message(world: World, tmp_path: Path, body: str, code: int, said: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE.format(body=body))
    config = world.config(
        "dpo", tmp_path, {"explorer.name": f"{file}:Mine", "evaluation": None, "stop.max_steps": 1}
    )
    assert forked(lambda: oat("train", config), tmp_path / "log") == code
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last.startswith("oat train: " + said.format(file=file))


RULE = """
import numpy as np

def rule(rewards_MBG, valid_BG, generator):
    pairs_B2 = np.argsort(~valid_BG, axis=1, kind="stable")[:, :2]
    pairs_B2[{where}, 1] = pairs_B2[{where}, 0]
    return pairs_B2
"""


def users_rule(folder: Path, where: str) -> str:
    """Write a rule that returns one candidate twice for these prompts. Return its name."""
    (folder / "twice.py").write_text(RULE.format(where=where), encoding="utf-8")
    return f"{folder / 'twice.py'}:rule"


def test_a_rule_that_returns_one_candidate_twice_is_refused(tmp_path: Path) -> None:
    """The first prompt that has such a pair is enough. Prompts without two candidates are not its fault."""
    rule = find_rule(users_rule(tmp_path, "2"), {})
    rewards_MBG, valid_BG = np.zeros((4, 5, 3), dtype=np.float32), np.ones((5, 3), dtype=bool)
    valid_BG[0, 1:] = valid_BG[3, 0] = False
    with pytest.raises(ContractError, match=r"^explorer\.rule: .*twice\.py:rule chose candidate 1") as raised:
        call_rule(rule, rewards_MBG, valid_BG, np.random.default_rng(0))
    said = "twice for a prompt whose candidates are [1, 2]; return two different candidates; repair it"
    assert said in str(raised.value)
    sound = find_rule(users_rule(tmp_path, "0:0"), {})
    assert call_rule(sound, rewards_MBG, valid_BG, np.random.default_rng(0))[0].tolist() == [0, 0]


def test_a_run_with_a_rule_that_returns_one_candidate_twice_ends(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the refusal, nothing would be asked, and a run with a budget alone would never end."""
    changes = {
        "explorer": {"name": "ensemble", "samples": 4, "rule": users_rule(tmp_path, ":")},
        "evaluation": None,
        "stop": {"max_queries": 8, "max_steps": 2},
    }
    assert oat("train", world.config("dpo", tmp_path, changes)) == 1
    error = capsys.readouterr().err
    assert "explorer.rule: " in error
    assert "return two different candidates" in error
    assert "Traceback" not in error


@pytest.mark.sample("1", seconds=1.5)
@pytest.mark.parametrize("jobs", [1, 2])
def test_the_laboratory_refuses_the_rule_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    from oat.laboratory import report

    monkeypatch.setattr(report, "ROUNDS", 2)
    places = ("--worlds", "independent", "--agents", "ideal", "--out", tmp_path / "out")
    flags = ("--rules", users_rule(tmp_path, "3"), "--seeds", 1, "--jobs", jobs)
    assert oat("bench", "explore", *places, *flags) == 1
    error = capfd.readouterr().err
    assert "twice.py:rule chose candidate 0 twice" in error
    assert "Traceback" not in error


def test_what_a_callback_leaves_is_put_back(world: World, tmp_path: Path) -> None:
    def careless(step: int, row: dict[str, float]) -> None:
        torch.set_default_dtype(torch.float64)
        row.clear()

    Trainer(**lines(world, tmp_path / "plain"), quiet=True).train()
    with pytest.warns(
        OatWarning, match=r"the callback careless changed torch\.set_default_dtype and left it so"
    ):
        Trainer(**lines(world, tmp_path / "run"), callbacks=[careless], quiet=True).train()
    assert torch.get_default_dtype() == torch.float32
    assert digest_run(tmp_path / "run") == digest_run(tmp_path / "plain")
