"""`oat train --profile N`: a trace of N steps, in the format of Chrome, which Perfetto and chrome://tracing
open.

What stands in it under the names of the boxes: sample (generation, and sending the questions), take (waiting
for answers), prepare, update, sync, evaluate, save (copying, and waiting for an older one to be written).
Tracing slows a run and changes none of its results.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from oat.loop import Report, Run, train


def train_traced(run: Run, report: Report, directory: Path, steps: int) -> tuple[str, Path | None]:
    """As `loop.train`, with a trace of some steps: the first one of this process is left out, since much is
    done in it only once, and the trace begins with the second.

    Args:
        directory: where the trace goes, as `trace_step_XXXXXXXX.json`, named after the number of updates that
        were done when it begins.
        steps: at least 1; fewer are traced if the run ends before.
    Returns:
        Why the run ended, and the trace; None if it ended with its first step.
    """
    trace = _Trace(directory, steps)
    name_boxes(run, record_function)

    def then(step: int, values: dict[str, float]) -> None:
        report(step, values)
        if step > 0:
            trace.after(step)

    try:
        reason = train(run, then)
    finally:
        trace.end()
    return reason, trace.file


class _Trace:
    """Attributes:
    file: where it was written.
    """

    def __init__(self, directory: Path, steps: int):
        self.directory = directory
        self.steps = steps
        self.done = -1
        self.file: Path | None = None
        self._name = ""
        self._profiler: Any = None

    def after(self, step: int) -> None:
        """Called after each step of this process."""
        self.done += 1
        if self.done == 0:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would tell people when it begins and ends
            self._name = f"trace_step_{step:08d}.json"
            self._profiler = profile(
                activities={ProfilerActivity.CPU, ProfilerActivity.CUDA} & supported_activities()
            )
            self._profiler.start()
        elif self.done == self.steps:
            self.end()

    def end(self) -> None:
        """Write the steps that are done, unless that has happened."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        if self.done > 0:
            self.directory.mkdir(exist_ok=True)
            new = self.directory / ".new-trace.json"
            profiler.export_chrome_trace(str(new))
            os.replace(new, self.directory / self._name)
            self.file = self.directory / self._name


def name_boxes(run: Run, within: Callable[[str], Any]) -> None:
    """Have what the boxes do in a step done within something that knows its name, such as `record_function`.

    Args:
        within: gives a decorator for a name.
    """
    named: list[tuple[Any, str, str]] = [
        (run.collector, "fill", "sample"),
        (run.ledger, "take", "take"),
        *((objective, "prepare", "prepare") for objective in run.objectives),
        (run.learner, "update", "update"),
        (run.weights, "sync", "sync"),
        *([(run.evaluation, "run", "evaluate")] if run.evaluation is not None else []),
        (run.checkpoints, "save", "save"),
    ]
    for box, method, name in named:
        setattr(box, method, within(name)(getattr(box, method)))
