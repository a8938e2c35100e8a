"""The inputs of a run, made from its configuration: renderer, prompts, environment and oracles. None of them
needs the weights of the run's models."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oat.assemble.engine_record import engine_record
from oat.assemble.fingerprints import (
    Inputs,
    inputs_of_explorer,
    inputs_of_models,
    inputs_of_oracles,
    inputs_of_template,
    inputs_of_weights,
    refuse_other_models,
    refuse_other_weights,
    versions_of,
    warn_of_changed_oracles,
    warn_of_other_prompts,
    weights_read,
)
from oat.assemble.models import check_tokenizer, load_models
from oat.assemble.oracles import Addressed, by_field, evaluation_oracles, training_oracle
from oat.assemble.outline import ModelOutline, outline_of
from oat.assemble.prompts import PromptReader, inputs_of_held_out
from oat.config.settings import Config
from oat.config.stored import stored_config
from oat.data.prompts import Prompts
from oat.environments.batched import BatchedEnvironment
from oat.errors import ConfigError
from oat.explore.settings import ensemble_of
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_tokenizer
from oat.oracles.base import Oracle
from oat.resolve.environment import make_batched
from oat.resolve.resolve import resolve
from oat.resolve.resolved import Resolved
from oat.rollout.recorded import RecordedActor
from oat.seeds import Seeds
from oat.text.question_forms import FORMS
from oat.text.renderer import Renderer


@dataclass(frozen=True, eq=False)
class RunInputs:
    """The inputs of a run. None of them needs the weights of the run's models.

    Attributes:
        outline: the outline of the policy.
        held_out: the prompts of evaluations; None: there are none.
        pairs: the held-out pairs, which evaluations measure; None: there are none.
        training_oracle: the oracle that training asks, with its address.
        evaluation_oracles: the oracles that evaluations ask, each with its address, by purpose.
        known: the fingerprints of earlier processes of the run (`assemble/fingerprints.py`); None: there are
            none.
        inputs: the fingerprints of the present inputs.
        news: sentences for people that are said when this process writes its first row.
        closing: further functions that `close` calls.
        clients: oracles that other processes ask, by address. The ledger asks them in place of the run's own
            oracles of these addresses.
    """

    outline: ModelOutline
    renderer: Renderer
    prompts: Prompts
    held_out: Prompts | None
    pairs: Prompts | None
    environment: BatchedEnvironment | None
    training_oracle: Addressed
    evaluation_oracles: dict[str, Addressed]
    known: Inputs | None
    inputs: Inputs
    news: list[str] = field(default_factory=list)
    closing: list[Callable[[], None]] = field(default_factory=list)
    clients: dict[str, Oracle] = field(default_factory=dict)

    @property
    def roles(self) -> dict[str, Addressed]:
        """Each oracle with its address, by the field that names it."""
        return by_field(self.training_oracle, self.evaluation_oracles)

    @property
    def oracles(self) -> dict[str, Oracle]:
        """Every oracle that the run asks, by address."""
        return dict([self.training_oracle, *self.evaluation_oracles.values()])

    @property
    def has_character_steps(self) -> bool:
        """True if training's answers may have rewards of steps that end at characters of a response. Then
        the trajectories must say where their text ends after each token."""
        return self.training_oracle[1].gives_steps == "characters"

    @property
    def sources(self) -> list[Prompts]:
        """The prompts of training, the held-out prompts and the held-out pairs. What the run lacks is left
        out."""
        return [source for source in (self.prompts, self.held_out, self.pairs) if source is not None]

    def close(self) -> None:
        """Release the resources of the oracles and of the environment, and of what else was made beside
        them."""
        for close in self.closing:
            close()
        if self.environment is not None:
            self.environment.close()
        for oracle in {id(oracle): oracle for oracle in self.oracles.values()}.values():
            oracle.close()


def gather_inputs(
    resolved: Resolved,
    *,
    folder: Path | None = None,
    has_opponent: bool = False,
    known: Inputs | None = None,
) -> RunInputs:
    """Make the inputs of a run.

    Args:
        folder: the run directory, for indexes and for copies of data that can only be read in order; None:
            there is no directory.
        has_opponent: True if an evaluation compares responses with those of another model. A comparing oracle
            then needs no reference responses in the data.
        known: the fingerprints of the run whose checkpoint is used. A model, tokenizer or template is
            refused if its fingerprint differs from the one in `known`. None: nothing is compared.

    Raises:
        OatError: a part cannot be made as configured.
    """
    config, error_context = resolved.config, resolved.error_context
    outline, renderer, inputs = _gather_text(resolved, known)
    reader = PromptReader(resolved, renderer, outline.context_length, Seeds(config.seed), folder)
    with error_context("prompts.path"):
        prompts = reader.training()
    with error_context("evaluation.path"):
        held_out = reader.held_out()
    with error_context("evaluation.pairs"):
        pairs = reader.pairs()
    environment = make_batched(resolved.config, resolved.origins)
    with error_context("oracle.name"):
        training, oracle = training_oracle(resolved)
        oracle.check_columns(prompts.columns, prompts.has_references)
        oracle.tell_opening(renderer.opening)
    evaluating = evaluation_oracles(resolved, oracle)
    for purpose, (_, each) in evaluating.items():
        with error_context("evaluation.gold" if purpose == "gold" else "evaluation.oracle"):
            each.tell_opening(renderer.opening)
    with error_context("evaluation.oracle"):
        _check_evaluation(config, evaluating, held_out, has_opponent=has_opponent)
    inputs |= {"prompts": prompts.digests, **inputs_of_held_out(config, held_out, pairs)}
    inputs |= engine_record(resolved)
    run_inputs = RunInputs(
        outline=outline,
        renderer=renderer,
        prompts=prompts,
        held_out=held_out,
        pairs=pairs,
        environment=environment,
        training_oracle=training,
        evaluation_oracles=evaluating,
        known=known,
        inputs=inputs,
    )
    inputs |= inputs_of_oracles(run_inputs.roles, versions_of(known, run_inputs.roles))
    return run_inputs


def _gather_text(resolved: Resolved, known: Inputs | None) -> tuple[ModelOutline, Renderer, Inputs]:
    """Return the outline of the policy, the renderer, and the fingerprints of models and template. Refuse
    models or a template whose fingerprints differ from those in `known`."""
    config, error_context = resolved.config, resolved.error_context
    with error_context("model.path"):
        lm = load_models(config, (), Seeds(config.seed), resolved.outlines.on_meta)["policy"]
        outline = outline_of(lm, config.compute.profile)
        tokenizer = load_tokenizer(config.model.path)
    with error_context("model.path"):
        inputs = inputs_of_models(config, lm, tokenizer, error_context)
    with error_context("render.template"):
        inputs |= inputs_of_template(config, tokenizer)
    refuse_other_models(config, known, inputs, error_context)
    with error_context("render.template"):
        renderer = make_renderer(config, lm, tokenizer)
    with error_context("model.path"):
        check_tokenizer(lm, config.model.path, renderer)
    return outline, renderer, inputs


def _check_evaluation(
    config: Config, oracles: dict[str, Addressed], held_out: Prompts | None, *, has_opponent: bool
) -> None:
    """Refuse an oracle of evaluations in two cases. It needs references or columns that the held-out prompts
    lack. Or it compares, and there is nothing to compare with: no opponent, and no
    `prompts.reference_key`."""
    compares = any(oracle.answers == "compare" for _, oracle in oracles.values())
    if compares and not has_opponent and config.prompts.reference_key is None:
        raise ConfigError(
            "evaluation by a comparing oracle is a win rate against reference responses; set "
            "prompts.reference_key"
        )
    if held_out is not None:
        for _, oracle in oracles.values():
            oracle.check_columns(held_out.columns, held_out.has_references)


def refuse_weights(resolved: Resolved, run_inputs: RunInputs, *, is_begun: bool) -> None:
    """Add the fingerprints of the weights on this machine to `run_inputs.inputs`. If the run reads weights
    whose fingerprints differ from those in `run_inputs.known`, refuse them.

    Args:
        is_begun: True if the run is continued from a checkpoint.

    Raises:
        ModelError: weights have changed.
    """
    config = resolved.config
    features, ensemble = resolved.features, ensemble_of(resolved.explorer)
    of_explorer = inputs_of_explorer(
        features.backbone if features is not None and features.is_own else None,
        None if ensemble is None else ensemble.start,
        resolved.error_context,
    )
    of_models = inputs_of_weights(config)
    run_inputs.inputs["weights"] = {**of_models["weights"], **of_explorer}
    fields = weights_read(
        config,
        has_reference="reference" in resolved.models,
        has_critic="critic" in resolved.models and config.model.critic is not None,
        is_begun=is_begun,
    )
    # no checkpoint has a backbone, nor the ensemble to start from, to which the prior pulls
    refuse_other_weights(run_inputs.known, run_inputs.inputs, [*fields, *of_explorer], resolved.error_context)


def warn_of_changes(run_dir: Path, resolved: Resolved, run_inputs: RunInputs) -> None:
    """Warn if the oracles or held-out prompts of a run's evaluation have changed since the run used them. If
    the settings of evaluation or oracle are not the run's own, do not warn."""
    config, stored = resolved.config, resolve(stored_config(run_dir)[0], {}).config
    if (stored.evaluation, stored.oracle) == (config.evaluation, config.oracle):
        warn_of_changed_oracles(run_inputs.known, run_inputs.roles, run_dir)
        warn_of_other_prompts(run_inputs.known, run_inputs.inputs)


def make_renderer(config: Config, lm: CausalLM, tokenizer: Any = None) -> Renderer:
    """Make the renderer of a configuration.

    Args:
        lm: the policy, with or without weights.
        tokenizer: the policy's tokenizer; None: it is loaded.
    """
    render, has_turns = config.render, config.sampling.environment is not None
    common: dict[str, Any] = {
        "stop": config.sampling.stop,
        "eos_ids": lm.eos_ids,
        "has_turns": has_turns,
        "special_tokens": render.special_tokens or "keep",
    }
    if render.question is not None:
        common |= {"question": FORMS[render.question], "few_shot": render.few_shot}
    tokenizer = tokenizer or load_tokenizer(config.model.path)
    return Renderer(tokenizer, template=render.template, system=render.system, date=render.date, **common)


def recorded_actor(resolved: Resolved, run_inputs: RunInputs) -> RecordedActor | None:
    """Make the actor of recorded responses. Return None if the policy samples the responses."""
    p = resolved.config.prompts
    if not p.responses:
        return None
    has_ends = run_inputs.has_character_steps
    return RecordedActor(run_inputs.prompts.fit, p.responses, p.score_key, records_text_ends=has_ends)
