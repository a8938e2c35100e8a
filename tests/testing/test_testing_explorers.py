"""`check_explorer` passes the explorers of `oat`, and finds the faults of others."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oat.errors import ConfigError, ContractError
from oat.explore.base import NoExploration
from oat.testing import check_explorer
from oat.types import ENSEMBLE, Plan, Question

PROTOCOL = Path(__file__).parents[1] / "protocol"


@pytest.mark.parametrize("kind", ["compare", "score"])
def test_ours_passes(kind: Any) -> None:
    check_explorer(NoExploration, kind)


@pytest.mark.parametrize("name", ["oat.explore.apl:APL", "oat.explore.ensemble:EnsembleExplorer"])
def test_other_explorers_pass(name: str) -> None:
    check_explorer(name, samples=5)
    check_explorer(name, plan=Plan(12, {"sampler": 2}, 12))


class Broken(NoExploration):
    """Compares the first two responses. Subclasses add a fault."""

    def choose(self, round: Any) -> Any:
        return [self.spoilt(question, round.generator) for question in super().choose(round)]

    def spoilt(self, question: Question, generator: np.random.Generator) -> Question:
        return question


class GlobalRandomness(Broken):
    def spoilt(self, question: Question, generator: np.random.Generator) -> Question:
        return question if random.random() < 0.5 or question.oracle else turned(question)


class OfItsOwn(Broken):
    def __init__(self, kind: Any):
        super().__init__(kind)
        self.generator = np.random.default_rng(0)

    def spoilt(self, question: Question, generator: np.random.Generator) -> Question:
        return question if self.generator.random() < 0.5 or question.oracle else turned(question)


class OtherTexts(Broken):
    def spoilt(self, question: Question, generator: np.random.Generator) -> Question:
        return replace(question, candidates=question.candidates[::-1])


class OutOfRange(Broken):
    def spoilt(self, question: Question, generator: np.random.Generator) -> Question:
        return replace(question, picks=(0, 2))


class OtherKind(Broken):
    def spoilt(self, question: Question, generator: np.random.Generator) -> Question:
        return replace(question, kind="score")


class WithItself(Broken):
    def spoilt(self, question: Question, generator: np.random.Generator) -> Question:
        return replace(question, oracle="")


class OtherPrompt(Broken):
    def spoilt(self, question: Question, generator: np.random.Generator) -> Question:
        return replace(question, reference=None)


class NeverBelieved(Broken):
    def spoilt(self, question: Question, generator: np.random.Generator) -> Question:
        return replace(question, oracle=question.oracle or ENSEMBLE)


class Twice(Broken):
    def choose(self, round: Any) -> Any:
        return 2 * super().choose(round)


class NewKeys(Broken):
    def choose(self, round: Any) -> Any:
        return super().choose(replace(round, keys=[replace(key, round=1) for key in round.keys]))


class Nothing(Broken):
    def choose(self, round: Any) -> Any:
        return []


class Sorting(Broken):
    needs = frozenset({"sampler"})

    def choose(self, round: Any) -> Any:
        for logps in round.scores["sampler"]:
            logps.sort()
        return super().choose(round)


class Annotating(Broken):
    def choose(self, round: Any) -> Any:
        for group in round.groups:
            group.prompt.columns["seen"] = True
        return super().choose(round)


class Failing(Broken):
    def choose(self, round: Any) -> Any:
        return round.scores["sampler"]


class Unknown(Broken):
    needs = frozenset({"critic"})


class Growing(Broken):
    calls = 0

    def widen(self, plan: Plan) -> Plan:
        Growing.calls += 1
        return replace(plan, prompts=plan.prompts + Growing.calls)


class Wide(Broken):
    def widen(self, plan: Plan) -> Plan:
        return replace(plan, prompts=int(plan.prompts * 1.5) / 1)


class InPlace(Broken):
    def widen(self, plan: Plan) -> Plan:
        plan.samples["sampler"] = 2 * plan.samples["sampler"]
        return plan


def turned(question: Question) -> Question:
    return replace(question, picks=question.picks[::-1], candidates=question.candidates[::-1])


@pytest.mark.parametrize(
    ("explorer", "said"),
    [
        (GlobalRandomness, r"choose asked other questions .* draw numbers from `generator` only"),
        (OfItsOwn, r"when it was asked once more \(step 0\); .* keep nothing between calls"),
        (OtherTexts, r"has the candidates \('\w+', '\w+'\), and its picks are .*; use Question.about"),
        (OutOfRange, r"picks \(0, 2\) of 2 responses; pick places from 0 to 1, as plain int"),
        (OtherKind, r"is of the kind 'score', and 'compare' is wanted"),
        (WithItself, r"compares 'same' with itself; choose another pair, or address it to oat.types.UNASKED"),
        (OtherPrompt, r"speaks of another prompt than its group"),
        (NeverBelieved, r"is for the ensemble; put 'ensemble' in `needs`"),
        (Twice, r"choose asks more than one question with the key train/0/0/0/0; ask one a group"),
        (NewKeys, r"asks with the key train/0/1/0/0, which it was not given"),
        (Nothing, r"choose returned \[\]; return a list of questions, at least one a round"),
        (Sorting, r"choose changed the scores that it was given; work on copies"),
        (Annotating, r"choose changed the groups that it was given"),
        (Failing, r"choose raised KeyError: 'sampler' \(.*test_testing_explorers.py:\d+\)"),
        (
            Unknown,
            (
                r"needs is frozenset\(\{'critic'\}\); make it a frozenset of ensemble, features, "
                r"policy, reference, sampler"
            ),
        ),
        (
            Growing,
            r"widen returned Plan\(prompts=9,.* and then Plan\(prompts=10,.* a function of the argument",
        ),
        (Wide, r"widen returned Plan\(prompts=12.0,.* whole numbers above 0"),
        (InPlace, r"widen changed the plan that it was given"),
    ],
)
def test_what_is_wrong_is_said(explorer: type, said: str) -> None:
    with pytest.raises(ContractError, match=f"^{explorer.__name__}: .*{said}"):
        check_explorer(explorer)


@dataclass(frozen=True)
class PickyConfig:
    count: int
    """Number of responses per question."""
    names: tuple[str, ...] = field(default=())
    """Unused here."""


class Picky(Broken):
    Config = PickyConfig

    def __init__(self, kind: Any, config: PickyConfig):
        super().__init__(kind)
        if config.count < 2:
            raise ConfigError(f"explorer.count is {config.count}; it must be at least 2")


def test_options_go_into_its_config() -> None:
    check_explorer(Picky, count=2)
    with pytest.raises(ConfigError, match=r"explorer\.count is 1"):
        check_explorer(Picky, count=1)
    with pytest.raises(ContractError, match=r"Picky: __init__ raised TypeError: .*'size'"):
        check_explorer(Picky, size=1)
    with pytest.raises(
        ContractError, match="Broken: takes no options, and size were given; add a dataclass `Config`"
    ):
        check_explorer(Broken, size=1)
