"""The pairs that the explorer `ensemble` labels itself, and what it notes of pairs."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from explorer_rounds import (
    MEMBERS,
    TEXTS,
    addresses,
    explorer,
    labels,
    mixed_round,
    plain_round,
    round_of,
)
from fixtures import make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.explore.base import Round
from oat.explore.contract import question_faults
from oat.explore.model_labels import label_of
from oat.explore.rules import RULES
from oat.explore.settings import (
    ModelLabelsConfig,
)
from oat.types import ENSEMBLE, UNASKED


@pytest.mark.inventory(71)
@pytest.mark.parametrize(
    ("burn_in", "burn_in_pairs", "step", "pairs", "begins"),
    [
        (3, 0, 2, 999, False),
        (3, 0, 3, 0, True),
        (0, 10, 99, 9, False),
        (0, 10, 0, 10, True),
        (3, 10, 3, 9, False),
        (3, 10, 2, 10, False),
        (3, 10, 3, 10, True),
    ],
)
@pytest.mark.parametrize("pure", [False, True], ids=["mixed", "pure"])
def test_a_burn_in_lasts_steps_and_pairs(
    burn_in: int, burn_in_pairs: int, step: int, pairs: int, begins: bool, pure: bool
) -> None:
    """Before the burn-in is over, the oracle is asked about every pair, also if afterwards it is asked about
    none."""
    settings = ModelLabelsConfig(share=0.5, burn_in=burn_in, burn_in_pairs=burn_in_pairs, pure=pure)
    questions = explorer(model_labels=settings).choose(plain_round(8, step=step, pairs=pairs))
    assert addresses(questions).count(ENSEMBLE) == (4 if begins else 0)
    assert addresses(questions).count("") == (8 if not begins else 0 if pure else 4)
    assert [bool(question.notes.get("model")) for question in questions] == [
        question.oracle == ENSEMBLE for question in questions
    ]


@pytest.mark.inventory(71)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=9),
    share=st.integers(0, 8).map(lambda eighths: eighths / 8),
    pick=st.sampled_from(["random", "certain"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_at_most_a_share_of_the_round_is_labelled(
    sizes: list[int], share: float, pick: str, seed: int
) -> None:
    """The number is the share of all prompts of the round, rounded down. A prompt without a pair is never
    among them. All questions keep the protocol."""
    groups = [make_group(number, *TEXTS[:size]) for number, size in enumerate(sizes)]
    generator = np.random.default_rng(seed)
    rewards = [generator.normal(size=(MEMBERS, size)) for size in sizes]
    given_round = round_of(groups, rewards, seed=seed)
    made = explorer(rule="uniform", model_labels=labels(share=share, pick=pick))
    questions = made.choose(given_round)
    found = [place for place, question in enumerate(questions) if question.oracle == ENSEMBLE]
    can = [place for place, size in enumerate(sizes) if size >= 2]
    assert set(found) <= set(can)
    assert len(found) == min(len(can), math.floor(len(sizes) * share))
    assert not list(
        question_faults(questions, dict(zip(given_round.keys, groups, strict=True)), "compare", made.needs)
    )


@pytest.mark.inventory(71)
def test_a_whole_share_is_not_rounded_down_below_itself() -> None:
    """29 of 50 prompts are a share of 0.58, and 50 * 0.58 is 28.999999999999996 to the computer."""
    assert math.floor(50 * 0.58) == 28
    questions = explorer(model_labels=labels(share=0.58)).choose(plain_round(50))
    assert addresses(questions).count(ENSEMBLE) == 29


@pytest.mark.inventory(72)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_ensembles_pair_is_a_members_best_and_worst_with_the_preferred_one_first(rule: str) -> None:
    """Whatever the rule is. The members disagree enough that for some prompts the drawn member's order is not
    that of the mean."""
    made, turned = explorer(rule=rule, model_labels=labels()), 0
    for seed in range(6):
        given_round = plain_round(20, seed=seed)
        for question, rewards_MG in zip(made.choose(given_round), given_round.scores[ENSEMBLE], strict=True):
            assert question.oracle == ENSEMBLE
            first, second = question.picks
            assert question.notes["belief"] >= 0.5
            widest = {(int(row.argmax()), int(row.argmin())) for row in rewards_MG}
            assert {first, second} in [set(pair) for pair in widest]
            turned += (first, second) not in widest
    assert turned > 0


def test_a_member_is_drawn_for_each_prompt() -> None:
    """Of two members that find different candidates best and worst, both choose pairs of one round."""
    rewards = [np.array([[4.0, 0.0, 1.0, 2.0], [1.0, 2.0, 4.0, 0.0]])] * 40
    given_round = round_of([make_group(number, *TEXTS) for number in range(40)], rewards)
    pairs = {frozenset(question.picks) for question in explorer(model_labels=labels()).choose(given_round)}
    assert pairs == {frozenset((0, 1)), frozenset((2, 3))}


@pytest.mark.parametrize("rule", ["passive", "bai_ts"])
def test_the_other_pairs_are_those_of_the_rule(rule: str) -> None:
    without, mixed = (
        explorer(rule=rule, model_labels=each).choose(plain_round(10)) for each in (None, labels(share=0.5))
    )
    assert addresses(without) == [""] * 10
    left = [pair for pair in zip(without, mixed, strict=True) if pair[1].oracle != ENSEMBLE]
    assert len(left) == 5
    assert all(before.picks == after.picks for before, after in left)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_label_is_certain_or_the_mean_probability(kind: str) -> None:
    for question in explorer(model_labels=labels(labels=kind)).choose(plain_round(10)):
        p = 1.0 if kind == "hard" else question.notes["belief"]
        assert question.known == (p, 1 - p)
        assert (kind == "hard") == (question.known == (1.0, 0.0))


def test_a_sampled_label_is_drawn_with_the_mean_probability() -> None:
    """Each label names one winner. The less probable one wins as often as the ensemble believes."""
    made, drawn, expected = explorer(model_labels=labels(labels="sampled")), [], []
    for seed in range(40):
        for question in made.choose(plain_round(25, seed=seed, draw=seed)):
            assert question.known in ((1.0, 0.0), (0.0, 1.0))
            drawn.append(question.known[0])
            expected.append(question.notes["belief"])
    variance = sum(p * (1 - p) for p in expected)
    assert abs(sum(map(float, drawn)) - sum(expected)) < 3 * math.sqrt(variance)
    assert label_of(0.0, labels(labels="sampled"), np.random.default_rng(0)) == 0.0
    assert label_of(1.0, labels(labels="sampled"), np.random.default_rng(0)) == 1.0


SPREADS = (2.0, 0.1, 4.0, 1.0, 0.5, 3.0)
"""By prompt, by how much the margins of two members differ. The variance of their probabilities rises with
it."""


def spread_round(seed: int = 0) -> Round:
    """In each prompt, both members find candidate 0 best and candidate 1 worst."""
    rewards = [np.array([[1.0 + spread, 0.0, 0.5], [1.0, 0.0, 0.5]]) for spread in SPREADS]
    return round_of([make_group(number, *TEXTS[:3]) for number in range(len(SPREADS))], rewards, seed=seed)


def slow_variance(rewards_MG: np.ndarray, picks: tuple[int, ...]) -> float:
    """Return the unbiased variance over members of the probability that the first pick wins."""
    p = [1 / (1 + math.exp(float(row[picks[1]]) - float(row[picks[0]]))) for row in rewards_MG.astype(float)]
    mean = sum(p) / len(p)
    return sum((each - mean) ** 2 for each in p) / (len(p) - 1)


def variances(given_round: Round) -> list[float]:
    """Return the variance of the pair of each prompt that the ensemble would label."""
    questions = explorer(model_labels=labels()).choose(given_round)
    return [
        slow_variance(rewards_MG, question.picks)
        for rewards_MG, question in zip(given_round.scores[ENSEMBLE], questions, strict=True)
    ]


def labelled(given_round: Round, **options: Any) -> set[int]:
    """Return the places of the prompts that the ensemble labels."""
    questions = explorer(model_labels=labels(**options)).choose(given_round)
    return {place for place, question in enumerate(questions) if question.notes.get("model")}


def test_the_most_certain_pairs_are_labelled() -> None:
    found = variances(spread_round())
    order = sorted(range(len(found)), key=SPREADS.__getitem__)
    assert sorted(range(len(found)), key=found.__getitem__) == order
    for count in range(len(found) + 1):
        for seed in range(3):
            assert labelled(spread_round(seed), pick="certain", share=count / 6) == set(order[:count])
    assert len({frozenset(labelled(spread_round(seed), share=0.5)) for seed in range(9)}) > 1, "by chance"


@pytest.mark.parametrize("pick", ["random", "certain"])
def test_uncertain_pairs_are_not_labelled(pick: str) -> None:
    """The pair whose variance is the limit is labelled."""
    found = variances(spread_round())
    for limit in found:
        allowed = {place for place, variance in enumerate(found) if variance <= limit}
        for seed in range(3):
            assert labelled(spread_round(seed), pick=pick, max_variance=limit * (1 + 1e-9)) == allowed
            assert labelled(spread_round(seed), pick=pick, max_variance=limit * (1 + 1e-9), share=0.5) <= (
                allowed
            )
    assert labelled(spread_round(), pick=pick, max_variance=0.0) == set()


def test_audited_pairs_go_to_the_oracle_and_are_noted() -> None:
    """They are the ensemble's pairs: the preferred candidate is the first."""
    whole = explorer(model_labels=labels(share=0.5)).choose(plain_round(10))
    audited = explorer(model_labels=labels(share=0.5, audit=1.0)).choose(plain_round(10))
    assert addresses(audited) == [""] * 10
    assert [question.picks for question in audited] == [question.picks for question in whole]
    assert [question.notes for question in audited] == [question.notes for question in whole]
    assert sum(question.notes.get("model", 0.0) for question in audited) == 5
    assert {question.known for question in audited} == {()}


