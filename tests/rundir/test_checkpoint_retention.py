"""Retention: which checkpoints are kept and which are removed."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_files import loaded_step, on_disk, save
from fixtures import World, logged, oat

from oat.config.load import load_config
from oat.errors import CheckpointError, ConfigError
from oat.loop import Run, restore, train
from oat.opening.open_run import open_run
from oat.resolve.resolve import resolve
from oat.resolve.resolved import Resolved
from oat.rundir.checkpoints import Checkpoints


def resolved(file: Path) -> Resolved:
    return resolve(*load_config(file))


def test_the_newest_is_loaded_and_old_ones_go(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 2, 10, 11)
    assert loaded_step(checkpoints) == 11
    assert on_disk(checkpoints) == ["latest", "step_00000010", "step_00000011"]
    assert (checkpoints.steps, checkpoints.oldest) == ([10, 11], 10)


def test_the_best_stay(tmp_path: Path) -> None:
    """The best checkpoints are kept beside the newest. Of equal values the newer one counts as better. Rows
    without the metric, or with a value that is not finite, have no rank."""
    checkpoints = Checkpoints(tmp_path, every=1, keep_last=1, keep_best=2)
    kept = {}
    for step, value in enumerate([0.5, 0.9, None, 0.2, 0.9, float("nan"), 0.7], start=1):
        save(checkpoints, step, **({} if value is None else {"eval/sampled": value}))
        kept[step] = checkpoints.steps
    assert kept == {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 4], 5: [2, 5], 6: [2, 5, 6], 7: [2, 5, 7]}
    assert Checkpoints(tmp_path, every=1, keep_last=1).best() == 5
    again = Checkpoints(tmp_path, every=1, keep_last=1, keep_best=1)
    save(again, 8, **{"eval/sampled": 0.1})
    assert (again.steps, again.oldest) == ([5, 8], 5)


def test_another_metric_ranks_what_is_there(tmp_path: Path) -> None:
    """A continued run may rank by another metric, since every value of the row is stored."""
    save(Checkpoints(tmp_path, every=1, keep_last=9), 1, **{"eval/sampled": 0.9, "eval/greedy": 0.1})
    save(Checkpoints(tmp_path, every=1, keep_last=9), 2, **{"eval/sampled": 0.1, "eval/greedy": 0.9})
    by = {
        name: Checkpoints(tmp_path, every=1, keep_last=1, best_metric=name).best()
        for name in ("eval/sampled", "eval/greedy")
    }
    assert by == {"eval/sampled": 1, "eval/greedy": 2}
    with pytest.raises(CheckpointError, match=r"no checkpoint has a value of user/x; give a step \(1, 2\)"):
        Checkpoints(tmp_path, every=1, keep_last=1, best_metric="user/x").best()


def test_the_oldest_go_first_where_they_take_too_much(tmp_path: Path) -> None:
    """If checkpoints exceed `max_gb`, the oldest are removed, even one that ranks best."""
    save(Checkpoints(tmp_path, every=1, keep_last=9), 1, 2, 3, **{"eval/sampled": 1.0})
    size = sum(file.stat().st_size for file in (tmp_path / "step_00000001").iterdir())
    checkpoints = Checkpoints(tmp_path, every=1, keep_last=9, keep_best=9, max_gb=3.5 * size / 1e9)
    save(checkpoints, 4, **{"eval/sampled": 0.0})
    assert checkpoints.steps == [2, 3, 4]
    assert loaded_step(checkpoints) == 4


def test_an_older_one_that_is_needed_stays_whatever_the_limits(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, every=1, keep_last=9), 1, 2, 3)
    size = sum(file.stat().st_size for file in (tmp_path / "step_00000001").iterdir())
    checkpoints = Checkpoints(tmp_path, every=1, keep_last=2, max_gb=2.5 * size / 1e9)
    checkpoints.save(4, {"learner/w": torch.full((3,), 4.0)}, {"learner": {"updates": 4}}, keep=2)
    checkpoints.wait()
    assert checkpoints.steps == [2, 4]
    save(checkpoints, 5)
    assert checkpoints.steps == [4, 5]


def test_the_newest_stays_though_it_is_too_large(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, every=1, keep_last=3, max_gb=1e-9)
    with pytest.warns(
        UserWarning,
        match=r"that are needed take \S+ GB, more than checkpoint.max_gb 1e-09; no others are kept",
    ):
        save(checkpoints, 1, 2)
    assert loaded_step(checkpoints) == 2
    assert checkpoints.steps == [2]


def test_a_step_is_loaded_by_its_number(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 2)
    assert [checkpoints.load_step(step)[1]["learner/w"].tolist() for step in (1, 2)] == [[1.0] * 3, [2.0] * 3]
    with pytest.raises(CheckpointError, match="has none of step 3; there are checkpoints of the steps 1, 2"):
        checkpoints.load_step(3)
    (checkpoints.directory / "step_00000001" / "state.json").write_text("{}")
    with pytest.raises(
        CheckpointError,
        match=r"step_00000001: state.json has 2 bytes.*of the steps 1, 2 .checkpoint.keep_last says",
    ):
        checkpoints.load_step(1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoint.best_metric": "eval/greedy"}, "nothing reads checkpoint.best_metric"),
        (
            {"checkpoint.keep_best": 1, "checkpoint.best_metric": "eval/sample"},
            "there is no metric 'eval/sample'; did you mean `eval/sampled`",
        ),
        (
            {"checkpoint.keep_best": 1, "evaluation": None},
            "checkpoint.best_metric is 'eval/sampled': no evaluation of this run gives it",
        ),
        ({"checkpoint.keep_best": 1, "evaluation.samples": 0}, "no evaluation of this run gives it"),
        (
            {
                "checkpoint.keep_best": 1,
                "checkpoint.best_metric": "eval/sampled_high",
                "evaluation.samples": 0,
            },
            "no evaluation of this run gives it",
        ),
        (
            {"checkpoint.keep_best": 1, "checkpoint.best_metric": "eval/greedy", "evaluation.greedy": False},
            "no evaluation of this run gives it",
        ),
        ({"checkpoint.max_gb": 0}, "checkpoint.max_gb"),
    ],
)
def test_a_retention_that_cannot_be_is_refused(
    world: World, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(*load_config(world.config("dpo", tmp_path, changes)))


def test_checkpoints_may_be_ranked_by_pass_at_k(world: World, tmp_path: Path) -> None:
    changes = {"checkpoint.keep_best": 1, "checkpoint.best_metric": "eval/pass@2", "evaluation.pass_at": [2]}
    changes |= {"evaluation.samples": 2}
    assert resolve(*load_config(world.config("grpo", tmp_path, changes))).config.checkpoint.keep_best == 1


@pytest.mark.inventory(113)
def test_so_many_stay_and_the_newest_gives_equal_logits(world: World, tmp_path: Path) -> None:
    def logits(run: Run) -> torch.Tensor:
        module: Any = run.learner.models["policy"].module  # type: ignore[attr-defined]
        with torch.no_grad():
            found: torch.Tensor = module(input_ids=torch.arange(12)[None]).logits
        return found

    config = world.config(
        "dpo",
        tmp_path,
        {"checkpoint.every": 1, "checkpoint.keep_last": 5, "stop.max_steps": 7, "evaluation": None},
    )
    with open_run(resolved(config)) as run:
        start = logits(run)
        train(run, lambda step, values: None)
        end = logits(run)
    assert Checkpoints(tmp_path / "dpo" / "checkpoints", every=1, keep_last=5).steps == [3, 4, 5, 6, 7]
    with open_run(resolved(config)) as again:
        assert torch.equal(logits(again), start)
        assert restore(again) == (7, None)
        assert torch.equal(logits(again), end)
    assert not torch.equal(start, end)


def test_a_run_keeps_its_best_and_exports_it(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config(
        "dpo",
        tmp_path,
        {"checkpoint.every": 1, "evaluation.every": 1, "learner.learning_rate": 0.05, "stop.max_steps": 5},
    )
    flags = [
        "--checkpoint.keep_last",
        "1",
        "--checkpoint.keep_best",
        "1",
        "--checkpoint.best_metric",
        "eval/greedy",
    ]
    assert logged(tmp_path / "log", "train", config, *flags) == 0
    rows = [json.loads(line) for line in (tmp_path / "dpo" / "metrics.jsonl").read_text().splitlines()][1:]
    best = max(rows, key=lambda row: (row["eval/greedy"], row["step"]))["step"]
    assert Checkpoints(tmp_path / "dpo" / "checkpoints", every=1, keep_last=1).steps == sorted({best, 5})
    assert all("time/save_s" in row for row in rows[1:])
    run = tmp_path / "dpo"
    assert oat("export", run, tmp_path / "best", "--step", "best") == 0
    assert oat("export", run, tmp_path / "step", "--step", best) == 0
    assert f"the model after {best} steps is in {tmp_path / 'best'}" in capsys.readouterr().out
    found = [safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("best", "step")]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    listed = ", ".join(map(str, sorted({best, 5})))
    for step, code, words in (
        ("99", 1, f"has none of step 99; there are checkpoints of the steps {listed}"),
        ("x", 2, "--step is 'x'"),
    ):
        assert oat("export", run, tmp_path / "none", "--step", step) == code
        assert words in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_pruning_never_removes_the_last_good_one(checkpoints: Checkpoints) -> None:
    """A damaged checkpoint of a later step must not cause the removal of the good one that was just
    written."""
    strict = Checkpoints(checkpoints.directory, every=1, keep_last=1)
    save(checkpoints, 8, 12)
    (checkpoints.directory / "step_00000012" / "state.json").write_text("{}")
    with pytest.warns(UserWarning, match="step_00000012: state.json"):
        assert loaded_step(strict) == 8
    save(strict, 9)
    assert loaded_step(strict) == 9
    assert on_disk(checkpoints) == ["latest", "step_00000009"]


def beside(folder: Path, kind: str) -> None:
    """Put something of a user into a checkpoint's folder, or something in its place."""
    if kind == "file":
        (folder / "notes.md").write_text("mine")
    elif kind == "hidden":
        (folder / ".gitattributes").write_text("mine")
    elif kind == "model":
        (folder / "hf").mkdir()
        (folder / "hf" / "tensors.safetensors").write_text("mine")
    elif kind == "empty folder":
        (folder / "hf").mkdir()
    elif kind == "broken link":
        (folder / "hf").symlink_to("nowhere")
    elif kind == "own name":
        (folder / "state.json").unlink()
        (folder / "state.json").mkdir()
    else:
        moved = folder.rename(folder.parent.parent / "elsewhere")
        if kind == "link":
            folder.symlink_to(moved)
        else:
            folder.mkdir()
            for name in ("manifest.json", "state.json", "tensors.safetensors"):
                (folder / name).symlink_to(moved / name)


