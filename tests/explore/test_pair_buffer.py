"""The ring buffer of an ensemble, compared with a deque."""

from collections import deque
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.explore.pair_buffer import PairBuffer, Sampled

WIDTH = 3
MUCH = 50_000


def numbered(first: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return pairs (size, 2, WIDTH) that are all different: each number stands for a pair and a place in
    it."""
    flat = torch.arange(first * 2 * WIDTH, (first + size) * 2 * WIDTH, dtype=dtype)
    return flat.reshape(size, 2, WIDTH)


def number_of(pairs_P2D: torch.Tensor) -> list[int]:
    """Return the numbers of pairs that `numbered` made. Each pair must be whole."""
    found = [int(pair[0, 0]) // (2 * WIDTH) for pair in pairs_P2D]
    for pair, number in zip(pairs_P2D, found, strict=True):
        assert torch.equal(pair, numbered(number, 1, pairs_P2D.dtype)[0])
    return found


def responses_of(number: int) -> tuple[Sampled, Sampled]:
    """Return two responses whose ids stand for the number. Lengths differ, and a response may be empty."""
    ids = np.arange(number, number + 9, dtype=np.int32)
    return Sampled(ids[:2], ids[: number % 4]), Sampled(ids[:2], ids[3 : 5 + number % 3])


def numbers_in(found: tuple[Sampled, Sampled]) -> list[list[int]]:
    return [ids.tolist() for one in found for ids in one]


def placed(newest: deque[int], capacity: int) -> list[int]:
    """Return the pairs of a deque in the order of the ring: pair number i is at i modulo the capacity."""
    return sorted(newest, key=lambda number: number % capacity)


@pytest.mark.inventory(60)
@given(capacity=st.integers(1, 12), sizes=st.lists(st.integers(1, 30), max_size=12), again=st.integers(0, 12))
@settings(max_examples=150, deadline=None)
def test_it_holds_the_newest_pairs_also_after_its_state_was_saved(
    capacity: int, sizes: list[int], again: int
) -> None:
    """Additions may be larger than the buffer. After some of them the buffer is replaced by one that loads
    its state. Pairs of odd additions come with their responses."""
    buffer, newest, seen = PairBuffer(capacity), deque[int](maxlen=capacity), 0
    written: set[int] = set()
    for place, size in enumerate(sizes):
        numbers = range(seen, seen + size) if place % 2 else range(0)
        written |= set(numbers)
        buffer.add(numbered(seen, size), [responses_of(number) for number in numbers], numbers)
        newest.extend(range(seen, seen + size))
        seen += size
        if place == again:
            before, buffer = buffer, PairBuffer(capacity)
            buffer.load_state(before.state)
        assert (buffer.seen, buffer.size) == (seen, len(newest))
        assert number_of(buffer.pairs) == placed(newest, capacity)
        kept = {number % capacity: number for number in newest if number in written}
        assert buffer.versions == kept
        assert {place: numbers_in(found) for place, found in buffer.responses.items()} == {
            place: numbers_in(responses_of(number)) for place, number in kept.items()
        }


def test_features_are_replaced_at_their_places() -> None:
    buffer = PairBuffer(3)
    buffer.add(numbered(0, 4), [responses_of(number) for number in range(4)], range(4))
    buffer.refresh([2, 0], numbered(8, 2), 7)
    assert number_of(buffer.pairs) == [9, 1, 8]
    assert buffer.versions == {0: 7, 1: 1, 2: 7}


def test_nothing_may_be_added() -> None:
    buffer = PairBuffer(3)
    buffer.add(torch.zeros(0, 2, WIDTH))
    assert (buffer.size, buffer.seen) == (0, 0)


@pytest.mark.parametrize("size", [1, 7, 300, 1000])
def test_memory_grows_with_the_pairs_and_keeps_them(size: int) -> None:
    """Memory is for few pairs at first, and at most doubles when it is full. It is never larger than the
    capacity."""
    buffer, capacity, places, bytes_of_a_pair = PairBuffer(1500), 1500, set(), 2 * WIDTH * 4
    for number in count():
        buffer.add(numbered(number * size, size))
        room = buffer.pairs.untyped_storage().nbytes() // bytes_of_a_pair
        places.add(buffer.pairs.data_ptr())
        assert buffer.size <= room <= min(max(256, 2 * buffer.size), capacity)
        if buffer.seen > 2 * capacity:
            break
        assert number_of(buffer.pairs[: min(buffer.seen, 3)])[:1] == [0] or buffer.seen > capacity
    assert len(places) <= 5
    assert sorted(number_of(buffer.pairs)) == list(range(buffer.seen - capacity, buffer.seen))


def test_a_large_capacity_alone_takes_no_memory() -> None:
    buffer = PairBuffer(MUCH)
    buffer.add(numbered(0, 2))
    assert buffer.pairs.untyped_storage().nbytes() < 256 * 2 * WIDTH * 4 + 1


def test_pairs_are_no_copy() -> None:
    """They are read at every optimiser step."""
    buffer = PairBuffer(4)
    buffer.add(numbered(0, 4))
    held = buffer.pairs
    assert held.data_ptr() == buffer.pairs.data_ptr()
    buffer.add(numbered(4, 1))
    assert number_of(held) == [4, 1, 2, 3], "a new pair is seen in what was read before"


def test_what_is_added_is_copied() -> None:
    buffer, mine = PairBuffer(4), numbered(0, 2)
    buffer.add(mine)
    mine.zero_()
    assert number_of(buffer.pairs) == [0, 1]


def test_a_loaded_state_is_independent_of_where_it_came_from() -> None:
    first, second = PairBuffer(3), PairBuffer(3)
    first.add(numbered(0, 5))
    second.load_state(first.state)
    first.add(numbered(5, 1))
    assert (number_of(second.pairs), second.seen) == ([3, 4, 2], 5)
    second.add(numbered(5, 2))
    assert (number_of(first.pairs), number_of(second.pairs)) == ([3, 4, 5], [6, 4, 5])


def test_an_empty_buffer_has_a_state() -> None:
    buffer = PairBuffer(3)
    buffer.load_state(PairBuffer(3).state)
    assert (buffer.size, buffer.seen, len(buffer.pairs)) == (0, 0, 0)
    buffer.add(numbered(0, 2))
    assert number_of(buffer.pairs) == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_keep_their_precision(dtype: torch.dtype) -> None:
    buffer, third = PairBuffer(3), torch.full((1, 2, WIDTH), 1 / 3, dtype=dtype)
    buffer.add(third)
    assert buffer.pairs.dtype == dtype
    assert torch.equal(buffer.pairs, third)
