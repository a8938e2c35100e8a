"""`tracking.sinks`: a sink gets each row of a run once, in a process of its own that may fail in any way, and
gets no secret."""

import json
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, forked, kill_at, logged, named, oat, told
from sink_runs import OWN, process

from oat.commands.digest import digest_run
from oat.metrics import repeatable
from oat.processes.marks import VARIABLE, marked
from oat.tracking import sink_process
from oat.tracking.sink_process import Described, SinkProcess, finish_all

MOMENTS = ("open", "2", "close")
WAYS = ("raises", "exits", "dies", "is killed", "hangs", "hangs deaf")


def own(**options: Any) -> dict[str, Any]:
    return {"name": f"{OWN}:Rows", "wait_s": 60.0, **options}


def written(run_dir: Path, file: str = "rows.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / file).read_text().splitlines()]


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def are_its_rows(found: list[dict[str, Any]], run_dir: Path) -> bool:
    """Return True if the sink has each row of the run once and in order. Steps that were repeated after a
    kill may have other seconds."""
    own, expected = [record for record in found if "step" in record], rows_of(run_dir)
    assert [record["step"] for record in own] == [row["step"] for row in expected]
    for record, row in zip(own, expected, strict=True):
        assert {**repeatable(record["values"]), "step": record["step"]} == repeatable(row)
    return True


def give(sink: SinkProcess, steps: range) -> None:
    for step in steps:
        sink.row(step, json.dumps({"step": step, "a": 1.5}), [json.dumps({"step": step, "prompt": "p"})])


def test_a_sink_gets_the_rows_the_configuration_and_only_where_asked_the_texts(
    world: World, tmp_path: Path
) -> None:
    sinks = ["files", own(samples=True), {**own(), "name": f"{tmp_path / 'quiet.py'}:Quiet"}]
    (tmp_path / "quiet.py").write_text(
        OWN.read_text()
        + '\n\nclass Quiet(Rows):\n    def __init__(self):\n        super().__init__("quiet.jsonl")\n'
    )
    config, run_dir = (
        world.config("grpo", tmp_path, {"tracking.sinks": sinks, "tracking.samples": 2}),
        tmp_path / "grpo",
    )
    assert logged(tmp_path / "log", "train", config) == 0, (tmp_path / "log").read_text()
    loud, quiet = written(run_dir), written(run_dir, "quiet.jsonl")
    assert are_its_rows(loud, run_dir)
    assert are_its_rows(quiet, run_dir)
    assert [record["values"] for record in loud if "step" in record] == [
        {k: v for k, v in row.items() if k != "step"} for row in rows_of(run_dir)
    ]
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [sample for record in loud for sample in record.get("samples", [])] == samples != []
    assert not any(record.get("samples") for record in quiet)
    assert loud[0]["config"]["stop"]["max_steps"] == 4
    assert (loud[0]["id"], loud[-1]) == (None, {"closed": True})
    assert "warning" not in (tmp_path / "log").read_text()


@pytest.mark.sample("oat.tracking.files:Tracking.row-4", seconds=3.1)
@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("oat.learner.learner:Learner.update", 1),
        ("oat.learner.learner:Learner.update", 4),
        ("oat.tracking.files:Tracking.row", 4),
    ],
)
def test_each_row_once_over_a_kill_and_a_fork_begins_its_own(
    world: World, tmp_path: Path, place: str, call: int
) -> None:
    config = world.config("grpo", tmp_path, {"tracking.sinks": [own()]})
    run_dir = tmp_path / "grpo"
    log = tmp_path / "log"
    assert (
        forked(lambda: kill_at(*named(place), call, after=True) or oat("train", config), log)
        == -signal.SIGKILL
    )
    assert logged(log, "train", config) == 0, log.read_text()
    found = written(run_dir)
    assert are_its_rows(found, run_dir)
    ids = [record["id"] for record in found if "id" in record]
    assert ids[0] is None
    assert re.fullmatch(r"run-\d+", ids[1])
    if call == 4:
        fork = tmp_path / "fork"
        assert (
            forked(
                lambda: oat("train", config, "--from", f"{run_dir}@2", "--run_dir", fork, "--seed", 7), log
            )
            == 0
        ), log.read_text()
        assert are_its_rows(written(fork), fork)
        assert written(fork)[0]["id"] is None
    assert "warning: the sink" not in log.read_text()


