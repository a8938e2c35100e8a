"""R18 on real Ray clusters: a process of a run, or a part of its cluster, fails, or a signal ends the run.
Nothing of the cluster is left, and the same command continues the run."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from apart_runs import ON_RAY, Pair, pair
from failures import AT_ONCE_S, PHASES, SETTINGS, ends, strike
from fixtures import Finished, forked, named, oat
from ray_runs import BROKER, RayStrikes, gone, part

from oat.processes.ray_cluster import Cluster

pytestmark = [pytest.mark.fault("R18-ray"), pytest.mark.large]

PARTS = {"the head": "gcs_server", "the raylet": "raylet", "the broker": BROKER}
CALLS = {
    "an actor starts": ("make", 0),
    "sampling": ("sample", 5),
    "new weights": ("put", 9),
    "an evaluation": ("sample", 9),
}
MOMENTS = {
    "the cluster starts": ("oat.processes.ray_cluster:Cluster.ask", 1, 0.7),
    "actors start": ("oat.runtime.worker_group:WorkerGroup.ready", 1, 0.7),
    "sampling": ("oat.runtime.pool:ActorPool.sample", 5, 0.0),
    "new weights": ("oat.runtime.pool:PoolInbox.put", 3, 0.0),
    "learning": ("oat.learner.learner:Learner.update", 3, 0.0),
    "an evaluation": ("an evaluation samples", 3, 0.0),
}
CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGKILL: -signal.SIGKILL}


def goes_on(run: Pair, strikes: RayStrikes, figure: Callable[[str], None]) -> None:
    """Continue a run, which must end as the local one."""
    strikes.plan([])
    assert run.train() == 0
    assert (strikes.left(), strikes.files_left()) == ([], [])
    figure(f"{int(run.is_equal)} of 1 ended runs equal the local one bitwise after the same command")
    assert run.is_equal


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_failure_ends_the_run(
    how: str,
    phase: str,
    finished: Finished,
    tmp_path: Path,
    strikes: RayStrikes,
    capsys: pytest.CaptureFixture[str],
    figure: Callable[[str], None],
) -> None:
    deadline = {"compute.max_restarts": 0, "compute.deadline_s": strikes.deadline_s}
    run, kill = (
        pair(
            finished,
            "grpo",
            tmp_path,
            {},
            {**SETTINGS[PHASES[phase][0]], "compute.runtime": "ray", **deadline},
        ),
        strike(phase, how),
    )
    strikes.plan([kill])
    seconds = ends(run, phase, kill, strikes, capsys)
    assert strikes.files_left() == []
    figure(f"at most {seconds:.1f} s from a failure to the end of the run (after the deadline, if it hangs)")
    goes_on(run, strikes, figure)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_failure_is_mended(
    phase: str,
    how: str,
    finished: Finished,
    tmp_path: Path,
    strikes: RayStrikes,
    figure: Callable[[str], None],
) -> None:
    own = {**SETTINGS[PHASES[phase][0]], "compute.runtime": "ray", "compute.deadline_s": strikes.deadline_s}
    run = pair(finished, "grpo", tmp_path, {}, own)
    strikes.plan([strike(phase, how)])
    assert run.train() == 0
    assert len(strikes.killed) == 1
    figure(f"{int(run.is_equal)} of 1 mended runs equal the local one bitwise")
    assert run.is_equal


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", PARTS.values(), ids=PARTS)
def test_a_part_of_the_cluster_fails(
    name: str,
    call: tuple[str, int],
    finished: Finished,
    tmp_path: Path,
    strikes: RayStrikes,
    capsys: pytest.CaptureFixture[str],
    figure: Callable[[str], None],
) -> None:
    run = pair(finished, "grpo", tmp_path, {}, ON_RAY)
    strikes.doing[call] = lambda: os.kill(part(strikes, name), signal.SIGKILL)
    capsys.readouterr()
    assert run.train() == 1
    seconds = time.monotonic() - strikes.struck_at
    assert (strikes.left(), strikes.files_left()) == ([], [])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    assert "the Ray cluster of this run has ended: its " in said[0]
    assert run.saved >= run.rows - 1
    figure(f"at most {seconds:.1f} s from a failure of the cluster to the end of the run")
    assert seconds < AT_ONCE_S
    goes_on(run, strikes, figure)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", ["the raylet", "the broker"])
def test_a_part_of_the_cluster_hangs(
    name: str,
    call: tuple[str, int],
    finished: Finished,
    tmp_path: Path,
    strikes: RayStrikes,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    figure: Callable[[str], None],
) -> None:
    """The run ends at the deadline of its first wait, and blames no actor that does not hang."""
    run = pair(finished, "grpo", tmp_path, {}, {**ON_RAY, "compute.deadline_s": strikes.deadline_s})
    strikes.doing[call] = lambda: os.kill(part(strikes, PARTS[name]), signal.SIGSTOP)
    waited = deadlines(monkeypatch)
    capsys.readouterr()
    assert run.train() == 1
    seconds = time.monotonic() - waited[0]
    assert waited[0] - strikes.struck_at < strikes.deadline_s + AT_ONCE_S
    assert (strikes.left(), strikes.files_left()) == ([], [])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    assert "the Ray cluster of this run has ended: " in said[0]
    assert run.saved >= run.rows - 1
    figure(f"at most {seconds:.1f} s from the deadline of a part that hangs to the end of the run")
    assert seconds < AT_ONCE_S
    goes_on(run, strikes, figure)


def deadlines(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that gets the times at which a wait reaches its deadline. A wait begins when the run has
    nothing else to do, such as to load its own models."""
    times = []
    for name in ("refuse_hanging", "_ended"):
        original = getattr(Cluster, name)

        def noted(*args: object, original: Callable[..., object] = original) -> object:
            times.append(time.monotonic())
            return original(*args)

        monkeypatch.setattr(Cluster, name, noted)
    return times


