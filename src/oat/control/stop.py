"""The stop conditions of a run.

If `prompts.epochs` is set, the number of steps is computed when the run is built. So the last step is known
beforehand, and is evaluated and saved like that of `stop.max_steps`. The state of this part is only the
running time, so `oat digest` leaves it out.
"""

import time
from typing import Any

from oat.types import Spent
from oat.types.budget import Budget


class Stop:
    """The stop conditions of a run. The first that is met ends it, between two steps.

    Args:
        last: number of steps of the run, from `stop.max_steps` or from `prompts.epochs`; None for no limit.
        budget: the budget of training. The run ends when the budget cannot buy another question, and steps
            have taken all questions that were paid for.
        max_hours: largest number of hours of running time, summed over all processes of the run. Only this
            condition looks at a clock.
    """

    def __init__(self, *, last: int | None, budget: Budget | None = None, max_hours: float | None = None):
        self.last = last
        self.budget = budget or Budget()
        self.max_hours = max_hours
        self.before, self.began = 0.0, time.monotonic()

    def reason(self, step: int, spent: Spent) -> str | None:
        """Return the reason why the run ends before step `step`, or None.

        Args:
            spent: the spending of the steps before `step`.
        """
        if (done := self.steps_done(step)) is not None:
            return done
        if (used_up := self.budget.used_up(spent)) is not None and not spent.open:
            return used_up
        if self.max_hours is not None and self.state["seconds"] >= 3600 * self.max_hours:
            return f"it ran for {self.state['seconds'] / 3600:.2f} hours (stop.max_hours {self.max_hours})"
        return None

    def steps_done(self, step: int) -> str | None:
        """Return the reason why nothing is left to do after `step` steps, or None."""
        if self.last is None or step < self.last:
            return None
        if step > self.last:
            return f"{step} steps are done, and it was to end after {self.last}"
        return f"all {step} steps are done" if step > 1 else "its only step is done"

    @property
    def state(self) -> dict[str, Any]:
        return {"seconds": self.before + time.monotonic() - self.began}

    def load_state(self, state: dict[str, Any]) -> None:
        self.before, self.began = state["seconds"], time.monotonic()
