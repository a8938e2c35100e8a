"""The numbers of an evaluation: computed by hand, compared with slow enumerations, and at extreme values."""

import itertools
import math
import random
import statistics
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.evaluation.statistics import (
    agreement,
    average,
    bootstrap_interval,
    length_controlled_win_rate,
    majority_at,
    pass_at,
    wins,
)

NAN = math.nan
QUICK = settings(derandomize=True, deadline=None, max_examples=50)
VALUES = st.sampled_from([0.0, 0.5, 1.0, NAN])
TABLES = st.integers(1, 5).flatmap(
    lambda size: st.lists(st.lists(VALUES, min_size=size, max_size=size), min_size=1, max_size=4)
)


def table(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float64)


def known(row: list[float]) -> list[float]:
    return [value for value in row if not math.isnan(value)]


def mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def close(found: float | None, expected: float | None) -> bool:
    return found is None if expected is None else found == pytest.approx(expected, abs=1e-12)


def test_average_by_hand() -> None:
    assert average(table([1, 0, 0.5], [1, 1, 1])) == 0.75
    assert average(table([1, NAN], [NAN, 0.5])) == 0.75
    assert average(table([NAN, NAN])) is None
    assert average(np.zeros((0, 3))) is None


def test_pass_at_by_hand() -> None:
    """One of 4 samples is right. With k = 1, pass@k is 1/4; with k = 2 it is 1 - C(3,2)/C(4,2) = 1/2; with k
    = 4 it is 1. A prompt without a right sample gives 0."""
    rows = table([0, 1, 0, 0], [0, 0, 0, 0])
    assert [pass_at(rows, k, success=1.0) for k in (1, 2, 3, 4)] == [0.125, 0.25, 0.375, 0.5]
    assert pass_at(rows, 1, success=0.0) == 1.0
    assert pass_at(rows, 5, success=1.0) is None
    assert pass_at(table([1, NAN], [0, 1]), 2, success=1.0) == 1.0, (
        "one value is too few for k = 2, and says nothing"
    )
    assert pass_at(table([2.0] * 3000), 1500, success=1.5) == 1.0
    assert pass_at(table([1.0] + [0.0] * 2999), 1500, success=1.0) == pytest.approx(0.5)


@QUICK
@given(TABLES, st.integers(1, 5), st.sampled_from([0.5, 1.0]))
def test_pass_at_counts_the_sets_of_samples(rows: list[list[float]], k: int, success: float) -> None:
    shares = []
    for row in rows:
        sets = list(itertools.combinations(known(row), k))
        if sets:
            shares.append(sum(max(drawn) >= success for drawn in sets) / len(sets))
    assert close(pass_at(table(*rows), k, success=success), mean(shares))


def test_majority_by_hand() -> None:
    """The majority is right with two votes for the right answer 7 and one for 8. A tie of a right and a wrong
    answer gives a half. Without any answers, the mean of the samples counts."""
    rows = table([1, 0, 1], [1, 0, 0], [0.25, 0.25, 1])
    answers = [[Decimal("7"), Decimal("8"), Decimal("7.0")], ["7", "8", None], [None, None, None]]
    assert majority_at(rows[:1], answers[:1], 3) == 1.0
    assert majority_at(rows[1:2], answers[1:2], 3) == 0.5
    assert majority_at(rows[2:], answers[2:], 3) == 0.5
    assert majority_at(rows, answers, 3) == pytest.approx(2 / 3)
    assert majority_at(rows, answers, 4) is None
    assert majority_at(rows, answers, 1) == pytest.approx((2 / 3 + 1 / 3 + 0.5) / 3)
    assert majority_at(table([1, 0, 0, 0, 0]), [["a", "b", "b", "b", "b"]], 2) == pytest.approx(
        (0.5 + 0) / 2
    ), "two groups of two, one is left"
    assert majority_at(table([NAN, 1, 1]), [["b", "a", "a"]], 2) == 1.0
    assert majority_at(table([1, 0, 0.5]), [["a", "a", "a"]], 3) == 0.5, (
        "an answer is worth the mean of its samples"
    )


