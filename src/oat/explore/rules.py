"""Selection rules: which two candidates of each prompt the oracle is asked about.

A rule is one function. It gets the rewards that the M members of an ensemble give the candidates of B
prompts, a mask of the candidates, and a random generator. It returns the two chosen candidates of each
prompt. Parameters behind the first three are the rule's options, which a configuration sets beside its name:

    explorer: {name: ensemble, rule: {name: bai_ts, variance: probability}}

`eets` may return the same candidate twice where the members agree; this is a *clash*, and the explorer says
what follows (`explorer.clash`). All other rules return two different candidates. So must a user's rule, which
is named by `path/to/file.py:function`: a rule that always clashed would never ask, and its run never end.

To add a rule, write the function here, under `@rule`. It then appears in configurations, in the laboratory
(`oat bench explore`) and in the documentation by its name.

Sources: SEA (arXiv:2411.01493), EE4LLM (arXiv:2402.00396), double Thompson sampling (arXiv:1604.07101),
information-directed sampling (Russo and Van Roy, arXiv:1403.5556). Departures:

1. The authors' code of `bai_ts` and `eets` draws one member for a whole batch. Thompson sampling draws one
   for each decision, so a member is drawn for each prompt; `member: batch` is the code's way.
2. The authors' code of `eets` returns the index -1 if three random draws clash. Here a clash stays a clash.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np

from oat.explore.uncertainty import MEASURES, entropy, win_probabilities

Rule = Callable[..., np.ndarray]
"""`rule(rewards_MBG, valid_BG, generator, **options) -> pairs_B2`. Each prompt has at least two valid
candidates. `pairs_B2` has the indices of the first and the second candidate; only those of `eets` may be
equal."""
Variance = Literal["logits", "probability", "bernoulli", "kl"]
Shared = Literal["prompt", "batch"]

RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Register a rule under its function's name."""
    RULES[function.__name__] = function
    return function


READS_NO_REWARDS = ("passive", "uniform")
"""The rules that need neither disagreeing members nor more than two candidates."""


