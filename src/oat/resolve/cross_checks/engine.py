"""Checks of the engine: whether it can do what the run needs of it."""

from collections.abc import Iterator

from oat.resolve.parts import run_facts
from oat.resolve.resolved import Resolved
from oat.resolve.sampling import plain_sampling
from oat.types import ENSEMBLE
from oat.types.part import Check

_FIELD = "engine.name"


def suits_run(resolved: Resolved) -> Iterator[Check]:
    """Check what is sampled, and where: by which slots, up to which string, and in which process."""
    config, can = resolved.config, resolved.engine.capabilities
    if not run_facts(config).is_sampling:
        return
    lacking = sorted({"sampler", "policy", *resolved.slots} - {ENSEMBLE} - (can.slots or set()))
    yield Check(
        _FIELD,
        can.slots is not None and lacking,
        f"it serves no slot {' and no slot '.join(lacking)}, which this run reads; take the engine torch",
    )
    yield Check(
        _FIELD,
        config.sampling.stop and not can.stop_strings,
        "it ends no response at a string; remove sampling.stop, or take the engine torch",
    )
    yield Check(
        _FIELD,
        config.model.lora is not None and not can.lora,
        "it computes with no adapter; remove model.lora, or take the engine torch",
    )
    yield Check(
        _FIELD,
        config.compute.runtime == "local" and not can.own_threads,
        "its number of threads is that of the whole process, the learner's too; set compute.runtime: "
        "processes, which gives it a process of its own",
    )


def suits_proof(resolved: Resolved) -> Iterator[Check]:
    """Check that the engine's weights can be proven as `learner.weights_proof` says."""
    config = resolved.config
    yield Check(
        "learner.weights_proof",
        config.learner.weights_proof in ("all", "sample")
        and not resolved.engine.capabilities.readable_weights,
        f"the weights of the engine {config.engine.name} cannot be read back; set it to probe, or leave it "
        "out",
    )


def suits_records(resolved: Resolved) -> Iterator[Check]:
    """Check what is recorded of each response: log-probabilities, kept sets and features."""
    config, can = resolved.config, resolved.engine.capabilities
    if config.prompts.responses:
        return
    name, is_ratio_based = config.algorithm.name, resolved.requires.ratio_based
    yield Check(
        _FIELD,
        is_ratio_based and not can.sampled_logps,
        f"{name} divides by the probability of sampling, which this engine does not record; take the engine "
        "torch",
    )
    yield Check(
        _FIELD,
        is_ratio_based and plain_sampling(config).truncates and not can.kept_sets,
        f"{name} divides by the probability of sampling, and this engine does not record from which tokens "
        "one was drawn; leave out sampling.top_k, top_p and min_p, or take the engine torch",
    )
    yield Check(
        _FIELD,
        "sampler" in resolved.explorer.needs and not can.raw_logps,
        f"the explorer {config.explorer.name} needs the log-probabilities of what was sampled, which this "
        "engine does not record; take the engine torch",
    )
    yield Check(
        _FIELD,
        resolved.features is not None and resolved.features.backbone == "policy" and not can.features,
        "it keeps no hidden states; give explorer.features another backbone, such as reference, or take the "
        "engine torch",
    )
