"""`oat train --profile N`: the content of a trace, when it is written, and no effect on the run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, logged, oat

from oat.commands.digest import digest_run

BOXES = ("sample", "take", "prepare", "update", "sync", "evaluate")


def train(config: Path, *flags: object) -> str:
    """Train in a child, which has traced nothing before, and return its output."""
    log = config.parent / "log"
    log.unlink(missing_ok=True)
    assert logged(log, "train", config, *flags) == 0, log.read_text()
    return log.read_text()


def events(trace: Path) -> list[dict[str, Any]]:
    """Return the trace's events that have a duration."""
    return [
        event
        for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        if event.get("ph") == "X"
    ]


@pytest.mark.sample("grpo-True", seconds=1.5)
@pytest.mark.parametrize(("algorithm", "serialise"), [("dpo", False), ("grpo", True)])
def test_the_boxes_of_the_traced_steps(algorithm: str, serialise: bool, world: World, tmp_path: Path) -> None:
    """The second and the third of four steps are traced, with an evaluation between them that also takes its
    answers. The run equals the one without a trace."""
    (tmp_path / "plain").mkdir()
    train(world.config(algorithm, tmp_path / "plain"))
    printed = train(world.config(algorithm, tmp_path, {"compute.serialise": serialise}), "--profile", 2)
    assert digest_run(tmp_path / algorithm) == digest_run(tmp_path / "plain" / algorithm)
    trace = tmp_path / algorithm / "profile" / "trace_step_00000001.json"
    assert f"oat train: the trace is {trace}; open it in Perfetto or chrome://tracing\n" in printed
    assert "profiler_" not in printed, "torch itself says when it starts and stops"
    assert [file.name for file in trace.parent.iterdir()] == [trace.name]
    found = events(trace)
    assert {name: sum(event["name"] == name for event in found) for name in BOXES} == dict.fromkeys(
        BOXES, 2
    ) | {"evaluate": 1, "take": 3}
    spans = {
        name: [(e["ts"], e["ts"] + e["dur"]) for e in found if e["name"] == name]
        for name in (*BOXES, "aten::mm")
    }
    for begin, end in spans["sample"] + spans["update"]:
        assert any(begin <= first and last <= end for first, last in spans["aten::mm"])


@pytest.mark.slow(instead="test_the_boxes_of_the_traced_steps", seconds=1.8)
def test_a_continued_run_is_traced_again(world: World, tmp_path: Path) -> None:
    config = world.config("dpo", tmp_path)
    folder = tmp_path / "dpo" / "profile"
    train(config, "--stop.max_steps", 2, "--profile", 1)
    assert "no trace: the run had no second step" in train(config, "--stop.max_steps", 3, "--profile", 1)
    assert [file.name for file in folder.iterdir()] == ["trace_step_00000001.json"]
    assert "the trace is" in train(config, "--stop.max_steps", 6, "--profile", 9)
    assert sorted(file.name for file in folder.iterdir()) == [
        "trace_step_00000001.json",
        "trace_step_00000004.json",
    ]
    assert sum(event["name"] == "update" for event in events(folder / "trace_step_00000004.json")) == 2
    assert "profile: 9" not in (tmp_path / "dpo" / "config.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("steps", [0, -3])
def test_no_steps_are_refused_before_anything_is_made(
    steps: int, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oat("train", world.config("dpo", tmp_path), "--profile", steps) == 2
    assert re.fullmatch(
        rf"oat train: --profile is {steps}; give the number of steps to trace, at least 1\n",
        capsys.readouterr().err,
    )
    assert not (tmp_path / "dpo").exists()