def struck(run: Pair, moment: tuple[str, int, float], number: int, at: Path) -> int:
    """Make a run in a process group of its own, which gets a signal at a moment."""
    os.setsid()
    place, call, later_s = moment
    owner, name = named(place)
    original, calls = getattr(owner, name), 0

    def send() -> None:
        at.write_text(f"{time.monotonic()}")
        os.killpg(0, number)

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            threading.Timer(later_s, send).start() if later_s else send()
        return original(*args, **kwargs)

    setattr(owner, name, counted)
    return run.train()


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
@pytest.mark.parametrize("number", CODES, ids=lambda number: signal.Signals(number).name)
def test_a_signal_ends_the_run(
    number: int,
    moment: tuple[str, int, float],
    finished: Finished,
    tmp_path: Path,
    strikes: RayStrikes,
    figure: Callable[[str], None],
) -> None:
    run, at, log = pair(finished, "grpo", tmp_path, {}, ON_RAY), tmp_path / "at", tmp_path / "log"
    assert forked(lambda: struck(run, moment, number, at), log) == CODES[signal.Signals(number)], (
        log.read_text()
    )
    assert "it is replaced" not in log.read_text()
    is_gone = gone(lambda: [*strikes.left(), *strikes.files_left()], AT_ONCE_S)
    seconds = time.monotonic() - float(at.read_text())
    assert is_gone, (strikes.left(), strikes.files_left())
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(("plasma", "ray"))]
    figure(f"at most {seconds:.1f} s from a signal until nothing is left of run and cluster")
    assert seconds < AT_ONCE_S
    if number != signal.SIGKILL:
        assert "Traceback" not in log.read_text()
    goes_on(run, strikes, figure)


@pytest.mark.parametrize("name", ["the raylet", "the broker", "the guard"])
def test_a_signal_ends_a_run_whose_cluster_hangs(
    name: str, finished: Finished, tmp_path: Path, strikes: RayStrikes, figure: Callable[[str], None]
) -> None:
    run, at, log = pair(finished, "grpo", tmp_path, {}, ON_RAY), tmp_path / "at", tmp_path / "log"

    def send() -> None:
        at.write_text(f"{time.monotonic()}")
        os.kill(os.getpid(), signal.SIGINT)

    def stop() -> None:
        os.kill(part(strikes, {**PARTS, "the guard": "oat.processes.guard"}[name]), signal.SIGSTOP)
        threading.Timer(0.0 if name == "the guard" else 1.0, send).start()

    strikes.doing["sample", 6] = stop
    assert forked(run.train, log) == 130, log.read_text()
    assert gone(lambda: [*strikes.left(), *strikes.files_left()], AT_ONCE_S), strikes.left()
    seconds = time.monotonic() - float(at.read_text())
    figure(f"at most {seconds:.1f} s from a signal until nothing is left of run and cluster")
    assert seconds < AT_ONCE_S
    goes_on(run, strikes, figure)


FORKING = """
import os
import time
from pathlib import Path

noted = Path(__file__).with_name("child")


def rule(prompts, completions, **columns):
    if not noted.exists() and (child := os.fork()) == 0:
        time.sleep(100)
        os._exit(0)
    elif not noted.exists():
        noted.write_text(str(child))
    return [len(text) % 7 / 7 for text in completions]
"""


@pytest.mark.parametrize("how", ["it ends", "it is killed"])
def test_a_reward_that_leaves_a_child(
    how: str, finished: Finished, tmp_path: Path, strikes: RayStrikes, figure: Callable[[str], None]
) -> None:
    """The child of the run's own process lives longer than the run. The cluster ends with the run."""
    (tmp_path / "rule.py").write_text(FORKING, encoding="utf-8")
    changes = {**ON_RAY, "oracle": {"name": f"{tmp_path / 'rule.py'}:rule"}, "evaluation": None}
    config = finished.world.config("grpo", tmp_path, {**changes, "stop.max_steps": 3})
    if how == "it is killed":
        strikes.doing["sample", 4] = lambda: os.kill(os.getpid(), signal.SIGKILL)
    log, begin = tmp_path / "log", time.monotonic()
    code = forked(lambda: oat("train", config), log)
    try:
        assert code == (0 if how == "it ends" else -signal.SIGKILL), log.read_text()
        is_gone = gone(lambda: [*strikes.left(), *strikes.files_left()], AT_ONCE_S)
        assert is_gone, (strikes.left(), strikes.files_left())
        assert time.monotonic() - begin < 90
        figure("1 of 1 clusters ended with a run that left a forked child")
    finally:
        with suppress(ProcessLookupError):
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
