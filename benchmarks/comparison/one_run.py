"""One run of the comparison, in this process."""

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from provenance import commit, machine

from comparison.plan import Job
from comparison.records import DONE, Evaluation, Record
from oat import Trainer
from oat.errors import AlarmError, NonFiniteError, OatError
from oat.files import write_atomically
from oat.quickstart import make_start
from oat.quickstart.task import build_task


def prepare_start(folder: Path, seed: int) -> None:
    """Write the data of a seed, its start model, and the recorded pairs into a folder. What is there is
    kept."""
    if not (folder / "start").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_start(folder, seed)
    if not (folder / "pairs.jsonl").exists():
        write_pairs(folder / "pairs.jsonl", seed)


def perform(job: Job, start: Path, run_dir: Path, parent: int | None = None) -> Record:
    """Make a run from its beginning, and return its record. The run directory is removed.

    Errors that the settings of the algorithm cause (numbers that are not finite, an alarm) are the outcome of
    the run. All others are raised.

    Args:
        start: the folder that `prepare_start` wrote for the seed of the job.
        parent: id of the process that started this one; if it has ended, the run ends too. None: nobody
            started it for the comparison.
    """
    rows: list[tuple[Mapping[str, float], float]] = []

    def note(step: int, row: Mapping[str, float]) -> None:
        rows.append((row, time.process_time()))
        if parent not in (None, os.getppid()):
            raise SystemExit("the comparison was killed, so this run ends")

    shutil.rmtree(run_dir, ignore_errors=True)
    trainer = Trainer(**job.tree(start, run_dir), callbacks=[note], quiet=True)
    try:
        trainer.train()
        outcome = DONE
    except (NonFiniteError, AlarmError) as error:
        outcome = f"{type(error).__name__}: {error}".splitlines()[0]
    shutil.rmtree(run_dir, ignore_errors=True)
    return Record(*job.key, job.purpose, outcome, machine(), commit(), tuple(evaluations(rows, job.name)))


def evaluations(rows: list[tuple[Mapping[str, float], float]], name: str) -> list[Evaluation]:
    """Return the evaluations of a run.

    A row of metrics has the seconds of its step and of its evaluation, by the clock. The time of the
    processor is known of both together, and divided in the same proportion.

    Args:
        rows: rows of metrics, each with the time of the processor at its end, in seconds.

    Raises:
        OatError: an evaluation failed.
    """
    found = []
    seconds = cpu_seconds = 0.0
    last = rows[0][1]
    for row, now in rows:
        own = row.get("time/step_s", 0.0)
        whole = own + row.get("time/evaluate_s", 0.0)
        seconds += own
        cpu_seconds += (now - last) * own / whole if whole else 0.0
        last = now
        if "eval/failed" in row:
            raise OatError(f"{name}: an evaluation failed")
        if "eval/sampled" in row:
            accuracies = row["eval/sampled"], row["eval/greedy"]
            queries = int(row.get("oracle/queries", 0))
            found.append(Evaluation(int(row["step"]), queries, seconds, cpu_seconds, *accuracies))
    return found


def write_pairs(path: Path, seed: int) -> None:
    """Write the training sums of a seed as recorded pairs: the right answer is better than the one without
    the carry."""
    write_atomically(
        path,
        "".join(
            json.dumps({"prompt": s.prompt, "answer": s.right, "chosen": s.right, "rejected": s.forgotten})
            + "\n"
            for s in build_task(seed, demonstrations=0).train
        ),
    )
