"""From a configuration to boxes. The only place that knows all of them, and where settings are held against each other."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from oat import boxes
from oat.actor import Actor, RecordedActor
from oat.algorithms.base import Objective
from oat.algorithms.direct import BNF, DPO, IPO, RobustDPO, SimPO, SLiC
from oat.algorithms.ensemble import EnsembleConfig, EnsembleLearning
from oat.algorithms.group import GRPO, DrGRPO
from oat.algorithms.supervised import SFT
from oat.checkpoint import Checkpoints
from oat.collector import Collector
from oat.config import Component, Config, OracleConfig, Origins, SamplingConfig, SourceConfig, convert, unknown_field, where
from oat.data import Source
from oat.engines.torch import TorchEngine
from oat.errors import ConfigError, did_you_mean
from oat.evaluate import Evaluation, Mode
from oat.explore.base import Explorer
from oat.explore.rules import NoExploration
from oat.features import Scorer
from oat.learner.ensemble import Ensemble
from oat.learner.learner import Learner
from oat.learner.limits import measure_tokens
from oat.learner.models import Critic, LanguageModel, Model
from oat.learner.optim import OptimiserSettings
from oat.ledger import Ledger
from oat.lm import CausalLM, load_lm, load_tokenizer
from oat.loop import Run
from oat.lora import load_model, share_base
from oat.oracles.base import Oracle
from oat.oracles.builtin import KnownOracle
from oat.oracles.preferences import Preferences
from oat.oracles.registry import build_oracle, oracle_options
from oat.oracles.router import OneOracle
from oat.plugins import load_symbol
from oat.prompts import Prompts
from oat.render import Renderer
from oat.runtime.local import over_wire
from oat.seeds import Seeds
from oat.stop import Stop
from oat.store import Store
from oat.tracking import Tracking
from oat.types import ENSEMBLE, Plan, Prompt, Requires, Sampling
from oat.weights import Holder, Weights

ALGORITHMS: dict[str, Any] = {cls.name: cls for cls in (DPO, RobustDPO, IPO, SLiC, SimPO, BNF, SFT, GRPO, DrGRPO)}
BUILTIN = ("environment", "recorded")
"""Oracles that ask nobody; the data or the environment know the value."""
EnsembleParts = tuple[EnsembleLearning, Ensemble, Scorer]


@dataclass(frozen=True)
class TorchEngineConfig:
    max_rows: int = 256
    """Most rows decoded together."""
    cache_gb: float = 4.0
    """Most memory for keys and values, 10^9 bytes; when it is full, rows wait."""
    deterministic: bool = False
    """The same tokens under any batching, for some speed."""


@dataclass(frozen=True)
class NoOptions:
    pass


def resolve(config: Config, origins: Origins) -> Config:
    """The configuration with every default of its parts filled in, and every rule between settings checked.

    Raises:
        ConfigError: names the place, the field, and what to do.
    """
    algorithm = algorithm_class(config.algorithm.name, origins)
    explorer = NoExploration if config.explorer.name == "none" or ":" not in config.explorer.name else load_symbol(config.explorer.name)
    choices = getattr(explorer, "Config", NoOptions)
    known: dict[str, type] = {"engine": TorchEngineConfig, "explorer": choices, "router": NoOptions, "algorithm": algorithm.Config}
    names = {"engine": ["torch"], "explorer": ["none"], "router": ["one"]}
    parts: dict[str, Any] = {}
    for section, cls in known.items():
        component: Component = getattr(config, section)
        if section in names and component.name not in names[section] and not (section == "explorer" and ":" in component.name):
            place = where((section, "name"), origins)
            raise ConfigError(f"{place}: there is no {section} {component.name!r}; {did_you_mean(component.name, names[section])}")
        parts[section] = Component(component.name, _options(section, component, cls, origins))
    config = replace(config, **parts)
    _check_oracle(config.oracle, origins)
    objective = _objective(config)
    _check(config, objective, _explorer(config, objective.requires), origins)
    if config.learner.micro_batch_size is None and config.learner.micro_batch_tokens is None:
        config = replace(config, learner=replace(config.learner, micro_batch_size=8))
    if config.learner.schedule != "constant" and config.learner.schedule_steps is None:
        if config.stop.max_steps is None:
            place = where(("learner", "schedule"), origins)
            raise ConfigError(f"{place}: a {config.learner.schedule} schedule ends at a step; set learner.schedule_steps, or stop.max_steps")
        updates = config.algorithm.options.get("epochs", 1) * config.algorithm.options.get("minibatches", 1)
        config = replace(config, learner=replace(config.learner, schedule_steps=config.stop.max_steps * updates))
    return config


def algorithm_class(name: str, origins: Origins) -> Any:
    """The class of an algorithm: ours by name, or a user's by path."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    place = where(("algorithm", "name"), origins)
    if ":" in name:
        found = load_symbol(name)
        if Objective not in getattr(found, "__mro__", ()) or not dataclasses.is_dataclass(getattr(found, "Config", None)):
            raise ConfigError(f"{place}: {name} is no algorithm; subclass Objective of oat/algorithms/base.py, with a dataclass `Config` in it")
        return found
    raise ConfigError(f"{place}: there is no algorithm {name!r}; {did_you_mean(name, ALGORITHMS)}, or path/to/file.py:Name")


