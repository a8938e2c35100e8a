"""The settings of alarms. `control/alarms.py` checks each alarm at every step, and docs/alarms.md has the
reason for each."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from oat.config.conditions import ROLLS_BACK
from oat.config.fields import setting
from oat.config.ranges import Count, Positive

Multiple = Annotated[float, Meta(gt=1, le=1e308)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class AlarmConfig:
    """Settings that every alarm has."""

    patience: Count = 5
    """The alarm is raised when the metric has been out of bounds in this many consecutive steps."""
    action: Literal["off", "warn", "stop", "roll_back"] = "warn"
    """Consequence of a raised alarm. `warn`: a warning. `stop`: the run is saved and ends with exit code 3.
    `roll_back`: the learned parts are restored from the newest checkpoint that has proven good
    (docs/alarms.md). `off`: the metric is not watched."""


@dataclass(frozen=True)
class KLAlarm(AlarmConfig):
    above: Positive = 1.0
    """Upper bound of `kl/reference`, nats per token."""


@dataclass(frozen=True)
class EntropyAlarm(AlarmConfig):
    below: Positive = 0.01
    """Lower bound of `policy/entropy`, nats per token."""


@dataclass(frozen=True)
class LengthAlarm(AlarmConfig):
    above: Multiple = 4.0
    """Upper bound of `response/length`, in multiples of its mean over the first three steps."""
    below: Fraction = 0.25
    """Lower bound of `response/length`, in multiples of its mean over the first three steps."""


@dataclass(frozen=True)
class RatioAlarm(AlarmConfig):
    above: Multiple = 100.0
    """Upper bound of `policy/ratio_max`."""


@dataclass(frozen=True)
class TruncatedAlarm(AlarmConfig):
    above: Fraction = 0.95
    """Upper bound of `response/truncated_frac`."""


@dataclass(frozen=True)
class SpreadAlarm(AlarmConfig):
    above: Fraction = 0.99
    """Upper bound of `reward/zero_spread_frac`. If the algorithm learns from pairs: upper bound of
    `answers/tied_frac`."""


@dataclass(frozen=True)
class UnansweredAlarm(AlarmConfig):
    above: Fraction = 0.49
    """Upper bound of `answers/missing_frac`."""
    patience: Count = 2
    """The alarm is raised when the metric has been out of bounds in this many consecutive steps."""


@dataclass(frozen=True)
class WastedAlarm(AlarmConfig):
    above: Fraction = 0.99
    """Upper bound of `answers/wasted_frac`. A step in which nothing was paid does not have this metric."""
    patience: Count = 3
    """The alarm is raised when the metric has been out of bounds in this many consecutive steps. Steps
    without the metric are passed over."""
    action: Literal["off", "warn", "stop", "roll_back"] = "stop"
    """Consequence of a raised alarm. The values have the same meanings as in `alarms.kl.action`."""


@dataclass(frozen=True)
class GoldAlarm(AlarmConfig):
    drop: Positive | None = None
    """Largest fall of the second oracle's score below its best value so far, in the units of this oracle. The
    score is `eval/gold_sampled`, or `eval/gold_greedy` if evaluation.samples is 0. None: the metric is not
    watched."""
    patience: Count = 2
    """The alarm is raised when the fall is larger than `drop` in this number of evaluations in a row."""


@dataclass(frozen=True)
class AlarmsConfig:
    kl: KLAlarm = KLAlarm()
    """The policy moves too far from the reference."""
    entropy: EntropyAlarm = EntropyAlarm()
    """The policy always gives the same response."""
    length: LengthAlarm = LengthAlarm()
    """Responses grow without end, or vanish."""
    ratio: RatioAlarm = RatioAlarm()
    """An update moves the probability of a token too far."""
    truncated: TruncatedAlarm = TruncatedAlarm()
    """Responses are cut off before their end."""
    spread: SpreadAlarm = SpreadAlarm()
    """The oracle's values have no variance, so nothing is learned."""
    unanswered: UnansweredAlarm = UnansweredAlarm()
    """Too many of the values that were asked for are missing: the oracle abstains or fails, or the budget
    does not allow the questions."""
    wasted: WastedAlarm = WastedAlarm()
    """Tokens or money are spent on questions that get no value."""
    gold: GoldAlarm = GoldAlarm()
    """The second oracle of evaluations gives the policy lower scores than before, even if the
    scores of the first oracle still rise."""
    max_roll_backs: Count = setting(3, read_if=ROLLS_BACK)
    """Largest number of roll backs in the complete run. If an alarm would cause one more, the run ends."""
