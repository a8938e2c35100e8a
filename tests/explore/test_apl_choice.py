"""The explorer `apl`: which prompts it keeps, and which two responses of each it asks about."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import World, make_group, oat
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.errors import ConfigError
from oat.explore.apl import APL, APLConfig
from oat.explore.base import Round, candidates_of
from oat.explore.contract import question_faults
from oat.explore.metrics import margin_metrics
from oat.testing import check_explorer
from oat.types import UNASKED, Answer, Feedback, Group, Item, Key, Plan, Question

Rows = list[list[float]]


def explorer(variant: str = "entropy_certainty", **options: Any) -> APL:
    return APL("compare", APLConfig(variant=variant, **options))  # type: ignore[arg-type]


def round_of(groups: Sequence[Group], policy: Rows, rewards: Rows) -> Round:
    """Return a round.

    Args:
        policy: for each group, the log-probabilities of its samples under the sampler.
        rewards: the implicit rewards: these minus the log-probabilities under the reference.
    """
    scores = {
        "sampler": [np.array(row, dtype=np.float32) for row in policy],
        "reference": [
            np.array(row, dtype=np.float32) - np.array(of_group, dtype=np.float32)
            for row, of_group in zip(policy, rewards, strict=True)
        ],
    }
    keys = [Key("train", 0, 0, group.prompt.occurrence) for group in groups]
    candidates = [candidates_of(group, reads_text=True) for group in groups]
    return Round(groups, keys, scores, candidates, 0, np.random.default_rng(0))


def plain_round(policy: Rows, rewards: Rows) -> Round:
    """Return a round in which all responses of a prompt differ."""
    groups = [make_group(number, *"abcdefgh"[: len(row)]) for number, row in enumerate(policy)]
    return round_of(groups, policy, rewards)


def chosen(made: APL, given_round: Round) -> list[tuple[int, tuple[int, ...], str]]:
    return [(each.key.occurrence, each.picks, each.oracle) for each in made.choose(given_round)]


POLICY: Rows = [[-1.0, -2.0, -3.0], [-9.0, -9.0, -9.0], [-4.0, -6.0, -5.0], [-2.0, -2.0, -3.5]]
"""The entropies of four prompts are 2, 9, 5 and 2.5."""
REWARDS: Rows = [[0.0, 5.0, 1.0], [0.5, 0.25, 0.0], [3.0, 0.0, 2.0], [-1.0, 0.0, -4.0]]
"""The largest margins are 5 (of samples 0 and 1), 0.5 (0 and 2), 3 (0 and 1) and 4 (1 and 2)."""
PAIRS = [(0, 1), (0, 2), (0, 1), (1, 2)]


@pytest.mark.inventory(19)
@pytest.mark.parametrize(
    ("oversample", "kept"), [(1, [0, 1, 2, 3]), (2, [1, 2]), (3, [1, 2]), (4, [1]), (9, [1])]
)
def test_prompts_of_large_entropy_are_kept(oversample: int, kept: list[int]) -> None:
    """One of so many prompts, rounded up, in the order of the groups. Each is asked about by the pair of the
    largest margin."""
    made = explorer(oversample=oversample)
    assert chosen(made, plain_round(POLICY, REWARDS)) == [(place, PAIRS[place], "") for place in kept]


@pytest.mark.inventory(21)
@pytest.mark.parametrize(("oversample", "kept"), [(2, [0, 3]), (3, [0, 3]), (4, [0])])
def test_prompts_of_large_margins_are_kept(oversample: int, kept: list[int]) -> None:
    made = explorer("certainty", oversample=oversample)
    assert chosen(made, plain_round(POLICY, REWARDS)) == [(place, PAIRS[place], "") for place in kept]


@pytest.mark.parametrize("variant", ["entropy_certainty", "certainty"])
def test_the_first_of_equal_prompts_and_pairs_is_taken(variant: str) -> None:
    found = chosen(
        explorer(variant, oversample=2), plain_round([[-1.0, -1.0, -1.0]] * 5, [[0.0, 1.0, 1.0]] * 5)
    )
    assert found == [(0, (0, 1), ""), (1, (0, 1), ""), (2, (0, 1), "")]


@pytest.mark.parametrize("variant", ["entropy_certainty", "certainty"])
def test_responses_without_a_margin_are_compared_too(variant: str) -> None:
    """The reference is the policy at the start of a run, so no rewards differ."""
    (found,) = explorer(variant, oversample=2).choose(plain_round([[-1.0, -2.0]] * 2, [[0.0, 0.0]] * 2))
    assert (found.picks, found.oracle, found.notes["margin"]) == ((0, 1), "", 0.0)


@pytest.mark.parametrize("variant", ["entropy_certainty", "certainty"])
def test_only_candidates_are_compared(variant: str) -> None:
    """An equal response, an empty one and an aborted episode have the largest rewards, and are not chosen. A
    margin of theirs does not make a prompt worth asking about."""
    group = make_group(0, "a", "b", "a", "", "c")
    rows = list(group.trajectories)
    rows[4] = replace(rows[4], finish_reason="aborted")
    groups = [replace(group, trajectories=tuple(rows)), make_group(1, "a", "b", "c", "d", "e")]
    rewards = [[0.0, 1.0, 90.0, -90.0, 50.0], [0.0, 2.0, 0.0, 0.0, 0.0]]
    given_round = round_of(groups, [[-3.0] * 5, [-2.0] * 5], rewards)
    both = {each.key.occurrence: each for each in explorer(oversample=1).choose(given_round)}
    assert (both[0].picks, both[1].picks) == ((0, 1), (0, 1))
    assert both[0].notes == {"entropy": 3.0, "margin": 1.0, "mean_margin": 1.0}
    (kept,) = explorer(variant, oversample=2).choose(given_round)
    assert kept.key.occurrence == (0 if variant == "entropy_certainty" else 1)


def test_a_prompt_without_a_pair_is_asked_of_nobody() -> None:
    """With `certainty`, it is kept only if there are too few others."""
    groups = [make_group(0, "a", "a"), make_group(1, "b", "c"), make_group(2, "", "d")]
    given_round = round_of(
        groups, [[-9.0, -9.0], [-1.0, -1.0], [-8.0, -8.0]], [[0.0, 9.0], [0.0, 0.0], [0.0, 5.0]]
    )
    made = explorer("certainty", oversample=2)
    assert chosen(made, given_round) == [(0, (0, 1), UNASKED), (1, (0, 1), "")]
    assert chosen(explorer("certainty", oversample=3), given_round) == [(1, (0, 1), "")]
    notes = [each.notes for each in explorer(oversample=1).choose(given_round)]
    assert notes == [{"entropy": 9.0}, {"entropy": 1.0, "margin": 0.0, "mean_margin": 0.0}, {"entropy": 8.0}]


def test_there_is_no_question_without_groups() -> None:
    assert explorer().choose(plain_round([], [])) == []


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    """Rounds of groups of several sizes, with few different texts and rewards, so that some are equal."""
    sizes = draw(st.lists(st.integers(2, 5), min_size=1, max_size=7))
    texts = [draw(st.lists(st.sampled_from(["", "a", "b", "cc"]), min_size=n, max_size=n)) for n in sizes]
    values = st.integers(-8, 8).map(lambda quarters: quarters / 4)
    policy, rewards = (
        [draw(st.lists(values, min_size=size, max_size=size)) for size in sizes] for _ in range(2)
    )
    groups = [make_group(number, *own) for number, own in enumerate(texts)]
    return round_of(groups, policy, rewards)


@pytest.mark.inventory(20)
@given(rounds(), st.integers(1, 4), st.sampled_from(["entropy_certainty", "certainty"]))
@settings(max_examples=80, deadline=None)
def test_the_choice_is_that_of_a_slow_version(given_round: Round, oversample: int, variant: str) -> None:
    oversample = max(oversample, 2 if variant == "certainty" else 1)
    expected = []
    for place in range(len(given_round.groups)):
        policy = given_round.scores["sampler"][place].tolist()
        reference = given_round.scores["reference"][place].tolist()
        rewards = [one - other for one, other in zip(policy, reference, strict=True)]
        candidates = [number for number, is_one in enumerate(given_round.candidates[place]) if is_one]
        margins = {
            (one, other): abs(rewards[one] - rewards[other])
            for one in candidates
            for other in candidates
            if one < other
        }
        notes = {"entropy": -sum(policy) / len(policy)}
        picks, oracle = (0, 1), UNASKED
        if margins:
            picks, oracle = max(margins, key=lambda pair: (margins[pair], -pair[0], -pair[1])), ""
            notes |= {"margin": margins[picks], "mean_margin": sum(margins.values()) / len(margins)}
        worth = notes["entropy"] if variant == "entropy_certainty" else notes.get("margin", -1.0)
        expected.append((worth, -place, picks, oracle, notes))
    count = math.ceil(len(expected) / oversample)
    kept = sorted(-entry[1] for entry in sorted(expected, reverse=True, key=lambda e: e[:2])[:count])
    made = explorer(variant, oversample=oversample)
    found = made.choose(given_round)
    assert [each.key.occurrence for each in found] == kept
    for each, place in zip(found, kept, strict=True):
        _, _, picks, oracle, notes = expected[place]
        assert (each.picks, each.oracle) == (picks, oracle)
        assert each.notes == pytest.approx(notes)
    group_of = dict(zip(given_round.keys, given_round.groups, strict=True))
    assert not list(question_faults(found, group_of, "compare", made.needs))


@pytest.mark.parametrize("options", [{}, {"variant": "certainty", "oversample": 2}])
def test_it_keeps_the_protocol_of_explorers(options: dict[str, Any]) -> None:
    check_explorer(APL, **options)


@pytest.mark.parametrize(
    ("options", "prompts", "samples"),
    [
        ({}, 24, 8),
        ({"oversample": 1, "samples": 2}, 6, 2),
        ({"variant": "certainty", "oversample": 3, "samples": 5}, 18, 2),
    ],
)
def test_more_prompts_are_sampled_than_are_asked_about(
    options: dict[str, Any], prompts: int, samples: int
) -> None:
    """The number of questions stays. With `certainty` each prompt has one pair."""
    made = APL("compare", APLConfig(**options))
    assert made.widen(Plan(6, {"sampler": 2}, 6)) == Plan(prompts, {"sampler": samples}, 6)
    assert made.needs == {"sampler", "reference"}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"oversample": 0}, "explorer.oversample is 0"),
        ({"oversample": -2}, "explorer.oversample is -2"),
        ({"variant": "certainty", "oversample": 1}, "explorer.oversample is 1"),
        ({"samples": 1}, "explorer.samples is 1"),
        ({"samples": 0}, "explorer.samples is 0"),
        ({"variant": "certainty", "samples": 1}, "explorer.samples is 1"),
    ],
)
def test_a_number_out_of_range_is_refused(options: dict[str, Any], field: str) -> None:
    APLConfig(**{**options, "oversample": 2, "samples": 2})
    with pytest.raises(ConfigError) as raised:
        APLConfig(**options)
    assert str(raised.value).startswith(field)


def test_an_algorithm_that_learns_from_scores_is_refused() -> None:
    with pytest.raises(ConfigError, match="the explorer apl chooses pairs, and the algorithm learns"):
        APL("score", APLConfig())


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(
    ("algorithm", "options", "field"),
    [
        ("dpo", {"variant": "certainty", "oversample": 1}, "explorer.oversample"),
        ("dpo", {"samples": 1}, "explorer.samples"),
        ("dpo", {"variant": "entropy"}, "explorer.variant"),
        ("grpo", {}, "the explorer apl chooses pairs"),
        ("xpo", {}, "explorer.name"),
    ],
)
def test_a_run_is_refused_before_anything_is_paid_for(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    algorithm: str,
    options: dict[str, Any],
    field: str,
    command: str,
) -> None:
    changes = {
        "explorer": {"name": "apl", **options},
        "oracle.name": f"{world.folder / 'reward.py'}:forbidden",
        "algorithm.samples": 2,
        "evaluation": None,
    }
    assert oat(command, world.config(algorithm, tmp_path, changes)) == 2
    assert field in capsys.readouterr().err
    assert not (tmp_path / algorithm).exists()


def item(number: int, **notes: float) -> Item:
    group = make_group(number, "a", "b")
    question = Question.about(group, Key("train", 0, 0, number), "compare", (0, 1), "o")
    return Item(group, replace(question, notes=notes), Answer(question.key, (1.0,), ("ok",), 1), 0)


def test_metrics_by_hand() -> None:
    """A note counts for the questions that have it: a prompt without a pair has no margin."""
    items = (
        item(0, entropy=1.0, margin=4.0, mean_margin=2.0),
        item(1, entropy=2.0, margin=0.0, mean_margin=0.0),
        item(2, entropy=6.0),
        item(3),
    )
    expected = {"explorer/entropy": 3.0, "explorer/margin": 2.0, "explorer/mean_margin": 1.0}
    assert margin_metrics(Feedback(0, items, 0)) == expected
    assert margin_metrics(Feedback(0, items[:1], 0, thrown_away=items[1:], older=items[:1])) == expected
    assert explorer().metrics(Feedback(0, items, 0)) == expected
    assert margin_metrics(Feedback(0, items[2:], 0)) == {"explorer/entropy": 6.0}
    assert margin_metrics(Feedback(0, items[3:], 0)) == {}
