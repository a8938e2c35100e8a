"""Explorers that need no ensemble."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oat.collector import Collector
from oat.errors import ConfigError
from oat.explore.base import NoExploration, Round, candidates_of
from oat.seeds import Seeds
from oat.types import UNASKED, Group, Key, Message, Plan, Prompt, Question, Segment, Trajectory


def group(occurrence, *texts):
    prompt = Prompt(1, occurrence, (Message("user", "2+2="),), "4", {"level": occurrence})
    segment = Segment("model", np.array([1, 2], dtype=np.int32), mask=np.array([True, True]))
    return Group(prompt, tuple(Trajectory("sampler", (segment,), "stop", text) for text in texts))


def choose(kind, *groups):
    keys = [Key("train", 3, 0, one.prompt.occurrence) for one in groups]
    candidates = [candidates_of(one, reads_text=True) for one in groups]
    return NoExploration(kind).choose(Round(groups, keys, {}, candidates, 0, np.random.default_rng(0)))


def test_a_question_without_an_address_goes_to_the_oracle_of_training() -> None:
    """A question without an oracle is sent to the training oracle. A question that names its oracle keeps
    it."""
    groups, plan = [group(0, "a", "b"), group(1, "a", "a")], Plan(2, {"sampler": 2}, 2)
    asked: list[Question] = []
    actor = SimpleNamespace(sample=lambda *arguments: groups, score=lambda *arguments: {})
    ledger = SimpleNamespace(
        ask=lambda step, round, groups, questions: asked.extend(questions), pairs_before=lambda step: 0
    )
    boxes: Any = (None, actor, NoExploration("compare"), "mine", ledger, Seeds(0))
    collector = Collector(*boxes, plans=lambda step: plan, last=1, max_outstanding=0)
    collector._ask(0, 0, [each.prompt for each in groups], plan)
    assert [question.oracle for question in asked] == ["mine", UNASKED]
    assert [question.key.occurrence for question in asked] == [0, 1]


def test_it_needs_nothing_and_widens_nothing():
    plan = Plan(prompts=4, samples={"sampler": 2}, questions=4)
    assert NoExploration("compare").widen(plan) == plan
    assert NoExploration("compare").needs == frozenset()


def test_scores_are_asked_for_all_samples():
    first, second = choose("score", group(7, "a", "a", "b"), group(8, "c"))
    assert (first.candidates, first.picks, first.oracle) == (("a", "a", "b"), (0, 1, 2), "")
    assert (first.key, first.kind, first.reference, first.columns) == (
        Key("train", 3, 0, 7),
        "score",
        "4",
        {"level": 7},
    )
    assert first.messages == (Message("user", "2+2="),)
    assert (second.key, second.candidates) == (Key("train", 3, 0, 8), ("c",))


def test_two_samples_are_compared_unless_they_are_equal():
    first, second = choose("compare", group(0, "a", "b"), group(1, "c", "c"))
    assert (first.kind, first.candidates, first.picks, first.oracle) == ("compare", ("a", "b"), (0, 1), "")
    assert (second.candidates, second.picks, second.oracle) == (("c", "c"), (0, 1), "none")


@pytest.mark.parametrize("texts", [("a",), ("a", "b", "c")])
def test_a_comparison_needs_two_samples(texts):
    with pytest.raises(
        ConfigError, match=f"needs 2 samples a prompt, not {len(texts)}; set 2 samples, or choose an explorer"
    ):
        choose("compare", group(0, *texts))
