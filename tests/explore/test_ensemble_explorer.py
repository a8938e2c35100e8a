"""The pairs that the explorer `ensemble` asks about."""

import math
from typing import Any

import numpy as np
import pytest
from explorer_rounds import (
    TEXTS,
    addresses,
    chi_square,
    explorer,
    labels,
    mixed_round,
    plain_round,
    round_of,
)
from fixtures import make_group

from oat.explore.base import Round
from oat.explore.ensemble import EnsembleExplorer
from oat.explore.rules import RULES
from oat.testing import check_explorer
from oat.types import ENSEMBLE, UNASKED, Plan


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("share", [0.0, 0.5], ids=["asked", "some labelled"])
@pytest.mark.parametrize("clash", ["unasked", "random"])
def test_a_pair_has_two_different_candidates_or_is_asked_of_nobody(
    rule: str, share: float, clash: str
) -> None:
    """Equal texts, empty responses and aborted episodes are never chosen. A prompt with fewer than two
    candidates is asked of nobody, and does not keep the others from being asked."""
    made = explorer(rule=rule, clash=clash, model_labels=labels(share=share))
    for seed in range(8):
        given_round = mixed_round(seed)
        questions = made.choose(given_round)
        assert [question.key for question in questions] == list(given_round.keys)
        for question, is_candidate_G in zip(questions, given_round.candidates, strict=True):
            first, second = question.picks
            is_possible = is_candidate_G.sum() >= 2
            if question.oracle != UNASKED:
                assert is_possible
                assert is_candidate_G[[first, second]].all()
                assert first != second
            elif is_possible:
                assert (rule, clash, first) == ("eets", "unasked", second), "only a clash is not asked"
            else:
                assert first == second
            assert all(map(math.isfinite, question.notes.values()))
        assert UNASKED not in [questions[place].oracle for place in (0, 2, 4)] or rule == "eets"
        assert [questions[place].oracle for place in (1, 3)] == [UNASKED, UNASKED]


def test_there_is_no_question_without_groups() -> None:
    assert explorer(model_labels=labels()).choose(round_of([], [])) == []


@pytest.mark.inventory(68)
def test_passive_asks_about_the_first_two_candidates() -> None:
    questions = explorer(rule="passive").choose(mixed_round())
    assert [questions[place].picks for place in (0, 2, 4)] == [(1, 3), (0, 2), (0, 1)]
    assert addresses(questions) == ["", UNASKED, "", UNASKED, ""]


def agreeing_round(seed: int) -> Round:
    """All members find candidate 2 best. The last prompt has one candidate."""
    rewards_MG = np.array([[0.0, 1.0, 9.0, 2.0], [3.0, -1.0, 9.0, 0.0]])
    groups = [*(make_group(number, *TEXTS) for number in range(3)), make_group(3, "e", "e", "e", "e")]
    return round_of(groups, [rewards_MG] * 4, seed=seed)


def test_a_clash_is_asked_of_nobody_and_noted() -> None:
    questions = explorer(rule="eets").choose(agreeing_round(0))
    assert addresses(questions) == [UNASKED] * 4
    assert [question.picks for question in questions] == [(2, 2)] * 3 + [(0, 0)]
    assert [question.notes["clash"] for question in questions] == [1, 1, 1, 0]


def test_a_clash_whose_pair_the_ensemble_replaces_is_none() -> None:
    questions = explorer(rule="eets", model_labels=labels()).choose(agreeing_round(0))
    assert addresses(questions) == [ENSEMBLE] * 3 + [UNASKED]
    assert [question.notes["clash"] for question in questions] == [0, 0, 0, 0]


@pytest.mark.inventory(69)
def test_a_clash_may_be_asked_about_with_a_random_other_candidate() -> None:
    """The first candidate stays. Each other candidate is drawn alike: the limit is exceeded by chance once in
    1000 seeds. The last sample equals the first, and is no candidate."""
    rewards = [np.array([[0.0, 1.0, 9.0, 2.0, 0.0], [3.0, -1.0, 9.0, 0.0, 3.0]])] * 600
    given_round = round_of([make_group(number, *TEXTS, "a") for number in range(600)], rewards)
    questions = explorer(rule="eets", clash="random").choose(given_round)
    assert addresses(questions) == [""] * 600
    assert {question.notes["clash"] for question in questions} == {1}
    assert chi_square([question.picks for question in questions], [(2, 0), (2, 1), (2, 3)]) < 13.8
    *_, alone = explorer(rule="eets", clash="random").choose(agreeing_round(0))
    assert (alone.oracle, alone.picks, alone.notes["clash"]) == (UNASKED, (0, 0), 0)


def test_clashes_alone_are_drawn_anew() -> None:
    """A pair of two different candidates is what the rule chose, whatever `clash` says."""
    plain, drawn = (
        explorer(rule="bai_ts", clash=clash).choose(plain_round(6)) for clash in ("unasked", "random")
    )
    assert [question.picks for question in plain] == [question.picks for question in drawn]
    assert {question.notes["clash"] for question in plain} == {0}


@pytest.mark.parametrize("rule", ["bai_ts", "uniform"])
def test_the_generator_alone_decides(rule: str) -> None:
    made = explorer(rule=rule, model_labels=labels(share=0.5, labels="sampled", audit=0.5))

    def chosen(seed: int) -> list[tuple[Any, ...]]:
        return [
            (each.picks, each.oracle, each.known, each.notes)
            for each in made.choose(plain_round(12, seed=seed))
        ]

    assert chosen(3) == chosen(3)
    assert chosen(3) != chosen(4)


@pytest.mark.parametrize("rule", ["bai_ts", "eets", "passive"])
def test_it_keeps_the_protocol_of_explorers(rule: str) -> None:
    check_explorer(EnsembleExplorer, samples=5, rule=rule, model_labels=labels(share=0.4, audit=0.5))


def test_it_samples_as_many_responses_as_its_settings_say() -> None:
    made = explorer(samples=7)
    assert made.widen(Plan(4, {"sampler": 2}, 4)) == Plan(4, {"sampler": 7}, 4)
    assert made.needs == {ENSEMBLE}
