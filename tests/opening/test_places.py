"""Relative paths count from the directory where the command began, even if user code changes the working
directory. A run whose directory vanishes ends."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import World, oat
from vanishing import moved, removed, replaced

from oat import Trainer, load_run
from oat.commands.digest import digest_run
from oat.config.load import load_config
from oat.errors import DirectoryError, LedgerError
from oat.files import seen_from
from oat.learner.learner import Learner
from oat.models.adapter_files import WEIGHTS
from oat.oracles.isolated import Isolated
from oat.resolve.targets import load_file
from oat.rundir.mark import mark

WANDERS = """
import asyncio
import os

{at_import}


def reward(prompts, completions, **columns):
    {at_call}
    return [text.count("a") + 0.1 * text.count("b") for text in completions]


async def late(prompts, completions, **columns):
    await asyncio.sleep(0.001)
    return reward(prompts, completions)


def records():
    {at_call}
    return [{{"prompt": f"{{a}}+{{b}}=", "answer": str(a + b)}} for a in range(3) for b in range(3)]


def answer(text):
    {at_call}
    return text
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
WAYS = {"import": ("reward", "at_import"), "call": ("reward", "at_call"), "thread": ("late", "at_call")}


@pytest.fixture
def project(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with everything that configurations name; commands begin in it. Beside it is the folder
    `elsewhere`, to which user code changes."""
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in ("model", "train.jsonl", "held_out.jsonl"):
        source = world.folder / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    (folder / "chat.jinja").write_text(TEMPLATE)
    monkeypatch.chdir(folder)
    write_reward(folder)
    return folder


def write_reward(folder: Path, way: str = "", line: str = "") -> None:
    """Write the reward file. `way` says where it gets a further line of Python: at import or at a call."""
    places = {"at_import": "", "at_call": "pass"} | ({way: line} if way else {})
    (folder / "reward.py").write_text(WANDERS.format(**places))


def away(folder: Path) -> str:
    return f"os.chdir({str(folder.parent / 'elsewhere')!r})"


def config(
    world: World,
    folder: Path,
    function: str = "reward",
    changes: dict[str, Any] | None = None,
    algorithm: str = "dpo",
) -> Path:
    """Write a configuration with a relative path in every field that takes a path."""
    own = {
        "run_dir": "runs/mine",
        "model.path": "model",
        "prompts.path": "train.jsonl",
        "evaluation.path": "held_out.jsonl",
        "evaluation.answers": "reward.py:answer",
        "evaluation.majority_at": [2],
        "evaluation.kl": True,
        "oracle.name": f"reward.py:{function}",
        "render.template": "chat.jinja",
        "tracking.tensorboard": True,
    }
    file = folder / "mine.yaml"
    file.write_text(
        yaml.safe_dump(world.tree(algorithm, Path("runs/mine"), {**own, **(changes or {})}), sort_keys=False)
    )
    return file


@pytest.mark.sample("thread", seconds=6.1)
@pytest.mark.parametrize("way", WAYS)
def test_a_reward_that_changes_the_working_directory_changes_nothing(
    world: World, project: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    function, place = WAYS[way]
    config(world, project, function)
    assert oat("train", "mine.yaml", "--run_dir", "runs/still") == 0
    write_reward(project, place, away(project))

    assert oat("train", "mine.yaml", "--stop.max_steps", "2") == 0
    assert Path.cwd() == project.parent / "elsewhere"
    monkeypatch.chdir(project)
    assert oat("train", "mine.yaml") == 0, "the run goes on where it lies"
    monkeypatch.chdir(project)

    assert not list((project.parent / "elsewhere").iterdir())
    assert sorted(file.name for file in Path("runs/mine").iterdir()) == sorted(
        file.name for file in Path("runs/still").iterdir()
    )
    assert digest_run(Path("runs/mine"))["weights"] == digest_run(Path("runs/still"))["weights"]
    stored = yaml.safe_load(Path("runs/mine/config.yaml").read_text())
    assert (stored["run_dir"], stored["model"]["path"], stored["oracle"]["name"]) == (
        "runs/mine",
        "model",
        f"reward.py:{function}",
    )


@pytest.mark.slow(instead="test_a_reward_that_changes_the_working_directory_changes_nothing", seconds=4.6)
def test_models_adapters_and_data_are_found_after_code_has_gone_elsewhere(
    world: World, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User code changes the working directory. Files with relative paths that are opened later are still
    found: an adapter, a reference model, functions that give data, and weights in another precision."""
    lora: dict[str, Any] = {
        "model.lora": {"rank": 2},
        "stop.max_steps": 1,
        "evaluation": None,
        "tracking.tensorboard": False,
    }
    names = {
        name: None
        for name in ("evaluation.path", "evaluation.answers", "evaluation.majority_at", "evaluation.kl")
    }
    assert oat("train", config(world, project, changes={**names, **lora, "run_dir": "runs/first"})) == 0
    assert oat("export", "runs/first", "adapter", "--adapter") == 0
    assert (project / "adapter" / WEIGHTS).exists()
    shutil.copytree("model", "reference")
    write_reward(project, "at_import", away(project))

    changes = {
        "model.adapter": "adapter",
        "model.reference": "reference",
        "prompts.path": "reward.py:records",
        "evaluation.path": "reward.py:records",
    }
    changes |= {"engine": {"name": "torch", "dtype": "bfloat16"}, "stop.max_steps": 1}
    config(world, project, changes=changes)
    for command in (
        ("check", "mine.yaml", "--memory"),
        ("train", "mine.yaml"),
        ("eval", "runs/mine"),
        ("eval", "mine.yaml", "--against", "model"),
    ):
        monkeypatch.chdir(project)
        assert oat(*command) == 0, command
    monkeypatch.chdir(project)
    assert oat("export", "runs/mine", "out") == 0
    assert (project / "out" / "config.json").exists()
    assert not list((project.parent / "elsewhere").iterdir())


def test_workers_of_a_function_begin_where_the_run_did(project: Path) -> None:
    with seen_from():
        os.chdir(project.parent / "elsewhere")
        oracle = Isolated("reward.py:reward")
        try:
            assert list(oracle.made_of) == ["reward.py"]
        finally:
            oracle.close()


def test_a_trainer_sees_paths_from_where_it_was_made(
    world: World, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = world.tree(
        "grpo",
        Path("runs/grpo"),
        {"model.path": "model", "prompts.path": "train.jsonl", "evaluation.path": "held_out.jsonl"},
    )
    lines["oracle"] = {"name": "reward.py:reward"}
    made = Trainer(**lines, callbacks=[lambda step, metrics: os.chdir(project.parent)], quiet=True)
    os.chdir(project.parent / "elsewhere")
    made.train()
    assert [row["step"] for row in made.metrics] == [0, 1, 2, 3, 4]
    made.save_model("out")
    assert (project / "out" / "config.json").exists()
    assert made.run_dir == Path("runs/grpo")
    monkeypatch.chdir(project)
    found = load_run("runs/grpo")
    os.chdir(project.parent / "elsewhere")
    assert len(found.samples["step"])
    assert not list((project.parent / "elsewhere").iterdir())


def test_a_run_directory_moves_between_two_lives(world: World, project: Path) -> None:
    """A run directory is renamed, and the run is continued there. Its model and records were given from
    Python."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = {
        "model": AutoModelForCausalLM.from_pretrained("model"),
        "tokenizer": AutoTokenizer.from_pretrained("model"),
    }
    lines = world.tree("grpo", Path("runs/first"), {"evaluation": None, "stop.max_steps": 2}) | given
    records = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    lines |= {"oracle": {"name": "reward.py:reward"}, "prompts": {"path": records, "reference_key": "answer"}}
    Trainer(**lines, quiet=True).train()
    os.rename("runs/first", "runs/second")
    again = {**lines, "run_dir": "runs/second", "stop": {"max_steps": 4}}
    Trainer(**again, quiet=True).train()
    os.rename("runs/second", "runs/third")
    assert oat("export", "runs/third", "out") == 0
    Trainer(**{**again, "run_dir": "runs/third"}, quiet=True).fork("runs/fork").train()
    assert oat("train", "runs/third/config.yaml", "--stop.max_steps", "5") == 0
    assert max(load_run("runs/third").metrics["step"]) == 5
    assert not Path("runs/first").exists()
    assert not Path("runs/second").exists()


def begun(folder: Path, run_dir: str | None) -> Path:
    """Make a folder with the mark of a run, and a configuration that names a run directory."""
    folder.mkdir(parents=True)
    mark(folder)
    given = "model" if run_dir is None else f"{run_dir}/given/model"
    tree = {"model": {"path": given}, "prompts": {"path": "train.jsonl"}, "oracle": {"name": "exact_match"}}
    tree |= {"algorithm": {"name": "grpo"}, "evaluation": {"pairs": f"{run_dir}/given/pairs.jsonl"}}
    tree |= {} if run_dir is None else {"run_dir": run_dir}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder


def is_same_place(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


@pytest.mark.parametrize(
    ("way", "is_old_there", "is_absolute"),
    [
        ("above", False, False),
        ("above", True, False),
        ("inside", False, True),
        ("inside", True, False),
        ("link to the folder", True, True),
        ("link to the file", True, False),
        ("absolute", True, False),
    ],
)
def test_the_configuration_of_a_run_is_that_of_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, is_old_there: bool, is_absolute: bool
) -> None:
    """Whatever `run_dir` it records, and from wherever it is reached. The files that were given from Python
    are those of this folder too. A flag decides otherwise."""
    monkeypatch.chdir(tmp_path)
    before = str(tmp_path / "runs/a") if is_absolute else "runs/a"
    if is_old_there:
        begun(Path("runs/a"), before)
    begun(Path("runs/b"), before)
    Path("latest").symlink_to("runs/b")
    Path("best.yaml").symlink_to("runs/b/config.yaml")
    file = {
        "above": "runs/b/config.yaml",
        "inside": "config.yaml",
        "link to the folder": "latest/config.yaml",
        "link to the file": "best.yaml",
        "absolute": str(tmp_path / "runs/b/config.yaml"),
    }[way]
    if way == "inside":
        monkeypatch.chdir("runs/b")
    found, _ = load_file(file)
    assert is_same_place(found.run_dir, str(tmp_path / "runs/b"))
    assert is_same_place(found.model.path, str(tmp_path / "runs/b/given/model"))
    assert found.evaluation is not None
    assert found.evaluation.pairs == f"{found.run_dir}/given/pairs.jsonl"
    assert found.prompts.path == "train.jsonl"
    other, _ = load_file(file, ["--run_dir", "runs/new"])
    assert other.run_dir == "runs/new"
    assert is_same_place(other.model.path, str(tmp_path / "runs/b/given/model"))
    (tmp_path / "runs/b/.oat-run").unlink()
    assert load_file(file) == load_config(file), "a configuration of the user"


def test_a_run_directory_that_is_right_stays_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun(Path("runs/a"), "runs/../runs/a")
    Path("latest").symlink_to("runs/a")
    for file in ("runs/a/config.yaml", "latest/config.yaml", str(tmp_path / "runs/a/config.yaml")):
        assert load_file(file) == load_config(file)
    assert load_file("latest/config.yaml", ["--run_dir", "./runs/a"])[0].model.path.startswith("runs/../")
    begun(Path("runs/none"), None)
    assert load_file("runs/none/config.yaml")[0].run_dir == "runs/none"


def test_a_way_up_leads_to_no_folder_that_is_there_already(
    world: World, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start that fails removes the folder that it made. The name `kept/missing/..` leads to the existing
    folder `kept`, which must stay."""
    config(world, project)
    kept = project / "kept"
    kept.mkdir()
    (kept / "thesis.txt").write_text("years of work")
    for command in ("check", "train"):
        assert oat(command, "mine.yaml", "--run_dir", "kept/missing/..") == 2
        assert "is not empty and holds no run" in capsys.readouterr().err
        assert [file.name for file in kept.iterdir()] == ["thesis.txt"]
    assert oat("train", "mine.yaml", "--run_dir", "missing/../runs/mine", "--stop.max_steps", "1") == 0
    assert not (project / "missing").exists()


@pytest.mark.parametrize("run_dir", ["/proc", "/dev/null", "/dev/null/run", "/proc/run"])
def test_a_directory_that_can_hold_no_run_is_a_mistake(
    world: World, project: Path, capsys: pytest.CaptureFixture[str], run_dir: str
) -> None:
    """`oat check` and `oat train` refuse a run directory that cannot hold a run, also if its path has more
    `..` than there are folders."""
    config(world, project)
    for name in (run_dir, "../" * 60 + run_dir[1:]):
        for command in ("check", "train"):
            assert oat(command, "mine.yaml", "--run_dir", name) == 2
            assert "--run_dir" in capsys.readouterr().err


@pytest.mark.sample("learned-removed", seconds=9.0)
@pytest.mark.parametrize("what", [moved, removed, replaced])
@pytest.mark.parametrize("when", ["asked", "learned", "last"])
def test_a_run_whose_directory_vanishes_ends(
    world: World,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: Callable[[Path], None],
    when: str,
) -> None:
    """The run directory vanishes while a reward is asked, or while a step learns, which may be the last step.
    The run ends with an error."""
    changes = {
        name: None
        for name in (
            "evaluation",
            "evaluation.path",
            "evaluation.answers",
            "evaluation.majority_at",
            "evaluation.kl",
        )
    }
    changes |= {"tracking.tensorboard": False, "checkpoint.every": 1}
    run_dir = project / "runs" / "mine"
    config(world, project, changes=changes)
    if when == "asked":
        line = f"vanishing.{what.__name__}(Path({str(run_dir)!r}))"
        is_due = "not os.path.exists('once') and os.path.exists('runs/mine/checkpoints/step_00000002')"
        write_reward(project, "at_call", f"{is_due} and open('once', 'x') and {line}")
        with (project / "reward.py").open("a") as file:
            file.write("\n\nfrom pathlib import Path\n\nimport vanishing\n")
        assert oat("train", "mine.yaml") == 1
    else:
        calls, update = iter(range(1, 5)), Learner.update
        lost_at = 4 if when == "last" else 3

        def does(*arguments: Any) -> Any:
            if next(calls) == lost_at:
                what(run_dir)
            return update(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Learner, "update", does)
            assert oat("train", "mine.yaml") == 1
    said = capsys.readouterr().err
    assert "was moved, removed or replaced while a run worked with it" in said
    assert str(run_dir) in said
    assert "Traceback" not in said
    if what is not replaced:
        assert not run_dir.exists()
    else:
        assert not (run_dir / "checkpoints" / "step_00000004").exists()

    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.with_name("moved").rename(run_dir)
    assert oat("train", "mine.yaml") == 0
    assert len(load_run(run_dir).metrics["step"]) == 5


def test_a_directory_that_vanishes_before_the_first_step_is_not_made_anew(
    world: World, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_reward(project, "at_call", "import shutil; shutil.rmtree('runs', ignore_errors=True)")
    config(world, project, changes={"prompts.path": "reward.py:records"})
    assert oat("train", "mine.yaml") == 1
    assert not (project / "runs").exists()
    assert "Traceback" not in capsys.readouterr().err


def test_checkpoints_that_vanish_under_a_run_end_it(
    world: World, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = world.tree(
        "grpo", Path("runs/grpo"), {"model.path": "model", "prompts.path": "train.jsonl", "evaluation": None}
    )
    lines["oracle"] = {"name": "reward.py:reward"}

    def lose(step: int, metrics: dict[str, float]) -> None:
        if step == 3:  # all at once: the checkpoint of step 2 may still be being written
            Path("runs/grpo/checkpoints").rename("elsewhere")

    with pytest.raises(DirectoryError, match="no checkpoint is written"):
        Trainer(**lines, callbacks=[lose], quiet=True).train()
    assert not Path("runs/grpo/checkpoints").exists()


def test_evaluations_that_vanish_under_a_run_end_it(world: World, project: Path) -> None:
    lines = world.tree(
        "grpo",
        Path("runs/grpo"),
        {"model.path": "model", "prompts.path": "train.jsonl", "evaluation.every": 1},
    )
    lines["evaluation"]["path"], lines["oracle"] = "train.jsonl", {"name": "reward.py:reward"}
    with pytest.raises(DirectoryError, match="evaluations: was moved, removed or replaced"):
        Trainer(
            **lines,
            callbacks=[lambda step, metrics: step == 2 and shutil.rmtree("runs/grpo/evaluations")],
            quiet=True,
        ).train()
    assert not Path("runs/grpo/evaluations").exists()


def test_a_lock_that_is_removed_ends_the_run(world: World, project: Path) -> None:
    """A run ends if its lock is removed, since another process could then use its directory."""
    lines = world.tree(
        "grpo", Path("runs/grpo"), {"model.path": "model", "prompts.path": "train.jsonl", "evaluation": None}
    )
    lines["oracle"] = {"name": "reward.py:reward"}
    with pytest.raises((DirectoryError, LedgerError), match="lock: was moved"):
        Trainer(
            **lines,
            callbacks=[lambda step, metrics: step == 1 and Path("runs/grpo/lock").unlink()],
            quiet=True,
        ).train()
