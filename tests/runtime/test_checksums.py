"""Checksums of tensors: every flipped bit changes them, and a sample reads what it says."""

import zlib

import numpy as np
import pytest
import torch
from weights import turn_bit

from oat.runtime.transfer import GROUP, checksum, checksums

ROW = 4096
"""Bytes of a row."""


def by_hand(data: bytes, first: int | None = None) -> int:
    """The checksum of bytes, in Python's whole numbers."""
    rows = [data[start : start + ROW] for start in range(0, len(data) // ROW * ROW, ROW)]
    if len(rows) < GROUP:
        return zlib.crc32(data)
    numbers = [[int.from_bytes(row[at : at + 8], "little") for at in range(0, ROW, 8)] for row in rows]
    numbers = numbers if first is None else numbers[first::GROUP]
    sums = [*map(sum, zip(*numbers, strict=True)), *map(sum, numbers)]
    tail = data[len(rows) * ROW :]
    return zlib.crc32(b"".join((number % 2**64).to_bytes(8, "little") for number in sums) + tail)


@pytest.mark.parametrize("size", [0, 1, ROW, GROUP * ROW - 1, GROUP * ROW, 37 * ROW + 1234])
@pytest.mark.parametrize("first", [None, 0, 5])
def test_a_checksum_is_that_of_whole_numbers(size: int, first: int | None) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert checksum(torch.from_numpy(data), first) == by_hand(data.tobytes(), first)


def test_threads_and_layout_and_place_in_memory_do_not_matter() -> None:
    tensor = torch.randn(301, 517, generator=torch.Generator().manual_seed(1))
    found = checksum(tensor)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert checksum(tensor) == found
    finally:
        torch.set_num_threads(before)
    assert checksum(tensor.t().contiguous().t()) == found
    shifted = torch.empty(1 + tensor.numel())
    shifted[1:] = tensor.view(-1)
    assert checksum(shifted[1:].view(tensor.shape)) == found
    assert checksum(tensor.to(torch.bfloat16)) != found


def test_every_flipped_bit_and_every_exchange_of_rows_is_found() -> None:
    tensor = torch.randn(300, 300, generator=torch.Generator().manual_seed(2))
    found = checksum(tensor)
    drawn = np.random.default_rng(3)
    for place, bit in zip(drawn.integers(0, tensor.nbytes, 300), drawn.integers(0, 8, 300), strict=True):
        turn_bit(tensor, int(place), int(bit))
        assert checksum(tensor) != found
        turn_bit(tensor, int(place), int(bit))
    assert checksum(tensor) == found
    raw = tensor.view(-1).view(torch.uint8)
    rows = raw[: 80 * ROW].view(80, ROW)
    rows[[3, 40]] = rows[[40, 3]]
    assert checksum(tensor) != found


def test_samples_of_all_versions_together_read_everything() -> None:
    """A flipped bit is in a sixteenth of the samples, wherever it is; small tensors are read whole."""
    tensors = {"large": torch.zeros(40 * ROW // 4), "small": torch.zeros(ROW)}
    before = {version: checksums(tensors, sample=version) for version in range(320)}
    for place in (0, 17 * ROW + 99, 40 * ROW - 1):
        turn_bit(tensors["large"], place, 3)
        found = [checksums(tensors, sample=version) != sums for version, sums in before.items()]
        turn_bit(tensors["large"], place, 3)
        assert 8 <= sum(found) <= 40
    turn_bit(tensors["small"], 5, 3)
    assert all(
        checksums(tensors, sample=version)["small"] != sums["small"] for version, sums in before.items()
    )
