"""Weights from the learner to the engine: the receipt, the schedule, and the copy that a checkpoint keeps."""

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from fixtures import World, forked, kill_at, oat
from weights import Source, held, turn_bit, weights_of

from oat.commands.digest import digest_run
from oat.engines.torch import TorchEngine
from oat.errors import WeightsError
from oat.models.loading import load_lm
from oat.runtime.transfer import Inbox, checksums
from oat.runtime.weights import Weights, prove
from oat.types import Receipt


@pytest.fixture
def source(world: World) -> Source:
    return Source(load_lm(str(world.folder / "model")))


def engine_of(world: World, policy: Any) -> TorchEngine:
    """Return an engine whose sampler has its own copy, and whose policy slot shares the learner's weights."""
    slots = {"sampler": load_lm(str(world.folder / "model")), "policy": policy}
    return TorchEngine(slots, num_tokens=16, stop_ids=[1], decode=lambda ids: "")


def sent(source: Source) -> dict[str, int]:
    return checksums(weights_of(source))


@pytest.mark.fault("R2")
@pytest.mark.parametrize(
    ("name", "place", "bit"),
    [("model.embed_tokens.weight", 0, 0), ("model.norm.weight", 63, 7), ("lm_head.weight", 500, 3)],
)
@pytest.mark.parametrize("proof", ["all", "sample"])
def test_one_turned_bit_in_the_engines_copy_is_found(
    world: World,
    source: Source,
    name: str,
    place: int,
    bit: int,
    proof: Literal["all", "sample"],
    figure: Callable[[str], None],
) -> None:
    """A bit of the engine's weights flips after they were copied, and the receipt shows it. A sample reads
    the tiny model whole."""

    class FaultyMemory(TorchEngine):
        def load(self, slot: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
            super().load(slot, version, tensors)
            turn_bit(self.tensors(slot)[name], place, bit)

    sound = engine_of(world, source.lm)
    faulty = FaultyMemory(sound._slots, num_tokens=16, stop_ids=[1], decode=lambda ids: "")
    Weights({"sampler": Inbox(sound)}, 2, proof=proof).sync(source, 3)
    with pytest.raises(WeightsError, match=rf"slot sampler, version 4: .* 1 tensors differ .*\({name}\)"):
        Weights({"sampler": Inbox(faulty)}, 2, proof=proof).sync(source, 4)
    figure("1 of 1 flipped bits in weights detected")


@pytest.mark.parametrize(
    ("held_", "words"),
    [
        (Receipt("sampler", 2, {"a": 1, "b": 2}), "has slot sampler, version 2"),
        (Receipt("policy", 3, {"a": 1, "b": 2}), "has slot policy"),
        (Receipt("sampler", 3, {"a": 1}), r"1 tensors differ.*\(b\)"),
        (Receipt("sampler", 3, {"a": 1, "b": 2, "c": 3}), r"1 tensors differ.*\(c\)"),
        (Receipt("sampler", 3, {}), r"2 tensors differ.*\(a, b\)"),
    ],
)
def test_a_receipt_must_name_slot_version_and_every_tensor(held_: Receipt, words: str) -> None:
    wanted = Receipt("sampler", 3, {"a": 1, "b": 2})
    prove(wanted, wanted)
    with pytest.raises(WeightsError, match=words):
        prove(held_, wanted)


@pytest.mark.inventory(96)
def test_a_copy_keeps_its_version_while_the_policy_moves(world: World, source: Source) -> None:
    engine = engine_of(world, source.lm)
    weights = Weights({"sampler": Inbox(engine), "policy": Inbox(engine)}, sync_every=2)
    assert [step for step in range(6) if weights.due(step)] == [1, 3, 5]
    weights.restore(source)
    before = sent(source)
    source.move()
    weights.push("policy", 1, source)
    assert (engine.version("sampler"), engine.version("policy")) == (0, 1)
    assert held(engine, "sampler") == before != held(engine, "policy")
    weights.sync(source, 2)
    assert engine.version("sampler") == 2
    assert held(engine, "sampler") == sent(source)


def test_the_kept_weights_survive_a_restart(world: World, source: Source) -> None:
    """Between two syncs the sampler holds older weights of the policy. After a restart it has these again,
    not the policy's present weights."""
    weights = Weights({"sampler": Inbox(engine_of(world, source.lm))}, sync_every=2)
    weights.sync(source, 2)
    at_sync = sent(source)
    source.move()
    state = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in weights.state.items()
    }
    engine = engine_of(world, source.lm)
    restarted = Weights({"sampler": Inbox(engine)}, sync_every=2)
    restarted.load_state(state)
    restarted.restore(source)
    assert (engine.version("sampler"), restarted.sampler_version) == (2, 2)
    assert held(engine, "sampler") == at_sync != sent(source)
    assert restarted.state.keys() == state.keys()


