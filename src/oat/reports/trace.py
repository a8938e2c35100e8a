"""`oat train --profile N`: a trace of N steps in Chrome's trace format, which Perfetto and chrome://tracing
open.

The trace shows these activities of the boxes by name:

* sample: generate responses and send questions
* take: wait for answers
* prepare, update, sync, evaluate
* save: copy the state, and wait until an older checkpoint is written

Tracing slows a run but does not change its results. The methods of the boxes are wrapped here, so `loop.py`
needs no code for tracing.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from oat.loop import Report, Run, train


def train_traced(run: Run, report: Report, directory: Path, steps: int) -> tuple[str, Path | None]:
    """Train as `loop.train` does, and trace some steps. The trace begins with the second step of this
    process, because the first step does much that happens only once.

    Args:
        directory: folder for the trace. The file is `trace_step_XXXXXXXX.json`; its number is that of the
            last step before the trace.
        steps: number of steps to trace, at least 1. If the run ends earlier, the trace has fewer steps.

    Returns:
        The reason why the run ended, and the file of the trace. The file is None if this process took fewer
        than two steps.
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
    """A trace of some steps.

    Attributes:
        file: the file of the trace; None until it is written.
    """

    def __init__(self, directory: Path, steps: int):
        self.directory = directory
        self.steps = steps
        self.done = -1
        self.file: Path | None = None
        self._name = ""
        self._profiler: Any = None

    def after(self, step: int) -> None:
        """Count a step that has ended. After this process's first step, start the trace. After `steps` traced
        steps, stop the trace and write it."""
        self.done += 1
        if self.done == 0:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps the profiler from printing
            self._name = f"trace_step_{step:08d}.json"
            self._profiler = profile(
                activities={ProfilerActivity.CPU, ProfilerActivity.CUDA} & supported_activities()
            )
            self._profiler.start()
        elif self.done == self.steps:
            self.end()

    def end(self) -> None:
        """Stop the trace. If it has at least one complete step, write it. If no trace runs, do nothing."""
        profiler = self._profiler
        self._profiler = None
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
    """Decorate the main method of each box that a step uses, such as the learner's `update`.

    Args:
        within: function that gets the name of an activity, such as "sample", and returns a decorator; for
            example `record_function`.
    """
    named: list[tuple[Any, str, str]] = [
        (run.collector, "fill", "sample"),
        (run.ledger, "take_feedback", "take"),
        *((objective, "prepare", "prepare") for objective in run.objectives),
        (run.learner, "update", "update"),
        (run.weights, "load", "sync"),
        *([(run.evaluation, "run", "evaluate")] if run.evaluation is not None else []),
        (run.checkpoints, "save", "save"),
    ]
    for box, method, name in named:
        setattr(box, method, within(name)(getattr(box, method)))