def _options(section: str, component: Component, cls: type, origins: Origins) -> dict[str, Any]:
    fields = {f.name for f in dataclasses.fields(cls)}
    for option in component.options:
        if option not in fields:
            readers = [name for name, other in ALGORITHMS.items() if section == "algorithm" and option in other.Config.__dataclass_fields__]
            hint = f" of {component.name}" + (f" (it is read by {', '.join(readers)})" if readers else "")
            raise unknown_field((section, option), fields, origins, hint)
    try:
        return dataclasses.asdict(convert(cls, component.options, (section,), origins))
    except ConfigError as error:
        place = where((section,), origins)
        raise error if place in str(error) or ":" in str(error).split(" ")[0] else ConfigError(f"{place}: {error}") from None


def _check_oracle(oracle: OracleConfig, origins: Origins) -> None:
    """Options that the oracle does not take, beside the fields that every oracle has."""
    if not oracle.options:
        return
    takes = set() if oracle.name in BUILTIN else oracle_options(oracle.name)
    for option in oracle.options:
        if takes is not None and option not in takes:
            valid = {f.name for f in dataclasses.fields(OracleConfig)} | takes
            raise unknown_field(("oracle", option), valid, origins, f" of {oracle.name}")


def _most_units(config: Config, objective: Objective, explorer: Explorer) -> float:
    """Pairs or rows that a step can have; of a user's algorithm nothing is known."""
    if config.algorithm.name not in ALGORITHMS:
        return math.inf
    plan = explorer.widen(objective.plan(0))
    rows = len(config.prompts.responses) or sum(plan.samples.values())
    return plan.questions * (1 if objective.requires.feedback == "compare" else rows)


def _contradictions(config: Config, requires: Requires, units: float) -> list[tuple[str, object, str]]:
    """Settings that contradict each other: the field to change, whether it is wrong, and what to do."""
    name, recorded = config.algorithm.name, bool(config.prompts.responses)
    ratio = f"{name} divides by the probability of sampling"
    counts = [
        (f"algorithm.{field}", config.algorithm.options.get(field, 1) < 1, "it must be at least 1") for field in ("prompts", "epochs", "minibatches")
    ]
    evaluation = config.evaluation
    return [
        *counts,
        (
            "algorithm.minibatches",
            config.algorithm.options.get("minibatches", 1) > units,
            f"a step has at most {units} {'pairs' if requires.feedback == 'compare' else 'rows'}; lower it, or raise algorithm.prompts",
        ),
        (
            "stop.max_steps",
            (config.stop.max_steps, config.stop.max_queries, config.stop.max_hours, config.prompts.epochs) == (None,) * 4,
            "the run would never end; set it, stop.max_queries, stop.max_hours or prompts.epochs",
        ),
        ("sampling.temperature", requires.ratio_based and config.sampling.temperature == 0, f"{ratio}; set it above 0"),
        (
            "oracle.max_outstanding",
            requires.ratio_based and config.oracle.max_outstanding,
            f"{name} needs answers about its newest samples; set it to 0",
        ),
        ("prompts.responses", requires.ratio_based and recorded, f"{ratio}, which recorded responses lack; choose another algorithm"),
        (
            "sampling.temperature",
            requires.feedback == "compare" and not recorded and config.explorer.name == "none" and _repeats(config.sampling, requires),
            "both samples of a pair would be the same, and nothing could be learned; set a temperature above 0 and top_k other than 1",
        ),
        ("oracle.name", config.oracle.name == "recorded" and not recorded, "it answers about recorded responses; name them in prompts.responses"),
        ("oracle.name", config.oracle.name == "environment" and not config.sampling.environment, "name the environment in sampling.environment"),
        (
            "evaluation.samples",
            evaluation and not evaluation.samples and not evaluation.greedy,
            "no responses to evaluate; set it, or evaluation.greedy",
        ),
        ("model.dtype", config.model.dtype == "bfloat16", "AdamW loses most of its steps on such weights; keep float32, set learner.autocast"),
        (
            "learner.micro_batch_tokens",
            config.learner.micro_batch_tokens == "auto" and config.compute.memory_gb is None,
            "set compute.memory_gb, what the learner may take",
        ),
    ]


