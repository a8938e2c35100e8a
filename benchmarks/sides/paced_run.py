"""A run of `oat` whose steps a benchmark asks for one by one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from task import Paced

from oat.config.load import load_config
from oat.loop import Run, train
from oat.opening.open_run import open_run
from oat.resolve.resolve import resolve


def paced_run(file: Path, opened: Callable[[Run], None] = lambda run: None) -> tuple[dict[str, float], Paced]:
    """Return the metrics of the last step, which every step replaces, and the paced run of a configuration.

    Args:
        file: the configuration.
        opened: function that gets the run before its first step.
    """
    given, origins = load_config(file)
    metrics: dict[str, float] = {}

    def work(turn: Any) -> None:
        def report(number: int, values: dict[str, float]) -> None:
            metrics.clear()
            metrics.update(values)
            turn()

        with open_run(resolve(given, origins)) as run:
            opened(run)
            train(run, report)

    return metrics, Paced(work)
