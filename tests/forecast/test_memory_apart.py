"""The estimated memory of a run whose actors are processes of their own, and what `oat check` says of it."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import World, oat
from pretended import pretended_gpu
from torch._subclasses.fake_tensor import FakeTensor

from oat.assemble.actor_side import ActorPlan, open_actor_side
from oat.config.load import dump, load_config
from oat.forecast.estimate import SURE, Lengths, estimate
from oat.forecast.memory_apart import FORKED, IMPORTS, RAY, Needs, estimate_actor, needs_of
from oat.forecast.places import size_of
from oat.models.loading import load_lm
from oat.resolve.resolve import resolve
from oat.resolve.resolved import Resolved

APART = {"compute.runtime": "ray", "compute.actors": 3}
LENGTHS = Lengths(8)


def resolved(world: World, folder: Path, changes: dict[str, Any], recipe: str = "grpo") -> Resolved:
    return resolve(*load_config(world.config(recipe, folder, changes)))


def weights(world: World) -> int:
    return sum(tensor.nbytes for tensor in load_lm(str(world.folder / "model")).tensors().values())


def test_the_own_process_has_no_engine(world: World, tmp_path: Path) -> None:
    local = estimate(resolved(world, tmp_path, {}), LENGTHS)
    own = needs_of(resolved(world, tmp_path, APART), LENGTHS).learner
    assert "sampling" in local.phases
    assert own.phases.keys() == local.phases.keys() - {"sampling"}
    assert own.parts == {**local.parts, "keys and values": 0}


def test_an_actor_has_models_of_its_own(world: World, tmp_path: Path) -> None:
    """It has a copy of the policy, keys and values of its share of the prompts, and once more the weights
    while new ones arrive. It has no optimiser."""
    found = [
        estimate_actor(resolved(world, tmp_path, {**APART, "compute.actors": actors}), LENGTHS)
        for actors in (1, 3)
    ]
    one, three = found
    assert weights(world) <= three.parts["weights"] < 1.1 * weights(world)
    assert three.phases["new weights"] == three.parts["weights"] + weights(world)
    assert 0 < three.parts["keys and values"] < one.parts["keys and values"]
    assert three.phases["sampling"] > three.parts["weights"] + three.parts["keys and values"]


def storages() -> dict[int, int]:
    """Return the bytes of the memory of all tensors of this process, by address."""
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    own = [tensor.untyped_storage() for tensor in tensors if not isinstance(tensor, FakeTensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in own if storage.device.type == "cpu"}


@pytest.mark.parametrize(
    "changes",
    [{}, {"learner.sync_every": 2}, {"engine.dtype": "bfloat16"}, {"algorithm.kl_coef": 0.1}],
    ids=str,
)
def test_an_actor_holds_what_is_estimated(world: World, tmp_path: Path, changes: dict[str, Any]) -> None:
    """The weights of a side that is made are those of the estimate."""
    config = resolved(world, tmp_path, {**APART, **changes})
    expected = estimate_actor(config, LENGTHS).parts["weights"]
    before = storages()
    side = open_actor_side(ActorPlan(dump(config.config), 7, records_text_ends=False))
    gc.collect()
    made = {place: size for place, size in storages().items() if place not in before}
    assert sum(made.values()) == pytest.approx(expected, rel=0.1)
    del side


def test_weights_that_the_cluster_keeps(world: World, tmp_path: Path) -> None:
    """The cluster keeps one copy of the weights. If evaluations have newer weights than sampling, it keeps
    both. They are in the precision of the engine."""
    stored = [
        needs_of(resolved(world, tmp_path, {**APART, **changes}), LENGTHS).stored
        for changes in ({}, {"learner.sync_every": 2}, {"engine.dtype": "bfloat16"})
    ]
    assert stored == [weights(world), 2 * weights(world), weights(world) // 2]


def test_what_is_needed_together(world: World, tmp_path: Path) -> None:
    def together(**changes: Any) -> tuple[int, Needs]:
        config = resolved(world, tmp_path, {**APART, **changes})
        needs = needs_of(config, LENGTHS)
        return needs.together(config.config.compute)[0], needs

    here, needs = together(**{"compute.standby": 1})
    assert here == needs.learner.peak + IMPORTS + 4 * (needs.actor.peak + IMPORTS) + RAY + needs.stored
    forked, needs = together(**{"compute.standby": 1, "compute.runtime": "processes"})
    assert forked == needs.learner.peak + 2 * IMPORTS + 4 * (needs.actor.peak + FORKED) + needs.stored
    elsewhere, needs = together(**{"compute.address": "10.0.0.1:6379"})
    assert elsewhere == needs.learner.peak
    gpus = {"compute.profile": "gpu", "compute.gpus": 2, "compute.actors": None}
    with pretended_gpu():
        for changes in (gpus, {**gpus, "compute.collocate": True}):
            config = resolve(
                *load_config(world.config("grpo", tmp_path, {"compute.runtime": "ray", **_given(changes)}))
            )
            needs = needs_of(config, LENGTHS)
            peaks = needs.learner.peak, needs.actor.peak
            expected = sum(peaks) if config.config.compute.collocate else max(peaks)
            assert needs.together(config.config.compute)[0] == expected


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({}, (1, 2)),
        ({"checkpoint.background": False}, (1, 1)),
        ({"checkpoint.every": 4}, (1, 1)),
        ({"model.reference_update": {"mix": 0.3}, "algorithm.kl_coef": 0.1}, (4 / 3, 2)),
    ],
    ids=str,
)
def test_what_the_own_process_fetches_of_a_learner_elsewhere(
    world: World, tmp_path: Path, changes: dict[str, Any], shares: tuple[float, int]
) -> None:
    """For a checkpoint it has the weights that learn and two moments of each, and a copy while a thread
    writes. It has each share of them twice more while it arrives."""
    config = resolved(world, tmp_path, {**APART, "compute.learner": "actor", **changes})
    needs = needs_of(config, LENGTHS)
    states, copies = shares
    state = needs.learner.state
    assert state == pytest.approx(states * 3 * weights(world), rel=0.01)
    assert needs.fetched == copies * state + 2 * state
    here, _ = needs.together(config.config.compute)
    others = needs.learner.peak + 3 * needs.actor.peak + 5 * IMPORTS + RAY + needs.stored
    assert here == others + needs.fetched
    assert "beside a checkpoint" not in needs.learner.phases
    elsewhere = replace(config.config.compute, address="10.0.0.1:6379")
    assert needs.together(elsewhere)[0] == needs.fetched


def test_what_the_own_process_fetches_for_a_transfer(world: World, tmp_path: Path) -> None:
    """With an adapter, a transfer has all weights and a checkpoint few. The copy in the precision of the
    engine, and older weights that are kept, are there beside them."""
    own = {"compute.learner": "actor", "model.lora": {"rank": 2}, "checkpoint.background": False}
    adapted = resolved(world, tmp_path, {**APART, **own})
    needs = needs_of(adapted, LENGTHS)
    sent = needs.stored
    assert needs.learner.state < weights(world) < sent
    assert needs.fetched == 3 * sent
    late = needs_of(resolved(world, tmp_path, {**APART, **own, "learner.sync_every": 2}), LENGTHS)
    assert late.fetched == pytest.approx(3 * sent + needs.learner.state / 3, rel=0.01)
    assert late.learner.parts == needs.learner.parts


def test_the_own_process_learns_and_fetches_nothing(world: World, tmp_path: Path) -> None:
    assert needs_of(resolved(world, tmp_path, APART), LENGTHS).fetched == 0


def _given(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if value is not None}


def test_actors_that_do_not_fit_on_this_machine(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes that fit one by one, and not together, are refused; with a cluster elsewhere they are not."""
    needs = needs_of(resolved(world, tmp_path, APART), LENGTHS)
    limit = {"compute.memory_gb": 0.9 * SURE * (IMPORTS * 4 + RAY) / 1e9}
    config = world.config("grpo", tmp_path, {**APART, **limit, "compute.actor_cpus": 0.25})
    assert needs.learner.peak < 0.1 * IMPORTS
    for command in ("check", "train"):
        assert oat(command, config) == 2
        error = capsys.readouterr().err
        assert "for each of 3 that sample, " in error
        assert "lower compute.actors or compute.standby, or use a Ray cluster of several machines" in error
    assert oat("check", config, "--compute.address", "127.0.0.1:1") == 0
    assert oat("check", config, "--compute.actors", "1") == 0
    assert oat("check", config, "--compute.memory_gb", "2") == 0


