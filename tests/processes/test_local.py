"""Processes of this machine that answer calls: each call has an end, and a lost process is named."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import children_of
from planned_kills import is_alive

from oat.errors import ConfigError, LostError
from oat.processes.local import LocalRemote, Machine
from oat.processes.marks import marked, processes


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine("children:answering", ["children"], tmp_path, deadline_s=60.0, cpus=3.0)
    yield made
    made.close()


def asked(remote: LocalRemote, text: str) -> str:
    return bytes(remote.call(text, text.encode())()).decode()


def keeper_of(remote: LocalRemote) -> int:
    return next(each.parent for each in processes() if each.number == remote.number)


def test_calls_are_answered_in_their_order_and_at_once(machine: Machine) -> None:
    launcher = machine.launcher(1.0)
    remotes = [launcher.start(f"one {number}") for number in range(3)]
    replies = [remote.call("a", f"a{number}".encode()) for number in range(5) for remote in remotes]
    assert [bytes(reply()).decode() for reply in replies] == [
        f"A{number}" for number in range(5) for _ in "123"
    ]
    assert len({remote.number for remote in remotes}) == 3


def test_a_call_for_several_is_sent_once(machine: Machine) -> None:
    launcher = machine.launcher(1.0)
    part = bytearray(b"a long call" * 100_000)
    shared = launcher.shared([memoryview(part)[:50], memoryview(part)[50:]])
    part[:] = bytes(len(part))
    replies = [launcher.start(f"one {number}").call("a", shared) for number in range(3)]
    assert {bytes(reply()) for reply in replies} == {b"A LONG CALL" * 100_000}


@pytest.mark.parametrize(
    ("text", "said"),
    [("exit", r"it ended its process \(exit code 3\)"), ("die", "it was ended by SIGSEGV")],
)
def test_a_lost_process_is_named_with_its_end(machine: Machine, text: str, said: str) -> None:
    remote = machine.launcher(1.0).start("actor 7")
    assert asked(remote, "a") == "A"
    waiting = [remote.call(text, text.encode()), remote.call("later", b"later")]
    for wait, name in zip(waiting, (text, "later"), strict=True):
        with pytest.raises(LostError, match=f"actor 7 has ended in the call `{name}` .{said}."):
            wait()
    with pytest.raises(LostError, match=said):
        asked(remote, "after")
    remote.close()


def test_a_process_that_hangs_is_named_with_its_call(tmp_path: Path) -> None:
    machine = Machine("children:answering", ["children"], tmp_path, deadline_s=3.0, cpus=3.0)
    remote = machine.launcher(1.0).start("actor 7")
    assert asked(remote, "a") == "A"
    with pytest.raises(LostError, match=r"actor 7 has not answered the call `hang` within 3 s \(comp"):
        asked(remote, "hang")
    number = remote.number
    machine.close()
    assert not is_alive(number or 0)


def test_what_users_code_forks_ends_with_its_process(machine: Machine) -> None:
    """Also if it has left group and session: it keeps no connection open, and its mark is not seen."""
    remote = machine.launcher(1.0).start("client 0")
    child = int(asked(remote, "fork"))
    assert is_alive(child)
    waiting = remote.call("hang", b"hang")
    os.kill(remote.number or 0, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(LostError, match=r"client 0 has ended in the call `hang` .it was ended by SIGKILL"):
        waiting()
    assert time.monotonic() - begin < machine.deadline_s / 2
    until = time.monotonic() + 20
    while is_alive(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_alive(child)


def test_jobs_in_the_background_are_reaped_when_they_end(machine: Machine) -> None:
    remote = machine.launcher(1.0).start("client 0")
    assert asked(remote, "jobs") == "0"
    keeper = keeper_of(remote)
    until = time.monotonic() + 20
    while children_of(keeper) != [remote.number] and time.monotonic() < until:
        time.sleep(0.01)
    assert children_of(keeper) == [remote.number]


def test_code_may_signal_the_group_in_which_it_finds_itself(machine: Machine) -> None:
    remote = machine.launcher(1.0).start("client 0")
    assert asked(remote, "signal") == "SIGNAL"
    assert asked(remote, "a") == "A"


def test_a_keeper_that_is_killed_takes_its_process_along(machine: Machine) -> None:
    remote = machine.launcher(1.0).start("client 0")
    child = int(asked(remote, "fork"))
    process, waiting = remote.number or 0, remote.call("hang", b"hang")
    os.kill(keeper_of(remote), signal.SIGKILL)
    with pytest.raises(LostError, match=r"client 0 has ended in the call `hang` .it was ended by SIGKILL"):
        waiting()
    until = time.monotonic() + 20
    while (is_alive(process) or is_alive(child)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_alive(process)
    assert not is_alive(child)


def test_a_server_that_hangs_is_replaced_and_costs_one_wait(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oat.processes.forks._PATIENCE_S", 2.0)
    monkeypatch.setattr(machine, "deadline_s", 3.0)
    launcher = machine.launcher(0.5)
    remotes = [launcher.start(f"one {number}") for number in range(4)]
    assert {asked(remote, "a") for remote in remotes} == {"A"}
    server = machine._server._child.number
    os.kill(server, signal.SIGSTOP)
    late = launcher.start("late")
    with pytest.raises(LostError, match="late has not answered"):
        asked(late, "prepare")
    begin = time.monotonic()
    assert asked(launcher.start("next"), "a") == "A"
    assert time.monotonic() - begin < 2 * len(remotes), "each process was waited for"
    assert not is_alive(server)


def test_the_server_of_processes_is_lost(machine: Machine) -> None:
    """Its processes end, since nobody could say how they end. The next one comes from another server."""
    launcher = machine.launcher(1.0)
    remote = launcher.start("first")
    assert asked(remote, "a") == "A"
    os.kill(machine._server._child.number, signal.SIGKILL)
    number = remote.number or 0
    machine._server._child.ends_within(60)
    second = launcher.start("second")
    assert asked(second, "b") == "B"
    remote.close()
    until = time.monotonic() + 30
    while is_alive(number) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_alive(number)


def test_a_server_that_cannot_start(tmp_path: Path) -> None:
    machine = Machine("children:answering", ["no_such_module"], tmp_path, deadline_s=60.0, cpus=3.0)
    remote = machine.launcher(1.0).start("first")
    with pytest.raises(LostError, match="first has ended in the call `prepare`"):
        asked(remote, "prepare")
    assert "no_such_module" in (tmp_path / "fork-server.log").read_text()
    machine.close()


def test_a_process_that_cannot_begin(tmp_path: Path) -> None:
    machine = Machine("children:no_such_function", ["children"], tmp_path, deadline_s=60.0, cpus=3.0)
    remote = machine.launcher(1.0).start("first")
    with pytest.raises(LostError, match=r"first has ended in the call `prepare` .*exit code 1"):
        asked(remote, "prepare")
    assert "no_such_function" in (tmp_path / "first.log").read_text()
    machine.close()


def test_each_writes_into_its_file(machine: Machine, tmp_path: Path) -> None:
    for name in ("actor 0", "actor 1"):
        assert asked(machine.launcher(1.0).start(name), "a") == "A"
        assert (tmp_path / f"{name.replace(' ', '-')}.log").read_text() == "begins\n"


def test_room(machine: Machine) -> None:
    whole, half = machine.launcher(1.0), machine.launcher(0.5)
    assert (whole.room, half.room) == (3, 6)
    first = whole.start("first")
    half.start("second")
    assert (whole.room, half.room) == (1, 3)
    first.close()
    assert (whole.room, half.room) == (2, 5)
    machine.refuse_too_many([1.0, 1.0, 1.0], "3 actors")
    with pytest.raises(ConfigError, match="4 actors need 4 logical CPUs, and this machine has 3; lower"):
        machine.refuse_too_many([1.0] * 4, "4 actors")


def test_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oat.processes.local.seen_gpus", lambda: ["4", "6", "7"])
    with pytest.raises(ConfigError, match=r"compute\.gpus is 4, and this process sees 3 GPUs"):
        machine.reserve(4, [0, 1], 2, 1.0, 0.0)
    gpus = machine.reserve(3, [0, 1], 2, 1.0, 0.0)
    assert gpus.hold() == 2
    launcher = machine.launcher(1.0, gpus.actors)
    first, second = (launcher.start(f"actor {number}") for number in range(2))
    assert [visible(each) for each in (first, second)] == ["4", "6"]
    first.close()
    third = launcher.start("actor 2")
    assert visible(third) == "4"
    learner = machine.launcher(1.0, gpus.learner).start("learner")
    assert visible(learner) == "7"


def visible(remote: LocalRemote) -> str:
    """Return the GPUs that a process sees."""
    return asked(remote, "gpus")


def test_the_close_leaves_nothing(machine: Machine) -> None:
    remotes = [machine.launcher(1.0).start(f"one {number}") for number in range(3)]
    assert [asked(each, "a") for each in remotes] == ["A"] * 3
    remotes[1].call("hang", b"hang")
    os.kill(remotes[2].number or 0, signal.SIGSTOP)
    marks: list[Any] = [each._process.mark for each in remotes]
    machine.close()
    assert not any(marked(mark) for mark in marks)
    assert not any(is_alive(each.number or 0) for each in remotes)
