"""Ensembles that are not those of the run: other settings in `oat eval`, files of `explorer.ensemble.start`
that have changed or are missing, and numbers that are not finite."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import Finished, World, logged, make_group, make_model, oat
from safetensors.torch import load_file, save_file

from oat.commands.digest import digest_run
from oat.errors import ModelError, NonFiniteError
from oat.ledger.store import Store
from oat.models.ensemble import Ensemble, load_ensemble
from oat.rollout.ensemble_scorer import EnsembleScorer
from oat.types import ENSEMBLE, Group

SHAPE: dict[str, Any] = {"members": 3, "hidden": 4, "batch": 4, "steps": 2, "learning_rate": 1e-2}
START = "explorer.ensemble.start"


def changes_of(world: World, **ensemble: Any) -> dict[str, Any]:
    """Return the changes that make a run of `World` explore with an ensemble, and evaluate with it."""
    section = {
        "name": "ensemble",
        "samples": 4,
        "features": {"backbone": "policy", "layer": "all"},
        "ensemble": {**SHAPE, **ensemble},
    }
    return {
        "explorer": section,
        "oracle.name": f"{world.folder / 'reward.py'}:reward",
        "evaluation.best_of": 3,
        "evaluation.greedy": False,
    }


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


@pytest.fixture
def evaluated(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Return a function that gives what `oat eval` measures, without the step."""

    def evaluate(target: Path, *flags: object) -> dict[str, Any]:
        capsys.readouterr()
        code = oat("eval", target, *flags)
        printed = capsys.readouterr()
        assert code == 0, printed.err
        found: dict[str, Any] = json.loads(printed.out)
        return {name: value for name, value in found.items() if name != "step"}

    return evaluate


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that gives the message with which a command is refused."""

    def said(*words: object) -> str:
        capsys.readouterr()
        assert oat(*words) in (1, 2), capsys.readouterr().out
        return capsys.readouterr().err

    return said


def last_evaluation(run_dir: Path) -> dict[str, Any]:
    row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    return {name: value for name, value in row.items() if name.startswith("eval/")}


def negate(out: Path) -> None:
    """Turn the rewards of an exported ensemble around."""
    weights = load_file(out / "ensemble.safetensors")
    turned = {name: -value if name in ("weight3", "bias3") else value for name, value in weights.items()}
    save_file(turned, out / "ensemble.safetensors")


def trained(world: World, folder: Path, changes: Mapping[str, Any], *flags: object) -> Path:
    """Train a run, and return its configuration."""
    folder.mkdir(exist_ok=True)
    config = world.config("dpo", folder, changes)
    assert logged(folder / "log", "train", config, *flags) == 0, (folder / "log").read_text()
    return config


# settings of `oat eval`

OTHERS: dict[str, tuple[str, str, str]] = {
    "pooling": ("--explorer.features.pooling", "last", "explorer.features.pooling is last, and that of"),
    "layer": ("--explorer.features.layer", "-1", "explorer.features.layer is -1, and that of"),
    "backbone": (
        "--explorer.features",
        "{backbone: reference, layer: all}",
        "explorer.features.backbone is reference, and that of",
    ),
    "members": ("--explorer.ensemble.members", "5", "explorer.ensemble.members is 5, and that of"),
    "hidden": ("--explorer.ensemble.hidden", "16", "explorer.ensemble.hidden is 16, and that of"),
    "activation": (
        "--explorer.ensemble.activation",
        "swish",
        "explorer.ensemble.activation is swish, and that of",
    ),
    "learn": ("--explorer.ensemble.learn", "false", "explorer.ensemble.learn is False, and that of"),
    "start": ("--explorer.ensemble.start", "EXPORTED", "explorer.ensemble.start is "),
}
"""Settings that make another ensemble or other features: the flag, its value, and the message."""


@pytest.mark.parametrize("what", OTHERS)
def test_an_evaluation_with_another_ensemble_is_refused(
    run: Path, exported: Path, refused: Callable[..., str], what: str
) -> None:
    flag, value, said = OTHERS[what]
    error = refused("eval", run, flag, value.replace("EXPORTED", str(exported)))
    assert error.startswith(f"oat eval: {flag}: {said}")
    assert str(run) in error
    assert "leave the setting out" in error


def test_other_settings_of_the_explorer_do_not_matter(
    run: Path, evaluated: Callable[..., dict[str, Any]]
) -> None:
    """Those of its rule and of its learning change nothing. Without `best_of` nothing of it is read."""
    last = last_evaluation(run)
    assert {"eval/best", "eval/sampled"} < last.keys()
    assert evaluated(run) == last
    others = ("--explorer.rule", "passive", "--explorer.samples", "7", "--explorer.ensemble.steps", "9")
    assert evaluated(run, *others) == last
    plain = {name: value for name, value in last.items() if "best" not in name}
    for flags in (
        ("--explorer", "{name: none}"),
        ("--explorer.ensemble.members", "5", "--explorer.features.layer", "-1"),
        ("--explorer.features", "{backbone: /nowhere}"),
    ):
        assert evaluated(run, "--evaluation.best_of", "null", *flags) == plain
    more = evaluated(run, "--evaluation.best_of", "5", "--evaluation.samples", "3")
    assert more.keys() == last.keys()
    assert more["eval/sampled"] != last["eval/sampled"]


@pytest.mark.sample("False", seconds=0.6)
@pytest.mark.parametrize("learn", [True, False])
def test_a_run_without_an_ensemble_is_evaluated_with_an_exported_one_only(
    finished: Finished,
    exported: Path,
    evaluated: Callable[..., dict[str, Any]],
    refused: Callable[..., str],
    learn: bool,
) -> None:
    """An ensemble with random weights would be no choice."""
    run_dir = finished.only_read("dpo", {"evaluation.greedy": False})
    section = {"name": "ensemble", "features": {"backbone": "policy", "layer": "all"}}
    flags = ("--evaluation.best_of", "3", "--explorer", json.dumps({**section, "ensemble": SHAPE}))
    assert f"{run_dir} has no ensemble that could choose the best response" in refused(
        "eval", run_dir, *flags
    )
    ensemble = {**SHAPE, "start": str(exported), "learn": learn}
    found = evaluated(run_dir, *flags[:3], json.dumps({**section, "ensemble": ensemble}))
    assert last_evaluation(run_dir).items() < found.items()
    assert "eval/best" in found


def test_a_sampler_that_lags_is_evaluated_without_its_explorer(
    world: World, tmp_path: Path, evaluated: Callable[..., dict[str, Any]]
) -> None:
    changes = {**changes_of(world), "learner.sync_every": 3}
    run_dir = trained(world, tmp_path, changes).with_suffix("")
    assert evaluated(run_dir) == last_evaluation(run_dir)
    found = evaluated(run_dir, "--explorer", "{name: none}", "--evaluation.best_of", "null")
    assert found.items() < last_evaluation(run_dir).items()


def test_another_backbone_at_a_new_place_is_refused(
    world: World, tmp_path: Path, evaluated: Callable[..., dict[str, Any]], refused: Callable[..., str]
) -> None:
    """The same files may be at another place."""
    make_model(tmp_path / "backbone", seed=8)
    changes = changes_of(world)
    changes["explorer"]["features"] = {"backbone": str(tmp_path / "backbone")}
    run_dir = trained(world, tmp_path, changes).with_suffix("")
    (tmp_path / "backbone").rename(tmp_path / "moved")
    flag = "--explorer.features.backbone"
    assert evaluated(run_dir, flag, tmp_path / "moved") == last_evaluation(run_dir)
    make_model(tmp_path / "other", seed=9)
    error = refused("eval", run_dir, flag, tmp_path / "other")
    assert f"the ensemble of {run_dir} has learned from features whose backbone is" in error
    error = refused("eval", run_dir)
    assert "explorer.features.backbone: " in error
    assert str(tmp_path / "backbone") in error


def test_a_comparison_has_no_best_response(
    run: Path,
    world: World,
    tmp_path: Path,
    evaluated: Callable[..., dict[str, Any]],
    refused: Callable[..., str],
) -> None:
    """Nor does it read the explorers, whose ensembles may have different shapes."""
    changes = changes_of(world, members=5, hidden=6)
    other = trained(world, tmp_path, changes, "--stop.max_steps", 2).with_suffix("")
    found = evaluated(run, "--against", other)
    assert "sampled_win_rate" in found
    assert not [name for name in found if "best" in name]
    error = refused("eval", run, "--against", other, "--evaluation.samples", "0")
    assert "evaluation.best_of takes no part in a comparison" in error


# files of explorer.ensemble.start


def test_an_ensemble_that_does_not_learn_must_be_that_of_the_run(
    world: World,
    exported: Path,
    tmp_path: Path,
    evaluated: Callable[..., dict[str, Any]],
    refused: Callable[..., str],
) -> None:
    """Its files may be at another place, if they are the same."""
    start = shutil.copytree(exported, tmp_path / "start")
    config = trained(world, tmp_path, changes_of(world, start=str(start), learn=False))
    run_dir, last = config.with_suffix(""), last_evaluation(config.with_suffix(""))
    assert evaluated(run_dir) == last
    negate(start)
    for words in (("eval", run_dir), ("check", config), ("train", config)):
        assert f"{START}: what is read of it is not what this run began with" in refused(*words)
    assert evaluated(run_dir, f"--{START}", exported) == last
    other = shutil.copytree(start, tmp_path / "other")
    error = refused("eval", run_dir, f"--{START}", other)
    assert f"the ensemble here is not the one with which {run_dir} began; put the files of {START}" in error
    shutil.rmtree(start)
    error = refused("eval", run_dir)
    assert f"{START}: {start} has no ensemble that can be read" in error


@pytest.mark.sample("idle", seconds=1.6)
@pytest.mark.parametrize("learn", [True, False], ids=["learning", "idle"])
def test_a_run_whose_start_has_changed_is_refused(
    world: World, exported: Path, tmp_path: Path, refused: Callable[..., str], learn: bool
) -> None:
    """The run goes on once the files are back as they were. If `environment.json` is lost, the checkpoint
    tells."""
    start = shutil.copytree(exported, tmp_path / "start")
    changes = changes_of(world, start=str(start), learn=learn)
    config = trained(world, tmp_path, changes, "--stop.max_steps", 2)
    run_dir, before = config.with_suffix(""), digest_run(config.with_suffix(""))
    negate(start)
    for command in ("check", "train"):
        assert f"{START}: what is read of it is not what this run began with" in refused(command, config)
    (run_dir / "environment.json").rename(tmp_path / "environment.json")
    error = refused("train", config)
    assert "what is frozen in the ensemble is not what this run began with" in error
    assert f"put the files of {START} back as they were" in error
    (tmp_path / "environment.json").replace(run_dir / "environment.json")
    assert digest_run(run_dir) == before
    shutil.rmtree(start)
    shutil.copytree(exported, start)
    trained(world, tmp_path, changes)
    whole = trained(world, tmp_path / "whole", changes).with_suffix("")
    assert digest_run(run_dir) == digest_run(whole)


@pytest.mark.sample("following*", seconds=0.8)
@pytest.mark.parametrize("follows", [False, True], ids=["frozen reference", "following reference"])
def test_an_ensemble_that_has_learned_needs_no_start_in_an_evaluation(
    world: World, exported: Path, tmp_path: Path, evaluated: Callable[..., dict[str, Any]], follows: bool
) -> None:
    """The checkpoint has it."""
    start = shutil.copytree(exported, tmp_path / "start")
    changes = changes_of(world, start=str(start))
    if follows:
        changes |= {"model.reference_update": {"every": 2, "mix": 0.5}, "evaluation.kl": True}
    run_dir = trained(world, tmp_path, changes).with_suffix("")
    negate(start)
    assert evaluated(run_dir) == last_evaluation(run_dir)
    shutil.rmtree(start)
    assert evaluated(run_dir) == last_evaluation(run_dir)


def test_a_missing_start_names_the_field(world: World, tmp_path: Path, refused: Callable[..., str]) -> None:
    """`oat check`, `oat eval` and `oat train` say the same."""
    config = world.config("dpo", tmp_path, changes_of(world, start=str(tmp_path / "nowhere")))
    messages = {
        refused(command, config).removeprefix(f"oat {command}: ") for command in ("check", "eval", "train")
    }
    (message,) = messages
    assert f"{START}: {tmp_path / 'nowhere'} has no ensemble that can be read (there is no file" in message
    assert "`oat export RUN OUT --ensemble`" in message


def test_a_changed_description_is_to_be_put_back(
    world: World, exported: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """A new run is told to change its setting instead."""
    start = shutil.copytree(exported, tmp_path / "start")
    config = trained(world, tmp_path, changes_of(world, start=str(start)), "--stop.max_steps", 2)
    file = start / "ensemble.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "activation": "swish"}))
    error = refused("train", config)
    assert f"{START}: activation in {file} is swish, and the run has relu; put the files back" in error
    file.write_text(json.dumps({**facts, "features": {**facts["features"], "layer": 1}}))
    error = refused("train", config)
    assert "whose layer is 1, and this run's is 'all'; put its files and those of the backbone back" in error
    error = refused("train", config, "--run_dir", tmp_path / "new")
    assert "features with layer 1, and this configuration has layer 'all'; set explorer.features" in error
    assert not (tmp_path / "new").exists()


# numbers that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_exported_ensemble_with_weights_that_are_not_finite_is_refused(
    world: World, exported: Path, tmp_path: Path, refused: Callable[..., str], value: float
) -> None:
    bad = shutil.copytree(exported, tmp_path / "bad")
    weights = load_file(bad / "ensemble.safetensors")
    weights["bias2"][0, 0, 1] = value
    save_file(weights, bad / "ensemble.safetensors")
    said = "1 of 12 numbers of `bias2` in ensemble.safetensors are NaN or infinite"
    with pytest.raises(ModelError, match=said):
        load_ensemble(str(bad))
    config = world.config("dpo", tmp_path, changes_of(world, start=str(bad), learn=False))
    for command in ("check", "train"):
        assert f"{START}: {bad}: {said}" in refused(command, config)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1="}\n')
    flags = ("--prompts", prompts, "--best-of", "2", "--ensemble", bad)
    assert f"{bad}: {said}" in refused("generate", world.folder / "model", *flags)


class Told:
    """Features with these numbers for each response."""

    width = 2

    def __init__(self, *numbers: float):
        self.identity: dict[str, Any] = {}
        self.numbers = np.array(numbers, dtype=np.float32)

    def of(self, groups: list[Group]) -> list[np.ndarray]:
        return [np.stack([self.numbers] * len(group.trajectories)) for group in groups]


@pytest.mark.parametrize(
    ("feature", "weight", "said"),
    [
        (1.0, 1e30, "6 of 6 rewards that the ensemble .* lower explorer.ensemble.learning_rate"),
        (1.0, float("nan"), "6 of 6 rewards that the ensemble .* lower explorer.ensemble.learning_rate"),
        (float("inf"), 1.0, r"3 of 6 features of responses .* \(explorer.features\)"),
    ],
)
def test_rewards_that_are_not_finite_are_refused(feature: float, weight: float, said: str) -> None:
    model = Ensemble(features=2, members=2, hidden=3, activation="relu", generator=np.random.default_rng(0))
    scorer = EnsembleScorer(Told(1.0, feature), model)
    groups = [make_group(0, "a", "b"), make_group(1, "c")]
    if np.isfinite(feature):
        scorer.score(groups)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(weight)
    with pytest.raises(NonFiniteError, match=said):
        scorer.score(groups)


@pytest.mark.filterwarnings("ignore:update 2 of ensemble")
def test_a_learning_rate_of_the_ensemble_that_is_too_high_is_named(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether steps of the learner with such numbers are left out or not. No pair is chosen by such
    rewards."""
    config = world.config("dpo", tmp_path, {**changes_of(world, learning_rate=1e30), "evaluation": None})
    for number, flags in enumerate(((), ("--learner.on_nonfinite", "skip"))):
        run_dir = tmp_path / str(number)
        capsys.readouterr()
        assert oat("train", config, "--run_dir", run_dir, *flags) == 1
        error = capsys.readouterr().err
        assert "lower explorer.ensemble.learning_rate" in error
        assert "learner.learning_rate" not in error
        store = Store(run_dir / "ledger.sqlite")
        notes = [text for (text,) in store.db.execute("SELECT notes FROM questions")]
        store.close()
        assert notes
        assert not [text for text in notes if "NaN" in text or "Infinity" in text]


