"""The settings of alarms. docs/alarms.md gives the reason for each alarm; `control/alarms.py` checks them at
every step."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from oat.config.ranges import Count, Positive

Multiple = Annotated[float, Meta(gt=1, le=1e308)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class AlarmConfig:
    """The fields that every alarm has."""

    patience: Count = 5
    """Steps in a row with the metric out of bounds after which the alarm is raised."""
    action: Literal["off", "warn", "stop", "roll_back"] = "warn"
    """Consequence of a raised alarm. `warn`: a warning. `stop`: the run is saved and ends with exit code 3.
    `roll_back`: what was learned is restored from the newest checkpoint that has proven good. `off`: the
    metric is not watched."""


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
    """Lower bound of `response/length`, in the same unit."""


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
    """Upper bound of `reward/zero_spread_frac`; of `answers/tied_frac` if the algorithm learns from pairs."""


@dataclass(frozen=True)
class UnansweredAlarm(AlarmConfig):
    above: Fraction = 0.49
    """Upper bound of `answers/missing_frac`."""
    patience: Count = 2
    """Steps in a row with the metric out of bounds after which the alarm is raised."""


@dataclass(frozen=True)
class WastedAlarm(AlarmConfig):
    above: Fraction = 0.99
    """Upper bound of `answers/wasted_frac`. Steps in which nothing was paid do not have this metric."""
    patience: Count = 3
    """Steps in a row with the metric out of bounds after which the alarm is raised. Steps without the metric
    do not count."""
    action: Literal["off", "warn", "stop", "roll_back"] = "stop"
    """Consequence of a raised alarm, as for the other alarms."""


@dataclass(frozen=True)
class GoldAlarm(AlarmConfig):
    drop: Positive | None = None
    """Largest fall of `eval/gold_sampled` (of `eval/gold_greedy` if evaluation.samples is 0) below its best
    value so far, in the units of the second oracle. None: the metric is not watched."""
    patience: Count = 2
    """Evaluations in a row with a larger fall than `drop` after which the alarm is raised."""


@dataclass(frozen=True)
class AlarmsConfig:
    kl: KLAlarm = KLAlarm()
    """The policy moves away from the reference."""
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
    """Half of the values that were asked for are missing: the oracle abstains or fails, or the budget does
    not allow its questions."""
    wasted: WastedAlarm = WastedAlarm()
    """Tokens or money are spent on questions that get no value."""
    gold: GoldAlarm = GoldAlarm()
    """The second oracle of evaluations gives the policy lower scores, while the rewarded score may still
    rise."""
    max_roll_backs: Count = 3
    """Largest number of roll backs in the whole run. An alarm that would lead to one more ends the run."""
