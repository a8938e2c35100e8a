"""The side of `oat` in `benchmarks/apart.py`: runs of GRPO, in one process or in several."""

import json
import os
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from paced_run import paced_run
from task import Memory, make_model, prompts, serve, text

from oat.commands.digest import digest_run
from oat.loop import Run
from oat.models.loading import save_lm
from oat.quickstart.task import build_model, build_task, build_tokenizer
from oat.runtime.pool import ActorPool
from oat.runtime.transfer import in_shares

RULE = "def rule(prompts, completions, **columns):\n    return [len(text) % 7 / 7 for text in completions]\n"
WORK = {
    "quickstart": {"vocabulary": 0, "prompts": 64, "samples": 8, "tokens": 4},
    "50M": {"vocabulary": 16384, "prompts": 4, "samples": 4, "tokens": 16},
    "tiny": {"vocabulary": 256, "prompts": 2, "samples": 2, "tokens": 4},
}
"""The work of a step, by size of the model."""
_FLYING = 2
"""Calls that are on their way to an actor at the same time, in a broadcast as in a transfer."""
held: dict[str, Any] = {}


def make(folder: str, size: str) -> dict[str, Any]:
    """Write a model with random weights, its prompts and a rule into a folder."""
    path = Path(folder)
    (path / "rule.py").write_text(RULE, encoding="utf-8")
    if size == "quickstart":
        tokenizer = build_tokenizer()
        save_lm(build_model(tokenizer, 0), tokenizer, str(path / "start"))
        build_task(0, demonstrations=1).write(path)
        return {}
    make_model(size, path / "start")
    lines = [json.dumps({"prompt": text(ids)}) for ids in prompts(64, WORK[size]["vocabulary"])]
    (path / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return {}


def train_(
    folder: str, size: str, name: str, threads: int, steps: int, cluster: dict[str, Any]
) -> dict[str, Any]:
    """Begin a run of so many steps. It waits before its first step.

    Args:
        folder: that of `make`.
        name: of the run's directory.
        cluster: settings of the section `compute` that say where its actors are.
    """
    torch.set_num_threads(threads)
    work = WORK[size]
    tree = {
        "run_dir": f"{folder}/{name}",
        "model": {"path": f"{folder}/start"},
        "prompts": {"path": f"{folder}/train.jsonl"},
        "sampling": {"max_new_tokens": work["tokens"]},
        "engine": {"max_rows": work["prompts"] * work["samples"], "threads": threads, "deterministic": True},
        "oracle": {"name": f"{folder}/rule.py:rule", "repeats": 0},
        "algorithm": {"name": "grpo", "prompts": work["prompts"], "samples": work["samples"]},
        "learner": {"learning_rate": 1e-6, "micro_batch_size": 512 if size == "quickstart" else 8},
        "checkpoint": {"every": 100_000},
        "compute": {"threads": threads, "actor_cpus": 0.25, "max_restarts": 1000, **cluster}
        if cluster
        else {"threads": threads},
        "stop": {"max_steps": steps},
    }
    file = Path(folder) / f"{name}.yaml"
    file.write_text(json.dumps(tree), encoding="utf-8")
    metrics, paced = paced_run(file, lambda run: held.update(run=run))
    held.update(metrics=metrics, paced=paced, directory=Path(tree["run_dir"]))
    return {"oat": version("oat-align"), "torch": torch.__version__}


def steps(count: int, seed: int = 0) -> dict[str, Any]:
    """Make steps, and return their seconds and those of two parts of a step."""
    begin, parts = time.perf_counter(), {"sample": 0.0, "learn": 0.0}
    for _ in range(count):
        held["paced"].step()
        parts = {name: parts[name] + held["metrics"][f"time/{name}_s"] for name in parts}
    return {"seconds": time.perf_counter() - begin, "steps": count, "parts": parts}


def started(seed: int = 0) -> dict[str, Any]:
    """Start a further process as an actor is started, and return the seconds until it has answered a first
    call. Then end it."""
    launcher = held["run"].collector.actor.crew.launcher
    begin = time.perf_counter()
    remote = launcher.start("actor 99")
    remote.call("prepare", b"\xff")()  # no call: it says so
    seconds = time.perf_counter() - begin
    remote.close()
    return {"seconds": seconds}


def killed(count: int, after: float | None, seed: int = 0) -> dict[str, Any]:
    """Make steps when all processes are ready, and return their seconds.

    Args:
        after: seconds after the beginning of these steps at which an actor is killed; None: none is.
    """
    crew = held["run"].collector.actor.crew
    crew.ready()
    killer = threading.Timer(after or 0.0, _kill, [crew.members[0].name])
    if after is not None:
        killer.start()
    found = steps(count)
    if after is not None:
        killer.join()
    return {**found, "restarts": crew.restarts.count}


def _kill(name: str) -> None:
    """Kill the actor of this name, whose output goes to the file of its name."""
    log = held["directory"] / "logs" / f"{name.replace(' ', '-')}.log"
    for place in Path("/proc").glob("[0-9]*/fd/1"):
        if place.is_symlink() and os.readlink(place) == str(log.resolve()):
            os.kill(int(place.parts[2]), signal.SIGKILL)


def transfer(proof: str, seed: int = 0) -> dict[str, Any]:
    """Give all actors the learner's weights, and return the seconds and the bytes; the bytes by which the
    memory of the learner's process rises while weights leave; and those that it keeps in memory that it
    shares, for actors that come later."""
    run: Run = held["run"]
    run.weights.proof = proof
    memory = Memory()
    begin = time.perf_counter()
    run.weights.push("sampler", run.weights.sampler_version, run.learner)
    seconds = time.perf_counter() - begin
    sizes = _sizes(run)
    return {
        "seconds": seconds,
        "bytes": sum(sizes),
        "bucket": max(sizes),
        "memory": memory.peak_above() * 1e9,
        "kept": _in_shared_files(),
    }


def _in_shared_files() -> int:
    """Return the bytes in files of memory (memfd) that this process has open. They count for no process."""
    kept = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            kept += os.stat(each).st_size if os.readlink(each).startswith("/memfd:") else 0
    return kept


def broadcast(seed: int = 0) -> dict[str, Any]:
    """Send all actors as many bytes as `transfer`, in as many calls, and return the seconds. The bytes are no
    call, so an actor answers at once that they are none."""
    run: Run = held["run"]
    pool: ActorPool = run.collector.actor
    sent = [b"\xff" * size for size in _sizes(run)]
    flying = {member: deque() for member in pool.crew.members}
    begin = time.perf_counter()
    for data in sent:
        shared = pool.crew.launcher.shared([data])
        for member, pending in flying.items():
            pending.append(member.remote.call("nothing", shared))
            if len(pending) > _FLYING:
                pending.popleft()()
    for pending in flying.values():
        while pending:
            pending.popleft()()
    return {"seconds": time.perf_counter() - begin, "bytes": sum(map(len, sent))}


def _sizes(run: Run) -> list[int]:
    """Return the bytes of each bucket of a transfer."""
    sizes = dict(run.learner.sizes("policy"))
    return [sum(sizes[name] for name in names) for names in in_shares(sizes.items())]


def digest() -> dict[str, Any]:
    """End the run, which has made its last step, and return its digests."""
    held["paced"].finish()
    return digest_run(held["directory"])


if __name__ == "__main__":
    serve(
        {
            "make": make,
            "train": train_,
            "steps": steps,
            "started": started,
            "killed": killed,
            "transfer": transfer,
            "broadcast": broadcast,
            "digest": digest,
        }
    )