@QUICK
@given(TABLES, st.integers(1, 5), st.randoms(use_true_random=False))
def test_majority_equals_slow_version(rows: list[list[float]], k: int, chance: random.Random) -> None:
    answers = [[chance.choice(["a", "b", "c", None]) for _ in row] for row in rows]
    prompts = []
    for row, given_ in zip(rows, answers, strict=True):
        left = [(answer, value) for answer, value in zip(given_, row, strict=True) if not math.isnan(value)]
        groups = []
        while len(left) >= k:
            group, left = left[:k], left[k:]
            votes = {
                answer: [v for a, v in group if a == answer] for answer, _ in group if answer is not None
            }
            best = [value for value in votes.values() if len(value) == max(map(len, votes.values()))]
            groups.append(
                statistics.fmean(map(statistics.fmean, best))
                if best
                else statistics.fmean(v for _, v in group)
            )
        if groups:
            prompts.append(statistics.fmean(groups))
    assert close(majority_at(table(*rows), answers, k), mean(prompts))


@QUICK
@given(TABLES)
def test_one_sample_passes_and_votes_as_it_is_worth(rows: list[list[float]]) -> None:
    """With k = 1, pass@k and majority@k equal the mean over prompts of the mean over samples."""
    worth = mean([statistics.fmean(known(row)) for row in rows if known(row)])
    solved = mean([statistics.fmean(float(value >= 1) for value in known(row)) for row in rows if known(row)])
    assert close(majority_at(table(*rows), [["a"] * len(row) for row in rows], 1), worth)
    assert close(pass_at(table(*rows), 1, success=1.0), solved)


@pytest.mark.inventory(99)
def test_win_rate_by_hand() -> None:
    """An oracle that always says 0.75 gives a win rate of 1 and a mean probability of 0.75. A tie is half a
    win."""
    always = np.full((5, 3), 0.75)
    assert (average(wins(always)), average(always)) == (1.0, 0.75)
    assert wins(table([0.0, 0.49, 0.5, 0.51, 1.0, NAN])).tolist()[0][:5] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert average(wins(table([0.9, 0.5], [NAN, 0.2]))) == 0.5


def test_the_interval_is_what_all_resamples_say() -> None:
    """The bootstrap interval equals that of all 4^4 = 256 resamples of four prompts, one of which has fewer
    values."""
    rows = table([0, 1], [1, 1], [0.5, NAN], [0, 0])
    means = []
    for drawn in itertools.product(rows.tolist(), repeat=4):
        values = [value for row in drawn for value in known(row)]
        means.append(statistics.fmean(values))
    found = bootstrap_interval(rows, np.random.default_rng(0), resamples=40_000)
    assert found is not None
    for end, share in zip(found, (0.025, 0.975), strict=True):
        below, upto = sum(m < end - 1e-9 for m in means) / 256, sum(m <= end + 1e-9 for m in means) / 256
        assert below - 0.005 <= share <= upto + 0.005


def test_the_interval_equals_slow_version() -> None:
    rows, generator = np.random.default_rng(1).random((7, 3)), np.random.default_rng(2)
    sums = [float(sum(row)) for row in rows]
    means = sorted(sum(sums[place] for place in generator.integers(7, size=7)) / 21 for _ in range(1000))
    assert bootstrap_interval(rows, np.random.default_rng(2)) == pytest.approx(
        (means[24], means[974]), abs=1e-12
    )


def test_the_interval_covers() -> None:
    """In 200 experiments with 60 prompts, about 95 in 100 intervals contain the true mean. Equal samples of
    one prompt do not narrow the interval."""
    generator = np.random.default_rng(3)
    held = 0
    widths = []
    for _ in range(200):
        solved = (generator.random((60, 1)) < 0.3).astype(float)
        interval = bootstrap_interval(np.repeat(solved, 8, axis=1), generator, resamples=200)
        assert interval is not None
        low, high = interval
        held += low <= 0.3 <= high
        widths.append(high - low)
    assert 180 <= held <= 200
    assert statistics.fmean(widths) == pytest.approx(2 * 1.96 * math.sqrt(0.3 * 0.7 / 60), rel=0.1)


def test_the_interval_at_its_extremes() -> None:
    assert bootstrap_interval(table([NAN, NAN]), np.random.default_rng(0)) is None
    assert bootstrap_interval(table([1.0, 0.0]), np.random.default_rng(0)) == (0.5, 0.5)
    assert bootstrap_interval(np.ones((9, 2)), np.random.default_rng(0)) == (1.0, 1.0)


