"""`oat serve`: serve a reward model over HTTP."""

import argparse
from dataclasses import fields
from pathlib import Path

from oat.errors import ConfigError

_LEAST = {"port": 0, "max_wait_ms": 0}
"""Numbers that may be 0; all others are at least 1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", metavar="reward", choices=("reward",), help="a reward model is what can be served")
    add(
        "--model", required=True, metavar="M", help="directory or org/name of a sequence-classification model"
    )
    add(
        "--devices",
        metavar="D",
        help=(
            "a process each, such as cpu or cuda:0,cuda:1; auto: one over all; by default every CUDA device, "
            "or cpu"
        ),
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        metavar="float32|bfloat16",
        help="precision of the weights",
    )
    add("--label", type=int, metavar="N", help="which of several labels is the score")
    _add_address(parser)
    _add_limits(parser)


def _add_address(parser: argparse.ArgumentParser) -> None:
    """The address of the server, and the token of those whom it answers."""
    add = parser.add_argument
    add(
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="address to listen on; any but this machine's own needs a token",
    )
    add("--port", type=int, default=8000, metavar="N", help="0 takes a free one")
    add("--token-file", type=Path, metavar="FILE", help="holds the token that requests have to bear")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """The limits of batches and requests."""
    add = parser.add_argument
    add(
        "--max-batch-size",
        type=int,
        default=64,
        metavar="N",
        help="most requests that a process scores together",
    )
    add(
        "--max-wait-ms",
        type=int,
        default=5,
        metavar="N",
        help="how long the first of them waits for the others",
    )
    add("--batch-tokens", type=int, default=16384, metavar="N", help="most tokens of a forward pass")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="a longer row has no score; by default what the model can read",
    )
    add("--max-body-bytes", type=int, default=1 << 22, metavar="N", help="most bytes of a request")
    add("--max-responses", type=int, default=256, metavar="N", help="most responses in a request")
    add(
        "--max-open",
        type=int,
        default=512,
        metavar="N",
        help="requests that are answered together; more are refused with 429",
    )
    add(
        "--timeout-s", type=int, default=60, metavar="N", help="seconds that a request may wait and be scored"
    )


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    """Run the server until it is told to end; returns the exit code."""
    from oat.oracles.remote.front import Limits
    from oat.oracles.remote.server import ServerConfig, all_devices, read_token, run_server

    for name, value in vars(arguments).items():
        if name != "label" and isinstance(value, int) and value < _LEAST.get(name, 1):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; give at least {_LEAST.get(name, 1)}")
    own = {field.name for field in fields(ServerConfig)} - {"devices", "token"}
    config = ServerConfig(
        **{name: value for name, value in vars(arguments).items() if name in own},
        devices=tuple(arguments.devices.split(",")) if arguments.devices else all_devices(),
        token=None if arguments.token_file is None else read_token(arguments.token_file),
        limits=Limits(
            body=arguments.max_body_bytes,
            responses=arguments.max_responses,
            open=arguments.max_open,
            answer_s=float(arguments.timeout_s),
        ),
    )
    run_server(config, lambda line: print(f"oat serve: {line}", flush=True))
    return 0
