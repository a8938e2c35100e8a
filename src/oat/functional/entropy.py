"""The coefficient of an entropy bonus: the loss gets - coef * entropy, a mean over tokens."""

import math


def adapted_entropy_coef(
    coef: float, entropy: float, *, target: float, step: float, lowest: float = 0.0, highest: float = 1.0
) -> float:
    """Return the next coefficient of an entropy bonus. It rises by a step while the policy's entropy is at
    its target or below, and falls by a step while the entropy is above (adaptive entropy control of
    Skywork-OR1, arXiv:2505.22312; at the target, and at the bounds, as `grpo_trainer.py` of TRL 1.16).

    next = min(coef + step, highest) if entropy <= target, else max(coef - step, lowest)

    The coefficient stays if the entropy is NaN, because there were no tokens. The loss gets
    `applied_entropy_coef`, not this coefficient.

    Args:
        coef: the coefficient so far, without unit.
        entropy: mean of the policy's entropy over the tokens of an optimiser step, nats per token.
        target: nats per token, positive.
        step: how far the coefficient moves, positive. TRL's default is 0.005.
        lowest, highest: bounds of the coefficient.
    """
    if math.isnan(entropy):
        return coef
    return min(coef + step, highest) if entropy <= target else max(coef - step, lowest)


def applied_entropy_coef(coef: float, entropy: float, *, target: float) -> float:
    """Return the coefficient that the loss gets: `coef` while the entropy is at most `target`, else 0. A
    policy above its target gets no bonus, although its coefficient may still be above 0. Arguments as in
    `adapted_entropy_coef`; an entropy that is NaN gives 0.
    """
    return coef if entropy <= target else 0.0
