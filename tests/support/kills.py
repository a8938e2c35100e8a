"""Helpers for tests that kill a run and continue it: ways to kill, and what a ledger contains afterwards."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from oat.ledger.store import Store
from oat.reports.accounts import accounts_table
from oat.types import Answer, Key


@dataclass(frozen=True)
class Books:
    """The content of a ledger.

    Attributes:
        answers: the answer and label of each answered question.
        in_flight: questions that were sent to the oracle and have no answer.
        trained: questions that steps learned from, one entry per step.
        again: number of questions that were asked once more.
        accounts: the lines of `oat ledger`, without `again` and without seconds.
    """

    answers: dict[Key, tuple[Answer, int | None]]
    in_flight: set[Key]
    trained: list[Key]
    again: int
    accounts: list[list[str]]


def books(run_dir: Path, copy: Path, steps: int) -> Books:
    """Return the content of a run's ledger. It is read from a copy, so that the run's files stay as the kill
    left them."""
    copy.mkdir()
    for file in run_dir.glob("ledger.sqlite*"):
        if not file.name.endswith("-shm"):
            shutil.copy(file, copy)
    with closing(Store(copy / "ledger.sqlite")) as store:
        answers = {asked.question.key: store.answer(asked) for asked in store.answered()}
        in_flight = {asked.question.key for asked in store.unanswered() if asked.is_sent}
        trained = [asked.question.key for step in range(steps) for asked in store.taken("train", step)]
        return Books(answers, in_flight, trained, store.asked_again(), _accounts(copy))


def _accounts(run_dir: Path) -> list[list[str]]:
    head, *lines = [line.split() for line in accounts_table(run_dir).splitlines()]
    return [
        [cell for name, cell in zip(head, line, strict=True) if name not in ("again", "seconds")]
        for line in lines
        if len(line) == len(head)
    ]


def killed_in_time(train: Callable[[float], int], run_dir: Path, seconds: float) -> None:
    """Train and kill after so many seconds. If the run ended before the kill, begin again with half the
    seconds."""
    while (code := train(seconds)) != -signal.SIGKILL:
        assert code == 0
        shutil.rmtree(run_dir)
        seconds /= 2


def cold(config: Path, run_dir: Path, kill_after_s: float | None = None) -> int:
    """Train from a cold shell, and return the exit code. The seconds until the kill begin with the first row
    of metrics."""
    command, metrics = (
        [sys.executable, "-m", "oat", "train", str(config), "--run_dir", str(run_dir)],
        run_dir / "metrics.jsonl",
    )
    with (run_dir.parent / "log").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    if kill_after_s is not None:
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until and not metrics.exists():
            time.sleep(0.005)
        try:
            process.wait(kill_after_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()