def _check(config: Config, objective: Objective, explorer: Explorer, origins: Origins) -> None:
    """Settings that contradict each other, or that nothing reads in this combination."""
    requires, needs = objective.requires, explorer.needs
    for field, is_wrong, why in _contradictions(config, requires, _most_units(config, objective, explorer)):
        if is_wrong:
            section, key = field.split(".")
            part = getattr(config, section)
            value = part.options[key] if section == "algorithm" else getattr(part, key)
            raise ConfigError(f"{where((section, key), origins)}: {field} is {value!r}: {why}")
    unread = {
        ("oracle", "labels"): requires.feedback != "compare",
        ("oracle", "scale"): requires.feedback != "compare",
        ("model", "reference"): not {"reference", ENSEMBLE} & (requires.models | requires.slots | needs),
        ("prompts", "score_key"): not config.prompts.responses,
        ("prompts", "split"): not isinstance(config.prompts.path, str),
        ("learner", "critic_learning_rate"): "critic" not in requires.models,
        ("learner", "schedule_steps"): config.learner.schedule == "constant",
        ("compute", "memory_gb"): config.learner.micro_batch_tokens is None,
        ("render", "date"): config.render.template in (None, "chatml"),
    }
    for (section, field), is_unread in unread.items():
        part = getattr(config, section)
        default = next(f.default for f in dataclasses.fields(part) if f.name == field)
        if is_unread and (section, field) in origins and getattr(part, field) != default:
            place = origins[section, field]
            raise ConfigError(f"{place}: nothing reads {section}.{field} with algorithm {config.algorithm.name} and these settings; remove it")


def _repeats(sampling: SamplingConfig, requires: Requires) -> bool:
    """Whether every response of a prompt is the same."""
    return len(requires.slots) == 1 and (sampling.temperature == 0 or sampling.top_k == 1)


