"""A real reward server in processes of its own, for tests; it ends with them."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiny_models import build_config, build_tokenizer, save_reward_model

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }}<eos>{% endfor %}"
START_S = 180.0


def save_tiny_reward_model(folder: Path, *, is_chat: bool = True) -> str:
    """A random reward model that reads 512 characters."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE if is_chat else None
    return save_reward_model(folder, build_config("llama", context=512), tokenizer)


@dataclass
class Served:
    """A server that is ready.

    Attributes:
        process: of its front.
        said: its lines so far.
    """

    url: str
    process: subprocess.Popen
    said: list[str]

    @property
    def session(self) -> dict[int, str]:
        """The other processes of the server with their command lines, by id."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((place / "stat").read_text().rsplit(")", 1)[1].split()[1])
                found[int(place.name)] = (
                    parent,
                    (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(),
                )
            except (OSError, ValueError):
                continue
        family = {self.process.pid}
        while more := {pid for pid, (parent, _) in found.items() if parent in family} - family:
            family |= more
        return {pid: found[pid][1] for pid in family - {self.process.pid}}

    @property
    def workers(self) -> list[int]:
        """The processes that hold the model."""
        return [
            pid
            for pid, command in self.session.items()
            if "--multiprocessing-fork" in command and "spawn_main" in command
        ]


@contextmanager
def served(
    *arguments: str,
    command: Sequence[str] = ("oat", "serve", "reward"),
    log: Path | None = None,
    port: int = 0,
) -> Iterator[Served]:
    """A server, once it is ready.

    Args:
        log: gets what it says on stderr.
        port: 0 takes a free one.
    """
    errors = log.open("wb") if log else None
    words = [sys.executable, "-m", *command, *arguments, "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, env=environment)
    try:
        yield _ready(process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if errors:
            errors.close()


def _ready(process: subprocess.Popen) -> Served:
    assert process.stdout is not None
    said = []
    text = b""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if not select.select([process.stdout], [], [], 1.0)[0]:
            continue
        data = os.read(process.stdout.fileno(), 4096)
        assert data, f"the server ended: {said}"
        text += data
        said = text.decode().splitlines()
        if found := re.search(rb"ready: POST (http://\S+)/get_feedback", text):
            return Served(found[1].decode(), process, said)
    raise AssertionError(f"the server was not ready: {said}")
