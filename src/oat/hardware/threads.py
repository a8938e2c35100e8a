"""The number of threads to compute with.

For small models one thread is faster than two, and many times faster on a busy machine, where threads wait
for each other. So the number is measured once, when a run is created. It is kept with the run, because the
rounding of some results depends on it.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

_ROUNDS = 3
LARGE = 200_000_000
"""A model with more parameters is large."""
_GAIN = 0.95
"""More threads are chosen if they take at most this share of the time of fewer."""


@contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """Run the kernels of the body on `count` threads; None: on as many as now."""
    before = torch.get_num_threads()
    if count is not None and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def candidates(parameters: int) -> list[int]:
    """Return the numbers of threads to measure: powers of two up to the number that torch would use now, and
    that number. For a large model it is that number alone: fewer are never faster, and a measurement would
    take long."""
    most = min(torch.get_num_threads(), os.cpu_count() or 1)
    if parameters > LARGE:
        return [most]
    return sorted({*(1 << power for power in range(most.bit_length()) if 1 << power <= most), most})


def fastest(
    work: Callable[[], object], counts: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> int:
    """Return the number of threads on which the work is fastest, by the median of three rounds after one to
    warm up. Each round runs every number once.

    Args:
        counts: the numbers to try, ascending; among numbers with nearly the same time the lowest is chosen.
    """
    if len(counts) == 1:
        return counts[0]
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for round_ in range(_ROUNDS + 1):
        for count in counts:
            with on_threads(count):
                begin = clock()
                work()
                if round_:
                    seconds[count].append(clock() - begin)
    best = counts[0]
    for count in counts[1:]:
        if statistics.median(seconds[count]) <= _GAIN * statistics.median(seconds[best]):
            best = count
    return best
