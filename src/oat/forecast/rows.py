"""The rows that `oat check` tells: one number each, with the setting from which it follows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One number of the forecast of a run."""

    name: str
    number: float | str
    unit: str
    setting: str
    """The setting from which the number follows, as a user writes it: `learner.micro_batch_tokens`."""
