"""Fields of peft's LoraConfig that decide the scale of an adapter together."""

import math
from collections.abc import Mapping
from typing import Any

SECTION = "peft_config"
"""The section of the table that has the fields of a LoraConfig."""
ADAPTER = tuple(f"{SECTION}.{name}" for name in ("r", "lora_alpha", "use_rslora"))
_DEFAULT = 8
"""peft's default of r, and of lora_alpha."""


def scaled(given: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return our settings for an adapter whose scale is alpha / sqrt(rank), and a remark; None: it has not
    this scale, or its fields are no numbers.

    Args:
        given: the fields that are set, with their values.
    """
    rank, alpha, is_by_root = (given.get(name, _DEFAULT) for name in ADAPTER)
    if is_by_root is not True or type(rank) is not int or not isinstance(alpha, int | float) or rank < 1:
        return None
    ours: dict[str, Any] = {"model.lora.rank": rank, "model.lora.alpha": round(alpha * math.sqrt(rank), 6)}
    ours |= {} if f"{SECTION}.target_modules" in given else {"model.lora.targets": ...}
    return ours, f"here alpha / rank is {alpha:g} / sqrt({rank}), the scale of use_rslora"
