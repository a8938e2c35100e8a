"""R25: code in workers. Whatever a call does, only this call fails, within its time limit, and the next call
finds a worker. A confined worker is denied what it may not do."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import World, oat

from oat.errors import ConfigError, OracleError
from oat.oracles.isolated import Isolated
from oat.plugins.isolated_workers import Workers
from oat.types import Key, Message, Question

TIMEOUT_S = 1.0
HOSTILE = """
import ctypes, os, re, signal, sys, threading, time


def reward(prompts, completions, **columns):
    print("noise on stdout")
    return [DO.get(text, len)(text) for text in completions]


def child(text):
    if os.fork() == 0:
        time.sleep(600)
    while True:
        pass


def deaf(text):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True:
        pass


def deep(text):
    return deep(text) + 1


DO = {
    "endless loop": lambda text: [0 for _ in iter(int, 1)],
    "endless sleep": lambda text: time.sleep(600),
    "an alarm that is not heard": deaf,
    "a child that goes on": child,
    "10 GB": lambda text: len(bytearray(10 * 10**9)),
    "sys.exit": lambda text: sys.exit(0),
    "os._exit": lambda text: os._exit(0),
    "segfault": lambda text: ctypes.string_at(0),
    "abort": lambda text: os.abort(),
    "recursion": deep,
    "catastrophic regex": lambda text: re.fullmatch(r"(a|aa)+", "a" * 200 + "b"),
}


def mistaken(prompts, completions, **columns):
    return [1 / 0 for text in completions]


def pair(prompts, first, second, **columns):
    return [float(len(a) > len(b)) for a, b in zip(first, second)]


def labelled(queries, prompts, labels, level):
    return [None if label is None else 1.0 for label in labels]


async def later(prompts, completions, completion_ids, level, **columns):
    return [float(len(ids) + own) for ids, own in zip(completion_ids, level)]
"""
FAILURES = {
    "endless loop": "ran past 1 s",
    "endless sleep": "ran past 1 s",
    "an alarm that is not heard": "ran past 1 s|ended by SIGXCPU",
    "a child that goes on": "ran past 1 s",
    "10 GB": "raised MemoryError",
    "sys.exit": "raised SystemExit",
    "os._exit": r"ended its process \(exit code 0\)",
    "segfault": "was ended by SIGSEGV",
    "abort": "was ended by SIGABRT",
    "recursion": "raised RecursionError",
    "catastrophic regex": "ran past 1 s",
}


def question(number: int, *texts: str, kind: Any = "score", **columns: Any) -> Question:
    ids = tuple(np.arange(len(text), dtype=np.int32) for text in texts)
    return Question(
        Key("train", 0, 0, number),
        kind,
        (Message("user", "2+2="),),
        texts,
        tuple(range(len(texts))),
        None,
        columns,
        ids=ids,
    )


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "hostile.py"
    path.write_text(HOSTILE, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def isolated(hostile: Path) -> Iterator[Isolated]:
    oracle = Isolated(f"{hostile}:reward", timeout_s=TIMEOUT_S, memory_gb=4)
    yield oracle
    oracle._workers.close()


def answers(oracle: Isolated, *questions: Question) -> list[Any]:
    tickets, found = oracle.submit(questions), dict[str, Any]()
    while len(found) < len(tickets):
        found.update(oracle.collect([ticket for ticket in tickets if ticket not in found], 60.0))
    return [found[ticket] for ticket in tickets]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.sample(
    slow=("endless sleep", "a child that goes on", "catastrophic regex", "an alarm that is not heard"),
    instead="test_what_a_call_started_ends_with_it, and the other tests of calls that run too long",
    seconds=8.1,
)
@pytest.mark.fault("R25")
@pytest.mark.parametrize("what", FAILURES)
def test_a_call_fails_alone_and_in_time(isolated: Isolated, what: str, figure: Callable[[str], None]) -> None:
    """The two responses beside the hostile one, in the same question and in another question, get their
    scores."""
    answers(isolated, question(0, "ready"))
    begin = time.monotonic()
    tickets = isolated.submit([question(1, what), question(2, "fine", "well")])
    with pytest.warns(UserWarning, match=FAILURES[what]):
        ((ticket, answer),) = isolated.collect(tickets[:1], 60.0)
    seconds = time.monotonic() - begin
    figure(f"{int(answer.marks == ('failed',))} of 1 hostile calls marked as failed")
    figure(f"at most {seconds:.1f} s until a call with a time limit of {TIMEOUT_S:g} s is marked as failed")
    assert (ticket, answer.marks, answer.values, answer.queries) == (tickets[0], ("failed",), (0.0,), 1)
    assert seconds < TIMEOUT_S + 20, "not the minutes that the call would take"
    ((_, healed),) = isolated.collect(tickets[1:], 60.0)
    assert (healed.marks, healed.values) == (("ok", "ok"), (4.0, 4.0))
    figure("1 of 1 next calls answered")


@pytest.mark.fault("R25")
def test_what_a_call_started_ends_with_it(tmp_path: Path) -> None:
    noting = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    (tmp_path / "own.py").write_text(HOSTILE.replace("time.sleep(600)", noting, 1), encoding="utf-8")
    # a busy machine may not run the child for seconds
    oracle = Isolated(f"{tmp_path / 'own.py'}:reward", timeout_s=3.0)
    with pytest.warns(UserWarning, match="ran past"):
        answers(oracle, question(0, "a child that goes on"))
    pid = int((tmp_path / "pid").read_text())
    for _ in range(1200):
        if not is_alive(pid):
            break
        time.sleep(0.05)
    assert not is_alive(pid)


ALONE = """
import sys
from oat.oracles.isolated import Isolated
from oat.types import Key, Message, Question

