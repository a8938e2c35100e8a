"""Weights from the learner to the engine, with proof.

After every load the engine reads back the tensors it generates with; their checksums must be those of the learner's. One flipped bit in the
engine's copy stops the run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from oat.boxes import Learner
from oat.engines.base import Engine, checksum
from oat.errors import WeightsError
from oat.types import Receipt


class Weights:
    """Keeps the engines' slots at the versions they should hold.

    Args:
        engines: every engine of the run.
        sync_every: steps between two syncs of the sampler.
    """

    def __init__(self, engines: Sequence[Engine], sync_every: int):
        self.engines, self.sync_every = engines, sync_every
        self.sampler_version = 0
        self.kept: dict[str, torch.Tensor] = {}

    def due(self, step: int) -> bool:
        return (step + 1) % self.sync_every == 0

    def sync(self, learner: Learner, version: int) -> None:
        """Give the sampler the policy's weights, as `version`."""
        tensors = learner.tensors("policy")
        if self.sync_every > 1:
            self.kept = {name: tensor.clone() for name, tensor in tensors.items()}
        self.sampler_version = version
        self.push("sampler", version, tensors)

    def restore(self, learner: Learner) -> None:
        """After a load of the learner: give every engine the versions of the checkpoint, also before step 0."""
        if self.kept:
            self.push("sampler", self.sampler_version, self.kept)
        else:
            self.sync(learner, self.sampler_version)

    def push(self, slot: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a slot of every engine and compare what it holds with what was sent.

        Raises:
            WeightsError: an engine holds other weights.
        """
        sent = {name: checksum(tensor) for name, tensor in tensors.items()}
        for number, engine in enumerate(self.engines):
            prove(engine.load(slot, version, tensors), Receipt(slot, version, sent), number)

    @property
    def state(self) -> dict[str, Any]:
        """The sampler's weights, where they may differ from the policy's, and their version."""
        return {"version": self.sampler_version, **{f"sampler/{name}": tensor for name, tensor in self.kept.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.sampler_version = state["version"]
        self.kept = {name.removeprefix("sampler/"): tensor for name, tensor in state.items() if name.startswith("sampler/")}


def prove(held: Receipt, sent: Receipt, number: int) -> None:
    """Compare two receipts.

    Raises:
        WeightsError: names the tensors that differ.
    """
    names = sent.checksums.keys() | held.checksums.keys()
    wrong = sorted(name for name in names if sent.checksums.get(name) != held.checksums.get(name))
    if wrong or (held.slot, held.version) != (sent.slot, sent.version):
        raise WeightsError(
            f"engine {number}, slot {sent.slot}, version {sent.version}: after the load it holds version {held.version}, and {len(wrong)} tensors "
            f"differ from those sent ({', '.join(wrong[:3])}); do not trust this run's newest samples, and check the machine's memory"
        )
