"""The gain of batching in a reward server. The server is one process on the CPU with a tiny random model. One
client or 64 clients ask it.

    python benchmarks/remote.py [--requests 4000] [--soak 100000]

alone     requests per second of one client. The server has no batches (--max-batch-size 1, --max-wait-ms 0).
together  requests per second of 64 clients, measured twice: without batches, and with batches
          (--max-batch-size 32, --max-wait-ms 5). With batches of 32, the requests of one half of the clients
          are scored while those of the other half are on their way.
latency   seconds of a request of the 64 clients with batches: median and 99th percentile.
memory    resident bytes of the server's processes, after a tenth of the soak and at its end. The soak is a
          long series of requests of the 64 clients (--soak).

A client is a connection that sends the next request when it has the reply to the last one. All clients run on
one event loop in this process. The loop uses the same machine as the server, so a client does little work.
"""

import argparse
import asyncio
import itertools
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from oat.oracles.remote.format import ROUTE, decode_reply, encode_request
from oat.oracles.remote.upstream import Upstream
from oat.types import Message

CLIENTS = 64
LETTERS = "abcdefghijklmnopqrstuvwxyz .,!?"
BATCHED = ("32", "5")
"""Largest number of requests in a batch, and milliseconds that its first request waits."""
SINGLE = ("1", "0")


def save_model(folder: Path) -> None:
    """Save a Llama of two layers with random weights, and a tokenizer of single letters. A sequence may have
    at most 512 tokens."""
    tokenizer = Tokenizer(
        models.WordLevel({token: id for id, token in enumerate(["<eos>", *LETTERS])}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="?").save_pretrained(
        folder
    )
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(0)
    LlamaForSequenceClassification(
        LlamaConfig(vocab_size=len(LETTERS) + 1, num_labels=1, **shape)
    ).save_pretrained(folder)


@contextmanager
def serving(model: Path, batch: tuple[str, str]) -> Iterator[tuple[str, subprocess.Popen]]:
    """Start a server, wait until it is ready, and yield its URL and its process. End it after the context."""
    flags = {
        "--model": str(model),
        "--devices": "cpu",
        "--port": "0",
        "--max-batch-size": batch[0],
        "--max-wait-ms": batch[1],
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "oat", "serve", "reward", *itertools.chain(*flags.items())],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        while not (found := re.search(r"ready: POST (\S+)/get_feedback", line := process.stdout.readline())):
            assert line, "the server ended"
        yield found[1], process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def ask(url: str, clients: int, requests: int) -> tuple[float, list[float]]:
    """Send requests from several clients. Return the number of requests per second, and the seconds of each
    request."""
    bodies = [
        encode_request([((Message("user", LETTERS[: 5 + n]),), (LETTERS[n:],))], "score") for n in range(16)
    ]
    left = iter(range(requests))
    taken = []

    async def client() -> None:
        connection = Upstream(int(url.rpartition(":")[2]), 60.0)
        for number in left:
            began = time.perf_counter()
            status, reply = await connection.ask("POST", ROUTE, bodies[number % len(bodies)])
            taken.append(time.perf_counter() - began)
            assert status == 200, reply
            decode_reply(reply, "score", 1)
        connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return requests / (time.perf_counter() - began), taken


def resident(process: subprocess.Popen) -> int:
    """Return the resident bytes of a process and of all its descendants."""
    parents = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(place.name)] = int((place / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    family = {process.pid}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(int((Path("/proc") / str(pid) / "statm").read_text().split()[1]) * 4096 for pid in family)


def measure(folder: Path, requests: int, soak: int) -> dict[str, Any]:
    """Return the figures that the head of this file describes, by name."""
    save_model(folder)
    with serving(folder, SINGLE) as (url, _):
        asyncio.run(ask(url, 1, 50))
        alone, _ = asyncio.run(ask(url, 1, max(50, requests // 8)))
        single, _ = asyncio.run(ask(url, CLIENTS, max(50, requests // 4)))
    with serving(folder, BATCHED) as (url, process):
        asyncio.run(ask(url, CLIENTS, 200))
        together, taken = asyncio.run(ask(url, CLIENTS, requests))
        found: dict[str, Any] = {
            "alone": alone,
            "together": together,
            "together without batches": single,
            "ratio": together / alone,
        }
        found |= {"p50_s": statistics.median(taken), "p99_s": statistics.quantiles(taken, n=100)[98]}
        if soak:
            asyncio.run(ask(url, CLIENTS, soak // 10))
            before = resident(process)
            asyncio.run(ask(url, CLIENTS, soak - soak // 10))
            found |= {
                "memory_mb": (before / 1e6, resident(process) / 1e6),
                "growth": resident(process) / before - 1,
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--soak", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, value in measure(Path(folder), given.requests, given.soak).items():
            print(f"{name:<26} {value if isinstance(value, tuple) else f'{value:.4g}'}")


if __name__ == "__main__":
    main()
