"""A reference that follows the policy: its weights after each step in learner, engine, checkpoints, forks and
evaluations."""

import json
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import World, forked, kill_at, made, make_model, oat

from oat.assemble.run import build
from oat.commands.digest import digest_run
from oat.config.load import load_config
from oat.engines.torch import TorchEngine
from oat.errors import ConfigError
from oat.learner.learner import Learner
from oat.learner.moving_reference import Following
from oat.ledger.reader import Reader
from oat.loop import Run, restore, train
from oat.models.loading import load_lm
from oat.resolve.resolve import resolve
from oat.rundir.checkpoints import Checkpoints

FOLLOWS = {
    "model.reference_update": {"every": 2, "mix": 0.25},
    "learner.learning_rate": 0.02,
    "checkpoint.every": 1,
    "evaluation": None,
}
LORA = {"model.lora": {"rank": 2, "targets": ["q_proj", "lm_head"]}}
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "adapter": LORA,
    "a late sampler": {"learner.sync_every": 3},
    "an engine in bfloat16": {
        "engine.dtype": "bfloat16",
        "evaluation": {"slot": "reference", "every": 1, "samples": 1},
    },
}


class Tensors:
    """A model of two tensors."""

    def __init__(self, *values: float):
        self.values = {
            name: torch.nn.Parameter(torch.tensor([value])) for name, value in zip("ab", values, strict=True)
        }

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return self.values


def test_hand_worked_numbers() -> None:
    """The reference has weights 1 and 10, the policy 2 and 30. Every second step mixes in a quarter of the
    policy, which gives 1.25 and 15, then 1.4375 and 18.75."""
    policy: Any = Tensors(2.0, 30.0)
    reference: Any = Tensors(1.0, 10.0)
    following, found = Following(every=2, mix=0.25), []
    for _ in range(5):
        following.step(policy, reference)
        found.append([value.item() for value in reference.values.values()])
    assert found == [[1.0, 10.0], [1.25, 15.0], [1.25, 15.0], [1.4375, 18.75], [1.4375, 18.75]]
    assert (following.updates, following.state) == (2, {"steps": 5, "updates": 2})


def test_a_moving_average_forgets_as_its_formula_says() -> None:
    """The reference follows a policy that does not change. After n updates, (1 - mix)^n of the start remains:
    0.992^100 = 0.44788."""
    policy: Any = Tensors(0.0, 1.0)
    reference: Any = Tensors(1.0, 0.0)
    following = Following(every=1, mix=0.008)
    for _ in range(100):
        following.step(policy, reference)
    assert reference.values["a"].item() == pytest.approx(0.447883, abs=1e-5)
    assert reference.values["b"].item() == pytest.approx(1 - 0.447883, abs=1e-5)


def test_a_share_of_one_is_the_policy_bitwise() -> None:
    policy: Any = Tensors(0.1, -7.3e-9)
    reference: Any = Tensors(1e8, 3.7)
    Following(every=1, mix=1.0).step(policy, reference)
    assert all(torch.equal(reference.values[name], policy.values[name]) for name in "ab")


def config_of(world: World, folder: Path, kind: str, changes: Mapping[str, Any] | None = None) -> Path:
    changes = {**FOLLOWS, **KINDS[kind], **(changes or {})}
    if changes["evaluation"] is not None:
        changes["evaluation"] = {"path": str(world.folder / "held_out.jsonl"), **changes["evaluation"]}
    return world.config("dpo", folder, changes)