oracle = Isolated(sys.argv[1], timeout_s=1.0)
oracle.submit([Question(Key("train", 0, 0, 0), "score", (Message("user", "?"),), (sys.argv[2],), (0,))])
print(oracle._workers._workers[0].process.number, flush=True)
oracle.collect(["nothing"], 0.5)
input()
"""


@pytest.mark.sample("endless loop", seconds=3.0)
@pytest.mark.fault("R25")
@pytest.mark.parametrize("text", ["endless loop", "endless sleep", "idle"])
def test_no_worker_outlives_a_run_that_was_killed(
    hostile: Path, text: str, figure: Callable[[str], None]
) -> None:
    command = [sys.executable, "-c", ALONE, f"{hostile}:reward", text]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        assert is_alive(pid)
        run.kill()
    begin = time.monotonic()
    while is_alive(pid) and time.monotonic() - begin < 60:
        time.sleep(0.05)
    figure(f"{int(is_alive(pid))} of 1 workers outlive a killed run by more than the time limit of a call")
    assert not is_alive(pid)


def test_one_hostile_response_of_a_group(isolated: Isolated) -> None:
    with pytest.warns(UserWarning, match="raised SystemExit"):
        (answer,) = answers(isolated, question(3, "one", "sys.exit", "three"))
    assert (answer.marks, answer.values, answer.queries) == (("ok", "failed", "ok"), (3.0, 0.0, 5.0), 3)


def test_the_workers_work_at_once_and_are_gone_when_they_are_not_used(hostile: Path) -> None:
    oracle = Isolated(f"{hostile}:reward", timeout_s=TIMEOUT_S, workers=2)
    with pytest.warns(UserWarning, match="ran past"):
        first, *rest = answers(
            oracle, *(question(n, text) for n, text in enumerate(("endless sleep", "a", "bb", "ccc")))
        )
    assert first.marks == ("failed",)
    assert [answer.values for answer in rest] == [(1.0,), (2.0,), (3.0,)]
    pids = [worker.process.number for worker in oracle._workers._workers]
    assert pids
    del oracle
    assert not any(map(is_alive, pids))


def test_other_functions_run_there_too(hostile: Path) -> None:
    """Workers also run a comparison and an async function with columns and token ids. The columns that each
    needs are checked in advance."""
    pair = Isolated(f"{hostile}:pair")
    assert pair.answers == "compare"
    assert answers(pair, question(0, "long", "no", kind="compare"))[0].values == (1.0,)
    later = Isolated(f"{hostile}:later")
    assert (later.answers, later.cacheable) == ("score", False)
    assert answers(later, question(0, "ab", "abc", level=10))[0].values == (12.0, 13.0)
    later.check_columns(["level"], False)
    with pytest.raises(ConfigError, match="its parameter `level` is neither a column"):
        later.check_columns(["levels"], False)
    labelled = Isolated(f"{hostile}:labelled")
    with pytest.raises(ConfigError, match="its parameter `labels` is neither a column"):
        labelled.check_columns(["level"], False)
    labelled.check_columns(["label", "level"], False)
    marks = [
        answer.marks
        for answer in answers(
            labelled, question(0, "a", label="a", level=1), question(1, "a", level=2), question(2, "a")
        )
    ]
    assert marks == [("ok",), ("abstain",), ("abstain",)]


def test_a_mistake_of_the_function_is_one_message(hostile: Path, tmp_path: Path) -> None:
    oracle = Isolated(f"{hostile}:mistaken")
    with pytest.raises(
        OracleError, match=r"mistaken raised ZeroDivisionError: division by zero \(line \d+ of hostile.py\)"
    ):
        answers(oracle, question(0, "a"))
    with pytest.raises(ConfigError, match="has no nothing"):
        Isolated(f"{hostile}:nothing")
    with pytest.raises(ConfigError, match="name a function as"):
        Isolated("exact_match")
    with pytest.raises(
        ConfigError, match="`timeout_s` of an oracle that runs in workers must be a number above 0"
    ):
        Isolated(f"{hostile}:reward", timeout_s=0)
    (tmp_path / "broken.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"broken\.py fails when imported: SystemExit: 3"):
        Isolated(f"{tmp_path / 'broken.py'}:reward")
    (tmp_path / "dead.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(ConfigError, match=r"ended its process \(exit code 3\) while it was started"):
        Isolated(f"{tmp_path / 'dead.py'}:reward")


def test_a_worker_that_died_idle_is_replaced(isolated: Isolated) -> None:
    answers(isolated, question(0, "ready"))
    (worker,) = isolated._workers._workers
    os.kill(worker.process.number, signal.SIGKILL)
    os.waitid(os.P_PID, worker.process.number, os.WEXITED | os.WNOWAIT)
    assert answers(isolated, question(1, "fine"))[0].values == (4.0,)


FORBIDDEN = """
import ctypes, os, pathlib, resource, shutil, socket, subprocess, sys, threading


