"""The memory that is free on this machine."""

import re
from pathlib import Path

import torch


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
