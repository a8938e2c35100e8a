"""A long run that records its memory, files and threads."""

import gc
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fixtures import World

from oat.algorithms.base import Objective
from oat.assemble.run import build
from oat.config.load import load_config
from oat.loop import Run, train
from oat.resolve.resolve import resolve
from oat.runtime.transfer import Inbox
from oat.types import Batch, Group, Prompt, Sampling, Segment, Trajectory, Work


class QuietActor:
    """An actor that gives every prompt its own number as response, at once."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        samples: Mapping[str, int],
        address: Sequence[str | int],
        sampling: Sampling | None = None,
    ) -> list[Group]:
        count, version = sum(samples.values()), address[1] if address[0] == "train" else 0
        return [
            Group(
                prompt, tuple(self._response(f"{prompt.occurrence + n}", int(version)) for n in range(count))
            )
            for prompt in prompts
        ]

    def score(self, groups: Sequence[Group], needs: Sequence[str]) -> dict[str, list[np.ndarray]]:
        return {}

    def work(self) -> Work:
        return Work()

    def _response(self, text: str, version: int) -> Trajectory:
        ids = np.array([int(digit) + 2 for digit in text], dtype=np.int32)
        logps = np.full(len(ids), -2.0, dtype=np.float32)
        response = Segment(
            "model",
            ids,
            np.ones(len(ids), dtype=bool),
            np.full(len(ids), version, dtype=np.int32),
            logps,
            logps,
        )
        return Trajectory(
            "sampler", (Segment("context", np.arange(4, dtype=np.int32)), response), "stop", text
        )


class QuietLearner:
    """A learner with one tensor; each update adds one to the tensor."""

    micro_batch_tokens = None

    def __init__(self) -> None:
        self.weights = torch.zeros(64)

    def forward(self, model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        return {want: torch.full((int(sum(row.trained.sum() for row in rows)),), -2.0) for want in wants}

    def update(self, objective: Objective, batch: Batch) -> dict[str, float]:
        self.weights += 1
        return {**batch.metrics, "loss/total": 0.0}

    def sizes(self, model: str) -> list[tuple[str, int]]:
        return [("weights", self.weights.nbytes)]

    def named_tensors(
        self, model: str, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weights", self.weights

    def version(self, model: str) -> int:
        return 0

    def trainable(self, model: str) -> list[str]:
        return ["weights"]

    def load_weights(self, model: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.weights.copy_(tensors["weights"])

    @property
    def state(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state(self, state: dict[str, Any]) -> None:
        self.load_weights("policy", state)


class QuietHolder:
    """A holder of weights that copies nothing."""

    def load(self, slot: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._version, self._tensors = version, tensors

    def tensors(self, slot: str) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def version(self, slot: str) -> int:
        return self._version


def quiet_run(world: World, folder: Path, steps: int) -> Run:
    """Return a run of GRPO whose actor, learner and holders of weights are the quiet ones."""
    changes = {
        "stop.max_steps": steps,
        "evaluation.every": 50,
        "checkpoint.every": 30,
        "learner.sync_every": 2,
        "algorithm.prompts": 2,
    }
    run = build(
        resolve(
            *load_config(world.config("grpo", folder, {**changes, "engine": {"name": "torch", "threads": 1}}))
        )
    )
    actor, learner = QuietActor(), QuietLearner()
    run.collector.actor = run.evaluation.actor = actor  # type: ignore[attr-defined, union-attr]
    run.weights.holders = {slot: Inbox(QuietHolder()) for slot in ("sampler", "policy")}  # type: ignore[attr-defined]
    return replace(run, learner=learner, parts={**run.parts, "learner": learner})


def held() -> dict[str, int]:
    """Return resident bytes, open files and threads of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def grow(world: str, folder: str, first: str, last: str) -> int:
    """Write to `folder` what the process holds after steps `first` and `last`. Both must be ten steps after a
    checkpoint, when its writing has ended."""
    run, found = quiet_run(World(Path(world)), Path(folder), int(last) + 1), {}

    def report(step: int, values: Mapping[str, float]) -> None:
        if step in (int(first), int(last)):
            found[step] = held()

    reason = train(run, report)
    run.ledger.close()
    print(reason)
    (Path(folder) / "held").write_text(json.dumps([found[int(first)], found[int(last)]]))
    return 0


def growth_is_bounded(folder: Path, first: int, last: int, figure: Callable[[str], None]) -> None:
    before, after = json.loads((folder / "held").read_text())
    share = after["bytes"] / before["bytes"] - 1
    figure(f"memory {share:+.2%} from step {first:,} to {last:,} ({before['bytes'] / 1e6:.0f} MB)")
    figure(f"{after['files']} open files and {after['threads']} threads at both steps")
    assert share < 0.02
    assert (before["files"], before["threads"]) == (after["files"], after["threads"])