def test_a_share_of_the_ensembles_pairs_is_audited() -> None:
    made = explorer(model_labels=labels(audit=0.3))
    found = [addresses(made.choose(plain_round(50, seed=seed))) for seed in range(10)]
    assert {address for each in found for address in each} == {"", ENSEMBLE}
    count = sum(each.count("") for each in found)
    assert abs(count - 150) < 3 * math.sqrt(500 * 0.3 * 0.7)


@pytest.mark.inventory(73)
def test_a_pure_run_asks_nobody_else() -> None:
    questions = explorer(model_labels=labels(share=0.25, pure=True)).choose(plain_round(8))
    assert sorted(addresses(questions)) == sorted([ENSEMBLE] * 2 + [UNASKED] * 6)
    assert {question.picks[0] != question.picks[1] for question in questions} == {True}


# what is noted of a question


def slow_notes(rewards_MG: np.ndarray, candidates: Sequence[int], picks: tuple[int, ...]) -> dict[str, float]:
    """Return the notes of a pair that the rule chose, with loops over members and candidates."""
    rows = [[float(value) for value in row] for row in rewards_MG]
    first, second = picks

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    def variance(values: list[float]) -> float:
        return math.fsum((value - mean(values)) ** 2 for value in values) / max(1, len(values) - 1)

    between = [
        variance([row[one] - row[other] for row in rows])
        for one in candidates
        for other in candidates
        if one != other
    ]
    return {
        "belief": mean([1 / (1 + math.exp(row[second] - row[first])) for row in rows]),
        "reward_first": mean([row[first] for row in rows]),
        "reward_second": mean([row[second] for row in rows]),
        "pair_variance": variance([row[first] - row[second] for row in rows]),
        "prompt_variance": mean(between) if between else 0.0,
        "gap": slow_gap(rows, candidates),
        "second_std": math.sqrt(variance([row[second] for row in rows])),
        "clash": 0.0,
    }


