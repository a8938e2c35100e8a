"""The number of threads to compute with.

For small models one thread is often faster than two. On a busy machine, where threads wait for each other,
one thread is many times faster. So on the CPU, if the settings leave the number open and the model is not
large, the fastest number is measured once, when a run is created. The run keeps this number, because the
rounding of some results depends on it.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

_ROUNDS = 3
_ENOUGH_S = 5.0
"""No round begins once the rounds before it have taken this many seconds."""
_MOST_WORK = 10**10
"""Largest number of tokens of a measured work, times the parameters of its model: a second or less of one
core. On a busy machine the work can take ten times as long on two threads."""
LARGE = 200_000_000
"""A model with more parameters than this number counts as large."""
_GAIN = 0.95
"""A larger number of threads is chosen only if the work then takes at most this fraction of its time on the
number chosen so far."""


@contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """Run torch's kernels in the body on `count` threads. None: the number of threads stays."""
    before = torch.get_num_threads()
    if count is not None and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def candidates(parameters: int) -> list[int]:
    """Return the numbers of threads to measure, ascending: the highest number and all powers of two below.
    The highest is torch's present number of threads or the number of processors, whichever is lower.

    For a large model, return the highest number alone: fewer threads were not faster, and measuring takes
    long.
    """
    most = min(torch.get_num_threads(), os.cpu_count() or 1)
    if parameters > LARGE:
        return [most]
    return sorted({*(1 << power for power in range(most.bit_length()) if 1 << power <= most), most})


def measured_tokens(parameters: int, most: int) -> int:
    """Return the number of tokens, from 1 to `most`, of the work that is measured with a model."""
    return max(1, min(most, _MOST_WORK // max(1, parameters)))


def fastest(
    work: Callable[[], object], counts: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> int:
    """Return the number of threads on which `work` is fastest. Each round runs `work` once on every number of
    threads. The first round warms up. Three more rounds are timed, and their medians are compared. There are
    fewer rounds if the work is slow (`_ENOUGH_S`). If only the first round was made, it counts.

    Args:
        counts: the numbers of threads to try, ascending. If several take nearly the same time, the lowest of
            them is chosen.
    """
    if len(counts) == 1:
        return counts[0]
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    start = clock()
    for _ in range(_ROUNDS + 1):
        for count in counts:
            with on_threads(count):
                begin = clock()
                work()
                seconds[count].append(clock() - begin)
        if clock() - start > _ENOUGH_S:
            break
    median = {count: statistics.median(times[1:] or times) for count, times in seconds.items()}
    best = counts[0]
    for count in counts[1:]:
        if median[count] <= _GAIN * median[best]:
            best = count
    return best
