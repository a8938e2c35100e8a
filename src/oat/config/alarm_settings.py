"""The settings of alarms. docs/alarms.md gives the reason for each; `control/alarms.py` watches them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from oat.config.ranges import Count, Positive

Multiple = Annotated[float, Meta(gt=1, le=1e308)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class AlarmConfig:
    """Fields of every alarm."""

    patience: Count = 5
    """Steps in a row with the metric out of bounds before the alarm is raised."""
    action: Literal["off", "warn", "stop", "roll_back"] = "warn"
    """Consequence of a raised alarm: a warning; the end of the run, saved, with exit code 3; or a return to
    the newest checkpoint that has proven good. `off`: the metric is not watched."""


@dataclass(frozen=True)
class KLAlarm(AlarmConfig):
    above: Positive = 1.0
    """Bound of `kl/reference`, nats a token."""


@dataclass(frozen=True)
class EntropyAlarm(AlarmConfig):
    below: Positive = 0.01
    """Bound of `policy/entropy`, nats a token."""


@dataclass(frozen=True)
class LengthAlarm(AlarmConfig):
    above: Multiple = 4.0
    """Upper bound of `response/length`, in multiples of its mean over the first three steps."""
    below: Fraction = 0.25
    """Lower bound, in the same unit."""


@dataclass(frozen=True)
class RatioAlarm(AlarmConfig):
    above: Multiple = 100.0
    """Bound of `policy/ratio_max`."""


@dataclass(frozen=True)
class TruncatedAlarm(AlarmConfig):
    above: Fraction = 0.95
    """Bound of `response/truncated_frac`."""


@dataclass(frozen=True)
class SpreadAlarm(AlarmConfig):
    above: Fraction = 0.99
    """Bound of `reward/zero_spread_frac`; where pairs are compared, of `answers/tied_frac`."""


@dataclass(frozen=True)
class UnansweredAlarm(AlarmConfig):
    above: Fraction = 0.49
    """Bound of `answers/missing_frac`."""
    patience: Count = 2
    """Steps in a row with the metric out of bounds before the alarm is raised."""


@dataclass(frozen=True)
class WastedAlarm(AlarmConfig):
    above: Fraction = 0.99
    """Bound of `answers/wasted_frac`, a metric of the steps in which something was paid."""
    patience: Count = 3
    """Such steps in a row out of bounds before the alarm is raised."""
    action: Literal["off", "warn", "stop", "roll_back"] = "stop"
    """Consequence, as for every alarm."""


@dataclass(frozen=True)
class GoldAlarm(AlarmConfig):
    drop: Positive | None = None
    """Largest fall of `eval/gold_sampled` below its best value so far, in the units of the second oracle;
    None: it is not watched."""
    patience: Count = 2
    """Evaluations in a row further below than that before the alarm is raised."""


@dataclass(frozen=True)
class AlarmsConfig:
    kl: KLAlarm = KLAlarm()
    """The policy moves away from the reference."""
    entropy: EntropyAlarm = EntropyAlarm()
    """The policy gives always the same response."""
    length: LengthAlarm = LengthAlarm()
    """Responses grow without end, or vanish."""
    ratio: RatioAlarm = RatioAlarm()
    """An update moves the probability of a token too far."""
    truncated: TruncatedAlarm = TruncatedAlarm()
    """Responses do not come to an end."""
    spread: SpreadAlarm = SpreadAlarm()
    """Answers have no variance, so nothing is learned."""
    unanswered: UnansweredAlarm = UnansweredAlarm()
    """Half of the values that were asked for are missing: the oracle abstains or fails, or the budget does
    not allow its questions."""
    wasted: WastedAlarm = WastedAlarm()
    """Tokens or money are spent, and no question that cost any gets a value."""
    gold: GoldAlarm = GoldAlarm()
    """The second oracle of evaluations scores the policy lower, while the rewarded score may still rise."""
    max_roll_backs: Count = 3
    """Roll backs of the whole run; the next alarm that would lead to one more ends it."""
