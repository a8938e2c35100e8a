"""`oat serve`: serve a reward model over HTTP."""

import argparse
from dataclasses import fields
from pathlib import Path

from oat.commands.interruptible import say_loading
from oat.errors import ConfigError

_LEAST = {"port": 0, "max_wait_ms": 0}
"""Least values of the arguments that may be 0. All other numbers must be at least 1, except `--label`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "what", metavar="reward", choices=("reward",), help="serve a reward model; nothing else can be served"
    )
    add(
        "--model", required=True, metavar="M", help="directory or org/name of a sequence-classification model"
    )
    add(
        "--devices",
        metavar="D",
        help=(
            "devices, one process for each, such as cpu or cuda:0,cuda:1; auto: one process over all; by "
            "default every CUDA device, or cpu"
        ),
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        metavar="float32|bfloat16",
        help="precision of the weights",
    )
    add("--label", type=int, metavar="N", help="number of the label that is the score, if there are several")
    _add_address(parser)
    _add_limits(parser)


def _add_address(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the server's address, and for the file of the secret that requests must have."""
    add = parser.add_argument
    add(
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="address to listen on; any but this machine's own needs a token",
    )
    add("--port", type=int, default=8000, metavar="N", help="port to listen on; 0 takes a free one")
    add("--token-file", type=Path, metavar="FILE", help="file with the token that requests must have")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the limits of batches and requests."""
    add = parser.add_argument
    add(
        "--max-batch-size",
        type=int,
        default=64,
        metavar="N",
        help="largest number of requests that a process scores together",
    )
    add(
        "--max-wait-ms",
        type=int,
        default=5,
        metavar="N",
        help="milliseconds that the first of these requests waits for others",
    )
    add(
        "--batch-tokens",
        type=int,
        default=16384,
        metavar="N",
        help="largest number of tokens in a forward pass",
    )
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="a row with more tokens gets no score; by default the model's own limit",
    )
    add("--max-body-bytes", type=int, default=1 << 22, metavar="N", help="largest size of a request in bytes")
    add(
        "--max-responses", type=int, default=256, metavar="N", help="largest number of responses in a request"
    )
    add(
        "--max-open",
        type=int,
        default=512,
        metavar="N",
        help="largest number of requests under way; more are refused with 429",
    )
    add(
        "--timeout-s",
        type=int,
        default=60,
        metavar="N",
        help="seconds within which a request must be answered, waiting included",
    )


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    """Run the server until a signal ends it, and return the exit code."""
    for name, value in vars(arguments).items():
        if name != "label" and isinstance(value, int) and value < _LEAST.get(name, 1):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; give at least {_LEAST.get(name, 1)}")
    say_loading(arguments.model)
    from oat.oracles.remote.front import Limits
    from oat.oracles.remote.server import ServerConfig, all_devices, read_token, run_server

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
