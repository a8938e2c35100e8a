"""Decides at which steps evaluations are due."""

import time
from collections.abc import Mapping
from typing import Any


class Trigger:
    """Decides when an evaluation is due. All of these must have happened since the last evaluation began:

    * The number of steps has reached or passed a multiple of `every`.
    * Training has made at least `every_queries` queries.
    * The run has run for at least `every_hours` hours. The time of its earlier processes counts too.

    Only the third condition depends on a clock. If `every_hours` is 0, it always holds.
    """

    def __init__(self, every: int, every_queries: int = 0, every_hours: float = 0.0):
        self.every = every
        self.every_queries = every_queries
        self.every_hours = every_hours
        self.step = self.queries = 0
        self.seconds = 0.0
        self.before = 0.0
        self.began = time.monotonic()

    def due(self, step: int, queries: int) -> bool:
        """Return True if an evaluation is due after `step` updates and `queries` queries of training."""
        is_pending = step // self.every > self.step // self.every
        return (
            is_pending
            and queries - self.queries >= self.every_queries
            and self._now() - self.seconds >= 3600 * self.every_hours
        )

    def begin(self, step: int, queries: int) -> None:
        self.step = step
        self.queries = queries
        self.seconds = self._now()

    @property
    def state(self) -> dict[str, Any]:
        """The numbers of updates and of training queries when the last evaluation began, and two running
        times of the run in seconds: until that evaluation began, and until now."""
        return {"step": self.step, "queries": self.queries, "seconds": [self.seconds, self._now()]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.queries = state["queries"]
        self.seconds, self.before = state["seconds"]
        self.began = time.monotonic()

    def _now(self) -> float:
        return self.before + time.monotonic() - self.began
