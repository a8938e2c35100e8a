"""From Python: forks, evaluations, results, arguments of callbacks, mixtures, and commands on runs that were
begun from Python."""

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, oat
from trainers import letters, lines, objects

from oat import Trainer
from oat.commands.digest import digest_run
from oat.errors import ConfigError
from oat.plugins.loading import load_symbol
from oat.trainer import Result

HELD_OUT = [{"prompt": "3+9=", "answer": "a"}]


def long(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


@pytest.fixture(scope="module")
def parent(world: World, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Return a trainer of a finished run of four steps, made from objects, with checkpoints of steps 2 and
    4."""
    trainer = Trainer(**lines(world, tmp_path_factory.mktemp("parent") / "run", **objects(world)), quiet=True)
    trainer.train()
    return trainer


def test_a_fork_that_changes_nothing_is_the_run_itself(parent: Trainer, tmp_path: Path) -> None:
    fork = parent.fork(tmp_path / "fork", 2)
    assert not (tmp_path / "fork").exists()
    result = fork.train()
    assert (result.reason, result.step, result.is_idle) == ("all 4 steps are done", 4, False)
    assert digest_run(tmp_path / "fork") == digest_run(parent.run_dir)


def test_a_fork_goes_its_own_way_and_the_same_lines_go_on(parent: Trainer, tmp_path: Path) -> None:
    """A fork changes fields of some sections; the other fields of these sections stay. The same lines
    continue it."""
    changes: dict[str, Any] = {
        "learner": {"learning_rate": 0.1},
        "stop": {"max_steps": 6},
        "evaluation": {"path": HELD_OUT, "samples": 1},
    }
    for reason, is_idle in (("all 6 steps are done", False), ("all 6 steps are done", True)):
        fork = parent.fork(tmp_path / "fork", **changes)
        assert fork.config.learner.micro_batch_size == 64
        result = fork.train()
        assert (result.reason, result.is_idle, result.metrics["optim/learning_rate"]) == (
            reason,
            is_idle,
            0.1,
        )
    assert (
        tmp_path / "fork" / "given" / "evaluation.jsonl"
    ).read_text() == '{"prompt": "3+9=", "answer": "a"}\n'
    assert parent.metrics == fork.metrics[:5]
    with pytest.raises(
        ConfigError, match=r"a fork of .* cannot change these.*\n  learner.sync_every: 1 -> 2"
    ):
        parent.fork(tmp_path / "other", learner={"sync_every": 2}).train()
    with pytest.raises(ConfigError, match="there is no such checkpoint"):
        parent.fork(tmp_path / "third", 3).train()


def test_a_fork_of_any_run_and_of_one_that_was_given_other_records(
    world: World, parent: Trainer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="was begun with other records"):
        Trainer(**lines(world, parent.run_dir, **objects(world) | {"prompts": [{"prompt": "1+1="}]})).fork(
            tmp_path / "fork"
        )
    assert oat("train", world.config("grpo", tmp_path, {"engine.threads": 1})) == 0
    file = lines(world, tmp_path / "fork", oracle=world.oracle)
    assert Trainer(**file, source=f"{tmp_path / 'grpo'}@2", quiet=True).train().step == 4
    assert digest_run(tmp_path / "fork") == digest_run(tmp_path / "grpo")


def test_an_evaluation_is_that_of_the_command_line_and_leaves_the_run_alone(parent: Trainer) -> None:
    """`evaluate` draws the same samples as the evaluation at the end of the run. Its arguments give other
    prompts, oracles and numbers of samples."""
    before = {
        file: file.read_bytes()
        for file in parent.run_dir.rglob("*")
        if file.is_file() and "sqlite" not in file.name
    }
    found = parent.evaluate()
    assert found["step"] == 4
    assert found == {name: value for name, value in parent.metrics[-1].items() if name in found}
    assert found.keys() - {"step"} == {name for name in parent.metrics[-1] if name.startswith("eval/")}
    other = parent.evaluate(
        path=HELD_OUT, oracle=lambda prompts, completions: [7.0] * len(prompts), samples=4, greedy=False
    )
    assert (other["eval/sampled"], "eval/greedy" in other) == (7.0, False)
    start = parent.evaluate(slot="reference")
    assert (
        start["eval/greedy_length"] == parent.metrics[0]["eval/greedy_length"] != found["eval/greedy_length"]
    )
    assert {file: file.read_bytes() for file in before} == before


def test_an_evaluation_of_a_start(world: World, parent: Trainer, tmp_path: Path) -> None:
    fresh = Trainer(**lines(world, tmp_path / "run", **objects(world)), quiet=True)
    assert fresh.evaluate()["eval/sampled"] == parent.metrics[0]["eval/sampled"]
    fresh.train()
    assert digest_run(fresh.run_dir) == digest_run(parent.run_dir)
    without = Trainer(**lines(world, tmp_path / "other", evaluation=None))
    with pytest.raises(ConfigError, match="nothing says which prompts; give evaluate"):
        without.evaluate()
    assert without.evaluate(path=world.folder / "held_out.jsonl")["step"] == 0


def test_what_training_comes_to(parent: Trainer, world: World, tmp_path: Path) -> None:
    again = parent.train()
    assert again == Result(parent.run_dir, "all 4 steps are done", True, True, 4, parent.metrics[-1])
    assert str(again) == "all 4 steps are done"
    ended = Trainer(
        **lines(world, tmp_path / "run"), callbacks=[lambda step, row: step == 1], quiet=True
    ).train()
    assert (str(ended), ended.is_finished, ended.step, ended.metrics["step"]) == (
        "a callback ended it",
        False,
        1,
        1,
    )


def test_callbacks_are_given_rows(world: World, tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    def careless(step: int, row: dict[str, float]) -> None:
        seen.append(row)
        row["reward/mean"]

    with pytest.raises(KeyError) as error:
        Trainer(**lines(world, tmp_path / "run"), callbacks=[careless], quiet=True).train()
    assert error.value.__notes__ == [
        (
            "oat.Trainer: the callback careless was given row 0, which is before the first step and has what "
            "an evaluation found"
        )
    ]
    trainer = Trainer(
        **lines(world, tmp_path / "other"), callbacks=[lambda step, row: seen.append(row)], quiet=True
    )
    seen.clear()
    trainer.train()
    assert seen == trainer.metrics


def test_a_list_of_oracles_is_their_mixture(world: World, tmp_path: Path) -> None:
    """A list of oracles is their mixture, in training and in evaluations. It may have functions, names and
    sections."""
    mixed = [letters, {"name": long, "weight": 0.5}, {"name": "regex", "pattern": "a", "label": "has_a"}]
    changes: dict[str, Any] = {
        "evaluation": {
            "path": world.folder / "held_out.jsonl",
            "oracle": [long, long.__get__(0)],
            "samples": 1,
        }
    }
    with pytest.raises(ConfigError, match="two different objects are called long"):
        Trainer(**lines(world, tmp_path / "run", oracle=mixed, **changes))
    changes["evaluation"]["oracle"] = [long]
    trainer = Trainer(
        **lines(world, tmp_path / "run", oracle={"name": mixed, "repeats": 0}, **changes), quiet=True
    )
    assert trainer.config.oracle.name == "mixture"
    row = trainer.train().metrics
    sources = [row[f"oracle/source/{label}"] for label in ("letters", "long", "has_a")]
    assert row["reward/mean"] == pytest.approx(sources[0] + 0.5 * sources[1] + sources[2])
    assert 0 < trainer.metrics[0]["eval/greedy"] <= trainer.metrics[0]["eval/greedy_length"]
    with pytest.raises(ConfigError, match="at least one"):
        Trainer(**lines(world, tmp_path / "none", oracle=[]), quiet=True).train()


@pytest.mark.slow(instead="the other forks from Python", seconds=3.6)
def test_commands_go_on_with_a_run_of_python_whose_function_is_named_by_file(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run was begun from Python with a reward function. Commands that name the function's file continue,
    fork and evaluate it. Other settings are refused as in Python."""
    reward = load_symbol(world.oracle)
    runs = [lines(world, tmp_path / name, oracle=reward, **objects(world)) for name in ("python", "command")]
    for given in runs:
        Trainer(**given | {"stop": {"max_steps": 2}}, quiet=True).train()
    Trainer(**runs[0], quiet=True).train()
    named = (tmp_path / "command" / "config.yaml", "--oracle.name", world.oracle)
    more = (*named, "--stop.max_steps", 4)
    assert oat("check", *more) == 0
    assert oat("train", *more) == 0
    assert digest_run(tmp_path / "command") == digest_run(tmp_path / "python")
    assert "name: python:reward" in (tmp_path / "command" / "config.yaml").read_text()
    capsys.readouterr()
    assert oat("eval", tmp_path / "command", "--oracle.name", world.oracle) == 0
    assert (
        json.loads(capsys.readouterr().out)["eval/sampled"] == Trainer(**runs[0]).evaluate()["eval/sampled"]
    )
    assert oat("train", *more, "--run_dir", tmp_path / "fork", "--from", f"{tmp_path / 'command'}@2") == 0
    assert digest_run(tmp_path / "fork") == digest_run(tmp_path / "python")
    (tmp_path / "mine.py").write_text((world.folder / "reward.py").read_text().replace("0.1 *", "0.2 *"))
    for name, words in (
        ("forbidden", 'oracle.name: "python:reward" -> '),
        ("reward", "it has changed since this run last asked it"),
    ):
        capsys.readouterr()
        assert (
            oat("train", named[0], "--oracle.name", f"{tmp_path / 'mine.py'}:{name}", "--stop.max_steps", 6)
            == 2
        )
        assert words in capsys.readouterr().err
    assert oat("train", named[0], "--stop.max_steps", 6) == 2
    assert (
        "go on with it through oat.Trainer, or name the file that has it in its place, as "
        "path/to/file.py:reward"
    ) in capsys.readouterr().err
