"""Weights on the way to a holder: in buckets, staged and checked on arrival, and switched when all are there.

A holder, such as an engine, keeps its old weights until `Inbox.commit`. So a transfer that is cut off, or in
which a bucket is lost or damaged, leaves the old version answering.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from oat.engines.base import checksum
from oat.errors import WeightsError
from oat.types import Bucket, Receipt, Shipment

BUCKET_BYTES = 64 * 2**20
"""Most bytes of a bucket. A larger tensor is a bucket of its own."""


class Holder(Protocol):
    """An engine, or another box that computes with weights of the learner."""

    def load(self, slot: str, version: int, tensors: Mapping[str, Tensor]) -> Receipt: ...


class Inbox:
    """The side of a holder. It may be in another process than the sender.

    Args:
        holder: gets the weights when they are complete.
    """

    def __init__(self, holder: Holder):
        self.holder = holder
        self._shipment: Shipment | None = None
        self._staged: dict[str, Tensor] = {}

    def begin(self, shipment: Shipment) -> None:
        """Begin a transfer. What an earlier, unfinished one has staged is dropped."""
        self._shipment, self._staged = shipment, {}

    def put(self, bucket: Bucket) -> None:
        """Stage a bucket.

        Raises:
            WeightsError: no transfer has begun, the bucket belongs to another one, or one of its tensors has
                another checksum than at the sender.
        """
        shipment = self._current()
        if (bucket.slot, bucket.version) != (shipment.slot, shipment.version):
            raise WeightsError(
                f"slot {shipment.slot}, version {shipment.version}: a bucket of slot {bucket.slot}, version "
                f"{bucket.version}, came in between; send one transfer after the other"
            )
        damaged = [name for name, tensor in bucket.tensors.items() if checksum(tensor) != bucket.sums[name]]
        if damaged:
            raise WeightsError(
                f"slot {shipment.slot}, version {shipment.version}: {len(damaged)} tensors changed on the "
                f"way ({', '.join(damaged[:3])}); the holder keeps its old weights. Check memory and network"
            )
        self._staged |= bucket.tensors

    def commit(self) -> Receipt:
        """Give the holder the staged weights, and return its receipt.

        Raises:
            WeightsError: no transfer has begun, tensors are missing, or the holder refuses them.
        """
        shipment = self._current()
        missing = [name for name in shipment.names if name not in self._staged]
        if missing:
            raise WeightsError(
                f"slot {shipment.slot}, version {shipment.version}: {len(missing)} of {len(shipment.names)} "
                f"tensors did not arrive ({', '.join(missing[:3])}); the holder keeps its old weights"
            )
        staged, self._shipment, self._staged = self._staged, None, {}
        return self.holder.load(shipment.slot, shipment.version, staged)

    def _current(self) -> Shipment:
        if self._shipment is None:
            raise WeightsError("weights came without the beginning of a transfer; send all of it again")
        return self._shipment


def loaded_with(slot: str, shared: Sequence[Collection[str]]) -> Collection[str]:
    """Return the slots that have new weights when a slot was loaded: itself, and those with its storage.

    Args:
        shared: sets of slots that share their storage.
    """
    return next((slots for slots in shared if slot in slots), (slot,))


def buckets(
    slot: str, version: int, tensors: Mapping[str, Tensor], most_bytes: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Yield the tensors in buckets of at most `most_bytes`, in their order, each with its checksum."""
    some: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if some and size + tensor.nbytes > most_bytes:
            yield _bucket(slot, version, some)
            some, size = {}, 0
        some[name] = tensor
        size += tensor.nbytes
    if some:
        yield _bucket(slot, version, some)


def _bucket(slot: str, version: int, tensors: Mapping[str, Tensor]) -> Bucket:
    sums = {name: checksum(tensor) for name, tensor in tensors.items()}
    return Bucket(slot, version, dict(tensors), sums)