def test_a_sink_that_comes_late_has_all_rows_and_one_that_was_away_what_it_missed(tmp_path: Path) -> None:
    """A run has five processes of two steps each. The second and the fourth have the sink, and the fourth
    also gives it texts. The fifth has the sink with other settings, so it gets all rows again."""
    lives: list[SinkProcess | None] = [
        None,
        process(tmp_path),
        None,
        process(tmp_path, config={}),
        process(tmp_path, fails="never"),
    ]
    for number, sink in enumerate(lives):
        if sink is not None:
            sink.open(2 * number)
        for step in (2 * number, 2 * number + 1):
            for name, record in {
                "metrics": {"step": step, "a": 1.5, "time/step_s": 100.0},
                "samples": {"step": step, "prompt": f"p{step}"},
            }.items():
                with (tmp_path / f"{name}.jsonl").open("a") as file:
                    file.write(json.dumps(record) + "\n")
            if sink is not None:
                give(sink, range(step, step + 1))
        finish_all([sink] if sink is not None else [])
    found = written(tmp_path, "mine.jsonl")
    steps = [record.get("step", "closed" if "closed" in record else "open") for record in found]
    assert steps == [
        "open",
        *range(4),
        "closed",
        "open",
        *range(4, 8),
        "closed",
        "open",
        *range(10),
        "closed",
    ]
    assert [record["samples"] for record in found if "step" in record][:8] == [
        [],
        [],
        [],
        [],
        *([{"step": n, "prompt": f"p{n}"}] for n in (4, 5)),
        *([{"step": n, "prompt": "p"}] for n in (6, 7)),
    ]
    assert [record["id"] is None for record in found if "config" in record] == [True, False, True]
    times = [record["seconds"] for record in found if "step" in record][:3]
    assert [later - sooner for sooner, later in pairwise(times)] == pytest.approx([100, 0], abs=20)


@pytest.mark.slow(instead="test_every_way_at_every_moment_is_told_of_once_and_leaves_nothing", seconds=1.9)
def test_no_way_to_fail_touches_training(world: World, tmp_path: Path) -> None:
    """Three sinks fail at once. The run ends bitwise like a run without them, and warns once of each."""
    plain = world.config("grpo", tmp_path)
    run_dir = tmp_path / "with"
    log = tmp_path / "log"
    (tmp_path / "three.py").write_text(
        OWN.read_text() + "".join(f"\n\nclass {name}(Rows):\n    pass\n" for name in "ABC")
    )
    sinks = [
        {"name": f"{tmp_path / 'three.py'}:A", "file": "A.jsonl", "fails": "dies", "at": 2, "wait_s": 120},
        {
            "name": f"{tmp_path / 'three.py'}:B",
            "file": "B.jsonl",
            "fails": "hangs deaf",
            "at": "open",
            "wait_s": 1,
        },
        {
            "name": f"{tmp_path / 'three.py'}:C",
            "file": "C.jsonl",
            "fails": "raises",
            "at": "close",
            "wait_s": 120,
        },
    ]
    assert logged(tmp_path / "plain", "train", plain) == 0
    flags = ("--run_dir", run_dir, "--tracking.sinks", json.dumps(sinks))
    assert forked(lambda: told("train", plain, *flags), log) == 0, log.read_text()
    assert digest_run(run_dir) == digest_run(tmp_path / "grpo")
    assert sorted(re.findall("warning: (the sink .*?);", log.read_text())) == [
        "the sink three-A ended its process (exit code 3)",
        "the sink three-B was not done 1 s after the last row (its wait_s)",
        "the sink three-C could not be closed: ValueError: no more of this, says nobody",
    ]


