"""The inputs of a run, made from its configuration: what is read, and who answers. Nothing here needs a
weight."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oat.algorithms.base import Objective
from oat.build.fingerprints import (
    Inputs,
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
from oat.build.models import ModelOutline, check_tokenizer, load_models, outline_of
from oat.build.resolve import resolve
from oat.build.resolved import Resolved
from oat.config.load import stored_config
from oat.config.settings import Config, OracleConfig, SamplingConfig, SourceConfig
from oat.data.formats import UNPAIRED
from oat.data.index_cache import cache_folders
from oat.data.prompt_set import Source
from oat.data.prompts import Prompts
from oat.environments.base import Environment, build_environment
from oat.errors import ConfigError
from oat.models.causal_lm import CausalLM
from oat.models.identity import hash_of
from oat.models.loading import load_tokenizer
from oat.oracles.base import Oracle
from oat.oracles.builtin import BUILTIN, KnownOracle
from oat.oracles.preferences import Preferences
from oat.oracles.registry import build_oracle, name_source
from oat.plugins.loading import load_symbol
from oat.rollout.recorded import RecordedActor
from oat.seeds import Seeds
from oat.text.question_forms import FORMS
from oat.text.renderer import Renderer
from oat.types import Kind, Requires
from oat.types.budget import Budget

Judges = dict[str, tuple[str, Oracle]]
"""The oracles that evaluations ask, by purpose, each with its address."""


@dataclass(frozen=True, eq=False)
class RunInputs:
    """Everything of a run that needs no weights: what is read, and who answers.

    Attributes:
        outline: of the policy.
        held_out: the prompts of evaluation, if there are any.
        pairs: those that are never learned, if there are any.
        asked: the oracle that training asks, by its address.
        known: what earlier processes of the run were made from, and what this one is
        (`build/fingerprints.py`).
    """

    outline: ModelOutline
    renderer: Renderer
    prompts: Prompts
    held_out: Prompts | None
    pairs: Prompts | None
    environment: Environment | None
    asked: dict[str, Oracle]
    judges: Judges
    known: Inputs | None
    inputs: Inputs

    @property
    def roles(self) -> dict[str, tuple[str, Oracle]]:
        """By field an oracle with its address."""
        judges = {
            "evaluation.gold" if purpose == "gold" else "evaluation.oracle": judge
            for purpose, judge in self.judges.items()
        }
        return {"oracle": next(iter(self.asked.items())), **judges}

    @property
    def sources(self) -> list[Prompts]:
        """All that is read."""
        return [source for source in (self.prompts, self.held_out, self.pairs) if source is not None]

    def close(self) -> None:
        """End what its oracles hold."""
        everyone = [*self.asked.values(), *(judge for _, judge in self.judges.values())]
        for oracle in {id(oracle): oracle for oracle in everyone}.values():
            oracle.close()


def gather_inputs(
    resolved: Resolved,
    *,
    folder: Path | None = None,
    has_opponent: bool = False,
    known: Inputs | None = None,
) -> RunInputs:
    """The inputs of a run. Of the policy only its configuration is read.

    Args:
        folder: of the run, for copies of what can only be read in order.
        known: what the run was made from whose checkpoint is to be used; its model and its text must be what
        they were.
        has_opponent: responses are compared with those of another model, so that an oracle that compares
        needs no references.

    Raises:
        OatError: a part cannot be made as configured.
    """
    config, blame = resolved.config, resolved.blame
    seeds = Seeds(config.seed)
    objective = resolved.objective
    with blame("model.path"):
        lm = load_models(config, (), seeds, resolved.outlines.on_meta)["policy"]
        outline = outline_of(lm, config.compute.profile)
        tokenizer = load_tokenizer(config.model.path)
    with blame("model.reference" if config.model.reference else "model.path"):
        inputs = inputs_of_models(config, lm, tokenizer)
    with blame("render.template"):
        inputs |= inputs_of_template(config, tokenizer)
    refuse_other_models(config, known, inputs, blame)
    with blame("render.template"):
        renderer = make_renderer(config, lm, tokenizer)
    with blame("model.path"):
        check_tokenizer(lm, config.model.path, renderer)
    with blame("prompts.path"):
        prompts = _training_prompts(config, objective, renderer, lm.context_length, seeds, folder)
    held_out: Prompts | None = None
    if config.answering is not None:
        with blame("evaluation.path"):
            held_out = _held_out_prompts(config, renderer, lm.context_length, seeds, folder)
    pairs: Prompts | None = None
    if config.evaluation is not None and config.evaluation.pairs is not None:
        with blame("evaluation.pairs"):
            pairs = _held_out_pairs(config, objective.numbers, renderer, lm.context_length, seeds, folder)
    with blame("sampling.environment"):
        environment = build_environment(config.sampling.environment) if config.sampling.environment else None
    with blame("oracle.name"):
        asked, oracle = _asked(config, resolved.requires)
        for name, each in asked.items():
            _check_price(resolved.budgets["train"], name, each, "stop")
        oracle.check_columns(prompts.columns, prompts.has_references)
    judges = _judges(resolved, oracle)
    with blame("evaluation.oracle"):
        if (
            not has_opponent
            and config.prompts.reference_key is None
            and any(judge.answers == "compare" for _, judge in judges.values())
        ):
            raise ConfigError(
                "evaluation by a comparing oracle is a win rate against reference responses; set "
                "prompts.reference_key"
            )
        for _, judge in judges.values():
            if held_out is not None:
                judge.check_columns(held_out.columns, held_out.has_references)
    inputs |= {"prompts": prompts.digests, **_held_out_inputs(config, {"held_out": held_out, "pairs": pairs})}
    run_inputs = RunInputs(
        outline, renderer, prompts, held_out, pairs, environment, asked, judges, known, inputs
    )
    inputs |= inputs_of_oracles(run_inputs.roles, versions_of(known, run_inputs.roles))
    return run_inputs


def refuse_weights(resolved: Resolved, run_inputs: RunInputs, *, is_begun: bool) -> None:
    """Remember the weights that lie on this machine, and hold those that are read against what they were.

    Args:
        is_begun: there is a checkpoint to go on with.

    Raises:
        ModelError: they are others.
    """
    config = resolved.config
    run_inputs.inputs.update(inputs_of_weights(config))
    fields = weights_read(config, has_reference="reference" in resolved.models, is_begun=is_begun)
    refuse_other_weights(run_inputs.known, run_inputs.inputs, fields, resolved.blame)


def warn_of_changes(run_dir: Path, resolved: Resolved, run_inputs: RunInputs) -> None:
    """For an evaluation of a run by its own configuration: oracles or held-out prompts that are not those of
    the run, whose stored configuration is resolved for it."""
    config, stored = resolved.config, resolve(stored_config(run_dir)[0], {}).config
    if (stored.evaluation, stored.oracle) == (config.evaluation, config.oracle):
        warn_of_changed_oracles(run_inputs.known, run_inputs.roles, run_dir)
        warn_of_other_prompts(run_inputs.known, run_inputs.inputs)


def make_renderer(config: Config, lm: CausalLM, tokenizer: Any = None) -> Renderer:
    """With the policy's tokenizer, unless it is given."""
    render, has_turns = config.render, config.sampling.environment is not None
    common: dict[str, Any] = {"stop": config.sampling.stop, "eos_ids": lm.eos_ids, "has_turns": has_turns}
    if render.question is not None:
        common |= {"question": FORMS[render.question], "few_shot": render.few_shot}
    tokenizer = tokenizer or load_tokenizer(config.model.path)
    return Renderer(tokenizer, template=render.template, system=render.system, date=render.date, **common)


