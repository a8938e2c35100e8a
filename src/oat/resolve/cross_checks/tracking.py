"""Checks of `tracking.shown`, the metrics that the line of a step shows. Each must be known, or begin with
`user/`. Whether the run reports it shows only in a row (`reports/outcome.py` warns after the first step)."""

from collections.abc import Iterator

from oat.metrics import why_unknown
from oat.resolve.resolved import Resolved
from oat.types.part import Check


def shown_metrics(resolved: Resolved) -> Iterator[Check]:
    for metric in resolved.config.tracking.shown:
        why = "the line of a step always begins with `step`; remove it" if metric == "step" else ""
        why = why or why_unknown(metric)
        yield Check("tracking.shown", bool(why), f"{metric!r}: {why}" if why else "")
