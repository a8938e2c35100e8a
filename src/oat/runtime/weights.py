"""The transfer of weights from the learner to engines, with proof.

The tensors travel in buckets (`runtime/transfer.py`), each with its checksum. After the switch, the holder of
a slot, such as an engine, proves that it computes with them (`Shipment.proof`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch

from oat.errors import WeightsError
from oat.protocols import Learner
from oat.runtime.probe import Probing
from oat.runtime.transfer import buckets, checksums, loaded_with
from oat.types import ENSEMBLE, Bucket, Probe, Receipt, Shipment

MODEL_OF_SLOT = {"sampler": "policy", "policy": "policy", "reference": "reference", "ensemble": "ensemble"}
"""For each slot, the learner's model whose weights the slot holds. The slot `policy` is loaded for an
evaluation only. The slot `reference` is loaded when the reference has changed."""


class Receiver(Protocol):
    """The side of a holder (`transfer.Inbox`)."""

    def begin(self, shipment: Shipment) -> None: ...

    def put(self, bucket: Bucket) -> None: ...

    def commit(self) -> Receipt: ...


class Weights:
    """The transfer of weights to the slots of a run. Every `sync_every` steps there is a sync: the synced
    slots (all except `policy` and `reference`) get the learner's weights.

    Args:
        holders: the side of the box that holds each slot, by slot. The slot `reference` is there only if the
            reference follows the policy.
        sync_every: number of steps from one sync to the next.
        dtypes: precisions by slot, for slots whose precision differs from the learner's. Weights are cast to
            the slot's precision before they are sent.
        shared: sets of slots that share their storage. Who loads one of them has loaded all.
        versions: where the version is noted that each slot was last given.
        proof: how holders prove that they compute with what was sent. An ensemble is not probed; its tensors
            are read back.
    """

    def __init__(
        self,
        holders: Mapping[str, Receiver],
        sync_every: int,
        dtypes: Mapping[str, torch.dtype] | None = None,
        shared: Sequence[Collection[str]] = (),
        versions: dict[str, int] | None = None,
        proof: Literal["all", "sample"] | Probing = "all",
    ):
        self.holders = dict(holders)
        self.sync_every = sync_every
        self.dtypes = dict(dtypes or {})
        self.shared = [frozenset(slots) for slots in shared]
        self.versions = {} if versions is None else versions
        self.proof = proof
        self.synced = [slot for slot in self.holders if slot not in ("policy", "reference")]
        self.sampler_version = self.reference_version = 0
        self.kept: dict[str, dict[str, torch.Tensor]] = {}

    def due(self, step: int) -> bool:
        """Return True if all slots except `policy` and `reference` get new weights after this step."""
        return (step + 1) % self.sync_every == 0

    def take(self, learner: Learner, version: int) -> None:
        """Take the learner's weights, as version `version`, for every synced slot. From here on `state` says
        that the slots get them; `load` loads them."""
        self.sampler_version = version
        if self.sync_every > 1:
            for slot in self.synced:
                model, kept = MODEL_OF_SLOT[slot], self.kept.setdefault(slot, {})
                # one after another, so that there is never a second copy of the model
                for name, tensor in learner.named_tensors(model, learner.trainable(model)):
                    kept[name] = tensor.clone()

    def load(self, learner: Learner) -> None:
        """Load the learner's weights, which `take` took, into every synced slot."""
        for slot in self.synced:
            self.push(slot, self.sampler_version, learner)

    def sync(self, learner: Learner, version: int) -> None:
        """Load the learner's weights into every synced slot, as version `version`."""
        self.take(learner, version)
        self.load(learner)

    def follow(self, learner: Learner) -> None:
        """If the version of the learner's reference has changed, by an update or by a roll back, load the
        reference into the slot `reference`."""
        version = learner.version("reference")
        if "reference" in self.holders and version != self.reference_version:
            self.push("reference", version, learner)
            self.reference_version = version

    def restore(self, learner: Learner) -> None:
        """Load into each synced slot the weights that it had at the checkpoint; in a new run, the learner's
        initial weights. Update the slot `reference` as `follow` does. The learner's state must be loaded
        before this call."""
        self.follow(learner)
        if not self.kept:
            self.sync(learner, self.sampler_version)
        for slot, tensors in self.kept.items():
            with _older(learner, MODEL_OF_SLOT[slot], tensors):
                self.push(slot, self.sampler_version, learner)

    def push(self, slot: str, version: int, learner: Learner) -> None:
        """Cast the learner's weights of a slot's model to the slot's precision, and load them into its
        holder. Check that the holder then computes with the weights that were sent.

        Raises:
            WeightsError: weights did not arrive as they were sent, or the holder has others afterwards.
        """
        model, proof = MODEL_OF_SLOT[slot], self._proof(slot, learner)
        sizes = learner.sizes(model)
        holder, sent, sampled = self.holders[slot], dict[str, int](), dict[str, int]()
        holder.begin(Shipment(slot, version, tuple(name for name, _ in sizes), proof))

        def take(names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
            return self._cast(slot, learner.named_tensors(model, names))

        for bucket in buckets(slot, version, sizes, take):
            sent |= bucket.sums
            if proof == "sample":
                sampled |= checksums(bucket.tensors, sample=version)
            holder.put(bucket)
            del bucket
        prove(holder.commit(), Receipt(slot, version, sampled if proof == "sample" else sent))
        self.versions |= dict.fromkeys(loaded_with(slot, self.shared), version)

    def _cast(
        self, slot: str, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights in the precision of a slot."""
        dtype = self.dtypes.get(slot)
        for name, tensor in tensors:
            yield name, tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

    def _proof(self, slot: str, learner: Learner) -> Literal["all", "sample"] | Probe:
        if not isinstance(self.proof, Probing):
            return self.proof
        return "all" if slot == ENSEMBLE else self.proof.probe(learner, MODEL_OF_SLOT[slot])

    @property
    def state(self) -> dict[str, Any]:
        """The version of the synced slots. If `sync_every` is above 1, also their trained weights, which may
        differ from the learner's."""
        tensors = {
            f"{slot}/{name}": tensor for slot, kept in self.kept.items() for name, tensor in kept.items()
        }
        return {"version": self.sampler_version, **tensors}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.sampler_version = state["version"]
        self.kept = {}
        for place, tensor in state.items():
            slot, slash, name = place.partition("/")
            if slash and self.sync_every > 1 and slot in self.holders:  # an evaluation has fewer slots
                self.kept.setdefault(slot, {})[name] = tensor


def _trained(learner: Learner, model: str) -> dict[str, torch.Tensor]:
    """Return copies of those weights of a model that learning changes."""
    return {name: tensor.clone() for name, tensor in learner.named_tensors(model, learner.trainable(model))}


@contextmanager
def _older(learner: Learner, model: str, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Within the body, a model of the learner has older trained weights."""
    now = _trained(learner, model)
    learner.load_weights(model, tensors)
    try:
        yield
    finally:
        learner.load_weights(model, now)


def prove(held: Receipt, sent: Receipt) -> None:
    """Compare the receipt of a holder with that of the weights that were sent.

    Raises:
        WeightsError: the receipts differ. The message names up to three tensors that differ.
    """
    names = sent.checksums.keys() | held.checksums.keys()
    wrong = sorted(name for name in names if sent.checksums.get(name) != held.checksums.get(name))
    if wrong or (held.slot, held.version) != (sent.slot, sent.version):
        raise WeightsError(
            f"slot {sent.slot}, version {sent.version}: after the load its holder has slot {held.slot}, "
            f"version {held.version}, and {len(wrong)} tensors differ from those sent "
            f"({', '.join(wrong[:3])}); do not trust this run's newest samples, and check the machine's "
            "memory"
        )
