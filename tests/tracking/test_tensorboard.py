"""`tracking.tensorboard`: the points of `metrics.jsonl`, each once, as TensorBoard's own library reads
them."""

import importlib.util
import json
import math
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, forked, kill_at, logged, named, oat

from oat.config.settings import TrackingConfig
from oat.tracking.sink_process import SinkProcess, finish_all
from oat.tracking.sinks import described_sinks

ON = {"tracking.tensorboard": True}
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)

Points = Callable[[Path], dict[tuple[str, int], list[float]]]


@pytest.fixture
def points() -> Points:
    """Return a function that reads every value of all files of a run, by name and step. A later value hides
    no earlier one."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    def read(run_dir: Path) -> dict[tuple[str, int], list[float]]:
        found: dict[tuple[str, int], list[float]] = {}
        for file in (run_dir / "tensorboard").iterdir():
            for event in LegacyEventFileLoader(str(file)).Load():
                for value in event.summary.value:
                    found.setdefault((value.tag, event.step), []).append(value.simple_value)
        return found

    return read


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def are_its_rows(found: dict[tuple[str, int], list[float]], run_dir: Path) -> bool:
    expected = {
        (name, row["step"]): value
        for row in rows_of(run_dir)
        for name, value in row.items()
        if name != "step"
    }
    assert found.keys() == expected.keys()
    return all(
        len(values) == 1 and math.isclose(values[0], expected[place], rel_tol=1e-6, abs_tol=1e-30)
        for place, values in found.items()
    )


@pytest.mark.slow(
    instead="tests/tracking/test_sinks.py::test_each_row_once_over_a_kill_and_a_fork_begins_its_own",
    seconds=2.5,
)
@needs_library
def test_each_point_once_over_kills(world: World, tmp_path: Path, points: Points) -> None:
    """The run is killed after a checkpoint, continued, and made longer. TensorBoard's files have each point
    once."""
    config, run_dir = world.config("grpo", tmp_path, ON), tmp_path / "grpo"
    assert (
        forked(
            lambda: kill_at(*named("oat.learner.learner:Learner.update"), 4) or oat("train", config),
            tmp_path / "log",
        )
        == -signal.SIGKILL
    )
    for flags in ((), ("--stop.max_steps", 6)):
        assert logged(tmp_path / "log", "train", config, *flags) == 0, (tmp_path / "log").read_text()
        assert are_its_rows(points(run_dir), run_dir)
    assert [row["step"] for row in rows_of(run_dir)] == list(range(7))


@pytest.mark.slow(
    instead="tests/tracking/test_sinks.py::test_a_sink_that_comes_late_has_all_rows_and_one_that_was_away_what_it_missed",
    seconds=1.6,
)
@needs_library
def test_a_run_that_is_told_late_has_all_points(world: World, tmp_path: Path, points: Points) -> None:
    config, run_dir = world.config("dpo", tmp_path, {"stop.max_steps": 2}), tmp_path / "dpo"
    assert logged(tmp_path / "log", "train", config) == 0
    assert not (run_dir / "tensorboard").exists(), "off by default"
    flags = ("--tracking.tensorboard", "true", "--stop.max_steps", 4)
    assert logged(tmp_path / "log", "train", config, *flags) == 0
    assert are_its_rows(points(run_dir), run_dir)


@pytest.mark.slow(
    instead="tests/tracking/test_sinks.py::test_each_row_once_over_a_kill_and_a_fork_begins_its_own",
    seconds=1.9,
)
@needs_library
def test_points_that_lie_elsewhere_stand_there_once(world: World, tmp_path: Path, points: Points) -> None:
    """The folder `tensorboard` is a link to another disk. Its files have each point once."""
    config = world.config("dpo", tmp_path, {**ON, "stop.max_steps": 2})
    run_dir = tmp_path / "dpo"
    elsewhere = tmp_path / "elsewhere"
    assert logged(tmp_path / "log", "train", config) == 0
    (run_dir / "tensorboard").rename(elsewhere)
    (run_dir / "tensorboard").symlink_to(elsewhere)
    assert logged(tmp_path / "log", "train", config, "--stop.max_steps", 3) == 0
    assert are_its_rows(points(run_dir), run_dir)
    assert (run_dir / "tensorboard").is_symlink()


@needs_library
def test_times_of_kept_rows_go_on_from_each_other(tmp_path: Path) -> None:
    """Three rows of an earlier process took 100 s each. TensorBoard gets them with times 100 s apart, and
    then the first row of this process."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    rows = [{"step": step, "a": 1.0, "time/step_s": 100.0} for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (sink,) = [SinkProcess(sink, tmp_path, {}) for sink in described_sinks(TrackingConfig(tensorboard=True))]
    sink.open(kept=3)
    sink.row(3, '{"step": 3, "a": 2.0}', [])
    finish_all([sink])
    (file,) = (tmp_path / "tensorboard").iterdir()
    times = [event.wall_time for event in LegacyEventFileLoader(str(file)).Load() if event.summary.value]
    assert [later - sooner for sooner, later in pairwise(times)] == pytest.approx([100, 100, 0], abs=20)


@needs_library
def test_samples_are_texts_that_only_those_see_who_asked(world: World, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    tags: dict[bool, set[str]] = {}
    for samples in (False, True):
        config = world.config(
            "grpo",
            tmp_path,
            {
                "stop.max_steps": 1,
                "evaluation": None,
                "tracking.sinks": [{"name": "tensorboard", "samples": samples}],
            },
        )
        run_dir = tmp_path / str(samples)
        assert (
            forked(
                lambda config=config, run_dir=run_dir: oat("train", config, "--run_dir", run_dir),
                tmp_path / "log",
            )
            == 0
        )
        (file,) = (run_dir / "tensorboard").iterdir()
        values = [value for event in LegacyEventFileLoader(str(file)).Load() for value in event.summary.value]
        tags[samples] = {value.tag for value in values}
        texts = b"".join(text for value in values for text in value.tensor.string_val)
        assert (b"prompt" in texts) == samples
    assert tags[True] - tags[False] == {f"samples/{number}" for number in range(4)}


def test_without_the_library(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, find=importlib.util.find_spec: None if name == "tensorboard" else find(name),
    )
    assert oat("train", world.config("dpo", tmp_path, ON)) == 2
    assert (
        "tracking.tensorboard is set, and its library is missing: pip install 'oat-align[tensorboard]'"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "dpo").exists()


@needs_library
def test_files_of_another_program_stay(tmp_path: Path) -> None:
    """The sink deletes its own files only. An earlier version gave them no ending: there, all are its own."""
    from oat.tracking.base import Opening
    from oat.tracking.tensorboard import TensorBoard

    folder = tmp_path / "tensorboard"
    folder.mkdir()
    foreign = folder / "events.out.tfevents.1.mine"
    foreign.write_bytes(b"mine")

    def opened(id: str | None) -> tuple[str, set[str]]:
        sink = TensorBoard()
        found = sink.open(Opening(tmp_path, {}, id))
        sink.close()
        return found, {file.name for file in folder.iterdir()} - {foreign.name}

    id, first = opened(None)
    _, second = opened(id)
    assert len(first) == len(second) == 1
    assert first.isdisjoint(second)
    assert foreign.read_bytes() == b"mine"
    (tmp_path / "sinks").mkdir()
    (tmp_path / "sinks" / "tensorboard.json").touch()
    opened(None)
    assert not foreign.exists()
