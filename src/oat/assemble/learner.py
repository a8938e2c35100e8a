"""Functions that make a run's learner."""

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from oat.assemble.ensemble import EnsembleParts, ensemble_optimiser
from oat.config.settings import Config, LearnerConfig
from oat.learner.learner import Learner
from oat.learner.limits import Limits, measure_tokens
from oat.learner.models import Critic, LanguageModel, Model, RewardModel
from oat.learner.moving_reference import Following
from oat.learner.optimiser import OptimiserSettings
from oat.models.causal_lm import CausalLM
from oat.models.outline_errors import NotOutlinedError, outlining
from oat.models.sequence_classifier import check_backbone
from oat.models.value_head import read_value_head
from oat.resolve.model_starts import critic_model, has_own_critic
from oat.resolve.resolved import Resolved
from oat.resolve.sampling import make_sampling
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.types import ENSEMBLE


def make_learner(
    resolved: Resolved,
    lms: Mapping[str, CausalLM],
    renderer: Renderer,
    seeds: Seeds,
    ensemble: EnsembleParts | None,
    keep: Path | None = None,
) -> Learner:
    """Make the learner of a run.

    Args:
        keep: folder for a batch that makes a number infinite or NaN; None: no batch is written.

    Raises:
        ConfigError: with `micro_batch_tokens: auto`, not even one row fits into `compute.memory_gb`.
        ModelError: a model cannot be a reward model, or `learner.gradient_checkpointing` is set and a model
            has no gradient checkpointing.
    """
    config, objective = resolved.config, resolved.objective
    c = config.learner
    models: dict[str, Model] = {
        name: _model(config, name, lms[name], renderer, seeds) for name in sorted(objective.requires.models)
    }
    for name in objective.wants if c.gradient_checkpointing else ():
        lms[name].checkpoint_gradients()
    optimisers = {name: _optimiser(c, name) for name in objective.wants}
    if ensemble:
        models[ENSEMBLE] = ensemble.model
        if ensemble.objective is not None:
            optimisers[ENSEMBLE] = ensemble_optimiser(ensemble.objective.config)
    learner = Learner(
        models,
        optimisers,
        micro_batch_size=c.micro_batch_size,
        micro_batch_tokens=None if c.micro_batch_tokens == "auto" else c.micro_batch_tokens,
        gradient_checkpointing=c.gradient_checkpointing,
        max_updates=c.max_updates,
        critic_only_steps=c.critic_only_steps,
        max_skips=c.max_skips if c.on_nonfinite == "skip" else 0,
        following=Following(update.every, update.mix) if (update := config.model.reference_update) else None,
        keep=keep,
        seeds=seeds,
    )
    if c.micro_batch_tokens == "auto":
        assert config.compute.memory_gb is not None, "cross_checks/learner.py asks for it"
        sampling, longest = make_sampling(resolved), config.prompts.max_tokens
        limits = Limits(config.compute.memory_gb, sampling.max_new_tokens, longest, c.micro_batch_size)
        # a pass may fail only for want of weights; then nothing is measured
        without_weights = not lms["policy"].has_weights
        with suppress(NotOutlinedError), outlining() if without_weights else nullcontext():
            learner.micro_batch_tokens = measure_tokens(
                learner, objective, limits, sampling, renderer.num_tokens
            )
    return learner


def _model(config: Config, name: str, lm: CausalLM, renderer: Renderer, seeds: Seeds) -> Model:
    """Make the learner's model of this name from a language model."""
    c, start = config.learner, critic_model(config.model).path
    autocast = c.autocast is not None
    if name == "critic":
        head = read_value_head(start, lm) if has_own_critic(config.model) else None
        return Critic(lm, seeds.at("init", name), head=head, autocast=autocast)
    if name == "reward":
        check_backbone(lm)
        return RewardModel(lm, seeds.at("init", name), trailing=renderer.trailing, autocast=autocast)
    return LanguageModel(lm, num_tokens=renderer.num_tokens, chunk=c.logits_chunk, autocast=autocast)


def _optimiser(c: LearnerConfig, model: str) -> OptimiserSettings:
    """Return the settings of AdamW for one of the models. The critic's settings replace the policy's, unless
    they are left open."""

    def own(name: str) -> Any:
        value = getattr(c, f"critic_{name}") if model == "critic" else None
        return getattr(c, name) if value is None else value

    return OptimiserSettings(
        own("learning_rate"),
        c.betas,
        own("weight_decay"),
        schedule=own("schedule"),
        warmup_steps=own("warmup_steps"),
        schedule_steps=own("schedule_steps") or 1,
        max_grad_norm=own("max_grad_norm"),
    )
