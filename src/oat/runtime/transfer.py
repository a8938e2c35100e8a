"""Weights on the way to a holder: in buckets, staged and checked on arrival, and switched when all are there.

A holder, such as an engine, keeps its old weights until `Inbox.commit`. So a transfer that is cut off, or in
which a bucket is lost or damaged, leaves the old version answering.

Checksums of tensors on their way to a holder.

The bytes of a tensor are the numbers of a table: 64 bits a number, `_ROW` numbers a row. The checksum is the
CRC-32 of the sums of all columns and of all rows, modulo 2^64, and of the bytes after the last whole row.
Sums of whole numbers are exact in any order. So a CPU with any number of threads and a GPU find the same
checksum, and a GPU sends only the sums to the CPU. One flipped bit, and any change of a single number,
changes the sum of its column. Bytes that differ in another way have equal checksums by chance, 1 in 2^32. A
tensor with fewer than `GROUP` rows has the CRC-32 of its bytes.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, cast

import torch
from torch import Tensor

from oat.engines.base import Engine
from oat.errors import WeightsError
from oat.runtime.probe import refuse_other_logps
from oat.types import Bucket, Probe, Receipt, Shipment

_ROW = 512
GROUP = 16
"""A sample has one row, 4 KiB, of this number."""


def checksum(tensor: Tensor, first: int | None = None) -> int:
    """Return the checksum of a tensor's bytes in row-major order.

    Args:
        first: a number below `GROUP`: only the rows `first`, `first + GROUP`, `first + 2 GROUP` and so on are
            read, and the bytes after the last whole row. None: all bytes are read.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // (8 * _ROW) * 8 * _ROW
    if whole < GROUP * 8 * _ROW:
        return zlib.crc32(flat.cpu().numpy().data)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    table = flat[:whole].view(torch.int64).view(-1, _ROW)
    rows = table if first is None else table[first::GROUP]
    found = 0
    for part in (_column_sums(rows), rows.sum(1), flat[whole:]):
        found = zlib.crc32(part.cpu().numpy().data, found)
    return found


def _column_sums(rows: Tensor) -> Tensor:
    """Return the sum of each column. On a CPU numpy sums columns three times as fast as torch on one core."""
    return torch.from_numpy(rows.numpy().sum(0)) if rows.device.type == "cpu" else rows.sum(0)


def checksums(tensors: Mapping[str, Tensor], *, sample: int | None = None) -> dict[str, int]:
    """Return the checksum of each tensor, by name.

    Args:
        sample: number of a sample, such as a version: only `1 / GROUP` of the bytes are read. Which, depends
            on this number and on the tensor's name, as if it were drawn. A tensor with fewer than `GROUP`
            rows is read whole. None: all bytes are read.
    """
    return {
        name: checksum(tensor, None if sample is None else zlib.crc32(f"{sample} {name}".encode()) % GROUP)
        for name, tensor in tensors.items()
    }


BUCKET_BYTES = 64 * 2**20
"""Most bytes of a bucket. A larger tensor is a bucket of its own."""


class Holder(Protocol):
    """An engine, or another box that computes with weights of the learner. The methods are those of
    `oat.engines.base.Engine`."""

    def load(self, slot: str, version: int, tensors: Mapping[str, Tensor]) -> None: ...

    def tensors(self, slot: str) -> Mapping[str, Tensor]: ...

    def version(self, slot: str) -> int: ...


class Inbox:
    """The side of a holder. It may be in another process than the sender.

    Args:
        holder: gets the weights when they are complete.
    """

    def __init__(self, holder: Holder):
        self.holder = holder
        self._shipment: Shipment | None = None
        self._staged: dict[str, Tensor] = {}
        self._sums: dict[str, int] = {}

    def begin(self, shipment: Shipment) -> None:
        """Begin a transfer. What an earlier, unfinished one has staged is dropped."""
        self._shipment, self._staged, self._sums = shipment, {}, {}

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
        arrived = checksums(bucket.tensors)
        damaged = [name for name, found in arrived.items() if found != bucket.sums[name]]
        if damaged:
            raise WeightsError(
                f"slot {shipment.slot}, version {shipment.version}: {len(damaged)} tensors changed on the "
                f"way ({', '.join(damaged[:3])}); the holder keeps its old weights. Check memory and network"
            )
        self._staged |= bucket.tensors
        self._sums |= arrived

    def commit(self) -> Receipt:
        """Give the holder the staged weights, and return the receipt that `Shipment.proof` asks for.

        Raises:
            WeightsError: no transfer has begun, tensors are missing, the holder refuses them, or it computes
                other log-probabilities than those of the probe.
        """
        shipment = self._current()
        missing = [name for name in shipment.names if name not in self._staged]
        if missing:
            raise WeightsError(
                f"slot {shipment.slot}, version {shipment.version}: {len(missing)} of {len(shipment.names)} "
                f"tensors did not arrive ({', '.join(missing[:3])}); the holder keeps its old weights"
            )
        staged, arrived = self._staged, self._sums
        self._shipment, self._staged, self._sums = None, {}, {}
        self.holder.load(shipment.slot, shipment.version, staged)
        return Receipt(shipment.slot, self.holder.version(shipment.slot), self._proven(shipment, arrived))

    def _proven(self, shipment: Shipment, arrived: dict[str, int]) -> dict[str, int]:
        """Return the checksums of a receipt.

        Args:
            arrived: those of the tensors that arrived.
        """
        if isinstance(shipment.proof, Probe):
            refuse_other_logps(shipment.proof, cast(Engine, self.holder), shipment)
            return arrived
        sample = shipment.version if shipment.proof == "sample" else None
        return checksums(self.holder.tensors(shipment.slot), sample=sample)

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
    slot: str,
    version: int,
    sizes: Iterable[tuple[str, int]],
    take: Callable[[Collection[str]], Iterable[tuple[str, Tensor]]],
    most_bytes: int = BUCKET_BYTES,
) -> Iterator[Bucket]:
    """Yield tensors in buckets of at most `most_bytes`, each with its checksum. A larger tensor is a bucket
    of its own. A thread computes the checksums while a bucket is filled. Who drops a bucket before the next
    comes has one of them in memory at a time.

    Args:
        sizes: the names of the tensors, in their order, and their bytes.
        take: function that returns the tensors with these names.
    """
    with ThreadPoolExecutor(1, "checksums") as thread:
        for names in in_shares(sizes, most_bytes):
            content, sums = dict[str, Tensor](), dict[str, Future[int]]()
            for name, tensor in take(names):
                content[name], sums[name] = tensor, thread.submit(checksum, tensor)
                del tensor
            yield Bucket(slot, version, content, _known(sums))
            del content


def _known(sums: Mapping[str, "Future[int]"]) -> dict[str, int]:
    return {name: found.result() for name, found in sums.items()}


def in_shares(sizes: Iterable[tuple[str, int]], most_bytes: int = BUCKET_BYTES) -> Iterator[list[str]]:
    """Yield names of tensors in shares of at most `most_bytes`, in their order. A larger tensor is a share of
    its own.

    Args:
        sizes: pairs of a name and a size in bytes.
    """
    some, total = list[str](), 0
    for name, size in sizes:
        if some and total + size > most_bytes:
            yield some
            some, total = [], 0
        some.append(name)
        total += size
    if some:
        yield some