def build(config: Config, *, directory: Path | None = None) -> Run:
    """The boxes of a resolved configuration.

    Args:
        directory: where the run lives, if not in `config.run_dir`.

    Raises:
        OatError: a part cannot be made as configured.
    """
    directory = directory or Path(config.run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    if config.compute.threads:
        torch.set_num_threads(config.compute.threads)
    seeds = Seeds(config.seed)

    def wired(box: Any, local: tuple[type, ...] = ()) -> Any:
        return over_wire(box, local=local) if config.compute.serialise else box

    objective = _objective(config)
    explorer = _explorer(config, objective.requires)
    lms = _language_models(config, objective.requires, explorer, seeds)
    renderer = _renderer(config, lms["policy"])
    prompts, held_out, notes, dropped = _prompts(config, renderer, lms["policy"].context_length, seeds)
    ensemble = _ensemble(explorer, lms, seeds)
    objectives = [objective, ensemble[0]] if ensemble else [objective]
    learner = wired(_learner(config, objective, lms, renderer, seeds, ensemble), tuple(type(o) for o in objectives))
    engine, scorer = wired(_engine(config, lms, renderer)), ensemble[2] if ensemble else None
    actor, trained = (wired(box) for box in _actors(config, objective.requires, renderer, engine, lms["policy"], scorer, seeds))
    asked, scoring = _oracles(config, objective.requires)
    served: dict[str, Oracle] = {**asked, **scoring, **({ENSEMBLE: KnownOracle(ENSEMBLE, "compare")} if ensemble else {})}
    served = {name: wired(oracle) for name, oracle in served.items()}
    holders: dict[str, list[Holder]] = {"sampler": [engine], "policy": [engine], **({ENSEMBLE: [wired(scorer)]} if scorer else {})}
    ledger = Ledger(Store(directory / "ledger.sqlite"), served, seeds, labels=config.oracle.labels, deadline_s=config.oracle.deadline_s)

    def plans(step: int) -> Plan:
        return explorer.widen(objective.plan(step))

    last = _last_step(config, prompts, plans)
    stop = Stop(last=last, max_queries=config.stop.max_queries, max_hours=config.stop.max_hours)
    weights = Weights(holders, config.learner.sync_every)
    learned = dict(zip(("objective", ENSEMBLE), objectives, strict=False))
    parts: dict[str, boxes.Stateful] = {"learner": learner, "weights": weights, "prompts": prompts, "stop": stop, **learned}
    total = math.inf if last is None else sum(plans(step).questions for step in range(last))
    router = OneOracle(next(iter(asked)))
    return Run(
        objectives=objectives,
        plans=plans,
        stop=stop,
        seeds=seeds,
        collector=Collector(prompts, trained, explorer, router, ledger, seeds, total=total, max_outstanding=config.oracle.max_outstanding),
        ledger=ledger,
        learner=learner,
        weights=weights,
        evaluation=_evaluation(config, held_out, actor, ledger, scoring, directory),
        checkpoints=Checkpoints(directory / "checkpoints", every=config.checkpoint.every, keep_last=config.checkpoint.keep_last),
        tracking=Tracking(directory, samples=config.tracking.samples),
        parts=parts,
        start={"prompts/dropped": dropped},
        notes=notes,
    )


def _objective(config: Config) -> Objective:
    cls = algorithm_class(config.algorithm.name, {})
    objective: Objective = cls(convert(cls.Config, config.algorithm.options, ("algorithm",), {}))
    objective.recorded_is_old = config.learner.autocast is None
    return objective


def _sampling(config: Config, requires: Requires) -> Sampling:
    sampling = _plain_sampling(config)
    return replace(sampling, keep_sets=requires.ratio_based and sampling.truncates)


def _renderer(config: Config, lm: CausalLM) -> Renderer:
    render = config.render
    stop, eos_ids = config.sampling.stop, lm.eos_ids
    tokenizer = load_tokenizer(config.model.path)
    return Renderer(tokenizer, template=render.template, system=render.system, date=render.date, stop=stop, eos_ids=eos_ids)


def _actors(
    config: Config, requires: Requires, renderer: Renderer, engine: TorchEngine, policy: CausalLM, scorer: Scorer | None, seeds: Seeds
) -> tuple[boxes.Actor, boxes.Actor]:
    """The actor that samples, for evaluation; and the one that training learns from: the same, or that of recorded responses."""
    environment = load_symbol(config.sampling.environment)() if config.sampling.environment else None
    sampling, room = _sampling(config, requires), _room(config.sampling, policy.context_length)
    actor = Actor(renderer, engine, sampling, seeds, environment=environment, scorer=scorer, longest_prompt=room)
    if not config.prompts.responses:
        return actor, actor
    return actor, RecordedActor(renderer, config.prompts.responses, config.prompts.score_key)


def _plain_sampling(config: Config) -> Sampling:
    names = [f.name for f in dataclasses.fields(Sampling) if f.name != "keep_sets"]
    return Sampling(**{name: getattr(config.sampling, name) for name in names})


def _language_models(config: Config, requires: Requires, explorer: Explorer, seeds: Seeds) -> dict[str, CausalLM]:
    """The policy; a frozen reference if anything needs it; the sampler's own copy when it may hold older weights; the critic's backbone. With an
    adapter they share the frozen weights, and the reference is the policy with the adapter off."""
    model, policy = config.model, load_model(config.model, seeds.key("init", "policy"))
    lms = {"policy": policy}
    if "reference" in requires.models | requires.slots | explorer.needs or ENSEMBLE in explorer.needs:
        is_shared = model.lora is not None and model.reference is None
        lms["reference"] = policy.base() if is_shared else load_lm(model.reference or model.path, dtype=model.dtype)
    for name, is_needed in (("sampler", config.learner.sync_every > 1), ("critic", "critic" in requires.models)):
        if is_needed:
            lms[name] = load_model(model, seeds.key("init", name))
            if model.lora is not None:
                share_base(lms[name], policy)
    return lms


def _learner(
    config: Config, objective: Objective, lms: Mapping[str, CausalLM], renderer: Renderer, seeds: Seeds, ensemble: EnsembleParts | None
) -> Learner:
    c = config.learner
    models: dict[str, Model] = {}
    for name in sorted(objective.requires.models):
        if name == "critic":
            models[name] = Critic(lms[name], seeds.at("init", name), autocast=c.autocast is not None)
        else:
            models[name] = LanguageModel(lms[name], num_tokens=renderer.num_tokens, chunk=c.logits_chunk, autocast=c.autocast is not None)
        if c.gradient_checkpointing and name in objective.wants:
            lms[name].checkpoint_gradients()
    rates = {"policy": c.learning_rate, "critic": c.learning_rate if c.critic_learning_rate is None else c.critic_learning_rate}
    common: dict[str, Any] = {"schedule": c.schedule, "warmup_steps": c.warmup_steps, "schedule_steps": c.schedule_steps or 1}
    optimisers = {name: OptimiserSettings(rates[name], c.betas, c.weight_decay, **common) for name in objective.wants}
    if ensemble:
        settings = ensemble[0].config
        models[ENSEMBLE] = ensemble[1]
        optimisers[ENSEMBLE] = OptimiserSettings(settings.learning_rate, weight_decay=settings.weight_decay)
    learner = Learner(
        models,
        optimisers,
        micro_batch_size=c.micro_batch_size,
        micro_batch_tokens=None if c.micro_batch_tokens == "auto" else c.micro_batch_tokens,
        max_grad_norm=c.max_grad_norm,
        gradient_checkpointing=c.gradient_checkpointing,
        seeds=seeds,
    )
    if c.micro_batch_tokens == "auto":
        learner.micro_batch_tokens = measure_tokens(learner, objective, config)
    return learner


def _engine(config: Config, lms: Mapping[str, CausalLM], renderer: Renderer) -> TorchEngine:
    """The torch engine; its slots share the learner's tensors wherever their versions cannot differ."""
    slots = {"sampler": lms.get("sampler", lms["policy"]), "policy": lms["policy"]}
    if "reference" in lms:
        slots["reference"] = lms["reference"]
    options = TorchEngineConfig(**config.engine.options)
    return TorchEngine(
        slots,
        num_tokens=renderer.num_tokens,
        stop_ids=renderer.stop_ids,
        decode=renderer.decode,
        max_rows=options.max_rows,
        cache_gb=options.cache_gb,
        deterministic=options.deterministic,
    )


def _explorer(config: Config, requires: Requires) -> Explorer:
    """NoExploration, or a user's class: constructed with (kind), or (kind, config) where it has a dataclass `Config`."""
    assert requires.feedback != "none", "an objective without feedback needs no explorer"
    if config.explorer.name == "none":
        return NoExploration(requires.feedback)
    cls: Callable[..., Explorer] = load_symbol(config.explorer.name)
    settings = getattr(cls, "Config", None)
    return cls(requires.feedback, *([convert(settings, config.explorer.options, ("explorer",), {})] if settings else []))


def _ensemble(explorer: Explorer, lms: Mapping[str, CausalLM], seeds: Seeds) -> EnsembleParts | None:
    """The ensemble's objective, the learner's ensemble, and the actor's side of it, where the explorer needs one.

    Raises:
        ConfigError: the explorer says nothing about its ensemble.
    """
    if ENSEMBLE not in explorer.needs:
        return None
    settings = getattr(getattr(explorer, "config", None), "ensemble", None)
    if not isinstance(settings, EnsembleConfig):
        raise ConfigError("an explorer that needs the ensemble has a field `ensemble: EnsembleConfig` in its Config, and keeps it as `config`")
    backbone = lms["reference"]
    width = backbone.module.get_output_embeddings().in_features

    def fresh() -> Ensemble:
        shape = {"features": width, "members": settings.members, "hidden": settings.hidden}
        return Ensemble(**shape, activation=settings.activation, generator=seeds.at("init", ENSEMBLE))

    return EnsembleLearning(settings), fresh(), Scorer(backbone, fresh())


def _oracles(config: Config, requires: Requires) -> tuple[dict[str, Oracle], dict[str, Oracle]]:
    """The oracle that training asks and the one that evaluation asks, each by its address."""
    kind = requires.feedback
    assert kind != "none", "an objective without feedback asks no oracle"
    name = config.oracle.name
    oracle: Oracle = KnownOracle(name, kind) if name in BUILTIN else build_oracle(name, config.oracle.options)
    asked, own = {name: oracle}, config.evaluation.oracle if config.evaluation else None
    if oracle.answers == "compare" and config.oracle.scale != OracleConfig.scale:
        raise ConfigError(f"oracle.scale is {config.oracle.scale}, and {name} compares by itself; nothing reads it, remove it")
    if kind != oracle.answers:
        if kind == "score":
            raise ConfigError(f"oracle {name} compares pairs, and {config.algorithm.name} learns from scores; use a scoring oracle")
        asked = {f"{name}/preferences": Preferences(oracle, config.oracle.scale)}
    if own is None or own == name:
        return asked, {name: oracle}
    return asked, {own: KnownOracle(own, "score") if own in BUILTIN else build_oracle(own, {})}


def _prompts(config: Config, renderer: Renderer, context: int | None, seeds: Seeds) -> tuple[Prompts, list[Prompt], tuple[str, ...], int]:
    """The prompts of training, those of evaluation, and of both together: what people should know, and how many were dropped."""
    p, e = config.prompts, config.evaluation
    entries = (SourceConfig(p.path, split=p.split),) if isinstance(p.path, str) else p.path
    sources = [Source(entry) if isinstance(entry, str) else Source(entry.path, entry.weight, entry.split) for entry in entries]
    common: dict[str, Any] = {"prompt_key": p.prompt_key, "reference_key": p.reference_key, "max_tokens": p.max_tokens}
    room = _room(config.sampling, context)
    own: dict[str, Any] = {"room": context if p.responses else room, "max_prompts": p.max_prompts, "epochs": p.epochs, "shuffle": p.shuffle}
    prompts = Prompts(sources, renderer, seeds, **own, **common)
    if e is None:
        return prompts, [], prompts.notes, prompts.dropped
    held_out = Prompts([Source(e.path, split=e.split)], renderer, seeds, room=room, max_prompts=e.max_prompts, **common)
    return prompts, held_out.all(), (*prompts.notes, *held_out.notes), prompts.dropped + held_out.dropped


def _room(sampling: SamplingConfig, context: int | None) -> int | None:
    """Most tokens of a prompt that the policy is to answer; None: there is no limit."""
    return None if context is None else context - (sampling.max_new_tokens if sampling.overflow == "refuse" else 0)


def _last_step(config: Config, prompts: Prompts, plans: Callable[[int], Plan]) -> int | None:
    """The run's number of steps: `stop.max_steps`, or fewer where the prompts are used up before."""
    if config.prompts.epochs is None:
        return config.stop.max_steps
    left, step = prompts.size * config.prompts.epochs, 0
    while left > 0 and (config.stop.max_steps is None or step < config.stop.max_steps):
        left -= plans(step).prompts
        step += 1
    return step


def _evaluation(
    config: Config, prompts: list[Prompt], actor: boxes.Actor, ledger: Ledger, oracles: Mapping[str, Oracle], directory: Path
) -> Evaluation | None:
    if config.evaluation is None:
        return None
    name, oracle = next(iter(oracles.items()))
    if oracle.answers == "compare" and config.prompts.reference_key is None:
        raise ConfigError("evaluation by a comparing oracle is a win rate against reference responses; set prompts.reference_key")
    sampling = _plain_sampling(config)
    modes = []
    if config.evaluation.samples:
        modes.append(Mode("sampled", config.evaluation.samples, sampling))
    if config.evaluation.greedy:
        modes.append(Mode("greedy", 1, Sampling(sampling.max_new_tokens, temperature=0.0, stop=sampling.stop)))
    folder = directory / "evaluations"
    return Evaluation(prompts, actor, ledger, modes, kind=oracle.answers, oracle=name, every=config.evaluation.every, directory=folder)
