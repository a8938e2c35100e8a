"""An engine whose weights cannot be read back proves new weights by log-probabilities (`weights_proof`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import unreadable
from fixtures import World, made, oat
from torch import Tensor

from oat.assemble.run import build
from oat.commands.digest import digest_run
from oat.config.load import load_config
from oat.engines.torch import TorchEngine
from oat.errors import WeightsError
from oat.loop import train
from oat.plugins.registry import ENGINES
from oat.resolve.resolve import resolve
from oat.runtime.probe import PROBE_TOKENS, probe_ids
from oat.types import Probe, Receipt

OWN = {"engine": {"name": "unreadable"}}
SMALL = {"stop.max_steps": 3, "evaluation.every": 2}
XPO = {"algorithm": {"name": "xpo", "prompts": 4}, "model.reference_update": {"mix": 0.5}}
ENSEMBLE = {"explorer": {"name": "ensemble", "samples": 4, "ensemble": {"members": 2, "hidden": 4}}}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("grpo", {}),
    "a lagging sampler": ("grpo", {"learner.sync_every": 2, "learner.learning_rate": 0.02}),
    "a reference that follows": ("dpo", XPO),
    "an ensemble": ("dpo", ENSEMBLE),
    "an adapter, over the wire": ("dpo", {"model.lora": {"rank": 2}, "compute.serialise": True}),
    "weights in four bits": ("grpo", {"model.lora": {"rank": 2}, "model.quantize": "nf4"}),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has a line in the registry."""
    monkeypatch.setitem(ENGINES._symbols, "unreadable", "unreadable:Kind")  # type: ignore[index]


class OldWeights(unreadable.Unreadable):
    """An engine that takes the new weights and their version, and goes on computing with the old ones."""

    def load(self, slot: str, version: int, tensors: Mapping[str, Tensor]) -> None:
        mine = self._slots[slot].tensors()
        before = {name: tensor.clone() for name, tensor in mine.items()}
        super().load(slot, version, tensors)
        if version >= 2:
            with torch.no_grad():
                for name, tensor in before.items():
                    mine[name].copy_(tensor)


class OldCache(unreadable.Unreadable):
    """An engine that keeps what it once computed for a sequence, also when its weights change."""

    def logps(self, sequences: Sequence[np.ndarray], slot: str) -> list[np.ndarray]:
        kept: dict[bytes, list[np.ndarray]] = self.__dict__.setdefault("kept", {})
        return kept.setdefault(np.concatenate(sequences).tobytes(), super().logps(sequences, slot))


@pytest.mark.sample("an adapter, over the wire", seconds=10.2)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_whose_weights_cannot_be_read_is_that_of_one_whose_weights_can(
    name: str, world: World, tmp_path: Path
) -> None:
    """The run goes through evaluations and a continuation. Its digests are those of the embedded engine."""
    recipe, changes = RUNS[name]
    digests = []
    for kind, engine in (("torch", {}), ("own", OWN)):
        own = {**SMALL, **changes, **engine, "run_dir": str(tmp_path / kind), "compute.threads": 1}
        config = world.config(recipe, tmp_path, own)
        assert oat("train", config) == 0
        assert oat("train", config, "--stop.max_steps", "5") == 0
        digests.append(digest_run(tmp_path / kind))
    assert digests[0] == digests[1]


@pytest.mark.fault("R15")
@pytest.mark.parametrize("engine", [OldWeights, OldCache])
def test_old_weights_and_old_caches_are_found_at_the_switch(
    engine: type[TorchEngine],
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figure: Any,
) -> None:
    """The run ends before the engine samples again. What arrived was undamaged, so the checksums of it, which
    are all that the engine's receipt has, show nothing."""
    receipts: list[tuple[Receipt, Receipt]] = []
    monkeypatch.setattr("oat.runtime.weights.prove", lambda held, sent: receipts.append((held, sent)))
    changes = {**SMALL, **OWN, "learner.learning_rate": 0.01, "evaluation": None}
    config = resolve(*load_config(world.config("grpo", tmp_path, changes)))
    run: Any = build(config.without_wire(), directory=made(tmp_path / "run"))
    run.collector.actor.engine.__class__ = engine
    steps: list[int] = []
    with pytest.raises(
        WeightsError, match=r"its log-probabilities of the probe differ from the learner's by"
    ):
        train(run, lambda step, values: steps.append(step))
    assert len(steps) <= 2
    assert receipts
    assert all(held == sent for held, sent in receipts)
    figure("1 of 1 engines with old weights found at the switch")


def test_without_the_probe_old_weights_are_not_found(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unreadable.Kind, "engine", OldWeights)
    monkeypatch.setattr("oat.runtime.transfer.refuse_other_logps", lambda *arguments: None)
    assert oat("train", world.config("grpo", tmp_path, {**SMALL, **OWN})) == 0


@pytest.mark.sample("probe", seconds=1.7)
@pytest.mark.parametrize("proof", ["sample", "probe"])
def test_another_proof_changes_nothing_that_is_learned(proof: str, world: World, tmp_path: Path) -> None:
    """The embedded engine is proven in every way; a continued run may change the way."""
    digests = []
    for way in ("all", proof):
        config = world.config(
            "dpo", tmp_path, {**SMALL, "run_dir": str(tmp_path / way), "learner.sync_every": 2}
        )
        assert oat("train", config) == 0
        assert oat("train", config, "--stop.max_steps", "5", "--learner.weights_proof", way) == 0
        digests.append(digest_run(tmp_path / way))
    assert digests[0] == digests[1]


@pytest.mark.sample("bfloat16", seconds=0.4)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_probe_allows_the_rounding_of_a_precision_and_little_more(
    precision: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    differences = []

    def note(probe: Probe, engine: TorchEngine, shipment: Any) -> None:
        found = engine.logps([probe.ids], shipment.slot)[0]
        differences.append((float(np.abs(found - probe.logps).mean()), probe.tolerance))

    monkeypatch.setattr("oat.runtime.transfer.refuse_other_logps", note)
    changes = {**SMALL, "engine.dtype": precision, "learner.weights_proof": "probe"}
    assert oat("train", world.config("grpo", tmp_path, changes)) == 0
    assert {tolerance for _, tolerance in differences} == {{"float32": 1e-4, "bfloat16": 0.05}[precision]}
    assert all(difference < tolerance / 5 for difference, tolerance in differences)


def test_the_sequence_fits_the_context_and_the_vocabulary() -> None:
    assert len(probe_ids(1000, None)) == PROBE_TOKENS
    ids = probe_ids(16, 12)
    assert (len(ids), ids.dtype) == (12, np.int32)
    assert set(ids.tolist()) <= set(range(16))
    assert len(set(ids.tolist())) > 8


@pytest.mark.parametrize("proof", ["all", "sample"])
def test_weights_that_cannot_be_read_are_not_read(
    proof: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config("grpo", tmp_path, {**OWN, "learner.weights_proof": proof})
    assert oat("check", config) == 2
    error = capsys.readouterr().err
    assert f"learner.weights_proof is '{proof}': the weights of the engine" in error
    assert "cannot be read back; set it to probe, or leave it out" in error
    assert oat("check", config, "--learner.weights_proof", "probe") == 0
