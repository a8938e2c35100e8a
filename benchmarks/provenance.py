"""What a page says of the machine and the code that made its figures."""

import functools
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def machine() -> str:
    """Return the processor and the number of cores of this machine."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    processor = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return f"{processor}, {os.cpu_count()} cores"


@functools.cache
def commit() -> str:
    """Return the last commit that changed `src`, as of this process's first call, followed by a plus if `src`
    had changed since."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments, "--", "src"], capture_output=True, text=True, check=False
        ).stdout.strip()

    return (git("log", "-1", "--format=%h") or "an unknown commit") + (
        "+" if git("status", "--porcelain") else ""
    )
