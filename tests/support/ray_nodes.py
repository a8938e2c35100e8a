"""Ray clusters that a test starts on this machine, and whose address a run is given."""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from ray_runs import MARK, RayStrikes, marked


class Nodes:
    """Nodes of a cluster on this machine, which a test starts and ends.

    Attributes:
        address: of the cluster.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self._folder, self.address, self._names = folder, "", list[str]()
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))

    def start(self, name: str, cpus: int, modules: str = "") -> None:
        """Start a node, and wait until it is there. The first one is the head.

        Args:
            modules: a folder in which its processes look for modules first.
        """
        log, where = Path(f"{name}.log"), ["--head", "--port=0", "--include-dashboard=false"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--num-cpus={cpus}", "--block"]
        command += [f"--address={self.address}"] if self.address else where
        command += [] if self.address else [f"--temp-dir={self._folder / 't'}"]
        self._names.append(name)
        with log.open("wb") as file:
            subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={
                    **os.environ,
                    **({"PYTHONPATH": modules} if modules else {}),
                    MARK: name,
                    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
                },
            )
        until = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text() and time.monotonic() < until:
            time.sleep(0.1)
        if not self.address:
            found = re.search(r"--address='(\S+)'", log.read_text())
            assert found is not None, log.read_text()
            self.address = found[1]

    def lose(self, name: str) -> None:
        """Kill all processes of a node."""
        for process in list(marked(name)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def close(self) -> None:
        for name in self._names:
            self.lose(name)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, strikes: RayStrikes) -> Iterator[Nodes]:
    made = Nodes(strikes.temporary, monkeypatch)
    yield made
    made.close()
