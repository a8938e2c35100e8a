"""The transfer of weights from the learner to engines, with proof.

The tensors travel in buckets (`runtime/transfer.py`). After the switch, the holder of a slot, such as an
engine, computes checksums of the tensors that it works with. They must equal the checksums of the tensors
that were sent. So a single flipped bit in a holder's copy stops the run.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from oat.errors import WeightsError
from oat.protocols import Learner
from oat.runtime.transfer import buckets, loaded_with
from oat.types import Bucket, Receipt, Shipment

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
        holders: the sides of the boxes that hold each slot, by slot. The slot `reference` is there only if
            the reference follows the policy.
        sync_every: number of steps from one sync to the next.
        dtypes: precisions by slot, for slots whose precision differs from the learner's. Weights are cast to
            the slot's precision before they are sent.
        shared: sets of slots that share their storage. Who loads one of them has loaded all.
        versions: where the version is noted that each slot was last given.
    """

    def __init__(
        self,
        holders: Mapping[str, Sequence[Receiver]],
        sync_every: int,
        dtypes: Mapping[str, torch.dtype] | None = None,
        shared: Sequence[Collection[str]] = (),
        versions: dict[str, int] | None = None,
    ):
        self.holders = dict(holders)
        self.sync_every = sync_every
        self.dtypes = dict(dtypes or {})
        self.shared = [frozenset(slots) for slots in shared]
        self.versions = {} if versions is None else versions
        self.synced = [slot for slot in self.holders if slot not in ("policy", "reference")]
        self.sampler_version = self.reference_version = 0
        self.kept: dict[str, dict[str, torch.Tensor]] = {}

    def due(self, step: int) -> bool:
        """Return True if all slots except `policy` and `reference` get new weights after this step."""
        return (step + 1) % self.sync_every == 0

    def sync(self, learner: Learner, version: int) -> None:
        """Load the learner's weights into every synced slot, as version `version`. If a load fails, `state`
        already says that the slots get them."""
        tensors = {slot: learner.tensors(MODEL_OF_SLOT[slot]) for slot in self.synced}
        self.sampler_version = version
        if self.sync_every > 1:
            self.kept = {
                slot: {name: tensors[slot][name].clone() for name in learner.trainable(MODEL_OF_SLOT[slot])}
                for slot in self.synced
            }
        for slot in self.synced:
            self.push(slot, version, tensors[slot])

    def follow(self, learner: Learner) -> None:
        """If the version of the learner's reference has changed, by an update or by a roll back, load the
        reference into the slot `reference`."""
        version = learner.version("reference")
        if "reference" in self.holders and version != self.reference_version:
            self.push("reference", version, learner.tensors("reference"))
            self.reference_version = version

    def restore(self, learner: Learner) -> None:
        """Load into each synced slot the weights that it had at the checkpoint; in a new run, the learner's
        initial weights. Update the slot `reference` as `follow` does. The learner's state must be loaded
        before this call."""
        self.follow(learner)
        if not self.kept:
            self.sync(learner, self.sampler_version)
        for slot, tensors in self.kept.items():
            self.push(slot, self.sampler_version, {**learner.tensors(MODEL_OF_SLOT[slot]), **tensors})

    def push(self, slot: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Cast weights to a slot's precision, and load them into every holder of the slot. Check that each
        holder then has the weights that were sent.

        Raises:
            WeightsError: weights did not arrive as they were sent, or a holder has other weights afterwards.
        """
        if slot in self.dtypes:
            tensors = {
                name: tensor.to(self.dtypes[slot]) if tensor.is_floating_point() else tensor
                for name, tensor in tensors.items()
            }
        holders, sent = self.holders[slot], dict[str, int]()
        for holder in holders:
            holder.begin(Shipment(slot, version, tuple(tensors)))
        for bucket in buckets(slot, version, tensors):
            sent |= bucket.sums
            for holder in holders:
                holder.put(bucket)
        for number, holder in enumerate(holders):
            prove(holder.commit(), Receipt(slot, version, sent), number)
        self.versions |= dict.fromkeys(loaded_with(slot, self.shared), version)

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


def prove(held: Receipt, sent: Receipt, number: int) -> None:
    """Compare the receipt of a holder with that of the weights that were sent.

    Args:
        number: the holder's index, for the message.

    Raises:
        WeightsError: the receipts differ. The message names up to three tensors that differ.
    """
    names = sent.checksums.keys() | held.checksums.keys()
    wrong = sorted(name for name in names if sent.checksums.get(name) != held.checksums.get(name))
    if wrong or (held.slot, held.version) != (sent.slot, sent.version):
        raise WeightsError(
            f"holder {number}, slot {sent.slot}, version {sent.version}: after the load it holds version "
            f"{held.version}, and {len(wrong)} tensors differ from those sent ({', '.join(wrong[:3])}); do "
            "not trust this run's newest samples, and check the machine's memory"
        )
