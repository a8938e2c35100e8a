"""Processes that this one starts (`oat.processes.spawn`): they are called, ended, and leave nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import children
import pytest
from planned_kills import is_alive

from oat.processes.marks import marked
from oat.processes.pipe import Message
from oat.processes.spawn import Child, ending, on_one_thread

PARENT = """
import os, signal, sys, time
from queue import SimpleQueue
import children
from oat.processes.spawn import Child, on_one_thread

said = SimpleQueue()
child = Child(
    "children:" + sys.argv[1], eval(sys.argv[2]), said.put, environment=on_one_thread(os.environ),
    lingers_s=float(sys.argv[3]), folder=sys.argv[4] or None, has_session=sys.argv[5] == "session",
)
print(bytes(said.get().head).decode(), flush=True)
END
time.sleep(600)
"""
ENDS = {
    "kill -9": "os.kill(os.getpid(), signal.SIGKILL)",
    "os._exit": "os._exit(1)",
    "sys.exit": "sys.exit(1)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "a closed terminal": "os.kill(os.getpid(), signal.SIGHUP)",
}
GONE_S = 30.0


def started(
    target: str, order: dict[str, Any], **options: Any
) -> tuple[Child, "SimpleQueue[Message | None]"]:
    said = SimpleQueue[Message | None]()
    child = Child(f"children:{target}", order, said.put, environment=on_one_thread(os.environ), **options)
    return child, said


def text_of(message: Message | None) -> str:
    assert message is not None, "the process has ended"
    return bytes(message.head).decode()


def gone(numbers: list[int]) -> bool:
    until = time.monotonic() + GONE_S
    while any(map(is_alive, numbers)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(is_alive, numbers))


def test_what_is_sent_comes_back_whole() -> None:
    child, said = started("echo", {"text": "ready"})
    assert text_of(said.get(timeout=60)) == "ready"
    large = os.urandom(3_000_000)
    child.link.send(b"head", [large[:1000], memoryview(large)[1000:]])
    child.link.send(b"")
    child.link.send(b"empty", [])
    first, second, third = (said.get(timeout=60) for _ in range(3))
    assert first is not None
    assert (bytes(first.head), bytes(first.data or b"")) == (b"head", large)
    assert second is not None
    assert (bytes(second.head), second.data) == (b"", None)
    assert third is not None
    assert third.data is not None
    assert (bytes(third.head), len(third.data)) == (b"empty", 0)
    child.end()
    assert said.get(timeout=60) is None


@pytest.mark.parametrize("has_session", [False, True])
@pytest.mark.parametrize("how", ["exits", "is killed", "hangs deaf"])
def test_its_end_leaves_nothing(how: str, has_session: bool) -> None:
    """Also processes that have left its group and its session end."""
    child, said = started("start_others", {"how": how}, has_session=has_session)
    numbers = [int(word) for word in text_of(said.get(timeout=60)).split()]
    assert len(numbers) == 3
    if how != "hangs deaf":
        assert child.ends_within(60)
        assert is_alive(numbers[2])
    code = child.end()
    assert not any(map(is_alive, numbers))
    assert not marked(child.mark)
    assert ending(code) == ("ended its process (exit code 3)" if how == "exits" else "was ended by SIGKILL")
    assert child.end() == code, "a second end changes nothing"
    assert said.get(timeout=10) is None


@pytest.mark.parametrize("has_session", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_this_process_leaves_nothing(end: str, has_session: bool, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    code = PARENT.replace("END", ENDS[end])
    words = ["start_others", "{'how': 'hangs deaf'}", "0", str(tmp_path / "folder")]
    words.append("session" if has_session else "group")
    run = _run(code, words)
    numbers = [int(word) for word in run.split()]
    assert len(numbers) == 3
    assert gone(numbers)
    assert _within(lambda: not (tmp_path / "folder").exists())


@pytest.mark.parametrize("seconds", [0.5, 600.0])
def test_a_process_that_may_go_on_has_its_time(seconds: float, tmp_path: Path) -> None:
    order = {"seconds": seconds, "file": str(tmp_path / "closed")}
    (tmp_path / "folder").mkdir()
    begin = time.monotonic()
    words = ["outlive", repr(order), "5" if seconds < 5 else "1", str(tmp_path / "folder"), "group"]
    _run(PARENT.replace("END", ENDS["kill -9"]), words)
    assert _within(lambda: not (tmp_path / "folder").exists())
    assert (tmp_path / "closed").exists() == (seconds < 5)
    assert time.monotonic() - begin < GONE_S


def test_a_forked_child_ends_nothing_of_its_parent() -> None:
    child, said = started("echo", {})
    said.get(timeout=60)
    if not (forked := os.fork()):
        try:
            child.end()
            os._exit(int(not child.has_ended))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    child.link.send(b"still there")
    assert text_of(said.get(timeout=60)) == "still there"
    child.end()


def test_a_message_that_is_too_large_ends_the_connection() -> None:
    child, said = started("echo", {"text": "x" * 2000}, most=1000)
    assert said.get(timeout=60) is None
    assert not child.has_ended
    child.end()


def test_a_process_that_does_not_read_holds_nobody() -> None:
    """Neither the one who sends, nor the end."""
    child, _ = started("end", {"how": "hangs deaf"})
    begin = time.monotonic()
    sent = [child.link.send(b"", [bytes(2**20)]) for _ in range(50)]
    assert time.monotonic() - begin < 30
    assert not all(future.done() for future in sent)
    child.end()
    assert isinstance(sent[-1].exception(10), OSError)


def test_what_it_prints_goes_to_its_file(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        child, said = started("echo", {"says": "a line"}, output=log.fileno())
    said.get(timeout=60)
    child.end()
    assert (tmp_path / "log").read_text() == "a line\n"


def test_what_it_prints_is_no_output_of_this_process(capfd: pytest.CaptureFixture[str]) -> None:
    child, said = started("echo", {"says": "a line"})
    said.get(timeout=60)
    child.end()
    assert capfd.readouterr() == ("", "a line\n")


def test_its_number_ends_it_and_no_later_group() -> None:
    """The group is killed before its number is free."""
    child, said = started("end", {"how": "exits"})
    assert said.get(timeout=60) is None
    assert child.ends_within(60)
    with pytest.MonkeyPatch.context() as patched:
        killed: list[int] = []
        patched.setattr("oat.processes.spawn.end_group", killed.append)
        assert child.end() == 3
        assert killed == [child.number]
        child.end()
        assert killed == [child.number]


def _run(code: str, words: list[str]) -> str:
    """Run a program that starts a process, and return what it prints."""
    support = str(Path(children.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([support, *sys.path])},
        check=False,
        timeout=120,
    )
    assert done.returncode in (1, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
    return done.stdout.decode()


def _within(is_so: Callable[[], bool]) -> bool:
    until = time.monotonic() + GONE_S
    while not is_so() and time.monotonic() < until:
        time.sleep(0.02)
    return is_so()
