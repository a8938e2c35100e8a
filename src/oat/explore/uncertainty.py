"""How much the members of an ensemble disagree about pairs of candidates.

Every function takes the members' rewards, (M, B, G), and returns (B, G, G): one number for each ordered pair
of candidates of a prompt. All are symmetric, 0 on the diagonal and at least 0. With D_m[i, j] = r_m[i] -
r_m[j] and p_m = sigmoid(D_m):

* `logits`: the unbiased variance of D_m over members. It is what the authors' code of SEA (arXiv:2411.01493)
  computes.
* `probability`: the unbiased variance of p_m over members, as in SEA's Algorithm 1.
* `bernoulli`: the variance of one answer, pbar (1 - pbar) with pbar the mean of p_m. It is large also where
  all members agree that a pair is even. The diagonal would be 1/4, and is set to 0.
* `kl`: the mean over members of KL(p_m || pbar), nats. This is the information that an answer gives about
  which member is right.

Departure from the authors' code: it repairs NaN of `kl` by the transposed entry; here no entry is NaN, since
x log x is computed as 0 at 0.
"""

from collections.abc import Callable

import numpy as np

Measure = Callable[[np.ndarray], np.ndarray]


def logits_variance(rewards_MBG: np.ndarray) -> np.ndarray:
    """Return the variance of the difference of rewards, (B, G, G), in squared units of reward.

    Var(r_i - r_j) = C_ii + C_jj - 2 C_ij with C the covariance over members, so no array has the axes M, G
    and G together.
    """
    members = len(rewards_MBG)
    centred_BMG = (rewards_MBG.astype(float) - rewards_MBG.astype(float).mean(axis=0)).swapaxes(0, 1)
    covariance_BGG = np.matmul(centred_BMG.swapaxes(1, 2), centred_BMG) / max(1, members - 1)
    own_BG = np.einsum("bii->bi", covariance_BGG)
    return _symmetric(own_BG[:, :, None] + own_BG[:, None, :] - 2 * covariance_BGG)


def probability_variance(rewards_MBG: np.ndarray) -> np.ndarray:
    """Return the variance of the probability that the first candidate wins, (B, G, G)."""
    return _symmetric(win_probabilities(rewards_MBG).var(axis=0, ddof=int(len(rewards_MBG) > 1)))


def bernoulli_variance(rewards_MBG: np.ndarray) -> np.ndarray:
    """Return the variance of an answer under the mean probability, (B, G, G)."""
    mean_BGG = win_probabilities(rewards_MBG).mean(axis=0)
    return _symmetric(mean_BGG * (1 - mean_BGG))


def kl_disagreement(rewards_MBG: np.ndarray) -> np.ndarray:
    """Return the mean over members of KL(p_m || pbar), (B, G, G), nats. It equals the entropy of the mean
    minus the mean of the entropies."""
    p_MBGG = win_probabilities(rewards_MBG)
    return _symmetric(entropy(p_MBGG.mean(axis=0)) - entropy(p_MBGG).mean(axis=0))


MEASURES: dict[str, Measure] = {
    "logits": logits_variance,
    "probability": probability_variance,
    "bernoulli": bernoulli_variance,
    "kl": kl_disagreement,
}


def win_probabilities(rewards_MBG: np.ndarray) -> np.ndarray:
    """Return each member's probability that candidate i wins against candidate j, (M, B, G, G)."""
    rewards_MBG = rewards_MBG.astype(float)
    return sigmoid(rewards_MBG[..., :, None] - rewards_MBG[..., None, :])


def sigmoid(values: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)) without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * values))


def entropy(p: np.ndarray) -> np.ndarray:
    """Return the entropy of Bernoulli variables with these probabilities, nats."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return -(np.where(p > 0, p * np.log(p), 0.0) + np.where(p < 1, (1 - p) * np.log1p(-p), 0.0))


def _symmetric(values_BGG: np.ndarray) -> np.ndarray:
    """Remove the rounding errors: make the values symmetric, at least 0, and 0 on the diagonal."""
    values_BGG = np.maximum(0.5 * (values_BGG + values_BGG.swapaxes(1, 2)), 0.0)
    size = values_BGG.shape[1]
    values_BGG[:, np.arange(size), np.arange(size)] = 0.0
    return values_BGG
