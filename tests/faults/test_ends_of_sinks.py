"""R4 and R29 for sinks: a run has a sink that hangs and has started processes. However the run ends, these
processes end soon after it, and no output shows a key."""

import json
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from ends import PLACE
from fixtures import World, forked, kill_at, named, oat

from oat.processes.marks import VARIABLE

OWN = Path(__file__).parents[1] / "support" / "sinks.py"
ENDS = {
    "kill -9": ((signal.SIGKILL,), -signal.SIGKILL),
    "done": ((), 0),
    "SIGTERM": ((signal.SIGTERM,), 75),
    "Ctrl-C twice": ((signal.SIGINT, signal.SIGINT), 130),
    "a closed terminal": ((signal.SIGHUP,), -signal.SIGHUP),
}
SAMPLE = "kill -9"
"""The case that `make test` runs."""


def of_sinks(wanted: str) -> list[str]:
    """Return the ids of the sinks' processes whose environment contains a text."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            variables = (place / "environ").read_bytes()
            if f"{VARIABLE}=".encode() in variables and wanted.encode() in variables:
                found.append(place.name)
        except OSError:
            continue
    return found


def struck(signals: tuple[int, ...], mark: str) -> None:
    """Send signals to this process at the third call of `PLACE`. The second call waits until the sink
    hangs."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    owner, name = named(PLACE)
    original, calls = getattr(owner, name), 0

    def waited(*arguments: object, **named_ones: object) -> object:
        nonlocal calls
        calls += 1
        deadline = time.monotonic() + 60
        while calls == 2 and len(of_sinks(mark)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        return original(*arguments, **named_ones)

    setattr(owner, name, waited)
    if signals:
        kill_at(owner, name, 3, signals=signals)


@pytest.mark.fault("R4")
@pytest.mark.parametrize(
    "name", [name if name == SAMPLE else pytest.param(name, marks=pytest.mark.large) for name in ENDS]
)
def test_no_end_leaves_anything_of_a_sink_that_hangs(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, figure: Callable[[str], None]
) -> None:
    scratch = tmp_path / "scratch"
    log = tmp_path / "log"
    mark = f"of {tmp_path}"
    (signals, code) = ENDS[name]
    scratch.mkdir()
    monkeypatch.setenv("OAT_TEST", mark)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    sinks = [{"name": f"{OWN}:Rows", "fails": "hangs deaf", "at": 1, "wait_s": 0.1}]
    config = world.config("grpo", tmp_path, {"tracking.sinks": sinks, "evaluation": None})
    assert forked(lambda: struck(signals, mark) or oat("train", config), log) == code, log.read_text()
    deadline = time.monotonic() + 10
    is_over = name not in ("kill -9", "a closed terminal")
    while not is_over and (of_sinks(mark) or list(scratch.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert of_sinks(mark) == []
    assert list(scratch.iterdir()) == []
    steps = [
        json.loads(line).get("step") for line in (tmp_path / "grpo" / "rows.jsonl").read_text().splitlines()
    ]
    assert steps == [None, 0, 1], "it hung"
    figure("1 of 1 ways to end a run with a hanging sink leave nothing behind")


@pytest.mark.fault("R29")
def test_what_a_sink_raises_is_told_without_the_key(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str], None]
) -> None:
    key = "sk-planted-0123456789"
    monkeypatch.setenv("MY_KEY", key)
    sinks = [{"name": f"{OWN}:Rows", "fails": "raises", "at": 1, "samples": True, "wait_s": 60}]
    config, log = (
        world.config("grpo", tmp_path, {"tracking.sinks": sinks, "evaluation": None}),
        tmp_path / "log",
    )

    def told() -> int:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            code = oat("train", config)
        print(*(warning.message for warning in said), sep="\n")
        return code

    assert forked(told, log) == 0, log.read_text()
    assert (
        "the sink sinks-Rows could not take a row: ValueError: no more of this, ***; the run goes on "
        "without it"
    ) in log.read_text()
    files = [file for file in (tmp_path / "grpo").rglob("*") if file.is_file()]
    assert [str(file) for file in (*files, log) if key.encode() in file.read_bytes()] == []
    figure(
        f"0 of {len(files)} files of a run contain a key that its sink raised, and no line of its output does"
    )
