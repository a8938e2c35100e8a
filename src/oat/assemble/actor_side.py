"""The side of a run that samples: the engine, the environment, the ensemble's scorer, and the actor that uses
them. It is made in the process that samples, from the configuration: in the run's own process beside the
learner (`make_actor_side`), or in another one (`open_actor_side`)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from oat import protocols as boxes
from oat import wire
from oat.assemble.engine import run_engine
from oat.assemble.ensemble import make_features, make_scorer
from oat.assemble.fingerprints import Inputs
from oat.assemble.models import device_of, load_models, shared_slots, slot_sources
from oat.assemble.run_inputs import make_renderer
from oat.assemble.same_inputs import identities, refuse_other_inputs
from oat.config.load import config_of
from oat.environments.batched import BatchedEnvironment
from oat.explore.settings import ensemble_of
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_tokenizer
from oat.models.sources import ModelSource
from oat.resolve.environment import make_batched
from oat.resolve.resolve import resolve
from oat.resolve.resolved import Resolved
from oat.resolve.sampling import make_sampling
from oat.rollout.actor import Actor
from oat.rollout.ensemble_scorer import EnsembleScorer
from oat.rollout.features import Features
from oat.runtime.local import over_wire
from oat.runtime.transfer import Inbox, loaded_with
from oat.runtime.weights import Receiver
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.types import ENSEMBLE

SLOTS = ("sampler", "policy", "reference")
"""The slots of an engine that weights may be sent to."""


@dataclass(frozen=True, eq=False)
class ActorSide:
    """The boxes that sample.

    Attributes:
        threads: number of threads of the engine; None: no number of its own, or each actor measured one.
        inboxes: where the weights of each slot arrive, by slot.
        versions: the version that each slot was last given. The actor refuses responses of other versions.
    """

    actor: boxes.Actor
    threads: int | None
    inboxes: Mapping[str, Receiver]
    versions: dict[str, int]


@dataclass(frozen=True)
class ActorPlan:
    """All that a worker needs to make its side.

    Attributes:
        config: every setting of the run, as plain data (`dump`). It is empty in the run's own process.
        first_seed: the seed of initial weights (`Seeds.first`).
        records_text_ends: see `Actor`.
        inputs: `inputs_sent` of the run's own process.
    """

    config: Mapping[str, Any]
    first_seed: int
    records_text_ends: bool
    inputs: Inputs = field(default_factory=dict)

    @property
    def encoded(self) -> bytes:
        """The plan as bytes; see `ActorWorker`."""
        return wire.encode((self.config, self.first_seed, self.records_text_ends, self.inputs))


def make_actor_side(
    resolved: Resolved,
    sources: Mapping[str, ModelSource],
    renderer: Renderer,
    environment: BatchedEnvironment | None,
    seeds: Seeds,
    *,
    context: int | None,
    scorer: EnsembleScorer | None,
    features: Features | None,
    records_text_ends: bool,
) -> ActorSide:
    """Make the side.

    Args:
        sources: the sources of the models that sample, by slot (`slot_sources`).
        context: largest number of tokens that each of these models reads; None: no limit is known.
        scorer: computes the ensemble's scores; None if there is no ensemble.
        features: the backbone of features; None if nothing reads them.
    """
    versions: dict[str, int] = defaultdict(int)
    with resolved.error_context("model.path"):
        engine = run_engine(resolved, sources, renderer)
    actor = Actor(
        renderer,
        over_wire(engine) if resolved.config.compute.serialise else engine,
        make_sampling(resolved),
        seeds,
        environment=environment,
        context=context,
        scorer=scorer,
        features=features,
        records_text_ends=records_text_ends,
        versions=versions,
    )
    inbox = Inbox(engine)
    inboxes: dict[str, Receiver] = dict.fromkeys(SLOTS, inbox)
    inboxes |= {ENSEMBLE: Inbox(scorer)} if scorer is not None else {}
    return ActorSide(actor, engine.threads, inboxes, versions)


def open_actor_side(plan: ActorPlan) -> ActorSide:
    """Make the side in a process of its own. The engine makes its models of their sources; their weights are
    those of the folders until the run's own process sends others.

    Raises:
        OatError: a part cannot be made as configured.
    """
    resolved = resolve(*config_of(plan.config))
    config = resolved.config
    if config.compute.threads:
        torch.set_num_threads(config.compute.threads)
    seeds, tokenizer = Seeds(config.seed, plan.first_seed), load_tokenizer(config.model.path)
    needs = resolved.models & {"reference"}
    outlines = load_models(config, needs, seeds, resolved.outlines.on_meta)
    refuse_other_inputs(resolved, plan.inputs, outlines["policy"], tokenizer)
    ensemble, features, lms = ensemble_of(resolved.explorer), None, dict[str, CausalLM]()
    if resolved.features is not None:
        if resolved.features.backbone == "reference":
            lms = load_models(config, needs, seeds)
        device = device_of(config.compute.profile)
        features = make_features({**outlines, **lms}, resolved.features, device)
    scorer = None
    if ENSEMBLE in resolved.explorer.needs:
        assert ensemble is not None, "the run's own process has checked it"
        assert features is not None, "an ensemble reads features"
        scorer = make_scorer(ensemble, features, seeds)
    return make_actor_side(
        resolved,
        slot_sources(resolved, seeds, lms, identities=identities(plan.inputs)),
        make_renderer(config, outlines["policy"], tokenizer),
        make_batched(resolved.config, resolved.origins),
        seeds,
        context=context_of(resolved, outlines),
        scorer=scorer,
        features=features,
        records_text_ends=plan.records_text_ends,
    )


class ActorWorker:
    """A side in a process of its own (`worker.Box`).

    Args:
        plan: the fields of the `ActorPlan`, encoded.
    """

    def __init__(self, plan: bytes):
        made = ActorPlan(*wire.decode(plan))
        self._side = open_actor_side(made)
        self._shared = shared_slots(config_of(made.config)[0])

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call a method: `sample`, `branch`, `score` or `work` of the actor; or `begin`, `put` or `commit` of
        the inbox of a slot, whose name is the first argument."""
        if name not in ("begin", "put", "commit"):
            return getattr(self._side.actor, name)(*arguments)
        slot, *rest = arguments
        reply = getattr(self._side.inboxes[slot], name)(*rest)
        if name == "commit":
            self._side.versions.update(dict.fromkeys(loaded_with(slot, self._shared), reply.version))
        return reply


def context_of(resolved: Resolved, lms: Mapping[str, CausalLM]) -> int | None:
    """Return the largest number of tokens that every model reads which samples; None if no limit is known.

    Args:
        lms: the models by name, with or without weights.
    """
    sampled = {"policy", *(resolved.slots & lms.keys())}
    return min((size for name in sampled if (size := lms[name].context_length) is not None), default=None)
