"""Alarms watch a run's own metrics, to report a collapse of the run before its budget is spent.
docs/alarms.md gives the reason for each alarm.

An alarm is raised when its metric has been out of bounds for `patience` steps in a row. Steps without the
metric are passed over. A raised alarm is counted and printed, and its action follows. The alarm can be raised
again after its metric has been within bounds, or after a roll back. Alarms depend only on recorded metrics
and on settings. So a continued run raises the same alarms at the same steps.

The metrics of a step come from the forward passes of its update; the first pass uses the weights of the
checkpoint before the step. This checkpoint is proven good if no alarm with the action `roll_back` is out of
bounds in the step. (If the second oracle has such an alarm, the weights must also have been evaluated.) A
roll back goes to the newest proven checkpoint that `checkpoint.every` made. Until there is one, a roll back
goes to the state before the first step that the run took with such an alarm.

An evaluation after step k and the metrics of step k + 1 describe the same weights. So the second oracle's
scores are checked together with step k + 1.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from oat.config.alarm_settings import AlarmsConfig, GoldAlarm
from oat.control.silence import CAUSES, MISSING, WASTED, why
from oat.errors import warn

LENGTH = "response/length"
LEVEL_ROWS = 3
"""The number of first steps whose mean response length is the start level of the alarm `length`."""
GOLD = ("eval/gold_sampled", "eval/gold_greedy")
"""The metrics of an evaluation's second oracle. The alarm `gold` watches the first of them that the run
reports."""

METRICS = {
    "kl": ("kl/reference",),
    "entropy": ("policy/entropy",),
    "length": (LENGTH,),
    "ratio": ("policy/ratio_max",),
    "truncated": ("response/truncated_frac",),
    "spread": ("reward/zero_spread_frac", "answers/tied_frac"),
    "unanswered": (MISSING,),
    "wasted": (WASTED,),
    "gold": GOLD,
}
"""The metrics of each alarm. An alarm watches the first of its metrics that the run reports."""

_HINTS = {
    "kl": (
        "look in samples.jsonl for what pays without being good; lower learner.learning_rate, or tie the "
        "policy more tightly (algorithm.kl_coef)"
    ),
    "entropy": (
        "samples hardly differ any more, so nothing new is found; look at samples.jsonl, and lower "
        "learner.learning_rate"
    ),
    "length": "look in samples.jsonl for repetition or silence that pays",
    "ratio": (
        "an update moves single tokens far; lower learner.learning_rate, algorithm.epochs or "
        "algorithm.minibatches, and see logps/recorded_gap"
    ),
    "truncated": (
        "responses are cut before their end; raise sampling.max_new_tokens, or see in samples.jsonl "
        "whether endless text pays"
    ),
    "spread": (
        "there is nothing to learn from; see in samples.jsonl whether the values are constant, or every "
        "prompt is solved, or hopeless"
    ),
    "gold": "what is rewarded is no longer what is wanted: take the checkpoint of its best "
    "(checkpoint.keep_best, oat export RUN OUT --step best), "
    "tie the policy more tightly, or improve the oracle of training (docs/over_optimisation.md)",
}


@dataclass(frozen=True)
class Alarm:
    """An alarm that is on in a run.

    Attributes:
        metric: the metric that it watches.
        patience: number of consecutive values of the metric that must be out of bounds before the alarm is
            raised. Steps without the metric do not count.
        action: the action when it is raised: "warn", "stop" or "roll_back".
        below, above: bounds of the metric. For the response length, multiples of its mean in the first steps
            (`LEVEL_ROWS`). For scores of the second oracle, `below` is minus the largest allowed fall from
            the best score so far.
    """

    metric: str
    patience: int
    action: str
    below: float
    above: float


def alarms_of(config: AlarmsConfig, watched: Collection[str]) -> dict[str, Alarm]:
    """Return the alarms of a run, by name. An alarm is left out if it is off, if it has no bound, or if the
    run does not report its metric.

    Args:
        watched: names of the metrics that the run reports.
    """
    alarms = {}
    for name, metrics in METRICS.items():
        settings = getattr(config, name)
        metric = next((metric for metric in metrics if metric in watched), None)
        if settings.action == "off" or metric is None:
            continue
        if isinstance(settings, GoldAlarm):
            bounds = (-math.inf if settings.drop is None else -settings.drop), math.inf
        else:
            bounds = getattr(settings, "below", -math.inf), getattr(settings, "above", math.inf)
        if bounds != (-math.inf, math.inf):
            alarms[name] = Alarm(metric, settings.patience, settings.action, *bounds)
    return alarms


class Alarms:
    """The alarms of one run, and their state.

    Args:
        alarms: the alarms by name.
        max_roll_backs: largest number of roll backs in a run. With none left, an alarm that
            would cause a roll back ends the run.
        oracle: name of the oracle that training asks; used in hints.

    Attributes:
        raised: the number of times that an alarm was raised.
        back: the step whose checkpoint is the target of roll backs; None if no alarm rolls back.
    """

    def __init__(self, alarms: Mapping[str, Alarm], max_roll_backs: int, *, oracle: str = ""):
        self.alarms = dict(alarms)
        self.max_roll_backs = max_roll_backs
        self.oracle = oracle
        self.rolling = [name for name, alarm in alarms.items() if alarm.action == "roll_back"]
        self.counts = dict.fromkeys(alarms, 0)
        self.lengths: list[float] = []
        self.best: float | None = None
        self.heard: dict[str, float] = {}
        self.raised = self.roll_backs = 0
        self.back: int | None = None
        self._end: dict[str, str] | None = None

    @property
    def ended(self) -> str | None:
        """The reason why an alarm ended the run, or None. The reason stays until the alarm's settings are
        changed."""
        return None if self._end is None else self._end["reason"]

    def begin(self, step: int) -> bool:
        """Choose the target of roll backs when a process begins. If there is a target already, or no alarm
        has the action `roll_back`, do nothing.

        Args:
            step: the step before which this process begins. The state before this step becomes the target.

        Returns:
            True if this call chose the target. The caller must then make sure that a checkpoint of this
            state is on disk.
        """
        if self.back is not None or not self.rolling:
            return False
        self.back = step
        return True

    def note_evaluation(self, values: Mapping[str, float]) -> None:
        """Store the second oracle's scores of an evaluation until the next step is checked."""
        self.heard = {
            alarm.metric: values[alarm.metric]
            for alarm in self.alarms.values()
            if alarm.metric in GOLD and alarm.metric in values
        }

    def check(self, step: int, values: Mapping[str, float], *, is_saved: bool) -> int | None:
        """Check the metrics of a step. This is called once for each step.

        Args:
            step: number of steps that are done, this one included.
            values: the step's metrics.
            is_saved: True if the state before this step was saved because of `checkpoint.every`.

        Returns:
            The step of the checkpoint to roll back to now; None if no roll back is due.
        """
        values, self.heard = {**values, **self.heard}, {}
        begun = [name for name in self.alarms if self._begins(name, values)]
        if LENGTH in values and len(self.lengths) < LEVEL_ROWS:
            self.lengths.append(values[LENGTH])
        self.raised += len(begun)
        if is_saved and self.back is not None and all(self._is_proven(name, values) for name in self.rolling):
            self.back = step - 1
        for name in begun:
            self._follow(name, step, values)
        if self._end is not None or not set(begun) & set(self.rolling):
            return None
        self.roll_backs += 1
        self.counts = dict.fromkeys(self.alarms, 0)
        warn(
            f"after {step} steps: back to the state after {self.back} (roll back {self.roll_backs} of "
            f"{self.max_roll_backs})"
        )
        return self.back

    def _begins(self, name: str, values: Mapping[str, float]) -> bool:
        """Count for how many steps in a row the metric of an alarm has been out of bounds. Return True if
        this step raises the alarm."""
        alarm = self.alarms[name]
        if alarm.metric not in values or (alarm.metric == LENGTH and len(self.lengths) < LEVEL_ROWS):
            return False
        value = values[alarm.metric]
        if alarm.metric in GOLD:
            self.best = max(value, value if self.best is None else self.best)
        below, above = self._bounds(alarm)
        self.counts[name] = self.counts[name] + 1 if value < below or value > above else 0
        return self.counts[name] == alarm.patience

    def _is_proven(self, name: str, values: Mapping[str, float]) -> bool:
        """Return True if the alarm's metric is within bounds for the state that a step began with. A metric
        of the second oracle must have been measured for that state."""
        metric = self.alarms[name].metric
        return not self.counts[name] and (metric not in GOLD or metric in values)

    def _bounds(self, alarm: Alarm) -> tuple[float, float]:
        if alarm.metric in GOLD and self.best is not None:
            return self.best + alarm.below, math.inf
        level = sum(self.lengths) / len(self.lengths) if alarm.metric == LENGTH else 1.0
        return alarm.below * level, alarm.above * level

    def _follow(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """If the action of a raised alarm is `stop`, or is `roll_back` and no roll back is left, the alarm
        ends the run: store the reason, if there is none yet. Otherwise warn of the alarm."""
        alarm = self.alarms[name]
        what = self._message(name, values)
        is_spent = alarm.action == "roll_back" and self.roll_backs >= self.max_roll_backs
        if alarm.action != "stop" and not is_spent:
            warn(f"after {step} steps: {what}")
        elif self._end is None:
            change = f"alarms.{name}" + (" or alarms.max_roll_backs" if is_spent else "")
            spent = f", and the run was rolled back {self.roll_backs} times" if is_spent else ""
            reason = (
                f"the run ended after {step} steps{spent}: {what}. It goes on from here once {change} is "
                "changed (docs/alarms.md)"
            )
            self._end = {"rule": name, "reason": reason}

    def _message(self, name: str, values: Mapping[str, float]) -> str:
        alarm = self.alarms[name]
        value = values[alarm.metric]
        below, above = self._bounds(alarm)
        is_low = value < below
        side, bound = ("below", below) if is_low else ("above", above)
        multiple = alarm.below if is_low else alarm.above
        level = f" ({multiple:g} times its level at the start)" if alarm.metric == LENGTH else ""
        level = f" ({-alarm.below:g} under its best, {self.best:.4g})" if alarm.metric in GOLD else level
        unit = "evaluation" if alarm.metric in GOLD else "step"
        since = f"for {alarm.patience} {unit}s on end" if alarm.patience > 1 else f"in one {unit}"
        return (
            f"alarm {name}: {alarm.metric} is {value:.4g}, {side} {bound:.4g}{level}, {since}; "
            f"{self._hint(name, values)}"
        )

    def _hint(self, name: str, values: Mapping[str, float]) -> str:
        """Return advice to the user. For the alarms `unanswered` and `wasted`, it depends on why most answers
        are missing: the oracle abstained or failed, or they were unpaid."""
        if name not in ("unanswered", "wasted"):
            return _HINTS[name]
        shares = {mark: values.get(metric, 0.0) for mark, metric in CAUSES.items()}
        return (
            why(max(shares, key=shares.__getitem__), self.oracle)
            if any(shares.values())
            else "look at the marks in samples.jsonl"
        )

    def _settings(self) -> dict[str, str]:
        """Return each alarm as text, by name.

        If an alarm's text has changed when a run is continued, its counts begin again at 0. So for the same
        settings the text must not differ between versions of oat.
        """
        limits = dict.fromkeys(self.rolling, f", max_roll_backs={self.max_roll_backs}")
        return {
            name: f"{alarm}{limits.get(name, '')}".replace("Alarm(", "Rule(", 1)
            for name, alarm in self.alarms.items()
        }

    @property
    def state(self) -> dict[str, Any]:
        return {
            "rules": self._settings(),
            "counts": dict(self.counts),
            "lengths": list(self.lengths),
            "best": self.best,
            "heard": dict(self.heard),
            "raised": self.raised,
            "roll_backs": self.roll_backs,
            "back": self.back,
            "end": self._end,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        unchanged = {name for name, text in self._settings().items() if state["rules"].get(name) == text}
        self.counts = {name: state["counts"][name] if name in unchanged else 0 for name in self.alarms}
        self.lengths = list(state["lengths"])
        self.raised = state["raised"]
        self.roll_backs = state["roll_backs"]
        # checkpoints of earlier versions lack `best` and `heard`
        self.best, self.heard = state.get("best"), dict(state.get("heard", {}))
        self.back = state["back"] if self.rolling else None
        self._end = state["end"] if state["end"] and state["end"]["rule"] in unchanged else None