def slow_gap(rows: list[list[float]], candidates: Sequence[int]) -> float:
    """Return by how much a member's best candidate exceeds the one that is best by the mean, in the mean over
    members."""
    best = max(candidates, key=lambda place: sum(row[place] for row in rows))
    return sum(max(row[place] for place in candidates) - row[best] for row in rows) / len(rows)


@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["the rule's pairs", "the ensemble's"])
def test_the_notes_are_those_of_a_slow_version(members: int, share: float) -> None:
    generator = np.random.default_rng(4)
    groups = [make_group(number, *TEXTS) for number in range(6)]
    groups[1] = make_group(1, "a", "a", "b", "c", "b", "d")
    groups[2] = make_group(2, "e", "f")
    rewards = [2 * generator.normal(size=(members, len(group.trajectories))) for group in groups]
    given_round = round_of(groups, rewards)
    made = explorer(rule="uniform", model_labels=labels(share=share) if share else None)
    for place, question in enumerate(made.choose(given_round)):
        expected = slow_notes(
            given_round.scores[ENSEMBLE][place],
            np.flatnonzero(given_round.candidates[place]).tolist(),
            question.picks,
        )
        assert question.notes == pytest.approx(expected | ({"model": 1.0} if share else {}), rel=1e-5)


def test_a_question_has_the_features_of_its_two_candidates() -> None:
    questions = explorer(rule="uniform", model_labels=labels(share=0.5)).choose(mixed_round(3))
    for place, question in enumerate(questions):
        assert question.features is not None
        assert question.features.tolist() == [[place, pick] for pick in question.picks]
        assert question.candidates == tuple(
            mixed_round().groups[place].trajectories[pick].text for pick in question.picks
        )