def of_step(run_dir: Path, step: int, model: str) -> dict[str, torch.Tensor]:
    _, tensors, _ = Checkpoints(run_dir / "checkpoints", every=1, keep_last=9).load_step(step)
    prefix = f"learner/{model}/weights/"
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@pytest.fixture(scope="module")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives a finished run of four steps of a kind of `KINDS`. Tests must not change
    it."""
    made: dict[str, Path] = {}

    def run_of(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp("run")
            assert oat("train", config_of(world, folder, kind, {"checkpoint.keep_last": 9})) == 0
            made[kind] = folder / "dpo"
        return made[kind]

    return run_of


@pytest.mark.sample("adapter", seconds=1.9)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_the_formula_says_after_every_step(finished: Callable[[str], Path], kind: str) -> None:
    """The reference equals the formula's mixture of the policies in the checkpoints. It changes after the
    second and the fourth step only."""
    run_dir = finished(kind)
    policies, references = (
        [of_step(run_dir, step, model) for step in range(1, 5)] for model in ("policy", "reference")
    )
    assert {name: tensor.shape for name, tensor in references[0].items()} == {
        name: tensor.shape for name, tensor in policies[0].items()
    }
    for step in (1, 3):
        for name, tensor in references[step].items():
            expected = 0.25 * policies[step][name] + 0.75 * references[step - 1][name]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)
        assert any(
            not torch.equal(tensor, references[step - 1][name]) for name, tensor in references[step].items()
        )
    assert all(torch.equal(tensor, references[1][name]) for name, tensor in references[2].items())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("reference/updates") for row in rows] == [None, 0, 1, 1, 2]


def engine_in(run: Run) -> TorchEngine:
    actor: Any = run.collector.actor  # type: ignore[attr-defined]
    engine: TorchEngine = actor.engine
    return engine


@pytest.mark.sample("adapter", "a late sampler", seconds=0.5)
@pytest.mark.parametrize("kind", KINDS)
def test_prepare_and_engine_have_the_moved_one(
    world: World, finished: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """After a checkpoint is loaded, the learner and the engine's slot give the log-probabilities of the moved
    reference. They differ from the start's and the policy's. If the slot gets pushed weights, its version is
    the number of updates."""
    config, origins = load_config(finished(kind) / "config.yaml")
    run = build(resolve(config, origins), directory=made(tmp_path / "built"))
    sequence, engine = np.array([2, 3, 4, 12, 13, 1], dtype=np.int32), engine_in(run)
    start = engine.logps([sequence], "reference")[0]
    _, tensors, plain = Checkpoints(finished(kind) / "checkpoints", every=1, keep_last=9).load_step(4)
    learner: Any = run.parts["learner"]
    learner.load_state(
        {**plain["learner"], **{name.removeprefix("learner/"): tensor for name, tensor in tensors.items()}}
    )
    run.weights.restore(run.learner)
    models: Any = learner.models
    ids = torch.from_numpy(sequence.astype(np.int64))[None]

    def of(name: str) -> np.ndarray:
        lm = models[name].lm
        with torch.no_grad():
            return lm.head(lm.hidden(ids)).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0].numpy()

    atol = 2e-2 if config.engine.options.get("dtype") == "bfloat16" else 1e-5
    np.testing.assert_allclose(engine.logps([sequence], "reference")[0], of("reference"), atol=atol)
    assert np.abs(of("reference") - start).max() > 5 * atol
    assert np.abs(of("reference") - of("policy")).max() > 5 * atol
    assert engine.version("reference") == (2 if config.evaluation else 0)
    run.ledger.close()


@pytest.mark.slow(instead="tests/faults/test_state.py walks over a run whose reference follows", seconds=2.7)
@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_killed_and_continued(
    world: World, finished: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    config = config_of(world, tmp_path, kind, {"checkpoint.keep_last": 9})

    def run(kill: int | None = None) -> int:
        def action() -> int:
            if kill:
                kill_at(Following, "step", kill, after=True)
            return oat("train", config)

        return forked(action, tmp_path / "log")

    assert [run(kill=3), run(kill=1), run()] == [-signal.SIGKILL, -signal.SIGKILL, 0], (
        tmp_path / "log"
    ).read_text()
    assert digest_run(tmp_path / "dpo") == digest_run(finished(kind))


def test_a_fork_has_it_and_may_mix_otherwise(
    world: World, finished: Callable[[str], Path], tmp_path: Path
) -> None:
    source = f"{finished('whole')}@2"
    same, other = tmp_path / "same", tmp_path / "other"
    config = config_of(world, tmp_path, "whole", {"checkpoint.keep_last": 9})
    assert oat("train", config, "--from", source, "--run_dir", same) == 0
    assert digest_run(same) == digest_run(finished("whole"))
    assert (
        oat("train", config, "--from", source, "--run_dir", other, "--model.reference_update.mix", "1") == 0
    )
    reference, policy = (of_step(other, 4, model) for model in ("reference", "policy"))
    assert all(torch.equal(reference[name], policy[name]) for name in policy)


def test_a_fork_cannot_begin_to_follow(
    world: World, finished: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(world, tmp_path, "whole", {"model.reference_update": None})
    assert oat("train", config, "--from", f"{finished('whole')}@2", "--run_dir", tmp_path / "other") == 2
    assert "model.reference_update" in capsys.readouterr().err


@pytest.mark.slow(instead="test_it_is_what_the_formula_says_after_every_step", seconds=1.1)
def test_with_a_share_of_one_after_every_step_the_kl_stays_small(world: World, tmp_path: Path) -> None:
    """The reference takes over the policy after every step, so a step's first pass has no divergence. A
    frozen reference has one."""

    def last_kl(name: str, changes: Mapping[str, Any]) -> float:
        folder = tmp_path / name
        folder.mkdir()
        options = {"learner.learning_rate": 0.02, "algorithm.kl_coef": 0.1, "evaluation": None, **changes}
        assert oat("train", world.config("grpo", folder, options)) == 0
        rows = [json.loads(line) for line in (folder / "grpo" / "metrics.jsonl").read_text().splitlines()]
        return float(rows[-1]["kl/reference"])

    assert last_kl("frozen", {}) > 1e-3
    assert last_kl("follows", {"model.reference_update": {}}) == pytest.approx(0, abs=1e-9)


@pytest.mark.slow(instead="test_an_evaluation_of_the_reference_is_of_the_moved_one", seconds=1.2)
def test_an_evaluation_measures_the_distance_to_the_moved_one(world: World, tmp_path: Path) -> None:
    """`evaluation.kl` measures the distance to the reference's present weights. If the reference takes over
    the policy after every step, the distance is 0."""

    def distances(name: str, changes: Mapping[str, Any]) -> list[float]:
        folder = tmp_path / name
        folder.mkdir()
        assert (
            oat(
                "train",
                world.config(
                    "dpo", folder, {"learner.learning_rate": 0.02, "evaluation.kl": True, **changes}
                ),
            )
            == 0
        )
        rows = [json.loads(line) for line in (folder / "dpo" / "metrics.jsonl").read_text().splitlines()]
        return [row["eval/kl"] for row in rows if "eval/kl" in row]

    assert abs(distances("frozen", {})[-1]) > 1e-3
    assert distances("follows", {"model.reference_update": {}}) == pytest.approx([0, 0, 0], abs=1e-6)


def test_over_the_wire(world: World, finished: Callable[[str], Path], tmp_path: Path) -> None:
    kind = "an engine in bfloat16"
    config = config_of(world, tmp_path, kind, {"checkpoint.keep_last": 9, "compute.serialise": True})
    assert oat("train", config) == 0
    assert digest_run(tmp_path / "dpo") == digest_run(finished(kind))


def test_an_evaluation_of_the_reference_is_of_the_moved_one(
    world: World, finished: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = finished("an engine in bfloat16")
    assert oat("eval", run_dir) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert found["eval/sampled"] == rows[-1]["eval/sampled"]


def test_an_algorithm_that_samples_from_it(world: World, tmp_path: Path) -> None:
    """XPO samples from a reference that follows the policy. These tokens carry the
    number of the reference's updates as version, and are drawn from the weights of that update."""
    changes = {
        **FOLLOWS,
        "tracking.keep_trajectories": True,
        "algorithm": {"name": "xpo", "prompts": 4},
        "checkpoint.keep_last": 9,
        "learner.sync_every": 3,
    }
    config, run_dir = world.config("xpo", tmp_path, changes), tmp_path / "xpo"
    assert oat("train", config) == 0
    with closing(Reader(run_dir / "ledger.sqlite")) as store:
        found = []
        for step in range(4):
            rows = [row for group in store.groups("train", step, 0) for row in group.trajectories]
            versions = {
                slot: {int(v) for row in rows if row.slot == slot for v in row.recorded("versions")}
                for slot in ("sampler", "reference")
            }
            found.append((versions["sampler"], versions["reference"]))
            if step == 3:
                row = next(row for row in rows if row.slot == "reference")
    assert found == [({0}, {0}), ({0}, {0}), ({0}, {1}), ({3}, {1})]
    lm = load_lm(str(world.folder / "model"))
    with torch.no_grad():
        for name, tensor in of_step(run_dir, 3, "reference").items():
            lm.tensors()[name].copy_(tensor)
        ids = torch.from_numpy(row.ids.astype(np.int64))[None]
        logps = lm.head(lm.hidden(ids)).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(logps[row.trained[1:]], row.recorded("raw_logps"), atol=1e-5)