def _check_price(budget: Budget, name: str, oracle: Oracle, section: str) -> None:
    """Whether a budget in tokens or money can be held; the oracle then hears of it."""
    if not oracle.names_price and (budget.tokens is not None or budget.cost is not None):
        field = f"{section}.max_tokens" if budget.tokens is not None else f"{section}.max_cost"
        raise ConfigError(
            f"{field} is set, and the oracle {name} does not say what a question costs; give it a method "
            "`price`, or remove it"
        )
    if not oracle.names_cost and budget.cost is not None:
        raise ConfigError(
            f"{section}.max_cost is set, and the oracle {name} does not know what a token costs; give it "
            "prices, or remove it"
        )
    if budget.tokens is not None or budget.cost is not None:
        oracle.bind()


def _check_outage(config: Config, name: str, oracle: Oracle) -> None:
    """A question must not be given up before what keeps it unanswered is known to be an outage."""
    outage_s, deadline_s = oracle.max_outage_s, config.oracle.deadline_s
    if outage_s is not None and deadline_s <= outage_s:
        raise ConfigError(
            f"oracle.deadline_s is {deadline_s:g}, and the oracle {name} has max_outage_s: {outage_s:g}, "
            "so questions would fail in an outage that "
            "is to end the run; set oracle.deadline_s above it, or a shorter max_outage_s"
        )