def lines_of(text: str) -> dict[str, str]:
    """Return the notes that `oat check` prints, by the word with which they begin."""
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


@pytest.mark.usefixtures("several_cpus")
def test_oat_check_says_who_runs_where(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts no cluster."""
    monkeypatch.setattr("oat.assemble.apart.Cluster", lambda address: pytest.fail("a cluster was started"))
    changes = {**APART, "compute.standby": 1, "compute.actor_cpus": 0.5}
    assert oat("check", world.config("grpo", tmp_path, changes), "--memory") == 0
    out = capsys.readouterr().out
    found = lines_of(out)
    assert found["this process"].startswith("learner, ledger, oracles; about ")
    assert found["actors"].startswith("3, each with 0.5 logical CPUs; about ")
    assert found["standbys"].startswith("1 with models loaded")
    assert found["object store"].startswith("about ")
    assert "for each of 4 that sample" in found["in all"]
    assert "an actor: at sampling" in out
    assert oat("check", world.config("grpo", tmp_path, {})) == 0
    assert "this process" not in lines_of(capsys.readouterr().out)


def test_oat_check_says_who_has_which_gpu(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"compute.runtime": "ray", "compute.profile": "gpu", "compute.gpus": 4}
    changes = {**changes, "compute.actor_cpus": 0.25}
    with pretended_gpu():
        assert oat("check", world.config("grpo", tmp_path, changes)) == 0
        out = capsys.readouterr().out
        found = lines_of(out)
        assert "; GPU 2 of the run; about " in found["this process"]
        assert found["actors"].startswith("2, each with 0.25 logical CPUs and a GPU; about ")
        assert "of which 1 GPU stays idle" in out
        assert oat("check", world.config("grpo", tmp_path, {**changes, "compute.collocate": True})) == 0
        found = lines_of(capsys.readouterr().out)
        assert found["actors"].startswith("4, each")
        assert "a GPU, shared with the learner on one" in found["actors"]
        assert "on one GPU" in found["in all"]


@pytest.mark.usefixtures("several_cpus")
def test_oat_check_names_further_processes(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learner and oracle clients in processes of their own are said, and counted in all."""
    in_all = []
    cpus = {"compute.actor_cpus": 0.25, "compute.learner_cpus": 0.5, "compute.oracle_cpus": 0.5}
    for further in ({}, {"compute.learner": "actor", "compute.oracle_clients": 2, **cpus}):
        changes = {"compute.runtime": "ray", "compute.actors": 2, **further}
        assert oat("check", world.config("grpo", tmp_path, changes)) == 0
        found = lines_of(capsys.readouterr().out)
        in_all.append(found["in all"])
    fetched = needs_of(resolved(world, tmp_path, changes), LENGTHS).fetched
    about = f"about {size_of(IMPORTS + fetched)}, {size_of(fetched)} of it for tensors of the learner"
    assert found["this process"] == f"ledger; {about}"
    assert found["for learning"].startswith("1, with 0.5 logical CPUs; about ")
    assert found["clients"].startswith("2, each with 0.5 logical CPUs; about 300 MB without")
    beside = " for this process", "300 MB for each of 2 without tensors"
    assert [[text in line for text in beside] for line in in_all] == [[False, False], [True, True]]


def test_a_cluster_that_this_machine_cannot_start(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`oat check` refuses what `oat train` would refuse; of a cluster elsewhere it does not know."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    changes = {"compute.runtime": "ray", "compute.actors": 2, "compute.standby": 1}
    config = world.config("grpo", tmp_path, changes)
    assert oat("check", config) == 2
    said = "2 actors at 1, 1 standby at 1 need 3 logical CPUs, and this machine has 2; lower their number"
    assert said in capsys.readouterr().err
    assert oat("check", config, "--compute.address", "127.0.0.1:1") == 0
    assert oat("check", config, "--compute.actor_cpus", "0.5") == 0
    twenty = {"compute.runtime": "ray", "compute.actors": 20, "compute.actor_cpus": 0.1}
    assert oat("check", world.config("grpo", tmp_path, {**twenty, "compute.memory_gb": 1000})) == 0
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    learning = {"compute.runtime": "ray", "compute.actors": 1, "compute.learner": "actor"}
    assert oat("check", world.config("grpo", tmp_path, learning)) == 2
    assert "1 actor at 1, 1 learner at 1 need 2 logical CPUs" in capsys.readouterr().err
    config = world.config("grpo", tmp_path, {**changes, "compute.actors": 1, "compute.standby": 0})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert oat("check", config, "--compute.actor_cpus", "0.5") == 2
    assert "needs the package ray, which is not installed" in capsys.readouterr().err


def test_a_learner_elsewhere_is_not_compared_with_the_memory_here(world: World, tmp_path: Path) -> None:
    """What this process fetches from it is compared."""
    apart = {"compute.runtime": "ray", "compute.learner": "actor", "compute.address": "127.0.0.1:1"}
    needs = needs_of(resolved(world, tmp_path, apart), LENGTHS)
    assert 1.05 * needs.fetched < needs.learner.peak
    config = world.config("grpo", tmp_path, apart)
    for share, code in ((1.04, 0), (0.9, 2)):
        assert oat("check", config, "--compute.memory_gb", f"{share * SURE * needs.fetched / 1e9}") == code
