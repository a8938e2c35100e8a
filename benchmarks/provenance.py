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
    """Return the project's commit when this process first asked for it, followed by a plus if the code of
    `src` or `benchmarks` had changed since that commit."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        ).stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "an unknown commit") + (
        "+" if git("status", "--porcelain", "--", "src", "benchmarks", ":!*.csv") else ""
    )
