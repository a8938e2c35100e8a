"""`oat export RUN OUT --ensemble`, and runs that start from what it wrote (`explorer.ensemble.start`)."""

import json
import shutil
import signal
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import Finished, World, forked, kill_at, make_model, oat, recorded, write_jsonl
from safetensors.torch import load_file, save_file

from oat.commands.digest import digest_run
from oat.commands.export_mark import MARK
from oat.errors import ModelError
from oat.learner.learner import Learner
from oat.ledger.store import Store
from oat.models.ensemble import Ensemble, load_ensemble
from oat.rundir.checkpoints import Checkpoints
from oat.types import ENSEMBLE, Question

MEMBERS, HIDDEN, WIDTH = 3, 8, 16
SHAPE: dict[str, Any] = {
    "members": MEMBERS,
    "hidden": HIDDEN,
    "activation": "swish",
    "batch": 6,
    "steps": 2,
    "buffer": 40,
    "learning_rate": 1e-2,
}


def changes_of(world: World, ensemble: Mapping[str, Any] | None = None, **explorer: Any) -> dict[str, Any]:
    """Return the changes that make a run of `World` explore with an ensemble. Its oracle names a winner of
    each pair."""
    section = {"name": "ensemble", "samples": 4, **explorer, "ensemble": {**SHAPE, **(ensemble or {})}}
    oracle = f"{world.folder / 'reward.py'}:first_is_longer"
    return {"explorer": section, "oracle.name": oracle, "evaluation": None}


@pytest.fixture(scope="module")
def run(finished: Finished) -> Path:
    """Return a finished run of four steps. Tests must not change it."""
    return finished.only_read("dpo", changes_of(finished.world))


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the exported ensemble of this run. Tests must not change it."""
    out = tmp_path_factory.mktemp("exported") / "out"
    assert oat("export", run, out, "--ensemble") == 0
    return out


def learned(run_dir: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Return the ensemble's weights in a checkpoint, by default in the newest one."""
    checkpoints = Checkpoints(run_dir / "checkpoints", every=1, keep_last=9)
    loaded = checkpoints.load() if step is None else checkpoints.load_step(step)
    assert loaded is not None
    prefix = f"learner/{ENSEMBLE}/weights/"
    return {
        name.removeprefix(prefix): tensor for name, tensor in loaded[1].items() if name.startswith(prefix)
    }