def lengths(size: int, seed: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.integers(20, 200, size=size) + shift, generator.integers(20, 200, size=size)


@pytest.mark.parametrize("shift", [-60, 0, 60])
@pytest.mark.parametrize("seed", range(4))
def test_an_oracle_that_only_likes_length(seed: int, shift: float) -> None:
    """An oracle prefers the longer response. The plain win rate is far from one half if one side writes more,
    and the length-controlled win rate is one half."""
    ours, theirs = lengths(2000, seed, shift)
    won = (1 + np.sign(ours - theirs)) / 2
    assert shift == 0 or abs(won.mean() - 0.5) > 0.2
    assert length_controlled_win_rate(won, ours, theirs) == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_an_oracle_that_ignores_length(rate: float) -> None:
    ours, theirs = lengths(4000, 5, 30)
    won = (np.random.default_rng(6).random(4000) < rate).astype(float)
    assert length_controlled_win_rate(won, ours, theirs) == pytest.approx(won.mean(), abs=0.03)


@pytest.mark.parametrize(("quality", "bias"), [(0.8, 1.5), (-0.5, 1.5), (1.0, -2.0)])
def test_a_known_effect_of_length_is_taken_out(quality: float, bias: float) -> None:
    """Wins are drawn from the model of the length-controlled win rate. The estimate is sigmoid(quality), for
    any effect of length."""
    ours, theirs = lengths(20_000, 7, 60)
    differences = (ours - theirs) / (ours - theirs).std(ddof=1)
    chances = 1 / (1 + np.exp(-(quality + bias * np.tanh(differences))))
    won = (np.random.default_rng(8).random(20_000) < chances).astype(float)
    true = 1 / (1 + math.exp(-quality))
    assert abs(won.mean() - true) > 0.07
    assert length_controlled_win_rate(won, ours, theirs) == pytest.approx(true, abs=0.02)


def test_the_fit_is_the_best_of_a_grid() -> None:
    won = np.array([1, 1, 0, 0.5, 1, 0])
    ours = np.array([9, 3, 4, 7, 8, 1])
    theirs = np.array([2, 5, 4, 6, 9, 3])
    feature = np.tanh((ours - theirs) / statistics.stdev((ours - theirs).tolist()))

    def loss(a: float, b: float) -> float:
        chances = [1 / (1 + math.exp(-(a + b * x))) for x in feature]
        return (
            -sum(w * math.log(p) + (1 - w) * math.log(1 - p) for w, p in zip(won, chances, strict=True))
            + b * b / 20
        )

    best = min(itertools.product(np.arange(-2, 2, 0.02), np.arange(-4, 4, 0.02)), key=lambda at: loss(*at))
    assert length_controlled_win_rate(won, ours, theirs) == pytest.approx(
        1 / (1 + math.exp(-best[0])), abs=0.01
    )


def test_length_at_its_extremes() -> None:
    ours, theirs = np.array([5.0, 6.0, 7.0]), np.array([4.0, 5.0, 6.0])
    assert length_controlled_win_rate(np.array([1.0, 0.0, 0.0]), ours, theirs) == pytest.approx(1 / 3), (
        "all are longer by one: the plain rate"
    )
    assert length_controlled_win_rate(np.array([0.5]), ours[:1], theirs[:1]) == 0.5
    assert length_controlled_win_rate(np.array([NAN, 1.0, NAN]), ours, theirs) == 1.0
    assert length_controlled_win_rate(np.array([NAN]), ours[:1], theirs[:1]) is None
    assert length_controlled_win_rate(np.ones(50), *lengths(50, 0, 0)) == pytest.approx(1.0, abs=1e-6)
    assert length_controlled_win_rate(
        np.array([1.0, 0.0]), np.array([10**9, 1]), np.array([1, 10**9])
    ) == pytest.approx(0.5)


def test_agreement_by_hand() -> None:
    """Two oracles order two of three pairs alike, so they agree in 2/3. A pair does not count if one oracle
    gives a tie or has no value."""
    assert agreement(table([1, 2, 3]), table([1, 2, 1.5])) == pytest.approx(2 / 3)
    assert agreement(table([1, 2, 3], [1, NAN, 2]), table([1, 2, 2], [0, 5, 1])) == 1.0
    assert agreement(table([1, 2]), table([2, 1])) == 0.0
    assert agreement(table([1, 1], [2, 1]), table([2, 1], [3, 3])) is None


@QUICK
@given(TABLES, st.randoms(use_true_random=False))
def test_agreement_goes_over_all_pairs(rows: list[list[float]], chance: random.Random) -> None:
    others = [[chance.choice([0.0, 0.5, 1.0, NAN]) for _ in row] for row in rows]
    orders = []
    for row, other in zip(rows, others, strict=True):
        for one, two in itertools.combinations(range(len(row)), 2):
            product = (row[one] - row[two]) * (other[one] - other[two])
            if product == product and product != 0:
                orders.append(float(product > 0))
    assert close(agreement(table(*rows), table(*others)), mean(orders))