def _asked(config: Config, requires: Requires) -> tuple[dict[str, Oracle], Oracle]:
    """The oracle that training asks, by its address; and the one of that name, from whose scores its
    preferences may be made."""
    kind = requires.feedback
    name = config.oracle.name
    oracle = _named(config, name, config.oracle.options, kind)
    _check_outage(config, name, oracle)
    asked = {name: oracle}
    if oracle.answers == "compare" and config.oracle.scale != OracleConfig.scale:
        raise ConfigError(
            f"oracle.scale is {config.oracle.scale}, and {name} compares by itself; nothing reads it, "
            "remove it"
        )
    if kind != oracle.answers:
        if kind == "score":
            raise ConfigError(
                f"oracle {name} compares pairs, and {config.algorithm.name} learns from scores; use a "
                "scoring oracle"
            )
        asked = {f"{name}/preferences": Preferences(oracle, config.oracle.scale)}
    return asked, oracle


def _named(config: Config, name: str, options: Mapping[str, Any], kind: Kind) -> Oracle:
    if name not in BUILTIN:
        return build_oracle(name, options, "cuda" if config.compute.profile == "gpu" else "cpu")
    known = KnownOracle(name, kind)
    if name == "environment" and config.sampling.environment is not None:
        name_source(known, load_symbol(config.sampling.environment), config.sampling.environment)
    return known


def _judges(resolved: Resolved, trained: Oracle) -> Judges:
    """Two sections of one name and equal options are one oracle; with other options the address says whose it
    is."""
    config, blame = resolved.config, resolved.blame
    made: dict[str, tuple[Mapping[str, Any], Oracle]] = {config.oracle.name: (config.oracle.options, trained)}
    found = {}
    for purpose, section in resolved.judges.items():
        name = address = section.name
        field = "evaluation.gold" if purpose == "gold" else "evaluation.oracle"
        if name in made and made[name][0] != section.options:
            address = f"{name}/{purpose}"
        if address not in made:
            with blame(field):
                made[address] = (section.options, _named(config, name, section.options, "score"))
        oracle = made[address][1]
        _check_outage(config, name, oracle)
        with blame(field):
            if oracle.is_relative:
                raise ConfigError(
                    f"the scores of {name} are relative to those that are asked about together "
                    "(`normalise: group` or `batch`), so that their mean "
                    f"is about 0 whatever the model does; name another {field}, such as the mixture with "
                    "`normalise: none` or `fixed`"
                )
        _check_price(
            resolved.budgets[purpose],
            name,
            oracle,
            "evaluation.gold" if purpose == "gold" else "evaluation",
        )
        found[purpose] = (address, oracle)
    return found


def _training_prompts(
    config: Config,
    objective: Objective,
    renderer: Renderer,
    context: int | None,
    seeds: Seeds,
    folder: Path | None,
) -> Prompts:
    p = config.prompts
    entries = (SourceConfig(p.path, split=p.split),) if isinstance(p.path, str) else p.path
    sources = [
        Source(entry) if isinstance(entry, str) else Source(entry.path, entry.weight, entry.split)
        for entry in entries
    ]
    own: dict[str, Any] = {
        "max_prompts": p.max_prompts,
        "epochs": p.epochs,
        "shuffle": p.shuffle,
        **_kept_in(folder),
        **_columns(config),
    }
    own |= {"responses": p.responses, "score_key": p.score_key, "numbers": objective.numbers}
    own |= {"room": context, "too_long": p.too_long} if p.responses else _room(config.sampling, context)
    prompts = Prompts(sources, renderer, seeds, **own)
    if p.responses:
        _check_scores(config, objective, prompts)
    return prompts