def make():
    return lambda what: DO[what]()


def write():
    with open("{folder}/written", "w") as file:
        file.write("x")


DO = {
    "connect": lambda: socket.create_connection(("127.0.0.1", 9)),
    "resolve": lambda: socket.getaddrinfo("localhost", 80),
    "write": write,
    "append": lambda: os.open("{folder}/kept", os.O_WRONLY | os.O_APPEND),
    "remove": lambda: os.remove("{folder}/kept"),
    "rename": lambda: os.rename("{folder}/kept", "{folder}/other"),
    "make a folder": lambda: pathlib.Path("{folder}/new").mkdir(),
    "remove a tree": lambda: shutil.rmtree("{folder}"),
    "run": lambda: subprocess.run(["true"]),
    "system": lambda: os.system("true"),
    "fork": lambda: os.fork(),
    "kill": lambda: os.kill(os.getppid(), 0),
    "native code": lambda: ctypes.CDLL(None),
}
LOOK = {
    "keys": lambda: sorted(name for name in os.environ if "KEY" in name or "TOKEN" in name),
    "read": lambda: open("{folder}/kept").read(),
    "interfaces": lambda: [line.split(":")[0].strip() for line in list(open("/proc/net/dev"))[2:]],
}
DO |= LOOK
"""
REFUSED = (
    "connect",
    "resolve",
    "write",
    "append",
    "remove",
    "rename",
    "make a folder",
    "remove a tree",
    "run",
    "system",
    "fork",
    "kill",
    "native code",
)


@pytest.mark.fault("R25")
def test_what_a_confined_worker_may_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str], None]
) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "code.py").write_text(FORBIDDEN.replace("{folder}", str(tmp_path)))
    monkeypatch.setenv("SECRET_KEY", "s")
    workers = Workers(f"{tmp_path / 'code.py'}:make", is_confined=True)
    outcomes = workers.map([[what] for what in (*REFUSED, "keys", "read", "interfaces")])
    figure(
        f"{sum(bool(o.failure) for o in outcomes[:-3])} of {len(REFUSED)} forbidden operations refused "
        "in a confined worker"
    )
    assert [outcome.failure for outcome in outcomes[: len(REFUSED)]] == ["raised PermissionError"] * len(
        REFUSED
    )
    keys, read, interfaces = outcomes[len(REFUSED) :]
    assert (keys.value, read.value) == ([], "kept")
    figure(f"a worker sees {len(interfaces.value)} network interface(s)")
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "code.py"}
    workers.close()


EXITING = """
import sys

def reward(prompts, completions, **columns):
    return [sys.exit() if text[:1] in ("1", "2") else float(len(text)) for text in completions]
"""


def test_a_run_with_a_function_that_exits(world: World, tmp_path: Path) -> None:
    """The reward function exits for some responses. The run goes on, learns from the others, and warns of the
    failure."""
    (tmp_path / "mine.py").write_text(EXITING, encoding="utf-8")
    changes = {
        "oracle": {"name": "isolated", "function": f"{tmp_path / 'mine.py'}:reward", "timeout_s": 5},
        "evaluation": None,
        "stop.max_steps": 1,
    }
    with pytest.warns(UserWarning, match="raised SystemExit about a response, which counts as failed"):
        assert oat("train", world.config("grpo", tmp_path, {**changes, "algorithm.prompts": 8})) == 0
    row = json.loads((tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()[1])
    assert 0 < row["rows/trained"] < 24
    assert row["oracle/queries"] == 24
