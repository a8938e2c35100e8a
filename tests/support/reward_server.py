"""A real reward server in processes of its own. It stops at the end of the test."""

import http.client
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from tiny_models import build_config, build_tokenizer, save_reward_model

from oat.models.scoring import Scorer
from oat.types import Message

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m.get('name', '') }} {{ m['content'] }}<eos>{% endfor %}"
)
START_S = 180.0
TOKEN = "sesame-4711-sesame"


def save_tiny_reward_model(folder: Path, *, is_chat: bool = True) -> str:
    """Save a random reward model with a context of 512 characters, and return its path."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE if is_chat else None
    return save_reward_model(folder, build_config("llama", context=512), tokenizer)


@dataclass
class Served:
    """A server that is ready.

    Attributes:
        process: the front process.
        said: the lines of its output so far.
        log: the file with its error output.
    """

    url: str
    process: subprocess.Popen
    said: list[str]
    log: Path = Path(os.devnull)

    @property
    def session(self) -> dict[int, str]:
        """Return the other processes of the server: command lines by process id."""
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
        """Return the ids of the processes that hold the model."""
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
    temporary: Path | None = None,
) -> Iterator[Served]:
    """Start a server, and yield it when it is ready.

    Args:
        log: the file for its error output.
        port: 0 selects a free port.
        temporary: the folder of the server's temporary files, which is made; None: the usual one.
    """
    errors = log.open("wb") if log else None
    words = [sys.executable, "-m", *command, *arguments, "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if temporary is not None:
        temporary.mkdir()
        environment["TMPDIR"] = str(temporary)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, env=environment)
    try:
        yield replace(_ready(process), log=log or Path(os.devnull))
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


def ask(
    server: Served, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, bytes, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60.0)
    connection.request(method, path, body or None, {"authorization": f"Bearer {TOKEN}", **headers})
    response = connection.getresponse()
    found = response.status, response.read(), response
    connection.close()
    return found


def feedback(
    server: Served, prompts: list[Any], candidates: list[list[str]], responses: list[str]
) -> tuple[int, Any]:
    body = msgspec.msgpack.encode(
        {"batch_prompt": prompts, "batch_candidates": candidates, "batch_response": responses}
    )
    status, reply, _ = ask(server, "POST", "/get_feedback", body)
    return status, msgspec.msgpack.decode(reply) if status == 200 else reply.decode()


def scores(model: str, *pairs: tuple[str, str]) -> list[float]:
    """Return the model's scores, computed without a server."""
    scorer = Scorer(model)
    found = scorer.score([scorer.encode((Message("user", prompt),), response) for prompt, response in pairs])
    return [value for value in found if value is not None]
