"""The model that a run has learned, loaded from one of its checkpoints."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from oat.algorithms.ensemble import EnsembleLearning, refuse_other_features
from oat.assemble.fingerprints import inputs_of_models, inputs_of_template, recorded, refuse_other_models
from oat.assemble.run_inputs import make_renderer
from oat.config.load import blaming
from oat.config.settings import Config
from oat.config.stored import stored_config
from oat.errors import CheckpointError, ConfigError
from oat.learner.models import Critic, RewardModel, refuse_other_tensors
from oat.loop import Run
from oat.models.causal_lm import CausalLM
from oat.models.frozen import frozen_checksum
from oat.models.loading import load_tokenizer
from oat.models.lora import load_model
from oat.models.outlines import Outlines
from oat.models.sources import ModelSource
from oat.resolve.about import RunSummary, about
from oat.resolve.model_starts import critic_model
from oat.rundir.checkpoints import Checkpoints
from oat.text.renderer import Renderer
from oat.types import ENSEMBLE


@dataclass(frozen=True, eq=False)
class Learned:
    """A model of a run, with the weights of a checkpoint.

    Attributes:
        name: "policy", "reward" or "critic".
        step: the checkpoint's step.
        lm: the language model. If it has an adapter, the adapter is not merged into the weights.
        model: `lm` itself, or the reward model or critic whose backbone is `lm`.
        ensemble: the weights of the explorer's ensemble; empty if the run has none that learned.
        features: the identity of the features from which this ensemble has learned; empty if it is unknown.
    """

    name: str
    step: int
    lm: CausalLM
    model: CausalLM | Critic
    tokenizer: Any
    renderer: Renderer
    ensemble: dict[str, torch.Tensor]
    features: dict[str, Any]


@dataclass(frozen=True, eq=False)
class LearnedPolicy:
    """The policy of a run with the weights of a checkpoint, before its model is made.

    Attributes:
        step: the checkpoint's step.
        source: the source of the model.
        outline: the model without weights.
        ensemble, features: as in `Learned`.
    """

    step: int
    source: ModelSource
    outline: CausalLM
    renderer: Renderer
    ensemble: dict[str, torch.Tensor]
    features: dict[str, Any]


def run_config(run_dir: Path) -> Config:
    """Read the resolved configuration of a run.

    Raises:
        ConfigError: the directory holds no run.
    """
    file = run_dir / "config.yaml"
    if not file.exists():
        raise ConfigError(
            f"{run_dir}: holds no run (config.yaml is missing); give the directory that `oat train` named"
        )
    return stored_config(run_dir)[0]


def about_run(run_dir: Path) -> RunSummary:
    """Read the settings of a run, as far as reports and commands use them.

    Raises:
        ConfigError: the directory holds no run.
    """
    return about(run_config(run_dir))


def policy_weights(
    run_dir: Path, which: int | Literal["best"] | None = None
) -> tuple[int, dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Read a checkpoint of a run.

    Args:
        which: the step of the checkpoint; "best": the checkpoint whose row has the highest
            `checkpoint.best_metric`; None: the newest.

    Returns:
        Four values: the step of the checkpoint; the weights of the run's main model, by parameter name; all
        tensors of the checkpoint; its state. The main model is the policy if the checkpoint has its weights,
        else the reward model.

    Raises:
        CheckpointError: the run has no usable checkpoint yet, or the checkpoint `which` is missing or
            damaged.
    """
    checkpoints = Checkpoints(run_dir / "checkpoints", **asdict(run_config(run_dir).checkpoint))
    if not checkpoints.steps:
        raise CheckpointError(
            f"{run_dir}: has no checkpoint yet; let `oat train` reach its first one (checkpoint.every steps)"
        )
    loaded = (
        checkpoints.load()
        if which is None
        else checkpoints.load_step(checkpoints.best() if which == "best" else which)
    )
    assert loaded is not None, "a run with checkpoints loads one or says why not"
    step, tensors, state = loaded
    prefix = weights_prefix(learned_model(tensors))
    return (
        step,
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)},
        tensors,
        state,
    )


