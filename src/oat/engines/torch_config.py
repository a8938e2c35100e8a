"""The settings of the engine `torch`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from oat.config.ranges import Count, Positive
from oat.types.part import Check, RunFacts


@dataclass(frozen=True)
class TorchEngineConfig:
    """Fields of the engine `torch`."""

    max_rows: Count = 256
    """Most rows that are decoded together."""
    cache_gb: Positive = 4.0
    """Most memory for keys and values, 10^9 bytes; when it is full, rows wait."""
    deterministic: bool = False
    """The same tokens under any batching, for some speed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the engine computes. In bfloat16 its slots have weights of their own, cast from the
    learner's at every sync."""
    threads: Count | None = None
    """Threads of the engine. None: as `compute.threads`, or, where that is not set either, the number that is
    fastest in a short measurement when the run is created, and is kept from then on."""


def torch_checks(config: TorchEngineConfig, run: RunFacts) -> Iterator[Check]:
    """Checks of promises that the engine cannot keep, and of settings that nothing reads."""
    yield Check(
        "engine.deterministic",
        config.deterministic and run.profile == "gpu",
        "on a GPU the same tokens under any batching are not promised; leave it out, or set compute.profile: "
        "cpu",
    )
    yield Check(
        "engine.dtype",
        config.dtype != "float32" and not run.is_sampling,
        "nothing is sampled from recorded responses without an evaluation, so nothing reads it; remove it",
    )
