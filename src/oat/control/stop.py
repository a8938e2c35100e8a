"""The stop conditions of a run.

If `prompts.epochs` is set, the number of steps is computed when the run is built. So the last step is known
beforehand. It is evaluated and saved in the same way as the last step of `stop.max_steps`. (With
`sampling.refill_rounds` this number is an upper bound, and `Collector.ended` may end the run earlier.)
`oat digest` leaves out the state of this part: the running time, and the condition on a metric that held.
"""

import operator
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from oat.errors import ConfigError
from oat.types import Spent
from oat.types.questions import Budget

_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_CONDITION = re.compile(r"\s*(>=|<=|>|<)\s*([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*")


class Condition(NamedTuple):
    """A condition on a metric, such as `eval/sampled_win_rate >= 0.8`."""

    metric: str
    sign: str
    bound: float

    def holds(self, values: Mapping[str, float]) -> bool:
        """Return True if the metric is there and fulfils the condition."""
        return self.metric in values and bool(_COMPARE[self.sign](values[self.metric], self.bound))

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.bound:g}"


def conditions_of(texts: Mapping[str, str]) -> tuple[Condition, ...]:
    """Read the setting `stop.when`.

    Args:
        texts: by metric, a sign and a number, such as ">= 0.8".

    Raises:
        ConfigError: a text is no sign and number.
    """
    conditions = []
    for metric, text in texts.items():
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"stop.when of {metric} is {text!r}; write a sign ({', '.join(_COMPARE)}) and a number, such "
                "as '>= 0.8'"
            )
        conditions.append(Condition(metric, found[1], float(found[2])))
    return tuple(conditions)


class Stop:
    """The stop conditions of a run. The first condition that holds ends the run, between two steps.

    Args:
        last: number of steps of the run, from `stop.max_steps` or `prompts.epochs`; None: no limit.
        budget: the budget of training. The run ends when the budget cannot pay another question and steps
            have taken all paid questions.
        max_hours: largest running time in hours, summed over all processes of the run; None: no limit. Only
            this condition depends on a clock.
        when: conditions on metrics. The run ends after the first step whose row of metrics fulfils one.

    Attributes:
        reached: the condition on a metric that held, as text; "" if none has.
    """

    def __init__(
        self,
        *,
        last: int | None,
        budget: Budget | None = None,
        max_hours: float | None = None,
        when: tuple[Condition, ...] = (),
    ):
        self.last = last
        self.budget = budget or Budget()
        self.max_hours = max_hours
        self.when = when
        self.reached = ""
        self.before, self.began = 0.0, time.monotonic()

    def reason(self, step: int, spent: Spent) -> str | None:
        """Return the reason why the run ends before step `step`; None if it goes on.

        Args:
            spent: the spending of the steps before `step`.
        """
        if (done := self.steps_done(step)) is not None:
            return done
        if self.reached:
            return f"{self.reached} (stop.when)"
        if (used_up := self.budget.used_up(spent)) is not None and not spent.open:
            return used_up
        if self.max_hours is not None and self.state["seconds"] >= 3600 * self.max_hours:
            return f"it ran for {self.state['seconds'] / 3600:.2f} hours (stop.max_hours {self.max_hours})"
        return None

    def note(self, values: Mapping[str, float]) -> str | None:
        """Return the reason why the run ends after a step with these metrics; None if it goes on. A condition
        that holds is remembered."""
        for condition in self.when:
            if condition.holds(values):
                self.reached = str(condition)
                return f"{self.reached} (stop.when)"
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
        seconds = self.before + time.monotonic() - self.began
        return {"seconds": seconds, **({"reached": self.reached} if self.reached else {})}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state. A condition that held counts only if the run still has it."""
        self.before, self.began = state["seconds"], time.monotonic()
        reached = state.get("reached", "")
        self.reached = reached if reached in map(str, self.when) else ""
