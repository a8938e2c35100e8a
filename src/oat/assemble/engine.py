"""The engine of a run, and the sampling settings of its requests."""

from collections.abc import Mapping
from typing import Literal

from oat.config.parts import find_part, settings_of
from oat.engines.base import Engine
from oat.engines.decoding import Pooling
from oat.engines.kind import EngineKind
from oat.explore.settings import FeaturesConfig
from oat.models.sources import ModelSource
from oat.resolve.resolved import Resolved
from oat.runtime.probe import TOLERANCES, Probing, probe_ids
from oat.text.renderer import Renderer


def run_engine(resolved: Resolved, sources: Mapping[str, ModelSource], renderer: Renderer) -> Engine:
    """Make the engine of a run.

    Args:
        sources: the result of `slot_sources`.
    """
    config, threads = resolved.config, given_threads(resolved)
    kind: EngineKind = find_part(config, "engine", {})
    engine = kind.make(
        settings_of(config, "engine"),
        sources,
        num_tokens=renderer.num_tokens,
        stop_ids=renderer.stop_ids,
        decode=renderer.decode,
        threads=threads,
        pooling=pooling_of(resolved.features),
    )
    has_weights = all(source.lm is None or source.lm.has_weights for source in sources.values())
    if threads is None and config.compute.profile == "cpu" and has_weights:
        engine.choose_threads(max(1, resolved.plan.prompts * resolved.plan.responses))
    return engine


def given_threads(resolved: Resolved) -> int | None:
    """Return the number of the engine's threads that the configuration gives; None: it leaves them open."""
    compute = resolved.config.compute
    return resolved.engine.threads or (compute.threads if compute.profile == "cpu" else None)


def engine_notes(resolved: Resolved) -> tuple[str, ...]:
    """Return sentences for people about the engine; empty if there is nothing to say."""
    can, compute = resolved.engine.capabilities, resolved.config.compute
    name, notes = resolved.config.engine.name, []
    if not can.addressed_draws:
        notes.append(
            f"the engine {name} draws tokens that depend on what it has drawn before: a run that is killed "
            "and continued samples other responses than one that is not"
        )
    if not can.batch_invariant and compute.runtime != "local" and compute.actors > 1:
        notes.append(
            f"under these settings the engine {name} rounds log-probabilities by what it computes together: "
            f"with another number of compute.actors than {compute.actors}, a run has other last bits, and in "
            "time other responses"
        )
    return tuple(notes)


def weights_proof(
    resolved: Resolved, context: int | None, num_tokens: int
) -> Literal["all", "sample"] | Probing:
    """Return how the holders of weights prove that they compute with what was sent.

    Args:
        context: largest number of tokens that every model of the learner reads; None: no limit is known.
        num_tokens: size of the tokenizer's vocabulary.
    """
    learner, engine = resolved.config.learner, resolved.engine
    if learner.weights_proof in ("all", "sample"):
        return learner.weights_proof
    if learner.weights_proof == "auto" and engine.capabilities.readable_weights:
        return "all"
    precision = "bfloat16" if learner.autocast else engine.dtype
    return Probing(probe_ids(num_tokens, context), TOLERANCES[precision])


def pooling_of(features: FeaturesConfig | None) -> Pooling | None:
    """Return the features that an engine keeps; None if nothing reads those of the policy."""
    if features is None or features.backbone != "policy":
        return None
    return Pooling(features.layer, takes_last=features.pooling == "last")
