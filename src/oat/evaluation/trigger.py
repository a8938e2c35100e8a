"""The times at which evaluations are due."""

import time
from collections.abc import Mapping
from typing import Any


class Trigger:
    """Decides when an evaluation is due, from the step, the queries and the time at which the last one began.

    An evaluation becomes pending every `every` steps. It is due as soon as training has also made
    `every_queries` queries and has run for `every_hours` since the last one began. Only the hours depend on a
    clock. They include the time that the run's earlier processes ran.
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
        """The updates and the queries of training before the last evaluation; and the seconds that the run
        had run until that evaluation, and until now."""
        return {"step": self.step, "queries": self.queries, "seconds": [self.seconds, self._now()]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.queries = state["queries"]
        self.seconds, self.before = state["seconds"]
        self.began = time.monotonic()

    def _now(self) -> float:
        return self.before + time.monotonic() - self.began
