"""When a run ends."""

import time
from typing import Any


class Stop:
    """The stop rules of a run; the first that is met ends it, at a step boundary.

    Args:
        last: the number of steps, from `stop.max_steps` or because the prompts are used up; None is no limit.
        max_queries: no step begins once so many queries are spent; counted at recorded takes, so a replay ends where the run ended.
        max_hours: of running time, over all restarts. Only this rule looks at a clock.
    """

    def __init__(self, *, last: int | None, max_queries: int | None = None, max_hours: float | None = None):
        self.last, self.max_queries, self.max_hours = last, max_queries, max_hours
        self.before, self.began = 0.0, time.monotonic()

    def reason(self, step: int, queries: int) -> str | None:
        """Why the run ends before step `step`, or None."""
        if self.last is not None and step > self.last:
            return f"{step} steps are done, and it was to end after {self.last}"
        if self.last is not None and step >= self.last:
            return f"all {self.last} steps are done"
        if self.max_queries is not None and queries >= self.max_queries:
            return f"{queries} queries are spent (stop.max_queries {self.max_queries})"
        if self.max_hours is not None and self.state["seconds"] >= 3600 * self.max_hours:
            return f"it ran for {self.state['seconds'] / 3600:.2f} hours (stop.max_hours {self.max_hours})"
        return None

    @property
    def state(self) -> dict[str, Any]:
        return {"seconds": self.before + time.monotonic() - self.began}

    def load_state(self, state: dict[str, Any]) -> None:
        self.before, self.began = state["seconds"], time.monotonic()
