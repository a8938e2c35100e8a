"""The engine of a run, and the sampling settings of its requests."""

from collections.abc import Mapping
from dataclasses import fields, replace

from oat.build.models import load_slots
from oat.build.resolved import Resolved
from oat.config.settings import Config
from oat.engines.records import Pooling
from oat.engines.split import SplitEngine
from oat.engines.torch import TorchEngine
from oat.engines.torch_config import TorchEngineConfig
from oat.explore.settings import FeaturesConfig
from oat.models.causal_lm import CausalLM
from oat.models.lora import LoadModel, load_model
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.types import Sampling


def run_engine(
    resolved: Resolved,
    lms: Mapping[str, CausalLM],
    renderer: Renderer,
    seeds: Seeds,
    load: LoadModel = load_model,
) -> TorchEngine | SplitEngine:
    """Make the engine of a run. A slot shares the learner's model if `load_slots` allows it.

    Args:
        lms: the learner's models by name.
        load: function that loads a model that a slot cannot share.
    """
    compute, options = resolved.config.compute, resolved.engine
    threads = options.threads or (compute.threads if compute.profile == "cpu" else None)
    pooling = pooling_of(resolved.features)
    slots = load_slots(resolved, lms, seeds, load)
    own = {"reference": slots.pop("reference")} if options.own_reference else {}
    main = make_engine(slots, renderer, options, threads, pooling)
    engine = SplitEngine(main, make_engine(own, renderer, options, threads, pooling)) if own else main
    if threads is None and compute.profile == "cpu" and lms["policy"].has_weights:
        engine.choose_threads(max(1, resolved.plan.prompts * resolved.plan.responses))
    return engine


def pooling_of(features: FeaturesConfig | None) -> Pooling | None:
    """Return the features that an engine keeps; None if nothing reads those of the policy."""
    if features is None or features.backbone != "policy":
        return None
    return Pooling(features.layer, takes_last=features.pooling == "last")


def make_engine(
    slots: Mapping[str, CausalLM],
    renderer: Renderer,
    options: TorchEngineConfig,
    threads: int | None,
    pooling: Pooling | None = None,
) -> TorchEngine:
    """Make the torch engine.

    Args:
        slots: the model of each slot.
        threads: number of torch's threads while the engine works; None: the number does not change.
        pooling: the features that the engine keeps; None: none.
    """
    return TorchEngine(
        slots,
        num_tokens=renderer.num_tokens,
        stop_ids=renderer.stop_ids,
        decode=renderer.decode,
        max_rows=options.max_rows,
        cache_gb=options.cache_gb,
        deterministic=options.deterministic,
        threads=threads,
        pooling=pooling,
    )


def make_sampling(resolved: Resolved) -> Sampling:
    """Return the sampling settings of training."""
    sampling = plain_sampling(resolved.config)
    return replace(sampling, keep_sets=resolved.requires.ratio_based and sampling.truncates)


def plain_sampling(config: Config) -> Sampling:
    """Return the sampling settings of evaluations. They record no kept sets."""
    names = [f.name for f in fields(Sampling) if f.name != "keep_sets"]
    return Sampling(**{name: getattr(config.sampling, name) for name in names})
