"""The settings that end a run. `control/stop.py` checks them after every step."""

from dataclasses import dataclass, field

from oat.config.ranges import Count, Positive


@dataclass(frozen=True)
class StopConfig:
    max_steps: Count | None = None
    """Number of steps of the run; None: no limit."""
    max_queries: Count | None = None
    """Budget in oracle queries, which is never exceeded. The run ends when the budget cannot pay another
    question and steps have taken all paid questions."""
    max_tokens: Count | None = None
    """Budget in tokens, for an oracle that states how many a question takes. When a question is asked, the
    most tokens that it can take are reserved. The questions of a step are asked in waves, so reserved tokens
    that were not used pay for questions of later waves."""
    max_cost: Positive | None = None
    """Budget in money, in the currency of an oracle that states its prices. Money is reserved and spent in
    the same way as the tokens of `max_tokens`."""
    max_hours: Positive | None = None
    """Number of hours of running, over all restarts, after which the run ends at the next step boundary.
    After a kill, the time since the last checkpoint is not counted."""
    when: dict[str, str] = field(default_factory=dict)
    """Conditions on metrics, such as `{eval/sampled_win_rate: ">= 0.8", explorer/gap: "< 0.05"}`. The run
    ends after the first step whose row of metrics fulfils one of them."""
