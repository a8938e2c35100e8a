"""Alarms: rules over a run's own metrics, so that a run that collapses says so before its budget is spent.
docs/alarms.md has the reason of each.

A rule holds once its metric has been out of bounds for `patience` steps on end; a step without the metric is
passed over. Each time a rule begins to hold an alarm is raised: it is counted, said aloud, and followed by
the rule's action. All of this is a function of recorded metrics and of the settings, so a run that is killed
and continued raises the same alarms at the same steps.

What a step reports was measured before its update. So a checkpoint is proven good by the step after it, and a
roll back leads to the newest one that `checkpoint.every` made and that was proven while no rule with
`roll_back` was out of bounds.

The second oracle of an evaluation speaks of the policy after the step of its row, as what the next step
reports does; so it is heard with that step.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from oat.config.alarm_settings import AlarmsConfig, GoldRule
from oat.control.silence import CAUSES, MISSING, WASTED, why
from oat.errors import warn

LENGTH = "response/length"
LEVEL_ROWS = 3
"""Steps whose mean length is the level at the start."""
GOLD = ("eval/gold_sampled", "eval/gold_greedy")
"""What an evaluation reports and a rule watches."""

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
"""By rule, what it watches: the first of these that the algorithm, or an evaluation, reports."""

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
class Rule:
    """A rule as a run watches it.

    Attributes:
        metric: what it watches.
        below, above: the bounds; those of a length are multiples of its level at the start, and those of the
        second oracle stand from its best on.
    """

    metric: str
    patience: int
    action: str
    below: float
    above: float


def rules_of(config: AlarmsConfig, watched: Collection[str]) -> dict[str, Rule]:
    """The rules of a run, by name: those that are not off and have a metric.

    Args:
        watched: names of the metrics that there are.
    """
    rules = {}
    for name, metrics in METRICS.items():
        settings, metric = (
            getattr(config, name),
            next((metric for metric in metrics if metric in watched), None),
        )
        if settings.action == "off" or metric is None:
            continue
        if isinstance(settings, GoldRule):
            bounds = (-math.inf if settings.drop is None else -settings.drop), math.inf
        else:
            bounds = getattr(settings, "below", -math.inf), getattr(settings, "above", math.inf)
        if bounds != (-math.inf, math.inf):
            rules[name] = Rule(metric, settings.patience, settings.action, *bounds)
    return rules


class Alarms:
    """The rules of one run, and what they remember.

    Args:
        oracle: the name of the one that training asks.

    Attributes:
        raised: alarms so far.
        back: the step whose checkpoint a roll back would lead to; None where no rule rolls back.
    """

    def __init__(self, rules: Mapping[str, Rule], max_roll_backs: int, *, oracle: str = ""):
        self.rules = dict(rules)
        self.max_roll_backs = max_roll_backs
        self.oracle = oracle
        self.rolling = [name for name, rule in rules.items() if rule.action == "roll_back"]
        self.counts = dict.fromkeys(rules, 0)
        self.lengths: list[float] = []
        self.best: float | None = None
        self.heard: dict[str, float] = {}
        self.raised = self.roll_backs = 0
        self.back: int | None = None
        self._end: dict[str, str] | None = None

    @property
    def ended(self) -> str | None:
        """Why an alarm ends the run here, or None; it stays until the rule is changed."""
        return None if self._end is None else self._end["reason"]

    def begin(self, step: int) -> bool:
        """Where no checkpoint has proven good yet, a roll back leads to the state of this step, in which the
        run begins.

        Returns:
            Whether that is news, so that the state has to be on disk.
        """
        if self.back is not None or not self.rolling:
            return False
        self.back = step
        return True

    def note_evaluation(self, values: Mapping[str, float]) -> None:
        """Keep what an evaluation says until the next step is checked."""
        self.heard = {
            rule.metric: values[rule.metric]
            for rule in self.rules.values()
            if rule.metric in GOLD and rule.metric in values
        }

    def check(self, step: int, values: Mapping[str, float], *, is_saved: bool) -> int | None:
        """Hold the metrics of the update that made it so many steps against the rules, once.

        Args:
            is_saved: whether a checkpoint that was due holds the state before that update.
        Returns:
            The step whose checkpoint the run goes back to now, or None.
        """
        values, self.heard = {**values, **self.heard}, {}
        begun = [name for name in self.rules if self._begins(name, values)]
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
        self.counts = dict.fromkeys(self.rules, 0)
        warn(
            f"after {step} steps: back to the state after {self.back} (roll back {self.roll_backs} of "
            f"{self.max_roll_backs})"
        )
        return self.back

    def _begins(self, name: str, values: Mapping[str, float]) -> bool:
        """Count a step; whether the rule begins to hold with it."""
        rule = self.rules[name]
        if rule.metric not in values or (rule.metric == LENGTH and len(self.lengths) < LEVEL_ROWS):
            return False
        if rule.metric in GOLD:
            self.best = max(values[rule.metric], values[rule.metric] if self.best is None else self.best)
        (below, above), value = self._bounds(rule), values[rule.metric]
        self.counts[name] = self.counts[name] + 1 if value < below or value > above else 0
        return self.counts[name] == rule.patience

    def _is_proven(self, name: str, values: Mapping[str, float]) -> bool:
        """Whether a rule finds nothing wrong with the state that a step began with; of one that was not
        evaluated the second oracle says nothing."""
        metric = self.rules[name].metric
        return not self.counts[name] and (metric not in GOLD or metric in values)

    def _bounds(self, rule: Rule) -> tuple[float, float]:
        if rule.metric in GOLD and self.best is not None:
            return self.best + rule.below, math.inf
        level = sum(self.lengths) / len(self.lengths) if rule.metric == LENGTH else 1.0
        return rule.below * level, rule.above * level

    def _follow(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Say it, or let it end the run."""
        rule = self.rules[name]
        value = values[rule.metric]
        below, above = self._bounds(rule)
        side, bound, multiple = (
            ("below", below, rule.below) if value < below else ("above", above, rule.above)
        )
        level = f" ({multiple:g} times its level at the start)" if rule.metric == LENGTH else ""
        level = f" ({-rule.below:g} under its best, {self.best:.4g})" if rule.metric in GOLD else level
        what = "evaluation" if rule.metric in GOLD else "step"
        since = f"for {rule.patience} {what}s on end" if rule.patience > 1 else f"in one {what}"
        what = (
            f"alarm {name}: {rule.metric} is {value:.4g}, {side} {bound:.4g}{level}, {since}; "
            f"{self._hint(name, values)}"
        )
        is_spent = rule.action == "roll_back" and self.roll_backs >= self.max_roll_backs
        if rule.action != "stop" and not is_spent:
            warn(f"after {step} steps: {what}")
        elif self._end is None:
            change = f"alarms.{name}" + (" or alarms.max_roll_backs" if is_spent else "")
            spent = f", and the run was rolled back {self.roll_backs} times" if is_spent else ""
            reason = (
                f"the run ended after {step} steps{spent}: {what}. It goes on from here once {change} is "
                "changed (docs/alarms.md)"
            )
            self._end = {"rule": name, "reason": reason}

    def _hint(self, name: str, values: Mapping[str, float]) -> str:
        """What to look at; where answers are missing, by the mark that most of the step's questions have."""
        if name not in ("unanswered", "wasted"):
            return _HINTS[name]
        shares = {mark: values.get(metric, 0.0) for mark, metric in CAUSES.items()}
        return (
            why(max(shares, key=shares.__getitem__), self.oracle)
            if any(shares.values())
            else "look at the marks in samples.jsonl"
        )

    def _settings(self) -> dict[str, str]:
        """What each rule is, as text; a rule that reads otherwise when a run is continued starts anew."""
        limits = dict.fromkeys(self.rolling, f", max_roll_backs={self.max_roll_backs}")
        return {name: f"{rule}{limits.get(name, '')}" for name, rule in self.rules.items()}

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
        self.counts = {name: state["counts"][name] if name in unchanged else 0 for name in self.rules}
        self.lengths = list(state["lengths"])
        self.raised = state["raised"]
        self.roll_backs = state["roll_backs"]
        # checkpoints of earlier versions lack them
        self.best, self.heard = state.get("best"), dict(state.get("heard", {}))
        self.back = state["back"] if self.rolling else None
        self._end = state["end"] if state["end"] and state["end"]["rule"] in unchanged else None