@rule
def passive(rewards_MBG: np.ndarray, valid_BG: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The first two candidates: two independent samples of the policy, as without an explorer."""
    return np.argsort(~valid_BG, axis=1, kind="stable")[:, :2]


@rule
def uniform(rewards_MBG: np.ndarray, valid_BG: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Two candidates drawn at random without replacement."""
    return np.argsort(np.where(valid_BG, generator.random(valid_BG.shape), 2.0), axis=1)[:, :2]


@rule
def eets(
    rewards_MBG: np.ndarray,
    valid_BG: np.ndarray,
    generator: np.random.Generator,
    *,
    tries: int | None = None,
    second_best: bool = False,
    member: Shared = "prompt",
) -> np.ndarray:
    """Exploration and exploitation by Thompson sampling (EE4LLM, double Thompson sampling): the first
    candidate is the best one of a drawn member. The second is the best one of the next drawn member that
    disagrees about the best.

    Args:
        tries: number of members that are looked at, the first one included; None: all.
        second_best: True: if all of them agree, the second candidate is the second best of the first member
            whose second best is another one. False: it is the first candidate again, a clash.
        member: draw the members for each prompt, or once for the batch.
    """
    members = len(rewards_MBG)
    order_MB = _orders(members, len(valid_BG), generator, member)[: members if tries is None else tries]
    best_MB = np.take_along_axis(_best(rewards_MBG, valid_BG), order_MB, axis=0)
    first_B = best_MB[0]
    second_B = _first_other(best_MB, first_B)
    if second_best:
        without_best = _hide(rewards_MBG, valid_BG)
        np.put_along_axis(without_best, _best(rewards_MBG, valid_BG)[..., None], -np.inf, axis=-1)
        seconds_MB = np.take_along_axis(without_best.argmax(axis=-1), order_MB, axis=0)
        second_B = np.where(second_B == first_B, _first_other(seconds_MB, first_B), second_B)
    return np.stack([first_B, second_B], axis=1)


@rule
def bai_ts(
    rewards_MBG: np.ndarray,
    valid_BG: np.ndarray,
    generator: np.random.Generator,
    *,
    variance: Variance = "logits",
    member: Shared = "prompt",
) -> np.ndarray:
    """Best-arm identification by Thompson sampling (SEA, Algorithm 1): the first candidate is the best one of
    a drawn member. The second is the one about which the members disagree most, compared with the first.

    Args:
        variance: the measure of disagreement (`oat.explore.uncertainty`).
        member: draw a member for each prompt, or once for the batch.
    """
    drawn_B = _orders(len(rewards_MBG), len(valid_BG), generator, member)[0]
    first_B = _best(rewards_MBG, valid_BG)[drawn_B, np.arange(len(drawn_B))]
    return _against(first_B, _row(MEASURES[variance](rewards_MBG), first_B), valid_BG)


@rule
def uncertainty(
    rewards_MBG: np.ndarray,
    valid_BG: np.ndarray,
    generator: np.random.Generator,
    *,
    variance: Variance = "logits",
) -> np.ndarray:
    """Pure exploration: the pair about which the members disagree most.

    Args:
        variance: the measure of disagreement (`oat.explore.uncertainty`).
    """
    return _largest(MEASURES[variance](rewards_MBG), valid_BG)


@rule
def double_ts(rewards_MBG: np.ndarray, valid_BG: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Double Thompson sampling (arXiv:1604.07101): the first candidate is the best one of a drawn member. The
    second is the best of the others under another drawn member, so there is no clash."""
    order_MB = _orders(len(rewards_MBG), len(valid_BG), generator, "prompt")
    every_B = np.arange(len(valid_BG))
    first_B = _best(rewards_MBG, valid_BG)[order_MB[0], every_B]
    second_M = order_MB[min(1, len(order_MB) - 1)]
    return _against(first_B, rewards_MBG[second_M, every_B], valid_BG)


@rule
def best_arm_information(
    rewards_MBG: np.ndarray, valid_BG: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """The pair whose answer tells most about which candidate is the best one: the mutual information of the
    answer and the best candidate, where each member has one vote for the best."""
    return _largest(_information(rewards_MBG, valid_BG), valid_BG)


@rule
def information_directed(
    rewards_MBG: np.ndarray, valid_BG: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Information-directed sampling (arXiv:1403.5556): the pair with the smallest ratio of squared expected
    regret to information about the best candidate. The regret of a pair is that of the mean of its two
    rewards. Departure: the best single pair, not the best distribution over two pairs."""
    information_BGG = _information(rewards_MBG, valid_BG)
    best_MB = _hide(rewards_MBG, valid_BG).max(axis=-1)
    regret_BG = (best_MB[..., None] - rewards_MBG).mean(axis=0)
    regret_BGG = 0.5 * (regret_BG[:, :, None] + regret_BG[:, None, :])
    # a pair without any information is chosen only among its like, the one of least regret first
    least = 1e-12
    return _largest(-(regret_BGG**2 + least) / (information_BGG + least), valid_BG)


@rule
def mean_best_improvement(
    rewards_MBG: np.ndarray, valid_BG: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """The best candidate by the members' mean, against the one with the largest expected improvement over it:
    the mean over members of max(0, r_m[j] - r_m[first]). If no member expects any, the one with the largest
    mean."""
    first_B = _mean_best(rewards_MBG, valid_BG)
    gain_MBG = rewards_MBG - np.take_along_axis(rewards_MBG, first_B[None, :, None], axis=2)
    improvement_BG = np.where(valid_BG, np.maximum(gain_MBG, 0.0).mean(axis=0), 0.0)
    is_expected_B = improvement_BG.max(axis=1, keepdims=True) > 0
    return _against(first_B, np.where(is_expected_B, improvement_BG, gain_MBG.mean(axis=0)), valid_BG)


@rule
def mean_best_variance(
    rewards_MBG: np.ndarray,
    valid_BG: np.ndarray,
    generator: np.random.Generator,
    *,
    variance: Variance = "logits",
) -> np.ndarray:
    """The best candidate by the members' mean, against the one about which they disagree most.

    Args:
        variance: the measure of disagreement (`oat.explore.uncertainty`).
    """
    first_B = _mean_best(rewards_MBG, valid_BG)
    return _against(first_B, _row(MEASURES[variance](rewards_MBG), first_B), valid_BG)


@rule
def mean_best_random(
    rewards_MBG: np.ndarray, valid_BG: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """A control: the best candidate by the members' mean, against a random other one."""
    return _against(_mean_best(rewards_MBG, valid_BG), generator.random(valid_BG.shape), valid_BG)


@rule
def mean_best_worst(
    rewards_MBG: np.ndarray, valid_BG: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """A control that explores nothing: the best against the worst candidate by the members' mean."""
    return _against(_mean_best(rewards_MBG, valid_BG), -rewards_MBG.mean(axis=0), valid_BG)


def widest_pairs(rewards_BG: np.ndarray, valid_BG: np.ndarray) -> np.ndarray:
    """Return the best and the worst candidate of each prompt under these rewards, (B, 2)."""
    worst_BG = np.where(valid_BG, rewards_BG, np.inf)
    return np.stack([_hide(rewards_BG, valid_BG).argmax(axis=-1), worst_BG.argmin(axis=-1)], axis=1)


def _information(rewards_MBG: np.ndarray, valid_BG: np.ndarray) -> np.ndarray:
    """Return the mutual information of a pair's answer and the best candidate, (B, G, G), nats."""
    best_MB = _best(rewards_MBG, valid_BG)
    found = []
    for place in range(len(valid_BG)):
        p_MGG = win_probabilities(rewards_MBG[:, place : place + 1])[:, 0]
        arms, counts = np.unique(best_MB[:, place], return_counts=True)
        left_GG = entropy(p_MGG.mean(axis=0))
        for arm, count in zip(arms, counts, strict=True):
            left_GG -= count / len(p_MGG) * entropy(p_MGG[best_MB[:, place] == arm].mean(axis=0))
        found.append(np.maximum(left_GG, 0.0))
    return np.stack(found)


def _hide(rewards_xBG: np.ndarray, valid_BG: np.ndarray) -> np.ndarray:
    """Return the rewards, with -inf for samples that are no candidates."""
    return np.where(valid_BG, rewards_xBG, -np.inf)


def _best(rewards_MBG: np.ndarray, valid_BG: np.ndarray) -> np.ndarray:
    """Return each member's best candidate of each prompt, (M, B)."""
    return _hide(rewards_MBG, valid_BG).argmax(axis=-1)


def _mean_best(rewards_MBG: np.ndarray, valid_BG: np.ndarray) -> np.ndarray:
    return _hide(rewards_MBG.mean(axis=0), valid_BG).argmax(axis=-1)


def _orders(members: int, prompts: int, generator: np.random.Generator, shared: Shared) -> np.ndarray:
    """Return random orders of the members, (M, B): one for each prompt, or the same one for all."""
    if shared == "batch":
        return np.repeat(generator.permutation(members)[:, None], prompts, axis=1)
    return np.argsort(generator.random((prompts, members)), axis=1).T


def _row(values_BGG: np.ndarray, first_B: np.ndarray) -> np.ndarray:
    return values_BGG[np.arange(len(first_B)), first_B]


def _against(first_B: np.ndarray, values_BG: np.ndarray, valid_BG: np.ndarray) -> np.ndarray:
    """Return the pairs of these first candidates with the other candidate of the largest value."""
    hidden_BG = np.where(valid_BG, values_BG, -np.inf)
    hidden_BG[np.arange(len(first_B)), first_B] = -np.inf
    return np.stack([first_B, hidden_BG.argmax(axis=1)], axis=1)


def _largest(values_BGG: np.ndarray, valid_BG: np.ndarray) -> np.ndarray:
    """Return the pair of two different candidates with the largest value of each prompt."""
    size = valid_BG.shape[1]
    upper_GG = np.triu(np.ones((size, size), dtype=bool), k=1)
    is_pair_BGG = valid_BG[:, :, None] & valid_BG[:, None, :] & upper_GG
    flat_B = np.where(is_pair_BGG, values_BGG, -np.inf).reshape(len(valid_BG), -1).argmax(axis=1)
    return np.stack(np.divmod(flat_B, size), axis=1)


def _first_other(chosen_MB: np.ndarray, first_B: np.ndarray) -> np.ndarray:
    """Return for each prompt the first candidate along M that is not `first_B`; `first_B` if all are."""
    differs_MB = chosen_MB != first_B
    at_B = differs_MB.argmax(axis=0)
    return np.where(differs_MB.any(axis=0), chosen_MB[at_B, np.arange(len(first_B))], first_B)
