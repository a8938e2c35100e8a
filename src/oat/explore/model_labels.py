"""Mixed preference learning: pairs that the ensemble labels itself (SEA, arXiv:2411.01493, Section 5).

For some prompts, the pair is a drawn member's best candidate and its worst one: the largest believed margin
approximates a comparison of the best policy with the worst. Such a pair costs no query, and the ensemble
never learns from it.

Departures from the papers' code:

1. The member is drawn for each prompt.
2. The label is that of the mean probability over members. The code takes the order of the drawn member. The
   two differ only where the members disagree about these two candidates.
3. `pick: certain`, `max_variance`, `labels: sampled` and `soft`, and `audit` are ours.
"""

from typing import NamedTuple

import numpy as np

from oat.explore.rules import widest_pairs
from oat.explore.settings import ModelLabelsConfig
from oat.explore.uncertainty import sigmoid


class ModelPairs(NamedTuple):
    """Pairs for the ensemble's label.

    Attributes:
        pairs_B2: for each prompt, the preferred candidate and the other one.
        is_chosen_B: True for the prompts whose pair the ensemble labels.
        is_audited_B: True for those of them that the oracle is asked about instead.
    """

    pairs_B2: np.ndarray
    is_chosen_B: np.ndarray
    is_audited_B: np.ndarray


def model_pairs(
    rewards_MBG: np.ndarray,
    valid_BG: np.ndarray,
    labels: ModelLabelsConfig,
    generator: np.random.Generator,
) -> ModelPairs:
    """Choose the prompts whose pair the ensemble labels, and these pairs.

    Args:
        rewards_MBG: the rewards that M members give G candidates of B prompts.
        valid_BG: True for candidates.
    """
    prompts = len(valid_BG)
    members_B = generator.integers(len(rewards_MBG), size=prompts)
    pairs_B2 = widest_pairs(rewards_MBG[members_B, np.arange(prompts)], valid_BG)
    rewards_MB2 = np.take_along_axis(rewards_MBG, pairs_B2[None], axis=2).astype(float)
    p_MB = sigmoid(rewards_MB2[..., 0] - rewards_MB2[..., 1])
    is_turned_B = p_MB.mean(axis=0) < 0.5
    pairs_B2[is_turned_B] = pairs_B2[is_turned_B][:, ::-1]
    variance_B = p_MB.var(axis=0, ddof=int(len(p_MB) > 1))
    can_B = (valid_BG.sum(axis=1) >= 2) & (pairs_B2[:, 0] != pairs_B2[:, 1])
    if labels.max_variance is not None:
        can_B &= variance_B <= labels.max_variance
    order_B = variance_B if labels.pick == "certain" else generator.random(prompts)
    sorted_B = np.argsort(order_B, kind="stable")
    is_chosen_B = np.zeros(prompts, dtype=bool)
    is_chosen_B[sorted_B[can_B[sorted_B]][: num_labelled(prompts, labels)]] = True
    is_audited_B = is_chosen_B & (generator.random(prompts) < labels.audit)
    return ModelPairs(pairs_B2, is_chosen_B, is_audited_B)


def num_labelled(prompts: int, labels: ModelLabelsConfig) -> int:
    """Return the largest number of a round's prompts whose pair the ensemble labels."""
    return int(prompts * labels.share + 1e-9)


def label_of(belief: float, labels: ModelLabelsConfig, generator: np.random.Generator) -> float:
    """Return the probability that the first candidate wins, as the ensemble's answer states it.

    Args:
        belief: the mean over members of this probability.
    """
    if labels.labels == "soft":
        return belief
    if labels.labels == "sampled":
        return float(generator.random() < belief)
    return 1.0