def test_without_a_copy_nothing_is_kept(world: World, source: Source) -> None:
    shared = TorchEngine(
        {"sampler": source.lm, "policy": source.lm}, num_tokens=16, stop_ids=[1], decode=lambda ids: ""
    )
    weights = Weights({"sampler": Inbox(shared)}, sync_every=1)
    weights.sync(source, 5)
    source.move()
    assert weights.state == {"version": 5}
    weights.restore(source)
    assert held(shared, "sampler") == sent(source)


@pytest.mark.fault("R2")
def test_a_run_stops_at_a_turned_bit(world: World, tmp_path: Path, figure: Callable[[str], None]) -> None:
    """The second of two steps ends with a sync into faulty memory. The run ends with exit code 1 and one
    message, and the step has no checkpoint."""
    config = world.config(
        "grpo",
        tmp_path,
        {"learner.sync_every": 2, "stop.max_steps": 2, "checkpoint.every": 1, "evaluation": None},
    )

    def faulty() -> int:
        load = TorchEngine.load

        def turned(self: TorchEngine, slot: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
            load(self, slot, version, tensors)
            if (slot, version) == ("sampler", 2):
                turn_bit(self.tensors(slot)["model.norm.weight"], 5, 2)

        TorchEngine.load = turned  # type: ignore[method-assign]
        return oat("train", config)

    log = tmp_path / "log"
    assert forked(faulty, log) == 1
    printed = log.read_text()
    assert "oat train: slot sampler, version 2: " in printed
    assert "(model.norm.weight)" in printed
    assert "Traceback" not in printed
    assert [path.name for path in (tmp_path / "grpo" / "checkpoints").glob("step_*")] == ["step_00000001"]
    figure("1 of 1 flipped bits in weights detected")


@pytest.mark.slow(instead="tests/faults/test_kill.py kills a run inside a weight sync of a copy", seconds=5.2)
@pytest.mark.inventory(96)
@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_killed_between_two_syncs(world: World, tmp_path: Path, algorithm: str) -> None:
    """With `sync_every: 2` and a checkpoint per step, versions follow the schedule. Runs that are killed at
    step 1 or 3 and continued are bitwise the unbroken run."""
    changes = {"learner.sync_every": 2, "checkpoint.every": 1, "stop.max_steps": 5, "evaluation": None}
    config = world.config(algorithm, tmp_path, changes)

    def run(name: str, kill: int | None = None) -> int:
        def action() -> int:
            from oat.learner.learner import Learner

            if kill:
                kill_at(Learner, "update", kill)
            return oat("train", config, "--run_dir", tmp_path / name)

        return forked(action, tmp_path / "log")

    assert run("unbroken") == 0
    assert [run("killed", kill=2), run("killed", kill=3), run("killed")] == [
        -signal.SIGKILL,
        -signal.SIGKILL,
        0,
    ]
    assert digest_run(tmp_path / "killed") == digest_run(tmp_path / "unbroken")
    rows = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("weights/version") for row in rows[1:]] == [0, 2, 2, 4, 4]
    assert [row["lag/versions"] for row in rows[1:]] == [0, 1, 0, 1, 0]


def test_old_log_probabilities_of_a_lagging_sampler_are_computed_again(world: World, tmp_path: Path) -> None:
    """The sampler is synced at every second step. At even steps the recorded log-probabilities are used as
    the old ones. At odd steps the sampler lags behind, and the learner computes them again."""
    assert (
        oat("train", world.config("grpo", tmp_path, {"learner.sync_every": 2, "learner.learning_rate": 0.02}))
        == 0
    )
    rows = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()][1:]
    assert [row["lag/versions"] for row in rows] == [0, 1, 0, 1]
    assert [row["logps/recorded_gap"] > 1e-4 for row in rows] == [False, True, False, True]
    assert [row["logps/recomputed"] for row in rows] == [0, 1, 0, 1]
    assert all(abs(row["policy/ratio_max"] - 1) < 1e-4 for row in rows)