def are_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def rows(run_dir: Path) -> list[dict[str, float]]:
    """Return the rows of metrics of the steps."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]


def questions(run_dir: Path, step: int) -> list[Question]:
    store = Store(run_dir / "ledger.sqlite")
    found = [intent.question for intent in recorded(store, "train", step)]
    store.close()
    return found


def were_scored_by(weights: Mapping[str, torch.Tensor], asked: list[Question]) -> bool:
    """Return True if the notes of the questions are those of an ensemble with these weights."""
    model = Ensemble(
        features=WIDTH,
        members=MEMBERS,
        hidden=HIDDEN,
        activation="swish",
        generator=np.random.default_rng(0),
    )
    model.start_from(weights)
    for question in asked:
        assert question.features is not None
        rewards_2M = model.rewards(torch.from_numpy(question.features)).detach()
        mean = rewards_2M.mean(dim=1).tolist()
        noted = [question.notes["reward_first"], question.notes["reward_second"]]
        if mean != pytest.approx(noted, rel=1e-4, abs=1e-6):
            return False
    return True


def train(world: World, folder: Path, changes: Mapping[str, Any], *flags: object) -> int:
    folder.mkdir(exist_ok=True)
    return oat("train", world.config("dpo", folder, changes), *flags)


# what is written


def test_the_weights_and_the_facts_of_the_newest_checkpoint_are_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out"
    assert oat("export", run, out, "--ensemble") == 0
    assert capsys.readouterr().out == f"oat export: the ensemble after 4 steps is in {out}\n"
    assert sorted(file.name for file in out.iterdir()) == ["ensemble.json", "ensemble.safetensors", MARK]
    weights, description = load_ensemble(str(out))
    assert are_equal(weights, learned(run))
    assert (description.members, description.hidden, description.activation, description.step) == (
        MEMBERS,
        HIDDEN,
        "swish",
        4,
    )
    identity = description.features
    assert {name: identity[name] for name in ("backbone", "layer", "pooling", "width")} == {
        "backbone": "reference",
        "layer": -1,
        "pooling": "mean",
        "width": WIDTH,
    }
    assert identity["weights"] > 0


def test_a_checkpoint_may_be_chosen(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oat("export", run, tmp_path / "out", "--ensemble", "--step", 2) == 0
    weights, description = load_ensemble(str(tmp_path / "out"))
    assert description.step == 2
    assert are_equal(weights, learned(run, 2))
    assert not are_equal(weights, learned(run, 4))
    assert oat("export", run, tmp_path / "none", "--ensemble", "--step", 3) == 1
    assert "step" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_an_earlier_export_is_replaced_and_other_files_stay(run: Path, tmp_path: Path) -> None:
    """A model may be exported into the same directory."""
    out = tmp_path / "out"
    assert oat("export", run, out) == 0
    (out / "notes.txt").write_text("mine")
    model = {file.name: file.read_bytes() for file in out.iterdir() if file.name != MARK}
    for step in (2, 4):
        assert oat("export", run, out, "--ensemble", "--step", step) == 0
        assert are_equal(load_ensemble(str(out))[0], learned(run, step))
    assert oat("export", run, out) == 0
    kept = {file.name: file.read_bytes() for file in out.iterdir()}
    assert {name: kept[name] for name in model} == model
    assert are_equal(load_ensemble(str(out))[0], learned(run))


@pytest.mark.parametrize("flag", ["--adapter", "--critic"])
def test_one_model_is_written_at_a_time(
    run: Path, tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oat("export", run, tmp_path / "out", "--ensemble", flag) == 2
    assert "--ensemble writes neither an adapter nor a critic" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_without_an_ensemble_that_learned_is_refused(
    finished: Finished, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is there one to export where the ensemble stayed as it started, or where there is no run."""
    idle = changes_of(finished.world, {"start": str(exported), "learn": False})
    for number, run_dir in enumerate((finished.only_read("dpo"), finished.only_read("dpo", idle))):
        assert oat("export", run_dir, tmp_path / f"{number}", "--ensemble") == 2
        error = capsys.readouterr().err
        assert f"{run_dir}: has no ensemble that learned" in error
        assert not (tmp_path / f"{number}").exists()
    assert oat("export", tmp_path, tmp_path / "out", "--ensemble") == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_file_is_not_overwritten(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("mine")
    assert oat("export", run, tmp_path / "out", "--ensemble") == 2
    assert f"{tmp_path / 'out'} is a file; give a directory" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"


# runs that start from it


@pytest.mark.inventory(77)
def test_a_run_starts_from_exactly_these_weights_and_learns_on(finished: Finished, exported: Path) -> None:
    """The first step's questions are scored by them, and later ones by others."""
    weights = load_file(exported / "ensemble.safetensors")
    changed = finished.only_read("dpo", changes_of(finished.world, {"start": str(exported)}))
    plain = finished.only_read("dpo", changes_of(finished.world))
    assert were_scored_by(weights, questions(changed, 0))
    assert not were_scored_by(weights, questions(changed, 1))
    assert not were_scored_by(weights, questions(plain, 0))
    assert not are_equal(learned(changed), weights)


@pytest.mark.inventory(77)
def test_an_ensemble_that_does_not_learn_stays_for_the_whole_run(finished: Finished, exported: Path) -> None:
    weights = load_file(exported / "ensemble.safetensors")
    run_dir = finished.only_read("dpo", changes_of(finished.world, {"start": str(exported), "learn": False}))
    for step in range(4):
        assert were_scored_by(weights, questions(run_dir, step))
    assert not [name for row in rows(run_dir) for name in row if "ensemble" in name]
    assert learned(run_dir) == {}


def test_the_prior_pulls_to_the_start(world: World, exported: Path, tmp_path: Path) -> None:
    """The prior of the first step is nearly 0, however strong it is: nothing has moved away from the start
    yet. From random weights, the start is thousands away."""
    strong = {"start": str(exported), "prior": 1e6, "learning_rate": 1e-5}
    changes = {**changes_of(world, strong), "stop.max_steps": 1}
    assert train(world, tmp_path / "run", changes) == 0
    (first,) = rows(tmp_path / "run" / "dpo")
    assert 0 < first["loss/prior"] < 1


def use_other_reference(world: World, folder: Path) -> dict[str, Any]:
    make_model(folder / "other", seed=9)
    return {**changes_of(world), "model.reference": str(folder / "other")}


def use_own_backbone(world: World, folder: Path) -> dict[str, Any]:
    return changes_of(world, features={"backbone": str(world.folder / "model")})


MISMATCHES: dict[str, tuple[Callable[[World, Path], dict[str, Any]], str]] = {
    "members": (
        lambda world, _: changes_of(world, {"members": 4}),
        "explorer.ensemble.members is 4, and that of",
    ),
    "hidden": (
        lambda world, _: changes_of(world, {"hidden": 9}),
        "explorer.ensemble.hidden is 9, and that of",
    ),
    "activation": (
        lambda world, _: changes_of(world, {"activation": "relu"}),
        "explorer.ensemble.activation is relu, and that of",
    ),
    "layer": (
        lambda world, _: changes_of(world, features={"layer": 1}),
        "features with layer -1, and this configuration has layer 1; set explorer.features",
    ),
    "all layers": (
        lambda world, _: changes_of(world, features={"layer": "all", "pooling": "last"}),
        "with layer -1, pooling 'mean', and this configuration has layer 'all', pooling 'last'; set",
    ),
    "pooling": (
        lambda world, _: changes_of(world, features={"pooling": "last"}),
        "features with pooling 'mean', and this configuration has pooling 'last'; set",
    ),
    "the policy": (
        lambda world, _: changes_of(world, features={"backbone": "policy"}),
        "features with backbone 'reference', and this configuration has backbone 'policy'; set",
    ),
    "a backbone of its own": (
        use_own_backbone,
        "features with backbone 'reference', and this configuration has backbone '",
    ),
    "another reference": (use_other_reference, "features of the reference of another model: its files"),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_an_ensemble_of_another_kind_is_refused(
    world: World, exported: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No oracle is asked, and no run directory is left. The message names the ensemble, and of what differs
    its value and that of the configuration."""
    make, said = MISMATCHES[what]
    changes = make(world, tmp_path)
    changes["explorer"]["ensemble"]["start"] = str(exported)
    changes["oracle.name"] = f"{world.folder / 'reward.py'}:forbidden"
    assert train(world, tmp_path / "run", changes) in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert str(exported) in error
    assert not (tmp_path / "run" / "dpo").exists()


def cut(out: Path) -> None:
    file = out / "ensemble.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def edit(**fields: Any) -> Callable[[Path], None]:
    def change(out: Path) -> None:
        found = json.loads((out / "ensemble.json").read_text()) | fields
        text = json.dumps({name: value for name, value in found.items() if value != "gone"})
        (out / "ensemble.json").write_text(text)

    return change


def as_file(out: Path) -> None:
    shutil.rmtree(out)
    out.write_text("no directory")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no directory": shutil.rmtree,
    "a file": as_file,
    "no weights": lambda out: (out / "ensemble.safetensors").unlink(),
    "no description": lambda out: (out / "ensemble.json").unlink(),
    "cut weights": cut,
    "empty weights": lambda out: (out / "ensemble.safetensors").write_bytes(b""),
    "no JSON": lambda out: (out / "ensemble.json").write_text("{"),
    "no text": lambda out: (out / "ensemble.json").write_bytes(b"\xff\xfe"),
    "a list": lambda out: (out / "ensemble.json").write_text("[]"),
    "a missing fact": edit(hidden="gone"),
    "a further fact": edit(colour="blue"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_ensemble_is_refused(exported: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(exported, tmp_path / "out")
    DAMAGES[what](tmp_path / "out")
    with pytest.raises(ModelError, match="has no ensemble that can be read") as raised:
        load_ensemble(str(tmp_path / "out"))
    assert str(raised.value).startswith(str(tmp_path / "out"))


def test_a_run_from_a_missing_ensemble_ends_with_one_message(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = changes_of(world, {"start": str(tmp_path / "absent")})
    assert train(world, tmp_path / "run", changes) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'absent'} has no ensemble that can be read" in error
    assert "`oat export RUN OUT --ensemble`" in error
    assert not (tmp_path / "run" / "dpo").exists()


# what may not change between two lives of a run


@pytest.mark.sample("simpo", seconds=0.6)
@pytest.mark.parametrize("algorithm", ["dpo", "simpo"])
def test_a_reference_that_has_changed_is_refused(
    world: World, tmp_path: Path, algorithm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the algorithm itself reads no reference: the features are the reference's."""
    make_model(tmp_path / "reference", seed=4)
    changes = {
        **changes_of(world),
        "model.reference": str(tmp_path / "reference"),
        "algorithm": {"name": algorithm, "prompts": 4},
    }
    config = world.config("run", tmp_path, changes)
    assert oat("train", config, "--stop.max_steps", 2) == 0
    before = digest_run(tmp_path / "run")
    make_model(tmp_path / "reference", seed=5)
    capsys.readouterr()
    assert oat("train", config) != 0
    assert "model.reference" in capsys.readouterr().err
    assert digest_run(tmp_path / "run") == before
    make_model(tmp_path / "reference", seed=4)
    assert oat("train", config) == 0


def test_a_backbone_of_its_own_that_has_changed_is_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path / "backbone", seed=4)
    changes = changes_of(world, features={"backbone": str(tmp_path / "backbone")})
    assert train(world, tmp_path / "run", changes, "--stop.max_steps", 2) == 0
    make_model(tmp_path / "backbone", seed=5)
    capsys.readouterr()
    assert train(world, tmp_path / "run", changes) == 2
    error = capsys.readouterr().err
    assert "explorer.features.backbone" in error
    assert "what is read of it is not what this run began with" in error


def test_an_ensemble_to_start_from_that_changes_before_the_first_checkpoint_is_refused(
    world: World, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = shutil.copytree(exported, tmp_path / "start")
    changes = {**changes_of(world, {"start": str(start)}), "checkpoint.every": 100}

    def die() -> int:
        kill_at(Learner, "update", 2)
        return train(world, tmp_path / "run", changes)

    assert forked(die, tmp_path / "log") == -signal.SIGKILL
    weights = load_file(start / "ensemble.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, start / "ensemble.safetensors")
    capsys.readouterr()
    assert train(world, tmp_path / "run", changes) == 2
    assert "explorer.ensemble.start" in capsys.readouterr().err


def test_a_check_reads_an_ensemble_to_start_from(
    world: World, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config("dpo", tmp_path, changes_of(world, {"start": str(exported)}))
    assert oat("check", config) == 0, capsys.readouterr().err


@pytest.mark.parametrize("damage", ["missing", "shape", "features"])
def test_a_damaged_ensemble_to_start_from_is_named(
    world: World, exported: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start = shutil.copytree(exported, tmp_path / "start")
    weights = load_file(start / "ensemble.safetensors")
    if damage == "missing":
        del weights["bias2"]
    if damage == "shape":
        weights["weight2"] = weights["weight2"][:, :, :1].contiguous()
    save_file(weights, start / "ensemble.safetensors")
    if damage == "features":
        facts = json.loads((start / "ensemble.json").read_text(encoding="utf-8"))
        (start / "ensemble.json").write_text(json.dumps({**facts, "features": None}), encoding="utf-8")
    assert train(world, tmp_path / "run", changes_of(world, {"start": str(start)})) in (1, 2)
    assert str(start) in capsys.readouterr().err


# the end of learning


@pytest.mark.inventory(77)
def test_the_ensemble_learns_no_more_after_so_many_pairs(world: World, tmp_path: Path) -> None:
    """The step that finds the buffer with as many pairs as allowed makes no update, and none after it does.
    Pairs are still stored, and the policy still learns."""
    most = 5
    changes = {
        **changes_of(world, {"max_pairs": most, "buffer": 40}),
        "checkpoint.every": 1,
        "stop.max_steps": 6,
    }
    assert train(world, tmp_path / "run", changes, "--checkpoint.keep_last", 9) == 0
    run_dir = tmp_path / "run" / "dpo"
    found = rows(run_dir)
    before = [0.0, *(row["ensemble/pairs"] for row in found[:-1])]
    learns = [pairs < most for pairs in before]
    assert (learns[0], learns[-1]) == (True, False)
    assert learns == sorted(learns, reverse=True)
    assert learns.count(True) >= 2
    assert learns.count(False) >= 2
    assert ["loss/ensemble" in row for row in found] == learns
    weights = [learned(run_dir, step) for step in range(1, 7)]
    changed = [not are_equal(one, other) for one, other in pairwise(weights)]
    assert changed == learns[1:]
    assert found[-1]["ensemble/pairs"] > before[-1], "pairs are stored further"
    assert all("loss/preference" in row for row in found)


def test_an_exported_ensemble_begins_with_an_empty_buffer(
    finished: Finished, exported: Path, run: Path
) -> None:
    """Its pairs do not come along, so `max_pairs` counts those of the new run."""
    changes = changes_of(finished.world, {"start": str(exported), "max_pairs": 6})
    first, *_ = rows(finished.only_read("dpo", changes))
    assert first["ensemble/pairs"] == rows(run)[0]["ensemble/pairs"] <= 4
    assert "loss/ensemble" in first


def test_prompts_of_another_run_do_not_matter(world: World, exported: Path, tmp_path: Path) -> None:
    """The ensemble knows its features, and not where they came from."""
    other = write_jsonl(tmp_path / "other.jsonl", [{"prompt": f"{a}=", "answer": "b"} for a in range(9)])
    changes = {**changes_of(world, {"start": str(exported)}), "prompts.path": str(other), "stop.max_steps": 1}
    assert train(world, tmp_path / "run", changes) == 0
    assert were_scored_by(
        load_file(exported / "ensemble.safetensors"), questions(tmp_path / "run" / "dpo", 0)
    )