# labels of the ensemble


def test_labels_of_the_ensemble_are_not_exported_as_answers(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Audited pairs have the oracle's answer, and are exported."""
    changes = {**changes_of(world), "evaluation": None}
    changes["explorer"] |= {"model_labels": {"share": 0.5, "burn_in": 1, "audit": 0.5}}
    run_dir = trained(world, tmp_path, changes, "--stop.max_steps", 6).with_suffix("")
    store = Store(run_dir / "ledger.sqlite")
    counts = dict(
        store.db.execute(
            "SELECT q.oracle, COUNT(*) FROM questions q JOIN answers a ON a.question = q.id "
            "WHERE a.label IS NOT NULL GROUP BY q.oracle"
        )
    )
    audited = store.db.execute(
        "SELECT COUNT(*) FROM questions WHERE notes LIKE '%model%' AND oracle != ?", (ENSEMBLE,)
    )
    assert audited.fetchone()[0] > 0
    store.close()
    labelled = counts.pop(ENSEMBLE)
    assert labelled > 0
    out = tmp_path / "pairs.jsonl"
    capsys.readouterr()
    assert oat("ledger", run_dir, "--export", out) == 0
    rows = sum(counts.values())
    said = f"oat ledger: {rows} rows are in {out}, without {labelled} pairs that the ensemble labelled\n"
    assert capsys.readouterr().out == said
    assert len(out.read_text().splitlines()) == rows


def test_a_run_whose_oracle_answered_all_says_nothing_of_labels(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oat("ledger", run, "--export", tmp_path / "pairs.jsonl") == 0
    assert "ensemble" not in capsys.readouterr().out