@pytest.mark.parametrize(
    ("kind", "later"),
    [
        *[(kind, False) for kind in ("file", "hidden", "model", "empty folder", "broken link", "links")],
        *[(kind, True) for kind in ("file", "own name", "link")],
    ],
)
def test_what_a_checkpoint_did_not_write_is_not_removed(
    checkpoints: Checkpoints, kind: str, later: bool
) -> None:
    """It is said once, and the run goes on. What a kill left of a checkpoint goes."""
    save(checkpoints, 1, 2)
    theirs = checkpoints.directory / ("step_00000001" if not later else "step_00000002")
    beside(theirs, kind)
    before = sorted((path.name, path.is_symlink()) for path in theirs.rglob("*"))
    if later:  # the user has gone back to step 1
        (checkpoints.directory / "latest").write_text("step_00000001")
    (checkpoints.directory / ".new-step_00000001").mkdir()
    (checkpoints.directory / ".new-step_00000001" / "state.json").write_text("half")
    again = Checkpoints(checkpoints.directory, every=1, keep_last=1, max_gb=1.0)
    with pytest.warns(UserWarning, match=theirs.name) as said:
        save(again, 1 if later else 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(again, 1 if later else 4)
    assert len(said) == 1
    assert sorted((path.name, path.is_symlink()) for path in theirs.rglob("*")) == before
    kept = "step_00000001.2" if later else "step_00000004"
    assert on_disk(again) == sorted(["latest", theirs.name, kept])


def test_a_checkpoint_that_was_removed_by_half_goes(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 2)
    (checkpoints.directory / "step_00000001" / "manifest.json").unlink()
    save(checkpoints, 3)
    assert on_disk(checkpoints) == ["latest", "step_00000002", "step_00000003"]


def test_older_ones_stay_when_the_new_one_does_not_verify(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, 1, 2)
    publish = Checkpoints._publish

    def failing_disk(self: Checkpoints, new: Path, step: int) -> Path:
        final = publish(self, new, step)
        (final / "tensors.safetensors").write_bytes(b"zeros")
        return final

    monkeypatch.setattr(Checkpoints, "_publish", failing_disk)
    with pytest.raises(CheckpointError, match=r"step_00000003: does not verify.*older checkpoints are kept"):
        save(checkpoints, 3)
    with pytest.warns(UserWarning, match="step_00000003"):
        assert loaded_step(checkpoints) == 2
