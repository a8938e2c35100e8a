"""A process of its own makes the side that samples from the run's configuration. It samples what the run's
own process samples."""

import importlib.metadata
import multiprocessing
import shutil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import World, made
from weights import in_buckets, weights_of

from oat import wire
from oat.assemble.actor_side import ActorPlan
from oat.assemble.run import build
from oat.config.load import dump, load_config
from oat.resolve.resolve import resolve
from oat.runtime import worker as workers
from oat.runtime.calls import call_of, value_of
from oat.runtime.worker import Worker, versions
from oat.types import Shipment

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "xpo": ("dpo", {"algorithm": {"name": "xpo", "prompts": 4}, "engine.own_reference": True}),
    "bfloat16": ("grpo", {"engine.dtype": "bfloat16"}),
    "an adapter": ("dpo", {"model.lora": {"rank": 2}, "model.reference_update": {"mix": 0.3}}),
    "a lagging sampler": ("grpo", {"learner.sync_every": 2}),
    "an ensemble": (
        "dpo",
        {"explorer": {"name": "ensemble", "samples": 4, "ensemble": {"members": 2, "hidden": 4}}},
    ),
}
ADDRESS = ("train", 1, 0)


def work(pipe: Connection) -> None:
    """Be a worker: answer every message but an empty one."""
    torch.set_num_threads(1)
    worker = Worker()
    while message := pipe.recv_bytes():
        pipe.send_bytes(b"".join(worker.answer(message)))


class Process:
    def __init__(self, plan: ActorPlan):
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other,))
        self.process.start()
        other.close()
        self.call("make", "oat.assemble.actor_side:ActorWorker", plan.encoded)

    def call(self, name: str, *arguments: Any) -> Any:
        self.pipe.send_bytes(call_of(name, *arguments))
        return value_of(self.pipe.recv_bytes(), "the worker")

    def close(self) -> None:
        self.pipe.send_bytes(b"")
        self.process.join(120)
        assert self.process.exitcode == 0


@pytest.mark.slow(instead="tests/processes/test_ray.py::test_a_run_on_ray_is_the_local_run", seconds=11.4)
@pytest.mark.parametrize("name", RUNS)
def test_a_worker_samples_and_scores_what_the_runs_own_process_does(
    name: str, world: World, tmp_path: Path
) -> None:
    """After a push of changed weights, in buckets, the worker's samples and scores are bitwise those of the
    run's own actor."""
    recipe, changes = RUNS[name]
    config = world.config(recipe, tmp_path, {**changes, "engine.deterministic": True, "engine.threads": 1})
    resolved = resolve(*load_config(config))
    run: Any = build(resolved, directory=made(tmp_path / "run"))
    run.weights.restore(run.learner)
    learner = getattr(run.learner, "_box", run.learner)
    with torch.no_grad():
        for tensor in learner.models["policy"].trainable().values():
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)), alpha=0.02)
    run.weights.sync(run.learner, 1)
    worker = Process(ActorPlan(dump(resolved.config), run.seeds.first, False))
    try:
        for slot in run.weights.synced:
            tensors = weights_of(run.learner, {"sampler": "policy"}.get(slot, slot))
            if slot in run.weights.dtypes:
                tensors = {key: tensor.to(run.weights.dtypes[slot]) for key, tensor in tensors.items()}
            worker.call("begin", slot, Shipment(slot, 1, tuple(tensors)))
            for bucket in in_buckets(slot, 1, tensors, 1000):
                worker.call("put", slot, bucket)
            assert worker.call("commit", slot).version == 1
        plan, needs = run.plans(1), sorted(resolved.explorer.needs)
        prompts = run.collector.prompts.take(4)
        here = run.collector.actor.sample(prompts, plan.samples, ADDRESS)
        there = worker.call("sample", prompts, dict(plan.samples), list(ADDRESS))
        assert wire.encode(here) == wire.encode(there)
        scores = run.collector.actor.score(here, needs)
        assert wire.encode(scores) == wire.encode(worker.call("score", there, needs))
    finally:
        worker.close()
        run.ledger.close()


def test_what_must_be_equal_in_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions are those of oat, torch, transformers and numpy. That of oat changes with the content and
    the name of each source file."""
    shutil.copytree(workers._SOURCES / "tracking", tmp_path / "oat")
    monkeypatch.setattr(workers, "_SOURCES", tmp_path / "oat")
    first = versions()
    assert first.keys() == {"oat", "torch", "transformers", "numpy"}
    assert first["torch"] == importlib.metadata.version("torch")
    assert versions() == first
    file = next((tmp_path / "oat").glob("*.py"))
    file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    edited = versions()
    assert edited == {**first, "oat": edited["oat"]} != first
    file.rename(file.with_name("renamed.py"))
    assert versions()["oat"] not in (first["oat"], edited["oat"])
