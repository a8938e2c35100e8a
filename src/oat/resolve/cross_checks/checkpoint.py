"""Checks of `checkpoint.best_metric`, the metric by which checkpoints are ranked. The metric must be known,
or begin with `user/`. If it is one of evaluations, such as `eval/sampled` or `eval/pairs/...`, evaluations
must have these responses or pairs. If `checkpoint.keep_best` is 0, nothing is checked."""

from collections.abc import Iterator

from oat.metrics import why_unknown
from oat.resolve.resolved import Resolved
from oat.types.part import Check


def ranking(resolved: Resolved) -> Iterator[Check]:
    config = resolved.config
    metric, e = config.checkpoint.best_metric, config.answering
    is_read = config.checkpoint.keep_best > 0
    given = {
        "eval/sampled": e is not None and e.samples > 0,
        "eval/greedy": e is not None and e.greedy,
        "eval/best": e is not None and bool(e.best_of),
        "eval/online": e is not None and e.online,
        "eval/pairs/": config.evaluation is not None and config.evaluation.pairs is not None,
    }
    why = why_unknown(metric) if is_read else ""
    yield Check("checkpoint.best_metric", bool(why), why)
    yield Check(
        "checkpoint.best_metric",
        is_read and any(metric.startswith(kind) for kind, is_given in given.items() if not is_given),
        "no evaluation of this run gives it; see the section evaluation, or name another metric",
    )