def learned_model(tensors: Collection[str]) -> str:
    """Return the name of a run's main model: "policy" or "reward".

    Args:
        tensors: names of the tensors of a checkpoint of the run.
    """
    return "policy" if any(name.startswith(weights_prefix("policy")) for name in tensors) else "reward"


def weights_prefix(model: str) -> str:
    return f"learner/{model}/weights/"


def ensemble_weights(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of the ensemble in a checkpoint, by the names of `Ensemble.tensors`; empty if there
    is none that learned."""
    prefix = weights_prefix(ENSEMBLE)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def ensemble_features(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of the features from which the ensemble of a checkpoint has learned; empty if it is
    unknown."""
    found: dict[str, Any] = state.get(ENSEMBLE, {}).get("features", {})
    return found


def load_trained_policy(run: Run, run_dir: Path) -> int:
    """Load the newest checkpoint of another run of the same model into this run, and return the checkpoint's
    step. If this run's reference follows the policy, the learner gets the complete state of the other run's
    learner. Otherwise it gets only the weights of the main model, which is the policy or the reward model.
    An ensemble gets its weights too. The engine's slots get the weights that they had at the checkpoint.

    Raises:
        ConfigError: the other run has learned a reward model, and this run has none.
        CheckpointError: the other run has no usable checkpoint yet, the checkpoint's adapter was trained
            with other frozen weights than this run's, or `_take_up_ensemble` refuses the ensemble.
    """
    step, weights, tensors, state = policy_weights(run_dir)
    learner, name = run.parts["learner"], learned_model(tensors)
    own, frozen = learner.state, state["learner"]["frozen"][name]
    if name not in own["frozen"]:
        raise ConfigError(
            f"{run_dir}: trained a reward model, and its policy is the model that it started from; give "
            "that model"
        )
    if own["frozen"][name] != frozen:
        raise CheckpointError(
            f"the model is not the one that the adapter of {run_dir} was trained beside; put its files "
            "back as they were"
        )
    if "following" in own:  # an evaluation may sample from a reference that follows
        others = {each: value for each, value in state["learner"]["frozen"].items() if each != ENSEMBLE}
        learner.load_state(
            {
                **state["learner"],
                "frozen": others,
                **{name.removeprefix("learner/"): tensor for name, tensor in tensors.items()},
            }
        )
    else:
        run.learner.load_weights(name, weights)
    _take_up_ensemble(run, run_dir, tensors, state, own["frozen"])
    kept = {
        name.removeprefix("weights/"): tensor
        for name, tensor in tensors.items()
        if name.startswith("weights/")
    }
    run.parts["weights"].load_state({"version": step, **kept})
    run.weights.restore(run.learner)
    return step


def _take_up_ensemble(
    run: Run,
    run_dir: Path,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    frozen: Mapping[str, int],
) -> None:
    """Load the ensemble of a checkpoint into this run, if it has one. If it did not learn, no checkpoint has
    its weights; then compare those with which this run was made.

    Args:
        tensors, state: the checkpoint.
        frozen: checksums of what is frozen in the models of this run.

    Raises:
        CheckpointError: the ensemble has learned from other features, or has other weights than in the run.
    """
    if ENSEMBLE not in frozen:
        return
    weights, objective = ensemble_weights(tensors), run.parts.get(ENSEMBLE)
    if weights and isinstance(objective, EnsembleLearning):
        features = ensemble_features(state) or objective.features
        refuse_other_features(
            features,
            objective.features,
            f"the ensemble of {run_dir}",
            whose="that of the features here",
            advice="leave the settings of explorer.features as they are in the run, and its files too",
        )
        run.learner.load_weights(ENSEMBLE, weights)
    elif state["learner"]["frozen"].get(ENSEMBLE, frozen[ENSEMBLE]) != frozen[ENSEMBLE]:
        raise CheckpointError(
            f"the ensemble here is not the one with which {run_dir} began; put the files of "
            "explorer.ensemble.start back as they were"
        )


def learned_policy(run_dir: Path, which: int | Literal["best"] | None, device: torch.device) -> LearnedPolicy:
    """Return the policy of a run with the weights of a checkpoint, before its model is made.

    Args:
        which: see `policy_weights`.

    Raises:
        ConfigError, CheckpointError, ModelError, TemplateError: see `load_learned`; or the run trained a
            reward model.
    """
    config = run_config(run_dir)
    step, weights, tensors, state = policy_weights(run_dir, which)
    if learned_model(tensors) == "reward":
        raise ConfigError(
            f"{run_dir}: trained a reward model, which answers nothing; give a run that trained a policy, "
            "or a model"
        )
    outline = Outlines().on_meta(config.model)
    renderer = _renderer(run_dir, config, outline, load_tokenizer(config.model.path))
    refuse_other_tensors("policy", weights, outline.trainable())
    source = ModelSource(
        config.model, device, tensors=weights.items, frozen=state["learner"]["frozen"]["policy"]
    )
    return LearnedPolicy(step, source, outline, renderer, ensemble_weights(tensors), ensemble_features(state))


def _renderer(run_dir: Path, config: Config, policy: CausalLM, tokenizer: Any) -> Renderer:
    """Return the renderer of a run.

    Raises:
        ModelError, TemplateError: files that the run read have changed.
    """
    now = {**inputs_of_models(config, policy, tokenizer), **inputs_of_template(config, tokenizer)}
    refuse_other_models(config, recorded(run_dir), now, partial(blaming, config, {(): str(run_dir)}))
    return make_renderer(config, policy, tokenizer)


def load_learned(
    run_dir: Path,
    which: int | Literal["best"] | None = None,
    device: torch.device | str = "cpu",
    *,
    critic: bool = False,
) -> Learned:
    """Load a model of a run with the weights of a checkpoint.

    Args:
        which: see `policy_weights`.
        critic: True: load the critic; False: load the main model.

    Raises:
        ConfigError: the critic is to be loaded, and the run has none.
        CheckpointError: the run has no usable checkpoint yet; the checkpoint `which` is missing or damaged;
            or the frozen weights are not those with which the adapter was trained.
        ModelError, TemplateError: the model that the run started from cannot be loaded, or its files have
            changed.
    """
    config = run_config(run_dir)
    step, _, tensors, state = policy_weights(run_dir, which)
    name = "critic" if critic else learned_model(tensors)
    if name not in state["learner"]["frozen"]:
        raise ConfigError(f"{run_dir}: {config.algorithm.name} has no critic; leave --critic out")
    start = critic_model(config.model) if critic else config.model
    lm, tokenizer = load_model(start, device=device, needs_head=not critic), load_tokenizer(config.model.path)
    renderer = _renderer(run_dir, config, Outlines().on_meta(config.model) if critic else lm, tokenizer)
    model: CausalLM | Critic = lm
    if critic:
        model = Critic(lm, np.random.default_rng())
    elif name == "reward":
        model = RewardModel(lm, np.random.default_rng(), trailing=renderer.trailing)
    own, prefix = model.trainable(), weights_prefix(name)
    held = [tensor.removeprefix(prefix) for tensor in tensors if tensor.startswith(prefix)]
    refuse_other_tensors(name, held, own)
    if frozen_checksum(model.module, own.values()) != state["learner"]["frozen"][name]:
        raise CheckpointError(
            f"{start.path} is not the model that the adapter of {run_dir} was trained beside; put its files "
            "back as they were"
        )
    with torch.no_grad():
        for tensor, parameter in own.items():
            parameter.copy_(tensors[prefix + tensor])
    ensemble, features = ensemble_weights(tensors), ensemble_features(state)
    return Learned(name, step, lm, model, tokenizer, renderer, ensemble, features)
