"""The memory of this machine: what is free of it, and how much of it libraries may keep."""

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path

import torch

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's malloc.h."""
_SIZE = 2**20
"""Bytes of the smallest block that gets a memory mapping of its own."""
_CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""The capacities of oneDNN's cache of kernels, and of torch's cache above it."""


def free_memory(profile: str) -> int | None:
    """Return the bytes that a run may still allocate on its device. Return None if the system does not report
    them.

    Args:
        profile: the setting `compute.profile`. For "gpu" the GPU's memory is reported, otherwise the CPU's.
    """
    if profile == "gpu":
        return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None
    try:
        free = re.search(
            r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE
        )
    except OSError:
        return None
    return min([int(free[1]) * 1024, *_free_in_group()]) if free else None


def _free_in_group() -> list[int]:
    """Return a list with the bytes that are left below the memory limit of this container (cgroup). If there
    is no limit, return an empty list."""
    group = Path("/sys/fs/cgroup")
    try:
        most, used, stat = (
            (group / f"memory.{name}").read_text(encoding="ascii") for name in ("max", "current", "stat")
        )
        droppable = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)
        return [int(most) - int(used) + int(droppable[1] if droppable else 0)]
    except (OSError, ValueError):  # the group is missing, or has no limit ("max")
        return []


def give_back_freed_memory() -> None:
    """Make glibc give every block of a mebibyte or more a memory mapping of its own. Such a block goes back
    to the system when it is freed. With another C library this function does nothing.

    By default glibc keeps freed blocks of up to 32 MB, and the gaps between them. With a model of 0.6 billion
    parameters, these were a quarter of the peak memory. Small models run faster with the default.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_MMAP_THRESHOLD, _SIZE)


def keep_few_kernels() -> None:
    """Let oneDNN keep 32 kernels in this process, and in processes that it starts. Numbers that the
    environment sets already stay. Call this before the first product of two matrices: oneDNN reads the
    numbers only once. No result depends on them.

    oneDNN makes a kernel for every shape of a product. A kernel takes half a millisecond to make and half a
    megabyte of memory, and by default 1,024 are kept. A backward pass of a model uses about 32 of them
    repeatedly: two or three for each shape.
    """
    for name in _CAPACITIES:
        os.environ.setdefault(name, "32")
