"""The side of a run that learns: the models, the learner, and the ensemble. It is made in the process that
learns, from the configuration: in the run's own process (`make_learner_side`), or in another one
(`LearnerWorker`)."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from oat import wire
from oat.algorithms.base import Objective
from oat.algorithms.ensemble import EnsembleLearning
from oat.assemble.ensemble import EnsembleParts, make_ensemble, make_features
from oat.assemble.fingerprints import Inputs
from oat.assemble.learner import make_learner
from oat.assemble.models import check_critic, check_reference, load_models
from oat.assemble.run_inputs import make_renderer
from oat.assemble.same_inputs import refuse_other_inputs
from oat.config.load import config_of
from oat.learner.learner import Learner
from oat.learner.limits import choose_threads
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_tokenizer
from oat.models.lora import LoadModel, load_model
from oat.resolve.model_starts import critic_model, has_own_critic
from oat.resolve.resolve import make_objective, resolve
from oat.resolve.resolved import Resolved
from oat.rollout.features import Features
from oat.seeds import Seeds
from oat.text.renderer import Renderer


@dataclass(frozen=True, eq=False)
class LearnerSide:
    """The boxes that learn.

    Attributes:
        lms: the models, by name.
        features: the backbone of features; None if nothing reads them.
        ensemble: None if the run has none.
    """

    lms: Mapping[str, CausalLM]
    features: Features | None
    ensemble: EnsembleParts | None
    learner: Learner

    @property
    def ensemble_objective(self) -> list[EnsembleLearning]:
        """The objective of the ensemble, in a list that is empty if there is none."""
        found = self.ensemble.objective if self.ensemble is not None else None
        return [] if found is None else [found]

    @property
    def context(self) -> int | None:
        """The largest number of tokens that every model reads; None if no limit is known."""
        lengths = [lm.context_length for lm in self.lms.values() if lm.context_length is not None]
        return min(lengths, default=None)

    def threads(self, objective: Objective) -> int:
        """Measure with how many threads the learner is fastest."""
        return choose_threads(self.learner, objective)


@dataclass(frozen=True)
class LearnerPlan:
    """All that another process needs to make the side.

    Attributes:
        config: every setting of the run, as plain data (`dump`). It is empty in the run's own process.
        first_seed: the seed of initial weights (`Seeds.first`).
        keep: path of the folder `Learner.keep`.
        longest: largest number of tokens of a prompt with its response; None: unknown.
        is_begun: True if the run has begun before.
        inputs: `inputs_sent` of the run's own process.
    """

    config: Mapping[str, Any]
    first_seed: int
    keep: str
    longest: int | None
    is_begun: bool
    inputs: Inputs = field(default_factory=dict)

    @property
    def encoded(self) -> bytes:
        """The plan as bytes; see `LearnerWorker`."""
        return wire.encode(
            (self.config, self.first_seed, self.keep, self.longest, self.is_begun, self.inputs)
        )


def make_learner_side(
    resolved: Resolved, renderer: Renderer, seeds: Seeds, plan: LearnerPlan, load: LoadModel = load_model
) -> LearnerSide:
    """Make the side.

    Args:
        load: function that loads each model.

    Raises:
        OatError: a part cannot be made as configured.
    """
    config = resolved.config
    resolved.objective.end_ids = renderer.stop_ids
    with resolved.error_context("model.reference" if config.model.reference else "model.path"):
        lms = load_models(config, resolved.models, seeds, load)
        if config.model.reference and "reference" in lms:
            check_reference(lms["reference"], config.model.reference, renderer)
    if has_own_critic(config.model) and "critic" in lms:
        with resolved.error_context("model.critic"):
            check_critic(lms["critic"], critic_model(config.model).path, renderer, plan.longest)
    with resolved.error_context("explorer.name"):
        features = make_features(lms, resolved.features) if resolved.features else None
        has_weights = lms["policy"].has_weights
        ensemble = make_ensemble(
            resolved.explorer, features, seeds, has_weights=has_weights, is_begun=plan.is_begun
        )
    with resolved.error_context("model.path"):
        learner = make_learner(resolved, lms, renderer, seeds, ensemble, Path(plan.keep))
    return LearnerSide(lms, features, ensemble, learner)


def own_objectives(resolved: Resolved, side: LearnerSide) -> list[Objective]:
    """Return objectives of the run and of its ensemble that share nothing with those that prepare batches."""
    own = [EnsembleLearning(each.config, each.features) for each in side.ensemble_objective]
    return [make_objective(resolved.config), *own]


class LearnerWorker:
    """A side in a process of its own (`worker.Box`).

    Args:
        plan: the fields of the `LearnerPlan`, encoded.
    """

    def __init__(self, plan: bytes):
        learning = LearnerPlan(*wire.decode(plan))
        resolved = resolve(*config_of(learning.config))
        compute = resolved.config.compute
        if compute.threads:
            torch.set_num_threads(compute.threads)
        config = resolved.config
        outline = load_models(config, (), Seeds(config.seed), resolved.outlines.on_meta)["policy"]
        tokenizer = load_tokenizer(config.model.path)
        refuse_other_inputs(resolved, learning.inputs, outline, tokenizer)
        renderer = make_renderer(config, outline, tokenizer)
        seeds = Seeds(resolved.config.seed, learning.first_seed)
        self._side = make_learner_side(resolved, renderer, seeds, learning)
        self._objectives = {each.name: each for each in own_objectives(resolved, self._side)}
        if compute.threads is None and compute.profile == "cpu":
            torch.set_num_threads(self._side.threads(resolved.objective))
        self._staged: dict[str, torch.Tensor] = {}

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call a method of the learner, or one of those that `RemoteLearner` calls beside them."""
        learner = self._side.learner
        if name in ("update", "measure"):
            objective, batch = arguments
            return getattr(learner, name)(copy.deepcopy(self._objectives[objective]), batch)
        if name in ("forward", "sizes", "trainable", "version"):
            return getattr(learner, name)(*arguments)
        return getattr(self, f"_{name}")(*arguments)

    def _facts(self) -> dict[str, Any]:
        features = self._side.features
        return {
            "micro_batch_tokens": self._side.learner.micro_batch_tokens,
            "context": self._side.context,
            "threads": torch.get_num_threads(),
            "features": None if features is None else features.identity,
        }

    def _plain_state(self) -> dict[str, Any]:
        return self._side.learner.plain_state

    def _some(self, names: Sequence[str], model: str) -> dict[str, torch.Tensor]:
        return dict(self._side.learner.named_tensors(model, names))

    def _state_sizes(self) -> list[tuple[str, int]]:
        return [(name, tensor.nbytes) for name, tensor in self._side.learner.state_tensors()]

    def _some_state(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return dict(self._side.learner.state_tensors(names))

    def _stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._staged |= tensors

    def _load_weights(self, model: str) -> None:
        staged, self._staged = self._staged, {}
        self._side.learner.load_weights(model, staged)

    def _load_state(self, plain: Mapping[str, Any]) -> None:
        staged, self._staged = self._staged, {}
        self._side.learner.load_state({**plain, **staged})
