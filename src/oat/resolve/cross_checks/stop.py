"""Checks of the section `stop`. A run must have a stop condition. A run whose oracle costs nothing must have
no budget."""

from collections.abc import Iterator

from oat.control.stop import conditions_of
from oat.metrics import why_unknown
from oat.oracles.builtin import BUILTIN
from oat.resolve.resolved import Resolved
from oat.types.part import Check


def ends(resolved: Resolved) -> Iterator[Check]:
    config = resolved.config
    stop, is_free = config.stop, config.oracle.name in BUILTIN
    budget = {"max_queries": stop.max_queries, "max_tokens": stop.max_tokens, "max_cost": stop.max_cost}
    for name, limit in budget.items():
        yield Check(
            f"stop.{name}",
            limit is not None and is_free,
            f"the oracle {config.oracle.name} costs nothing, so it is never spent; set stop.max_steps, "
            "stop.max_hours or prompts.epochs instead",
        )
    limits = (stop.max_steps, stop.max_hours, config.prompts.epochs, *budget.values())
    yield Check(
        "stop.max_steps",
        all(limit is None for limit in limits),
        f"the run would never end; set it, {'' if is_free else 'stop.max_queries, '}stop.max_hours or "
        "prompts.epochs",
    )
    for condition in conditions_of(stop.when):
        metric = condition.metric
        yield Check("stop.when", bool(why := why_unknown(metric)), why)
        yield Check(
            "stop.when",
            metric.startswith("eval/") and config.evaluation is None,
            f"this run has no evaluation, which would give {metric}; set the section evaluation",
        )