def _check_scores(config: Config, objective: Objective, prompts: Prompts) -> None:
    """Recorded responses that are judged each by itself need something that says what each is worth.

    Raises:
        ConfigError: nothing tells the good ones from the others.
    """
    p, name, setting = config.prompts, config.algorithm.name, objective.setting_for.get("answers")
    if len(p.responses) > 1:
        return
    if UNPAIRED in prompts.formats and not objective.reads_answers:
        way = f"; set algorithm.{setting}: 1 to learn the others alone, or 0 for all" if setting else ""
        raise ConfigError(
            f"{name} would learn every response, also those whose label is false (the data are unpaired "
            f"preferences){way}"
        )
    if config.oracle.name != "recorded" or not objective.judges_singly or p.score_key is not None:
        return
    if UNPAIRED in prompts.formats and len(prompts.formats) > 1:
        others = " and ".join(sorted(prompts.formats - {UNPAIRED}))
        raise ConfigError(
            f"prompts.path has sources whose records have labels, and others that are {others}, whose "
            "responses would all be worth 1; add a column 'label' to these, or set prompts.score_key to a "
            "column that all have"
        )
    if "label" not in prompts.columns:
        known = " (the data have a column 'score')" if "score" in prompts.columns else ""
        without = f"remove algorithm.{setting} to learn every response" if setting else "add a column 'label'"
        raise ConfigError(
            f"prompts.score_key is not set: {name} would take every response in {p.responses[0]!r} for worth "
            "1, since the data have neither labels nor scores that it reads; set prompts.score_key to the "
            f"column of their scores{known}, or {without}"
        )


def _held_out_prompts(
    config: Config, renderer: Renderer, context: int | None, seeds: Seeds, folder: Path | None
) -> Prompts:
    e = config.answering
    assert e is not None, "asked for where there is one"
    assert e.path is not None, "they are answered"
    own: dict[str, Any] = {
        **_room(config.sampling, context),
        "max_prompts": e.max_prompts,
        **_kept_in(folder),
        **_columns(config),
    }
    return Prompts([Source(e.path, split=e.split)], renderer, seeds, **own)


def _held_out_pairs(
    config: Config,
    numbers: Mapping[str, str],
    renderer: Renderer,
    context: int | None,
    seeds: Seeds,
    folder: Path | None,
) -> Prompts:
    """In the columns of training, or as TRL names them."""
    e, p = config.evaluation, config.prompts
    assert e is not None, "asked for where there is one"
    assert e.pairs is not None, "they are measured"
    own: dict[str, Any] = {
        "room": context,
        "max_prompts": e.max_prompts,
        "numbers": numbers,
        **_kept_in(folder),
        **_columns(config),
    }
    own |= {
        "responses": pair_columns(config),
        "score_key": p.score_key,
        "reference_key": None,
        "too_long": p.too_long,
    }
    return Prompts([Source(e.pairs, split=e.split)], renderer, seeds, **own)


def recorded_actor(resolved: Resolved, run_inputs: RunInputs) -> RecordedActor | None:
    """The actor of recorded responses; None where the policy answers."""
    p = resolved.config.prompts
    return RecordedActor(run_inputs.prompts.fit, p.responses, p.score_key) if p.responses else None


def pair_columns(config: Config) -> tuple[str, ...]:
    """Of both responses of a held-out pair."""
    return config.prompts.responses or ("chosen", "rejected")


def _kept_in(folder: Path | None) -> dict[str, Any]:
    """Where copies lie, and where what was read is remembered."""
    return {"folder": folder, "caches": [*([folder / "indexes"] if folder else []), *cache_folders()]}


def _held_out_inputs(config: Config, sources: Mapping[str, Prompts | None]) -> Inputs:
    e = config.evaluation
    if e is None:
        return {}
    paths = {"held_out": e.path, "pairs": e.pairs}
    given = {name: source for name, source in sources.items() if source is not None}
    return {
        name: {"of": hash_of(repr((paths[name], e.split, e.max_prompts))), "is": source.digests}
        for name, source in given.items()
    }


def _columns(config: Config) -> dict[str, Any]:
    p = config.prompts
    return {
        "prompt_key": p.prompt_key,
        "reference_key": p.reference_key,
        "max_tokens": p.max_tokens,
        "on_bad_record": p.on_bad_record,
    }


def _room(sampling: SamplingConfig, context: int | None) -> dict[str, Any]:
    """Most tokens of a prompt that the policy is to answer, and how the number comes about; empty: there is
    no limit."""
    if context is None or sampling.overflow != "refuse":
        return {"room": context}
    new = sampling.max_new_tokens
    is_default = ", the default" if new == SamplingConfig.max_new_tokens else ""
    return {
        "room": context - new,
        "room_is": f" ({context} tokens less sampling.max_new_tokens: {new}{is_default})",
    }
