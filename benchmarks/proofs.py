"""The transfer of new weights to an engine in the same process, with each proof (`learner.weights_proof`).

    python benchmarks/proofs.py [--size 50M] [--repetitions 9] [--threads 1]

The engine has a copy of its own. The ways take turns; figures are medians over the turns, in milliseconds.
`copy` is the engine's `load` alone. `arrived` adds buckets and the checksums of sender and inbox, and nothing
is proven after the switch. `crc32` is a checksum of all bytes by zlib, `sums` by `runtime/transfer.py`.
`probe_gap` is the mean difference of the probe's log-probabilities from the learner's, by the engine's
precision.
"""

import argparse
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from oat.engines.torch import TorchEngine
from oat.learner.learner import Learner
from oat.learner.models import LanguageModel
from oat.learner.optimiser import OptimiserSettings
from oat.models.loading import load_lm
from oat.runtime.probe import Probing, probe_ids
from oat.runtime.transfer import Inbox, checksums
from oat.runtime.weights import Weights
from oat.seeds import Seeds
from oat.types import Shipment

sys.path.insert(0, str(Path(__file__).parent / "sides"))
from task import make_model


class Unproven(Inbox):
    """An inbox that believes its holder."""

    def _proven(self, shipment: Shipment, arrived: dict[str, int]) -> dict[str, int]:
        return arrived


def compare(size: str, repetitions: int, threads: int) -> dict[str, Any]:
    """Return one row of figures."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        make_model(size, Path(folder))
        policy, copy, half = (load_lm(folder, dtype=dtype) for dtype in ("float32", "float32", "bfloat16"))
    ids = probe_ids(policy.vocab_rows, policy.context_length)
    learner = Learner(
        {"policy": LanguageModel(policy, num_tokens=policy.vocab_rows)},
        {"policy": OptimiserSettings(1e-7)},
        micro_batch_size=8,
        seeds=Seeds(0),
    )
    engine, rounded = (
        TorchEngine(
            {"sampler": lm}, num_tokens=lm.vocab_rows, stop_ids=[2], decode=lambda ids: "", cache_gb=0.5
        )
        for lm in (copy, half)
    )
    tensors = dict(learner.named_tensors("policy"))
    inbox = Inbox(engine)
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: engine.load("sampler", 1, tensors),
        "crc32": lambda: [zlib.crc32(tensor.numpy().reshape(-1).data) for tensor in tensors.values()],
        "sums": lambda: checksums(tensors),
        **{
            name: lambda weights=weights: weights.push("sampler", 1, learner)
            for name, weights in {
                "arrived": Weights({"sampler": Unproven(engine)}, 2),
                "all": Weights({"sampler": inbox}, 2),
                "sample": Weights({"sampler": inbox}, 2, proof="sample"),
                "probe": Weights({"sampler": inbox}, 2, proof=Probing(ids, 1e-4)),
            }.items()
        },
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            taken[name].append(1000 * (time.perf_counter() - begin))
    expected = Probing(ids, 1e-4).probe(learner, "policy").logps
    gaps = {"float32": engine, "bfloat16": rounded}
    return {
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "threads": threads,
        "milliseconds": {name: round(median(each[1:]), 1) for name, each in taken.items()},
        "probe_gap": {
            name: float(np.abs(each.logps([ids], "sampler")[0] - expected).mean())
            for name, each in gaps.items()
        },
        "torch": version("torch"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="50M")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    print(json.dumps(compare(arguments.size, arguments.repetitions, arguments.threads)))


if __name__ == "__main__":
    main()