@pytest.mark.fault("R4")
def test_every_way_at_every_moment_is_told_of_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str], None]
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-0123456789")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    places = [(way, moment) for way in WAYS for moment in MOMENTS]
    sinks = [
        process(tmp_path, key=f"{way}-{at}", fails=way, at=at, wait_s=1.0 if "hangs" in way else 60.0)
        for way, at in places
    ]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for sink in sinks:
            sink.open(0)
            give(sink, range(4))
        reached = {"open": {"config"}, "2": {"config", 0, 1, 2}, "close": {"config", 0, 1, 2, 3}}
        deadline = time.monotonic() + 60
        while (
            any(reached[at] - seen(tmp_path, f"{way}-{at}.jsonl") for way, at in places)
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        finish_all(sinks)
    for (way, moment), sink in zip(places, sinks, strict=True):
        (text,) = [
            str(warning.message) for warning in said if f"the sink {way}-{moment} " in str(warning.message)
        ]
        expected = {
            "raises": "could not",
            "exits": "could not",
            "dies": r"ended its process \(exit code 3\)",
            "is killed": r"was ended by SIGSEGV",
        }
        assert re.search(expected.get(way, r"was not done 1 s after the last row \(its wait_s\)"), text), text
        assert "sk-0123456789" not in text
        assert not marked(sink._mark)
        assert seen(tmp_path, f"{way}-{moment}.jsonl") == reached[moment]
        if moment == "2":
            kept = json.loads((tmp_path / "sinks" / f"{way}-2.json").read_text())
            assert kept["next"] == (2 if way in ("raises", "exits") else 3)
    assert list(scratch.iterdir()) == []
    figure(
        f"{len(places)} of {len(places)} failures of a sink (each kind at each moment) reported once, "
        f"nothing left behind"
    )


def seen(folder: Path, file: str) -> set[Any]:
    """Return the steps that a sink got, and the kinds of its other records, such as "config"."""
    records = written(folder, file) if (folder / file).exists() else []
    return {
        record["step"] if "step" in record else next(iter(record.keys() & {"config", "closed"}))
        for record in records
    }


def test_a_marked_process_is_found(tmp_path: Path) -> None:
    """A process that a sink started is found by its mark, also if it has left the session and its parent has
    ended."""
    sink = process(tmp_path, fails="hangs deaf", at="open", wait_s=0.0)
    sink.open(0)
    deadline = time.monotonic() + 30
    while len(marked(sink._mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    found = marked(sink._mark)
    assert len(found) == 2
    assert all(VARIABLE.encode() in Path(f"/proc/{number}/environ").read_bytes() for number in found)
    sink.end()
    while marked(sink._mark) and time.monotonic() < deadline:  # killed, and not yet gone on a busy machine
        time.sleep(0.02)
    assert not marked(sink._mark)


@pytest.mark.parametrize("bound", ["_MOST_ROWS", "_MOST_BYTES"])
def test_a_sink_that_hangs_is_given_up_when_too_much_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(sink_process, bound, 20 if bound == "_MOST_ROWS" else 2_000)
    sink = process(tmp_path, fails="hangs", at=1)
    sink.open(0)
    with pytest.warns(
        match=(
            r"the sink mine has not taken the row of step \d+ yet, and \d+ rows wait; the run goes on "
            r"without "
            r"it, and rows from"
        )
    ):
        give(sink, range(60))
    assert not marked(sink._mark)
    finish_all([sink])


def test_a_hang_holds_up_no_row(tmp_path: Path) -> None:
    """A sink hangs for ten minutes. Handing it rows of 4 MB in all, more than a pipe holds, does not wait for
    it."""
    sink = process(tmp_path, fails="hangs", at="open", wait_s=0.0)
    sink.open(0)
    begin = time.monotonic()
    for step in range(1000):
        sink.row(step, json.dumps({"step": step, "a": "x" * 4000}), [])
    assert time.monotonic() - begin < 60
    with pytest.warns(match="the sink mine was not done"):
        finish_all([sink])


def test_the_sink_of_the_life_before_is_waited_for(tmp_path: Path) -> None:
    """Training was killed while its sink still takes rows. The sink of the continued run begins when the
    first one has closed."""
    (tmp_path / "slow.py").write_text(
        OWN.read_text()
        + (
            "\n\nclass Slow(Rows):\n    def row(self, row):\n        time.sleep(0.15 * (row.step < "
            "6))\n        super().row(row)\n"
        )
    )
    lives = [
        SinkProcess(Described("slow", f"{tmp_path / 'slow.py'}:Slow", {}, {}, False, 60.0), tmp_path, {})
        for _ in range(2)
    ]
    lives[0].open(0)
    give(lives[0], range(6))
    deadline = time.monotonic() + 60
    while not (tmp_path / "rows.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    first = lives[0]._process
    assert first is not None
    first.link.close()  # as a kill would
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "a": 1.5}) + "\n" for step in range(3))
    )
    lives[1].open(3)
    give(lives[1], range(3, 8))
    finish_all(lives[1:])
    found = written(tmp_path)
    steps = [record.get("step", "closed" if "closed" in record else "open") for record in found]
    assert steps == ["open", *range(6), "closed", "open", 6, 7, "closed"]
    first.end()


@pytest.mark.slow(
    instead="tests/opening/test_places.py::test_a_run_directory_moves_between_two_lives", seconds=1.2
)
def test_a_run_directory_may_be_moved(world: World, tmp_path: Path) -> None:
    """The run directory is moved, and the run continued. The sink has each row once, since its state moved
    too."""
    config, log = (
        world.config("grpo", tmp_path, {"tracking.sinks": [own()], "stop.max_steps": 2, "evaluation": None}),
        tmp_path / "log",
    )
    assert logged(log, "train", config) == 0
    shutil.move(tmp_path / "grpo", tmp_path / "moved")
    assert logged(log, "train", config, "--run_dir", tmp_path / "moved", "--stop.max_steps", 3) == 0, (
        log.read_text()
    )
    assert are_its_rows(written(tmp_path / "moved"), tmp_path / "moved")
