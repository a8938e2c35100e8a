"""A row of metrics, and the part of it that equal runs repeat."""

from collections.abc import Mapping

from oat.errors import ConfigError, did_you_mean
from oat.metrics.names import NAMES, listed

UNREPEATABLE = (
    "time/",
    "roofline/",
    "episode/broken_calls",
    "oracle/reasked",
    "oracle/invalid_frac",
    "oracle/latency_s",
    "oracle/outages",
    "oracle/position_bias",
    "oracle/retries",
    "oracle/source/",
)
"""Beginnings of the names of metrics that depend on clocks, machines or restarts. Digests leave these metrics
out. In rows of earlier versions, `oracle/source/` depended on restarts."""


class Metrics:
    """One row of metrics: its numbers, by name."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add(self, values: Mapping[str, float]) -> None:
        """Add numbers, by name. A number replaces an earlier number of the same name.

        Raises:
            ConfigError: a name is neither in `NAMES` nor under `user/`.
        """
        for name, value in values.items():
            if listed(name) not in NAMES and not name.startswith("user/"):
                raise ConfigError(
                    f"an objective reports {name!r}, which no list knows; {did_you_mean(name, NAMES)[:80]}; "
                    f"or name your own user/{name}"
                )
            self.values[name] = float(value)


def repeatable(values: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers that are the same in two equal runs: all except the `UNREPEATABLE` ones."""
    return {name: value for name, value in values.items() if not name.startswith(UNREPEATABLE)}
