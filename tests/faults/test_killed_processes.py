"""R36: any process of a run is killed at any time: the run's own, an actor, the learner, a client, the fork
server, the guard, a sink, a worker. The run goes on, or the same command continues it, and it ends bitwise
equal to the unbroken one. Nothing is left."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from fixtures import World, oat

from oat.commands.digest import digest_run

OWN = Path(__file__).parents[1] / "support" / "sinks.py"
KILLS = 50
FEW = 3
FIRST = ("run", "fork-server", "actor", "actor", "learner", "oracle-client")
"""What must be there before a process is killed, whichever it is. A short run is alone for most of its start,
and then has few processes for a while."""
MARK = "OAT_TEST_KILLED"
"""An environment variable that all processes of a run inherit from a test."""
GONE_S = 60.0
REWARD = """
import time
from pathlib import Path


def reward(prompts, completions, **columns):
    if not Path({enough!r}).exists():  # the run is to be there until it was struck
        time.sleep({seconds} * len(completions))
    return [len(text) % 7 / 7 for text in completions]
"""
SLOW_S = 0.15
"""Seconds for each response, until all processes were killed."""
APART = {
    "compute.runtime": "processes",
    "compute.actors": 2,
    "compute.actor_cpus": 0.1,
    "compute.standby": 1,
    "compute.learner": "actor",
    "compute.learner_cpus": 0.1,
    "compute.oracle_clients": 1,
    "compute.oracle_cpus": 0.1,
    "compute.max_restarts": 20,
}


def of_test(folder: Path) -> dict[int, str]:
    """Return the living processes of a test, and what each of them is."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
            if f"{MARK}={folder}\0".encode() in (place / "environ").read_bytes() and state not in "ZX":
                log = os.readlink(place / "fd" / "1")
                words = (place / "cmdline").read_bytes().decode().split("\0")
                named = Path(log).stem if log.endswith(".log") else ""
                found[int(place.name)] = named or next(
                    (word for word in words if word.startswith("oat.")), "run"
                )
    return found


def killed_run(config: Path, folder: Path, draw: random.Random, kills: int, enough: Path) -> list[str]:
    """Train by the same command until the run ends, and kill so many processes meanwhile. Return what they
    were.

    Args:
        enough: a file that is made when all were killed.
    """
    struck: list[str] = []
    for _ in range(20 + 2 * kills):
        command = [sys.executable, "-m", "oat", "train", str(config), "--run_dir", str(folder / "run")]
        with (folder / "log").open("ab") as log:
            run = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, MARK: str(folder), "OMP_NUM_THREADS": "1"},
            )
        until, first = time.monotonic() + 120, draw.choice(FIRST)
        while len(struck) < kills and run.poll() is None and time.monotonic() < until:
            if not any(kind.startswith(first) for kind in of_test(folder).values()):
                time.sleep(0.2)
                continue
            time.sleep(draw.random() * (8.0 if first == "run" else 2.0))
            there = of_test(folder)
            if run.poll() is None and there:
                kind = draw.choice(sorted({*there.values()}))
                number = draw.choice([number for number, its in there.items() if its == kind])
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
                    struck.append(kind)
                    first = draw.choice(FIRST)
        if len(struck) == kills:
            enough.touch()
        code = run.wait(600)
        assert code in (0, 1, 2, -signal.SIGKILL), (folder / "log").read_text()
        until = time.monotonic() + GONE_S
        while (left := of_test(folder)) and time.monotonic() < until:
            time.sleep(0.1)
        assert left == {}, struck
        if code == 0:
            return struck
    raise AssertionError(f"the run does not end: {struck}")


def assert_killed_run_is_the_same(
    case: int, world: World, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    """Train in several processes, with two kills, and in one without. The number of a case decides the kills.
    The first case has one kill, and neither isolated code nor a sink."""
    enough = tmp_path / "enough"
    (tmp_path / "reward.py").write_text(REWARD.format(enough=str(enough), seconds=SLOW_S))
    isolated = {"name": "isolated", "function": f"{tmp_path / 'reward.py'}:reward"}
    changes = {
        "engine.deterministic": True,
        "engine.threads": 1,
        "stop.max_steps": 8,
        "oracle": isolated if case else {"name": f"{tmp_path / 'reward.py'}:reward"},
        "evaluation": None,
    }
    sinks = {"tracking.sinks": [{"name": f"{OWN}:Rows", "wait_s": 5.0}]} if case else {}
    (tmp_path / "local").mkdir()
    enough.touch()
    assert oat("train", world.config("grpo", tmp_path / "local", changes)) == 0
    enough.unlink()
    config = world.config("grpo", tmp_path, {**changes, **APART, **sinks})
    kills = min(2, 1 + case)
    struck = killed_run(config, tmp_path, random.Random(f"killed {case}"), kills, enough)
    assert len(struck) == kills
    is_equal = digest_run(tmp_path / "run") == digest_run(tmp_path / "local" / "grpo")
    figure(f"{int(is_equal)} of 1 runs with killed processes equal the unbroken one bitwise")
    for kind in struck:
        figure(f"1 of 1 kills: {kind.rstrip('0123456789-')}")
    assert is_equal, struck
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 8


@pytest.mark.fault("R36")
@pytest.mark.sample("0", seconds=15)
@pytest.mark.parametrize("case", range(FEW))
def test_any_process_may_be_killed_at_any_time(
    case: int, world: World, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    assert_killed_run_is_the_same(case, world, tmp_path, figure)


@pytest.mark.large
@pytest.mark.fault("R36-slow")
@pytest.mark.parametrize("case", range(FEW, FEW + KILLS // 2))
def test_fifty_processes_are_killed(
    case: int, world: World, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    assert_killed_run_is_the_same(case, world, tmp_path, figure)
