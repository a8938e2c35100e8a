"""The times at which evaluations are due."""

import time
from collections.abc import Mapping
from typing import Any


class Trigger:
    """Decides when an evaluation is due, from when the last one began.

    An evaluation becomes due every `every` steps. It then waits until training has made `every_queries`
    queries, and has run for `every_hours`, since the last one. Only the hours depend on a clock; the hours
    before restarts count too.
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
        """Return whether an evaluation is due after `step` updates and this many training queries."""
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
        """Steps and queries of training at the last evaluation; the run's seconds at it, and now."""
        return {"step": self.step, "queries": self.queries, "seconds": [self.seconds, self._now()]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.queries = state["queries"]
        self.seconds, self.before = state["seconds"]
        self.began = time.monotonic()

    def _now(self) -> float:
        return self.before + time.monotonic() - self.began
