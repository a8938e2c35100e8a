"""The memory that is free on this machine."""

import re
from pathlib import Path

import torch


def free_memory(profile: str) -> int | None:
    """Bytes that a run may still take on its device; None where the system does not say.

    Args:
        profile: `compute.profile`: "gpu", or the CPU.
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
    """The bytes that the limit of a container leaves, where there is one."""
    group = Path("/sys/fs/cgroup")
    try:
        most, used, stat = (
            (group / f"memory.{name}").read_text(encoding="ascii") for name in ("max", "current", "stat")
        )
        droppable = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)
        return [int(most) - int(used) + int(droppable[1] if droppable else 0)]
    except (OSError, ValueError):  # there is no such group, or "max": it has no limit
        return []
