"""The fields of alarms (docs/alarms.md has the reason of each); `control/alarms.py` watches them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from oat.config.ranges import Count, Positive

Multiple = Annotated[float, Meta(gt=1, le=1e308)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class RuleConfig:
    """Fields of every rule."""

    patience: Count = 5
    """Steps on end that the metric is out of bounds before an alarm is raised."""
    action: Literal["off", "warn", "stop", "roll_back"] = "warn"
    """What follows: nothing, and the rule is not watched; a warning; the end of the run, saved, with exit
    code 3; or a return to the newest checkpoint that has proven good."""


@dataclass(frozen=True)
class KLRule(RuleConfig):
    above: Positive = 1.0
    """`kl/reference`, nats a token."""


@dataclass(frozen=True)
class EntropyRule(RuleConfig):
    below: Positive = 0.01
    """`policy/entropy`, nats a token."""


@dataclass(frozen=True)
class LengthRule(RuleConfig):
    above: Multiple = 4.0
    """`response/length`, in multiples of its mean over the first three steps."""
    below: Fraction = 0.25
    """The same."""


@dataclass(frozen=True)
class RatioRule(RuleConfig):
    above: Multiple = 100.0
    """`policy/ratio_max`."""


@dataclass(frozen=True)
class TruncatedRule(RuleConfig):
    above: Fraction = 0.95
    """`response/truncated_frac`."""


@dataclass(frozen=True)
class SpreadRule(RuleConfig):
    above: Fraction = 0.99
    """`reward/zero_spread_frac`; of comparisons `answers/tied_frac`."""


@dataclass(frozen=True)
class UnansweredRule(RuleConfig):
    above: Fraction = 0.49
    """`answers/missing_frac`."""
    patience: Count = 2
    """Steps on end that the metric is out of bounds before an alarm is raised."""


@dataclass(frozen=True)
class WastedRule(RuleConfig):
    above: Fraction = 0.99
    """`answers/wasted_frac`, which steps have where something was paid."""
    patience: Count = 3
    """Such steps on end that it is out of bounds before an alarm is raised."""
    action: Literal["off", "warn", "stop", "roll_back"] = "stop"
    """As of every rule."""


@dataclass(frozen=True)
class GoldRule(RuleConfig):
    drop: Positive | None = None
    """How far `eval/gold_sampled` may fall below its best so far, in the second oracle's own units; None: it
    is not watched."""
    patience: Count = 2
    """Evaluations on end that it is further below before an alarm is raised."""


@dataclass(frozen=True)
class AlarmsConfig:
    kl: KLRule = KLRule()
    """The policy leaves the reference."""
    entropy: EntropyRule = EntropyRule()
    """The policy has only one thing to say."""
    length: LengthRule = LengthRule()
    """Responses grow without end, or vanish."""
    ratio: RatioRule = RatioRule()
    """An update moves the probability of a token too far."""
    truncated: TruncatedRule = TruncatedRule()
    """Responses do not come to an end."""
    spread: SpreadRule = SpreadRule()
    """Answers have no variance, so nothing is learned."""
    unanswered: UnansweredRule = UnansweredRule()
    """The oracle abstains or fails, or the budget does not allow its questions: half of the values that were
    asked for are missing."""
    wasted: WastedRule = WastedRule()
    """Tokens or money are spent, and no question that cost any brings a value."""
    gold: GoldRule = GoldRule()
    """What is rewarded rises, and what is wanted falls: the second oracle of evaluations says so."""
    max_roll_backs: Count = 3
    """Of the whole run; the next alarm that would lead to one more ends it."""
