"""The reward server: a front that receives requests, and Mosec's worker processes, which have the model.

`oat serve reward` starts it, and so does the predecessor's command:

    python -m oat.oracles.remote.server --remote_rm_model MODEL --cuda_devices 0,1 --max_wait_time 10
    [--multi_gpu]

Departures from the predecessor's server:
1. It listens on 127.0.0.1 by default. It listens on an address that others can reach only if it has a token.
2. It gathers requests into batches.
3. Bodies, batches and times have limits.
"""

import argparse
import asyncio
import contextlib
import ipaddress
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import torch

from oat.errors import ConfigError, OatError, OracleError, did_you_mean
from oat.files import for_sockets
from oat.models.scoring import Scorer
from oat.oracles.remote.format import ROUTE
from oat.oracles.remote.front import Front, Limits, MosecClient

_POLL_S, _GRACE_S = 0.2, 10.0


@dataclass(frozen=True)
class ServerConfig:
    """The settings of a reward server.

    Attributes:
        model: a directory or `org/name` of a sequence-classification model.
        devices: the devices, such as cpu or cuda:0; each has one process. "auto" alone is one process over
            all visible devices.
        visible: the CUDA devices that processes see, in the form of CUDA_VISIBLE_DEVICES; None: all.
        host: address to listen on; every address except the loopback needs a token.
        port: port to listen on; 0: a free one.
        token: the token that each request must have; None: requests need no token.
        dtype, label, batch_tokens, max_tokens: as in `oat.models.scoring.Scorer`.
        max_batch_size: largest number of requests that a process scores together.
        max_wait_ms: milliseconds that the first request of a batch waits for others.
    """

    model: str
    devices: tuple[str, ...] = ("cpu",)
    visible: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    dtype: str = "float32"
    label: int | None = None
    batch_tokens: int = 16384
    max_tokens: int | None = None
    max_batch_size: int = 64
    max_wait_ms: int = 5
    limits: Limits = field(default_factory=Limits)


def run_server(config: ServerConfig, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        say: called with each line that people should read.

    Raises:
        ConfigError: the host is not the loopback and there is no token, the server cannot listen on the
            address, a device does not exist, or Mosec is not installed.
        ModelError: the model's configuration or tokenizer is not that of a reward model.
        OracleError: the worker processes ended before they were ready.
    """
    if config.token is None and not _is_loopback(config.host):
        raise ConfigError(
            f"{config.host} can be reached by others, and the server has no token; give --token-file, or "
            "listen on 127.0.0.1"
        )
    _check_devices(config.devices)
    Scorer(
        config.model,
        dtype=config.dtype,
        label=config.label,
        batch_tokens=config.batch_tokens,
        max_tokens=config.max_tokens,
    )
    secret = secrets.token_bytes(16)
    with (
        tempfile.TemporaryDirectory(prefix="oat-serve-", dir=for_sockets()) as folder,
        socket.create_server(("127.0.0.1", 0)) as chosen,
    ):
        port = chosen.getsockname()[1]
        chosen.close()
        start = partial(_workers, config, Path(folder), port, secret)
        asyncio.run(_front(config, start, MosecClient(port, secret, config.limits.answer_s), say))


_Start = Callable[[], AbstractContextManager[subprocess.Popen]]
"""A function that returns a context. Mosec's process runs while the context is entered."""


async def _front(
    config: ServerConfig, start: _Start, workers: MosecClient, say: Callable[[str], None]
) -> None:
    """Answer requests until a signal comes. If Mosec ends after it was ready, start it again.

    Raises:
        ConfigError: the server cannot listen on the address.
        OracleError: Mosec ended before it was ready.
    """
    front, told = Front(workers, config.token, config.limits), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    try:
        server = await asyncio.start_server(
            front.connected, config.host, config.port, backlog=config.limits.connections
        )
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error}; give another --host or --port"
        ) from error
    address = server.sockets[0].getsockname()
    url = f"http://{f'[{address[0]}]' if ':' in address[0] else address[0]}:{address[1]}"
    is_ready, code = True, None
    while is_ready and not told.is_set():
        again = (
            ""
            if code is None
            else f"the processes with the model ended with exit code {code}, and are started again; "
        )
        say(
            f"{again}loading {config.model} on {', '.join(config.devices)}; until it is ready {url} "
            "answers 503"
        )
        is_ready = False
        with start() as process:
            while not told.is_set() and (code := process.poll()) is None:
                if not is_ready and await workers.are_well():
                    is_ready = True
                    say(f"ready: POST {url}{ROUTE}, GET {url}/health, GET {url}/metrics")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(told.wait(), _POLL_S)
        workers.have_gone()
    server.close()
    front.cut()
    workers.close()
    if not told.is_set():
        raise OracleError(
            f"the processes with the model ended with exit code {code} before they were ready; what they "
            "said stands above"
        )


