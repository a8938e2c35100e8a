"""R4: whatever ends a run, no process, port or temporary directory of it remains 30 seconds after the
signal."""

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ends import ENDS, End
from fixtures import World, forked, in_session, kill_at, named, oat


@pytest.mark.sample("done", "Ctrl-C twice", "oat eval, SIGTERM", seconds=2.4)
@pytest.mark.fault("R4")
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_no_end_leaves_anything(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: End, figure: Callable[[str], None]
) -> None:
    scratch, changes = tmp_path / "scratch", dict(end.changes or {})
    scratch.mkdir()
    if changes.get("oracle.name") == "forbidden":
        changes["oracle.name"] = world.oracle.replace(":reward", ":forbidden")
    config = world.config("dpo", tmp_path, changes)

    def action() -> int:
        os.setsid()
        (tmp_path / "session").write_text(str(os.getpid()))
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a shell may have told us to ignore it, as nohup does
        monkeypatch.setenv("TMPDIR", str(scratch))
        monkeypatch.setattr("tempfile.tempdir", None)
        if end.signals:
            kill_at(*named(end.place), 1, signals=end.signals)
        return oat(end.command, config)

    began = time.monotonic()
    assert forked(action, tmp_path / "log") == end.code, (tmp_path / "log").read_text()
    seconds = time.monotonic() - began
    left = in_session(int((tmp_path / "session").read_text())), [file.name for file in scratch.iterdir()]
    figure(
        f"{int(left[0] == [] and len(left[1]) <= end.at_most)} of 1 ways to end a run leave nothing behind"
    )
    assert left[0] == []
    assert len(left[1]) <= end.at_most, left[1]
    assert seconds < 30


def test_a_process_that_is_left_is_seen(tmp_path: Path) -> None:
    """A child ends without waiting for its own child, and the check must see the process that remains."""

    def action() -> int:
        os.setsid()
        (tmp_path / "session").write_text(str(os.getpid()))
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        return 0

    assert forked(action, tmp_path / "log") == 0
    (left,) = in_session(int((tmp_path / "session").read_text()))
    os.kill(int(left.split()[0]), signal.SIGKILL)


@pytest.mark.fault("R4")
def test_a_run_within_a_process_closes_what_it_opens(world: World, tmp_path: Path) -> None:
    """A run is called as a function three times. The later runs add no open file, socket or thread."""

    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def action() -> int:
        counts = []
        for number in range(3):
            assert oat("train", world.config("dpo", tmp_path), "--run_dir", tmp_path / str(number)) == 0
            counts.append(held())
        until = time.monotonic() + 10
        while counts[2] != counts[1] and time.monotonic() < until:
            time.sleep(0.05)  # the system lists a thread for a moment after it was joined
            counts[2] = held()
        print(counts)
        return 0 if counts[1] == counts[2] else 1

    assert forked(action, tmp_path / "log") == 0, (tmp_path / "log").read_text()