def test_a_roll_back_takes_the_reference_back(world: World, tmp_path: Path) -> None:
    """After a roll back, the engine's slot has the older reference again, with its older version."""
    folder = tmp_path
    evaluation = {"path": str(world.folder / "held_out.jsonl"), "slot": "reference", "samples": 1}
    config = world.config(
        "dpo",
        folder,
        {**FOLLOWS, "model.reference_update": {"mix": 0.5}, "evaluation": evaluation, "stop.max_steps": 3},
    )
    run = build(resolve(*load_config(config)), directory=made(folder / "dpo"))
    back: list[bool] = []
    check = run.alarms.check

    def once(step: int, values: Mapping[str, float], *, is_saved: bool) -> int | None:
        found = check(step, values, is_saved=is_saved)
        back.append(step == 3)
        return 1 if step == 3 else found

    run.alarms.check = once  # type: ignore[method-assign]
    train(run, lambda step, metrics: None)
    learner: Any = run.parts["learner"]
    assert back == [False, False, True]
    assert (learner.following.updates, engine_in(run).version("reference")) == (1, 1)
    kept = of_step(folder / "dpo", 3, "reference")
    first = of_step(folder / "dpo", 2, "reference")
    assert any(not torch.equal(kept[name], first[name]) for name in kept)
    run.ledger.close()
    again = build(resolve(*load_config(config)), directory=made(folder / "dpo"))
    assert restore(again)[0] == 3
    assert engine_in(again).version("reference") == 1
    again.ledger.close()


def test_models_that_do_not_correspond(world: World, tmp_path: Path) -> None:
    """`model.reference_update` is refused for a reference of another shape, and for full weights beside an
    adapter."""
    make_model(tmp_path / "wide", hidden=32)
    shutil.copytree(world.folder / "model", tmp_path / "another")
    for changes, words in (
        ({"model.reference": str(tmp_path / "wide")}, "tensors do not correspond"),
        ({"model.reference": str(tmp_path / "another"), **LORA}, "tensors do not correspond"),
    ):
        config = resolve(*load_config(config_of(world, tmp_path, "whole", changes)))
        with pytest.raises(ConfigError, match=words):
            build(config, directory=made(tmp_path / "built"))


def test_a_learner_says_which_model_has_moved(world: World, tmp_path: Path) -> None:
    run = build(
        resolve(*load_config(config_of(world, tmp_path, "whole"))), directory=made(tmp_path / "built")
    )
    learner: Any = run.parts["learner"]
    assert isinstance(learner, Learner)
    learner.following.updates = 3
    assert (learner.version("reference"), learner.version("policy")) == (3, 0)
    run.ledger.close()