@contextmanager
def _workers(config: ServerConfig, folder: Path, port: int, secret: bytes) -> Iterator[subprocess.Popen]:
    """A context with Mosec's process, which starts the worker processes. All of them end at the context's
    exit, or if this process dies."""
    try:
        from oat.oracles.remote.worker import SETTINGS, WorkerSettings
    except ImportError as error:
        raise ConfigError(f"a reward server needs Mosec ({error}); install oat-align[serve]") from error
    own = {name: getattr(config, name) for name in WorkerSettings.__struct_fields__ if name != "secret"}
    limits, milliseconds = config.limits, int(1000 * config.limits.answer_s)
    arguments = {
        "address": "127.0.0.1",
        "port": port,
        "path": tempfile.mkdtemp(dir=folder),
        "timeout": milliseconds,
        "wait": config.max_wait_ms,
    }
    arguments |= {
        "capacity": limits.open,
        "max-request-size": limits.body + len(secret),
        "namespace": "oat_reward",
        "log-level": "warning",
    }
    command = [
        sys.executable,
        "-P",
        "-m",
        "oat.oracles.remote.worker",
        *(f"--{name}={value}" for name, value in arguments.items()),
    ]
    environment = {**os.environ, SETTINGS: msgspec.json.encode(WorkerSettings(secret=secret, **own)).decode()}
    environment |= {} if config.visible is None else {"CUDA_VISIBLE_DEVICES": config.visible}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None, "a pipe was asked for"
    try:
        yield process
    finally:
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_token(file: Path) -> str:
    """Return the token in a file, without blanks around it.

    Raises:
        ConfigError: the file cannot be read, or no header can contain its content.
    """
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the token cannot be read from {file}: {type(error).__name__}; write it there, alone"
        ) from None
    if not (token and token.isprintable() and " " not in token):
        raise ConfigError(
            f"{file} holds no token; write one line without blanks there, for example that of: openssl "
            "rand -hex 32"
        )
    return token


def all_devices() -> tuple[str, ...]:
    """Return the names of all CUDA devices of this machine, or "cpu" if there are none."""
    return tuple(f"cuda:{number}" for number in range(torch.cuda.device_count())) or ("cpu",)


def _check_devices(devices: Sequence[str]) -> None:
    known = {"cpu", "auto", *all_devices()}
    for device in devices:
        if device not in known:
            raise ConfigError(f"there is no device {device!r} here; {did_you_mean(device, known)}")
    if "auto" in devices and len(devices) > 1:
        raise ConfigError("the device auto is one process over all devices; give it alone")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of the predecessor's reward server (see the head of this file), and return the exit
    code."""
    parser = argparse.ArgumentParser(prog="python -m oat.oracles.remote.server", allow_abbrev=False)
    parser.add_argument(
        "--remote_rm_model", "--remote-rm-model", default="Skywork/Skywork-Reward-Llama-3.1-8B-v0.2"
    )
    parser.add_argument("--max_wait_time", "--max-wait-time", type=int, default=10, help="milliseconds")
    parser.add_argument(
        "--cuda_devices", "--cuda-devices", default="all", help="numbers with commas between them, or all"
    )
    parser.add_argument(
        "--multi_gpu",
        "--multi-gpu",
        action="store_true",
        help="one model over all of them, instead of one on each",
    )
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--timeout", type=int, default=10_000, help="milliseconds")
    parser.add_argument("--token-file", type=Path)
    given = parser.parse_args(argv)
    try:
        return _serve_given(given)
    except OatError as error:
        print(f"reward server: {error}", file=sys.stderr)
        return error.exit_code


def _serve_given(given: argparse.Namespace) -> int:
    devices, visible = all_devices(), None if given.cuda_devices == "all" else str(given.cuda_devices)
    if visible is not None:
        devices = tuple(f"cuda:{place}" for place, _ in enumerate(visible.split(",")))
    config = ServerConfig(
        model=given.remote_rm_model,
        devices=("auto",) if given.multi_gpu else devices,
        visible=visible,
        host=given.address,
        port=given.port,
        token=None if given.token_file is None else read_token(given.token_file),
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        max_wait_ms=given.max_wait_time,
        limits=Limits(answer_s=given.timeout / 1000),
    )
    run_server(config, lambda line: print(f"reward server: {line}", flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
