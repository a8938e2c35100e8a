"""The settings of the engine `torch`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from oat.config.conditions import AS_COMPUTE_THREADS
from oat.config.fields import setting
from oat.config.ranges import Count, Positive
from oat.types.part import Check, RunFacts


@dataclass(frozen=True)
class TorchEngineConfig:
    """The settings of the engine `torch`."""

    max_rows: Count = setting(256, may_change="fork")
    # It decides, as `cache_gb` does, which rows are decoded together, and with it the last bits of logits.
    """Largest number of rows that are decoded together. `deterministic` rounds it up to a power of two, at
    least 64."""
    cache_gb: Positive = setting(4.0, may_change="fork")
    """Largest memory for keys and values, 10^9 bytes. When it is full, further responses wait."""
    deterministic: bool = False
    """Samples the same tokens however requests are batched; this costs some speed. Refused on a GPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the engine computes. In bfloat16, the engine's slots have weights of their own,
    which every sync casts from the learner's weights."""
    own_reference: bool = False
    """Gives the slot `reference` an engine of its own, with a KV cache of its own of `cache_gb`, for example
    for `xpo`, which samples from policy and reference. It changes no sample; by default both slots share one
    engine."""
    threads: Count | None = setting(None, open=None, follows=AS_COMPUTE_THREADS)
    """Number of threads of the engine. None: the value of `compute.threads`. If that is not set either, the
    fastest number is measured when the run is created, and the run keeps it. On a GPU, torch's default is
    used instead of a measurement."""


def torch_checks(config: TorchEngineConfig, run: RunFacts) -> Iterator[Check]:
    """Yield checks. `deterministic` is refused on a GPU. Another `dtype` than float32 is refused in a run
    that samples nothing, and beside weights in four bits. `own_reference` is refused in a run without the
    slot."""
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
    yield Check(
        "engine.dtype",
        config.dtype != "float32" and run.is_quantized,
        "the engine would have to pack other weights than the learner's (model.quantize); leave it at "
        "float32",
    )
    yield Check(
        "engine.own_reference",
        config.own_reference and run.slots is not None and "reference" not in run.slots,
        "this run's engine has no slot for the reference; remove it",
    )
