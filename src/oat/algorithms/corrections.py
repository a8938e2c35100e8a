"""The section `correction` of policy gradients: weights for tokens that other weights, or another arithmetic,
drew than those of the old policy (`functional/corrections.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from oat.errors import ConfigError
from oat.lazy import lazily

if TYPE_CHECKING:
    import torch

    from oat import functional as F
else:
    torch, F = lazily("torch"), lazily("oat.functional")


_BOUNDS: dict[str, tuple[float | None, float]] = {"truncate": (None, 2.0), "mask": (0.5, 5.0)}
"""The bounds that a form has by default."""


@dataclass(frozen=True)
class CorrectionConfig:
    """Weights of the policy's loss for tokens that the old policy would have sampled with another
    probability. k is the ratio of the old policy's probability to the sampler's."""

    form: Literal["none", "truncate", "mask"] = "none"
    """`truncate`: the weight is k, at most `high` (truncated importance sampling). `mask`: the weight is k,
    and 0 where k is outside of `low` and `high` (with `level: token`: IcePop)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Whose ratio k is. `token`: the token's own. `sequence`: the product over the tokens of the response.
    `geometric`: the geometric mean over them."""
    low: float | None = None
    """Lower bound of k. None: 0.5 with `mask`; no bound with `truncate`."""
    high: float | None = None
    """Upper bound of k. None: 2 with `truncate`, 5 with `mask`."""
    off_policy_bound: float | None = None
    """Bound of the mean over a response's tokens of recorded minus present log-probability, nats per token.
    Above it, tokens with a negative advantage give no gradient (off-policy sequence mask). None: no bound."""

    def __post_init__(self) -> None:
        if self.form == "none":
            changed = [
                field.name
                for field in fields(self)
                if field.name in ("level", "low", "high") and getattr(self, field.name) != field.default
            ]
            if changed:
                raise ConfigError(
                    f"algorithm.correction.{changed[0]} is {getattr(self, changed[0])}, and nothing reads it "
                    "without algorithm.correction.form; set form to truncate or mask, or remove it"
                )
        for name in ("low", "high", "off_policy_bound"):
            value = getattr(self, name)
            is_right = value is None or (0 <= value < math.inf and (name == "low" or value > 0))
            if not is_right:
                raise ConfigError(f"algorithm.correction.{name} is {value}; it must be positive, and finite")
        low, high = self.bounds
        if low is not None and low >= high:
            raise ConfigError(
                f"algorithm.correction.low is {low}, and high is {high}; low must be below high"
            )

    @property
    def bounds(self) -> tuple[float | None, float]:
        """The lower and the upper bound of k; the lower one may be None."""
        low, high = _BOUNDS.get(self.form, (None, math.inf))
        return low if self.low is None else self.low, high if self.high is None else self.high


def correction_weights(
    config: CorrectionConfig,
    old_K: torch.Tensor,
    recorded_K: torch.Tensor,
    row_of_K: torch.Tensor,
    num_rows: int,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the weight of each trained token, (K,), and metrics: the mean weight, and the share of tokens
    whose weight a bound changed. The form is not "none"."""
    low, high = config.bounds
    given = (old_K, recorded_K, row_of_K, num_rows)
    if config.form == "truncate":
        weights_K, changed_K = F.corrections.truncated_weights(
            *given, level=config.level, cap=high, floor=low
        )
    else:
        weights_K, changed_K = F.corrections.masked_weights(*given, level=config.level, low=low, high=high)
    has_tokens = len(weights_K) > 0
    return weights_K, {
        "correction/weight": float(weights_K.mean()) if has_tokens else 1.0,
        "correction/bounded_frac": float(changed_K.mean()) if has_tokens else 0.0,
    }
