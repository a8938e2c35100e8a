"""The stop conditions of a run.

If `prompts.epochs` is set, the number of steps is computed when the run is built. So the last step is known
beforehand. It is evaluated and saved in the same way as the last step of `stop.max_steps`. (With
`sampling.refill_rounds` this number is an upper bound, and `Collector.ended` may end the run earlier.)
`oat digest` leaves out the state of this part, which is only the running time.
"""

import time
from typing import Any

from oat.types import Spent
from oat.types.budget import Budget


class Stop:
    """The stop conditions of a run. The first condition that holds ends the run, between two steps.

    Args:
        last: number of steps of the run, from `stop.max_steps` or `prompts.epochs`; None: no limit.
        budget: the budget of training. The run ends when the budget cannot pay another question and steps
            have taken all paid questions.
        max_hours: largest running time in hours, summed over all processes of the run; None: no limit. Only
            this condition depends on a clock.
    """

    def __init__(self, *, last: int | None, budget: Budget | None = None, max_hours: float | None = None):
        self.last = last
        self.budget = budget or Budget()
        self.max_hours = max_hours
        self.before, self.began = 0.0, time.monotonic()

    def reason(self, step: int, spent: Spent) -> str | None:
        """Return the reason why the run ends before step `step`; None if it goes on.

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
        """Return the reason why no step is left after `step` steps; None if steps are left or there is no
        limit."""
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
