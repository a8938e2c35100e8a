"""The KL of OpenRLHF, which one switch puts into the loss or into the rewards."""

from collections.abc import Mapping
from typing import Any

_SWITCH, _COEF, _ESTIMATOR = (
    ("use_kl_loss", "algo.kl.use_loss"),
    ("init_kl_coef", "algo.kl.init_coef"),
    ("kl_estimator", "algo.kl.estimator"),
)
KL = (*_SWITCH, *_COEF, *_ESTIMATOR)
"""OpenRLHF's names for it, older ones and those of today."""


def kl_of(given: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return our settings for the KL, and a remark; None: the fields give no weight, or nothing beside it.

    Args:
        given: the fields that are set, with their values.
    """
    switch, coef, estimator = (
        next((given[name] for name in names if name in given), None) for names in (_SWITCH, _COEF, _ESTIMATOR)
    )
    if type(coef) not in (int, float) or (switch is None and estimator is None):
        return None
    in_loss = switch is True
    begin = "algorithm.kl" if in_loss else "algorithm.kl_reward"
    ours = {f"{begin}_coef": coef} | ({f"{begin}_estimator": estimator} if estimator is not None else {})
    return ours, f"the KL is in the {'loss' if in_loss else 'rewards'}"
