"""Forks with another seed of runs with an ensemble. What an ensemble never changes was drawn from the seed of
the first run, and no checkpoint has it."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, forked, kill_at, logged, make_model, oat

from oat.commands.digest import digest_run
from oat.learner.learner import Learner
from oat.rundir.provenance import first_seed
from oat.seeds import Seeds

ENSEMBLE: dict[str, Any] = {"members": 3, "hidden": 4, "batch": 4, "steps": 2}
KINDS: dict[str, dict[str, Any]] = {
    "policy": {"explorer.features": {"backbone": "policy", "layer": "all", "refresh_every": 2}},
    "reference": {"explorer.features": {"backbone": "reference"}},
    "a model of its own": {"explorer.features": {"backbone": "BACKBONE"}},
    "adapter, policy": {"explorer.features": {"backbone": "policy"}, "model.lora": {"rank": 2}},
    "adapter, reference": {"explorer.features": {"backbone": "reference"}, "model.lora": {"rank": 2}},
    "random and idle": {"explorer.ensemble": {**ENSEMBLE, "learn": False}, "model.lora": {"rank": 2}},
    "frozen policy": {"algorithm": {"name": "frozen", "prompts": 4}, "model.lora": {"rank": 2}},
}
"""The changes of each kind of run. `random and idle` and `frozen policy` have weights that come from the seed
and never change: those of the ensemble, or those of the adapter."""


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def evaluated(run_dir: Path, capsys: pytest.CaptureFixture[str], *flags: object) -> dict[str, Any]:
    """Return what `oat eval` measures, without the step."""
    capsys.readouterr()
    assert oat("eval", run_dir, *flags) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return {name: value for name, value in found.items() if name != "step"}


def of_evaluation(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name.startswith("eval/")}


@pytest.fixture(scope="module")
def parent(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the configuration of a finished run of four steps, by its kind. Each run
    is made once."""
    folder = tmp_path_factory.mktemp("parents")
    make_model(folder / "backbone", seed=8, hidden=8)
    found: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in found:
            own = folder / str(len(found))
            own.mkdir()
            given = json.loads(json.dumps(KINDS[kind]).replace("BACKBONE", str(folder / "backbone")))
            changes = {
                "explorer": {"name": "ensemble", "samples": 4, "ensemble": ENSEMBLE},
                "oracle.name": f"{world.folder / 'reward.py'}:reward",
                "evaluation.best_of": 3,
                "evaluation.greedy": False,
                **given,
            }
            found[kind] = world.config("dpo", own, changes)
            log = own / "log"
            assert logged(log, "train", found[kind]) == 0, log.read_text()
        return found[kind]

    return make


@pytest.mark.sample("adapter, reference", seconds=13.2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_with_another_seed_learns_and_goes_on_after_a_kill(
    parent: Callable[[str], Path], tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its later steps are others than those of the run that it was made from. A killed and continued fork is
    the unbroken one, also if the other run is gone meanwhile. Commands that read the fork compute with the
    same ensemble as the fork."""
    config = parent(kind)
    run = shutil.copytree(config.with_suffix(""), tmp_path / "run")

    def fork(run_dir: Path) -> int:
        flags = ("--seed", 5, "--stop.max_steps", 5, "--checkpoint.every", 1)
        return oat("train", config, "--run_dir", run_dir, "--from", f"{run}@2", *flags)

    def killed() -> int:
        kill_at(Learner, "update", 3)
        return fork(tmp_path / "killed")

    log = tmp_path / "log"
    assert forked(lambda: fork(tmp_path / "whole"), log) == 0, log.read_text()
    assert forked(killed, log) == -signal.SIGKILL, log.read_text()
    shutil.rmtree(run)
    assert forked(lambda: fork(tmp_path / "killed"), log) == 0, log.read_text()
    assert digest_run(tmp_path / "killed") == digest_run(tmp_path / "whole")
    before, after = rows(config.with_suffix("")), rows(tmp_path / "whole")
    assert after[:3] == before[:3]
    assert after[3]["reward/mean"] != before[3]["reward/mean"]
    assert len(after) == 6
    assert evaluated(tmp_path / "whole", capsys) == of_evaluation(after[-1])
    prompts = ("--prompts", config.parent / "prompts.jsonl")
    prompts[1].write_text(json.dumps({"prompt": "1+1=", "answer": "a"}) + "\n")
    assert oat("generate", tmp_path / "whole", *prompts, "--best-of", 2) == 0, capsys.readouterr().err


def test_a_fork_of_a_fork_draws_from_the_first_seed(
    parent: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, source = parent("policy"), f"{parent('policy').with_suffix('')}@2"
    for seed, steps in ((5, 4), (6, 5)):
        run_dir = tmp_path / str(seed)
        flags = ("--seed", seed, "--stop.max_steps", steps)
        assert oat("train", config, "--run_dir", run_dir, "--from", source, *flags) == 0
        assert first_seed(run_dir, seed) == 0
        source = f"{run_dir}@4"
    assert evaluated(tmp_path / "6", capsys) == of_evaluation(rows(tmp_path / "6")[-1])


def test_a_fork_that_an_earlier_version_could_not_begin_is_begun(
    parent: Callable[[str], Path], tmp_path: Path
) -> None:
    """An earlier version made the directory, and wrote no first seed."""
    config = parent("policy")
    command = ("train", config, "--run_dir", tmp_path / "fork", "--from", f"{config.with_suffix('')}@2")
    assert oat(*command, "--seed", 5, "--stop.max_steps", 3) == 0
    told = json.loads((tmp_path / "fork" / "fork.json").read_text())
    del told["seed"]
    (tmp_path / "fork" / "fork.json").write_text(json.dumps(told))
    assert oat(*command, "--seed", 5) == 0
    assert json.loads((tmp_path / "fork" / "fork.json").read_text()) == {**told, "seed": 0}


def test_another_seed_of_an_evaluation_draws_other_responses_only(
    parent: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Initial weights stay those of the run, so its features are still those that its ensemble learned
    from."""
    run_dir = parent("adapter, reference").with_suffix("")
    plain, other = evaluated(run_dir, capsys), evaluated(run_dir, capsys, "--seed", 9)
    assert plain == of_evaluation(rows(run_dir)[-1])
    assert other != plain


def test_only_initial_weights_come_from_the_first_seed() -> None:
    fork, first, own = Seeds(5, 3), Seeds(3), Seeds(5)
    assert fork.key("init", "ensemble") == first.key("init", "ensemble") != own.key("init", "ensemble")
    assert fork.at("init", "policy").random() == first.at("init", "policy").random()
    assert fork.key("token", "init", 1) == own.key("token", "init", 1) != first.key("token", "init", 1)
    assert Seeds(5).key("init", "critic") == Seeds(5, 5).key("init", "critic")


@pytest.mark.parametrize("text", ["{", "[]", '{"run": "a", "step": 2}', '{"seed": null}'])
def test_a_fork_that_does_not_say_the_first_seed_has_its_own(tmp_path: Path, text: str) -> None:
    """Forks of earlier versions of oat do not say it, and a file may be damaged."""
    assert first_seed(tmp_path, 7) == 7
    (tmp_path / "fork.json").write_text(text)
    assert first_seed(tmp_path, 7) == 7
