"""Runs of a test process do not wait for the disk, and ask git once about the project.

What a process has written survives its SIGKILL in the kernel's memory. Only a power cut would lose it, and no
test cuts the power. A cold process that a test starts waits for the disk, as users' processes do.
"""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oat.files import start
from oat.ledger.schema import Connection
from oat.rundir import provenance

ROOT = Path(__file__).parents[2]


def _sync(descriptor: int) -> None:
    os.fstat(descriptor)  # a closed descriptor still fails


@pytest.fixture(scope="session", autouse=True)
def brief_writes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let this process and its forks write files and ledgers without waiting for the disk. They ask git about
    the project's folder once, and about every other folder as often as users' runs do. In `make faults`
    nothing is replaced."""
    if request.config.getoption("--fault"):
        yield
        return
    opened, asked = Connection.__init__, provenance._git
    known = functools.cache(lambda *arguments: asked(*arguments))

    def opens(self: Connection, path: Path, **how: bool) -> None:
        opened(self, path, **how)
        if not self.is_read_only:
            self.db.execute("PRAGMA synchronous = OFF")

    def asks(*arguments: str) -> str | None:
        return (known if start() == ROOT else asked)(*arguments)

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (os, "fsync", _sync),
        (Connection, "__init__", opens),
        (provenance, "_git", asks),
    )
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, other in replaced:
            patch.setattr(owner, name, other)
        yield
