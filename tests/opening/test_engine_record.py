"""The record of a run says which engine drew its responses. A run goes on with that engine, and with another
only if another version of `oat` made the record."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fixtures import Finished, oat

from oat.assemble.engine_record import compare_engines
from oat.errors import ConfigError

COMMON = {"stop.max_steps": 1, "checkpoint.every": 1, "evaluation": None, "engine.threads": 1}


@pytest.fixture
def run_dir(finished: Finished, tmp_path: Path) -> Path:
    """Return the directory of a run that has made one step."""
    return finished.copy("grpo", tmp_path, {**COMMON, "algorithm.samples": 2})


def entries(run_dir: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))
    return found


def record(run_dir: Path) -> dict[str, Any]:
    """Return the newest record."""
    found: dict[str, Any] = [entry["inputs"] for entry in entries(run_dir) if "inputs" in entry][-1]["engine"]
    return found


def change(run_dir: Path, changes: Mapping[str, Any]) -> None:
    """Change the record of the run's engine."""
    (entry,) = entries(run_dir)
    entry["inputs"]["engine"] |= changes
    (run_dir / "environment.json").write_text(json.dumps([entry]), encoding="utf-8")


def go_on(run_dir: Path, steps: int, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Continue a run. Return the exit code and what was said."""
    capsys.readouterr()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        code = oat("train", run_dir / "config.yaml", "--run_dir", run_dir, "--stop.max_steps", steps)
    return code, "\n".join([capsys.readouterr().err, *(str(each.message) for each in caught)])


def test_the_record_says_what_drew_and_what_it_can(run_dir: Path) -> None:
    found = record(run_dir)
    assert (found["name"], found["way"]) == ("torch", "pages")
    assert found["can"]["addressed_draws"] is True
    assert found["can"]["slots"] is None
    assert found["oat"]


def test_another_engine_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(run_dir, {"way": "rows"})
    before = (run_dir / "metrics.jsonl").read_bytes()
    code, said = go_on(run_dir, 2, capsys)
    assert (code, (run_dir / "metrics.jsonl").read_bytes()) == (2, before)
    assert oat("check", run_dir / "config.yaml", "--run_dir", run_dir) == 2
    assert "another engine drew this run's responses so far:\n  way: was rows, is pages" in said
    assert "engine.name" in said


HERE = {"name": "torch", "way": "pages", "can": {"kept_sets": True, "lora": True}, "oat": "0.2.0"}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"name": "other"}, "name: was other, is torch"),
        ({"way": "rows"}, "way: was rows, is pages"),
        ({"can": {"kept_sets": False}}, "kept_sets: was False, is True"),
    ],
)
def test_what_differs(changes: dict[str, Any], line: str) -> None:
    """This version's record is believed. Another version's is not, and may know less of what an engine can
    do."""
    before, now = {"engine": HERE | changes}, {"engine": HERE}
    with pytest.raises(ConfigError, match=line):
        compare_engines(before, now)
    other = {"engine": HERE | changes | {"oat": "0.1.0"}}
    assert line in (compare_engines(other, now) or "")
    assert compare_engines({"engine": HERE | {"oat": "0.1.0"}}, now) is None
    assert compare_engines({"engine": HERE | {"can": {"lora": True, "new": True}}}, now) is None
    assert compare_engines(None, now) is None
    for edited in (None, "torch", [], {}, HERE | {"can": None}, HERE | {"way": 3}, {"name": "torch"}):
        assert "no record says" in (compare_engines({"engine": edited}, now) or "")
    assert "no record says" in (compare_engines({}, now) or "")


def test_a_record_of_another_version_is_replaced_and_said_once(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run_dir, {"way": "rows", "oat": "0.0.1"})
    code, said = go_on(run_dir, 2, capsys)
    words = "oat 0.0.1 recorded another engine for this run (way: was rows"
    assert (code, said.count(words)) == (0, 1)
    assert record(run_dir)["way"] == "pages"
    code, said = go_on(run_dir, 3, capsys)
    assert (code, said.count("engine drew"), said.count("another engine")) == (0, 0, 0)


def test_a_fork_may_have_another_engine(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run_dir, {"way": "rows"})
    fork = tmp_path / "fork"
    flags = ("--run_dir", fork, "--from", run_dir, "--stop.max_steps", 2)
    assert oat("train", run_dir / "config.yaml", *flags) == 0, capsys.readouterr().err
    assert record(fork)["way"] == "pages"


def test_what_somebody_has_changed_in_the_inputs_gets_one_message(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A continued run compares all of them."""
    (entry,) = entries(run_dir)
    assert {"models", "readers", "prompts", "oracles", "weights", "modules"} <= entry["inputs"].keys()
    for name in entry["inputs"]:
        for wrong in (
            None,
            5,
            ["x"] if name != "prompts" else {"x": 1},
            {"x": 1} if name != "prompts" else [1],
        ):
            changed = [entry | {"inputs": entry["inputs"] | {name: wrong}}]
            (run_dir / "environment.json").write_text(json.dumps(changed), encoding="utf-8")
            code = oat("check", run_dir / "config.yaml", "--run_dir", run_dir)
            said = capsys.readouterr().err
            if name == "engine":
                assert code == 0
            else:
                assert code == 2
                assert "environment.json: somebody has changed the `inputs` of an entry (Exp" in said
                assert f"`$.{name}" in said
