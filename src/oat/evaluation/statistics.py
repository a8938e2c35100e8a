"""Functions that compute the statistics of an evaluation from the values of its responses.

Axes: B prompts, G responses to each prompt, P pairs of responses. A missing value is NaN and is left out. A
statistic is None if too few values are left for it. If a function follows a paper, its docstring names the
paper and lists the departures from it.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np

_TAILS = (0.025, 0.975)
_LENGTH_VARIANCE = 10.0


def average(values_BG: np.ndarray) -> float | None:
    """Return the mean value; None if there are no values. If every prompt has n values, this is average@n:
    the mean over prompts of the mean over n samples."""
    known = values_BG[~np.isnan(values_BG)]
    return float(known.mean()) if known.size else None


def pass_at(values_BG: np.ndarray, k: int, *, success: float) -> float | None:
    """Estimate without bias the probability that at least one of k samples succeeds (pass@k: Chen et al.
    2021, arXiv:2107.03374, Eq. 1).

    pass@k = mean over prompts of 1 - C(n - c, k) / C(n, k)

    n is the number of a prompt's values, and c is the number of those that are at least `success`. So a
    prompt's term is the share of its sets of k samples that contain a success. A prompt with fewer than k
    values is left out. Return None if all prompts are left out.

    Args:
        k: at least 1.
        success: lowest value of a success.
    """
    shares = []
    for values in values_BG:
        n, c = int((~np.isnan(values)).sum()), int((values >= success).sum())
        if n >= k:
            shares.append(1.0 - math.comb(n - c, k) / math.comb(n, k))
    return float(np.mean(shares)) if shares else None


def majority_at(values_BG: np.ndarray, answers: Sequence[Sequence[Hashable | None]], k: int) -> float | None:
    """Return the mean over prompts of the value of the most frequent answer among k samples
    (self-consistency: Wang et al. 2022, arXiv:2203.11171, Section 2).

    * Groups: a prompt's samples that have a value are split, in their order, into groups of k. Samples that
      do not fill a group are left out, and so is a prompt without a group.
    * Votes: each sample of a group votes for its answer. The value of an answer is the mean value of its
      samples.
    * Value of a group: the value of the answer with the most votes. If several answers have the most votes,
      it is the mean of their values. If no sample has an answer, it is the mean of all values.
    * Value of a prompt: the mean over its groups.

    Args:
        answers: B sequences of G answers. Equal answers are votes for the same answer. None: the sample has
            no answer.
        k: at least 1.
    """
    voted = []
    for values, given in zip(values_BG, answers, strict=True):
        known = [
            (answer, float(value)) for answer, value in zip(given, values, strict=True) if not np.isnan(value)
        ]
        groups = [known[start : start + k] for start in range(0, len(known) - k + 1, k)]
        if groups:
            voted.append(np.mean([_voted(group) for group in groups]))
    return float(np.mean(voted)) if voted else None


def wins(probabilities: np.ndarray) -> np.ndarray:
    """Return the win for each probability of winning: 1 if it is above one half, 0 if it is below, one half
    if it is exactly one half, and NaN if it is NaN. The mean of the wins is the win rate."""
    return np.where(np.isnan(probabilities), np.nan, (1.0 + np.sign(probabilities - 0.5)) / 2.0)


def bootstrap_interval(
    values_BG: np.ndarray, generator: np.random.Generator, resamples: int = 1000
) -> tuple[float, float] | None:
    """Return the ends of a 95 % confidence interval of `average`, by percentiles of the bootstrap (Efron and
    Tibshirani 1993, An Introduction to the Bootstrap, Section 13.3); None if no prompt has a value. The
    prompts count as a random sample of all prompts of their kind.

    Each resample draws as many prompts as there are, with replacement, and takes all values of a drawn
    prompt. (The samples of one prompt are not independent of each other.) The ends are the ceil(0.025
    resamples)-th and the ceil(0.975 resamples)-th smallest mean of a resample. A prompt without a value is
    left out.
    """
    known_BG = ~np.isnan(values_BG)
    has_any = known_BG.any(axis=1)
    sums, counts = np.where(known_BG, values_BG, 0.0).sum(axis=1)[has_any], known_BG.sum(axis=1)[has_any]
    if not len(sums):
        return None
    draws = (generator.integers(len(sums), size=len(sums)) for _ in range(resamples))
    means = np.sort([sums[drawn].sum() / counts[drawn].sum() for drawn in draws])
    low, high = (means[math.ceil(tail * resamples) - 1] for tail in _TAILS)
    return float(low), float(high)


def length_controlled_win_rate(
    wins_P: np.ndarray, lengths_P: np.ndarray, other_lengths_P: np.ndarray
) -> float | None:
    """Estimate what the win rate would be if both responses of every pair were equally long (Dubois et al.
    2024, arXiv:2404.04475, Section 3). Return None if all wins are NaN.

    P(win) = sigmoid(a + b tanh(d / std(d))),   d = length - other length,   and the rate is sigmoid(a)

    a and b maximise the likelihood of the wins times the prior of b (departure 2). std is the unbiased
    standard deviation of d. If all d are equal, the result is the plain win rate.

    Departures:
        1. The paper has a third term, the difficulty of an instruction. It is estimated from the answers of
            many models. Here there are only one model and its opponent, so the term is left out.
        2. The paper shrinks all terms, with a strength that cross-validation chooses. Here only b has a prior
            (normal, mean 0, variance 10), so b is finite even if the longer response always wins. If length
            has no effect, the result is the plain win rate, because a has no prior.
        3. The paper adds answers of models that were told to be short or long. Here none are added. If one
            side is always longer and always wins, the effects of length and of quality cannot be separated.
            Then the wins are attributed to quality.

    Args:
        wins_P: (P,) 1, one half or 0; fractions between them are allowed too. A pair with NaN is left out.
        lengths_P, other_lengths_P: (P,) lengths of the response and of its opponent, in the same unit.
    """
    known = ~np.isnan(wins_P)
    won, differences = wins_P[known], (lengths_P - other_lengths_P)[known].astype(np.float64)
    if not len(won):
        return None
    spread = differences.std(ddof=1) if len(won) > 1 else 0.0
    if spread == 0.0:
        return float(won.mean())
    return float(_sigmoid(_fitted(np.tanh(differences / spread), won)[:1])[0])


def agreement(first_BG: np.ndarray, second_BG: np.ndarray) -> float | None:
    """Return the share of response pairs that two oracles order in the same way: (gamma + 1) / 2 (Goodman and
    Kruskal 1954, "Measures of association for cross classifications", Section 6).

    A pair is two responses to the same prompt. It counts if each oracle gives the two responses different
    values.
    """
    same = told = 0
    for first, second in zip(first_BG, second_BG, strict=True):
        orders = np.sign(np.subtract.outer(first, first)) * np.sign(np.subtract.outer(second, second))
        same += int((orders > 0).sum())
        told += int((np.abs(orders) > 0).sum())
    return same / told if told else None


def _voted(group: Sequence[tuple[Hashable | None, float]]) -> float:
    by_answer: dict[Hashable, list[float]] = {}
    for answer, value in group:
        if answer is not None:
            by_answer.setdefault(answer, []).append(value)
    if not by_answer:
        return float(np.mean([value for _, value in group]))
    most = max(len(values) for values in by_answer.values())
    return float(np.mean([np.mean(values) for values in by_answer.values() if len(values) == most]))


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -logits))


def _fitted(feature_P: np.ndarray, won_P: np.ndarray) -> np.ndarray:
    """Return (a, b) of a logistic model with a normal prior on b, fitted by Newton's method. If a Newton step
    does not lower the loss, the step is halved until it does."""
    features = np.stack([np.ones_like(feature_P), feature_P], axis=1)
    precision = np.array([0.0, 1.0 / _LENGTH_VARIANCE])

    def loss(at: np.ndarray) -> float:
        logits = features @ at
        return float(np.logaddexp(0.0, logits).sum() - won_P @ logits + 0.5 * precision @ at**2)

    found = np.zeros(2)
    for _ in range(100):
        expected = _sigmoid(features @ found)
        gradient = features.T @ (expected - won_P) + precision * found
        if np.abs(gradient).max() < 1e-9 * len(won_P):
            break
        hessian = (features * (expected * (1.0 - expected))[:, None]).T @ features + np.diag(precision)
        step = np.linalg.solve(hessian, gradient)
        size = next((size for size in 0.5 ** np.arange(40.0) if loss(found - size * step) < loss(found)), 0.0)
        if size == 0.0:
            break
        found = found - size * step
    return found
