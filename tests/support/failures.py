"""Failures of each kind of process at each phase of a run, and how the run has to end."""

import re
import signal
import time
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import pytest
from apart_runs import ACTORS, Pair
from planned_kills import Kill

LEARNER = {**ACTORS, "compute.actors": 1, "compute.learner": "actor", "compute.learner_cpus": 0.5}
CLIENT = {**ACTORS, "compute.actors": 1, "compute.oracle_clients": 1, "compute.oracle_cpus": 0.5}
SETTINGS: Mapping[str, Mapping[str, Any]] = {"actor": ACTORS, "learner": LEARNER, "oracle client": CLIENT}
PHASES: dict[str, tuple[str, str, int]] = {
    "an actor that starts": ("actor", "prepare", 1),
    "an actor that makes its side": ("actor", "make", 1),
    "an actor in the first evaluation": ("actor", "sample", 1),
    "an actor that samples": ("actor", "sample", 5),
    "an actor in an evaluation": ("actor", "sample", 9),
    "an actor that gets weights": ("actor", "put", 9),
    "an actor that takes weights": ("actor", "commit", 9),
    "an actor that is asked for its work": ("actor", "work", 4),
    "a learner that starts": ("learner", "prepare", 1),
    "a learner that makes its side": ("learner", "make", 1),
    "a learner that learns": ("learner", "update", 2),
    "a learner that gives weights": ("learner", "some", 4),
    "a learner that is saved": ("learner", "plain_state", 8),
    "a client that starts": ("oracle client", "prepare", 1),
    "a client that makes its oracles": ("oracle client", "make", 1),
    "a client that is asked": ("oracle client", "submit", 5),
    "a client that answers": ("oracle client", "collect", 5),
}
"""The process that fails, the call in which it does, and the number of that call."""
AT_ONCE_S = 30.0
"""Longest time in seconds from a failure, or from the deadline of a process that hangs, to the end."""


class Strikes(Protocol):
    """Processes of a run, of which some are struck (`planned_kills.StruckMachine`).

    Attributes:
        killed: the strikes so far.
        struck_at: the time of the last one.
        deadline_s: longest time for a reply.
    """

    killed: list[Kill]
    struck_at: float
    deadline_s: float

    def left(self) -> list[int]:
        """Return the processes that are still there."""


def strike(phase: str, how: str) -> Kill:
    """Return the strike of a phase; `how` is "killed" or "hangs"."""
    _, what, number = PHASES[phase]
    return Kill(what, number, signal=signal.SIGKILL if how == "killed" else signal.SIGSTOP)


def ends(run: Pair, phase: str, kill: Kill, strikes: Strikes, capsys: pytest.CaptureFixture[str]) -> float:
    """Make a run that must end by a failure: soon, with one message that says who failed, with its state
    saved, and without a process that is left. Return the seconds to its end, less the deadline of a process
    that hangs."""
    who, what, _ = PHASES[phase]
    capsys.readouterr()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert run.train() != 0
    seconds = time.monotonic() - strikes.struck_at
    assert strikes.killed == [kill]
    said = capsys.readouterr().err.splitlines()
    hangs = kill.signal == signal.SIGSTOP
    how = "has not answered the call `" if hangs else "has ended in the call `"
    assert len(said) == 1, said
    assert re.match(rf"oat train: {who} \d+ {how}", said[0]), said
    others = [str(each.message) for each in warned if "oat" in str(each.category)]
    assert [text for text in others if "cut at the length limit" not in text] == []
    assert strikes.left() == []
    if what not in ("prepare", "make"):
        assert run.saved >= run.rows - 1 - (2 if who == "learner" else 0), "its state is saved"
    seconds -= strikes.deadline_s if hangs else 0.0
    assert seconds < AT_ONCE_S
    return seconds
