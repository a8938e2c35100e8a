"""From a resolved configuration to boxes. The only place that knows all of them; `check.py` resolves, and knows the rules between settings."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oat import boxes
from oat.actor import Actor, RecordedActor
from oat.alarms import Alarms, rules_of
from oat.algorithms.base import Objective
from oat.algorithms.ensemble import EnsembleConfig, EnsembleLearning
from oat.budget import Budget
from oat.check import ALGORITHMS, BUILTIN, TorchEngineConfig, judges_of, make_explorer, make_objective, resolve, watched_metrics
from oat.checkpoint import Checkpoints
from oat.collector import Collector
from oat.config import Origins, blaming
from oat.data import Source
from oat.engines.torch import TorchEngine
from oat.environments.base import Environment, build_environment
from oat.errors import ConfigError
from oat.evaluate import Evaluation, Judge, Mode, Records, Trigger, Wanted
from oat.explore.base import Explorer
from oat.features import Scorer
from oat.formats import UNPAIRED
from oat.interruption import Interruption
from oat.learner.ensemble import Ensemble
from oat.learner.learner import Learner
from oat.learner.limits import choose_threads, measure_tokens
from oat.learner.models import Critic, LanguageModel, Model
from oat.learner.optim import OptimiserSettings
from oat.ledger import Ledger
from oat.lm import CausalLM, is_outlined, load_tokenizer, outlines
from oat.loop import Run
from oat.models import check_reference, check_tokenizer, device_notes, load_models, load_slots, slot_dtypes
from oat.oracles.answers import load_answers
from oat.oracles.base import Oracle, names_price
from oat.oracles.builtin import KnownOracle
from oat.oracles.callables import CallableOracle
from oat.oracles.preferences import Preferences
from oat.oracles.registry import build_oracle
from oat.oracles.router import OneOracle
from oat.prompts import Prompts
from oat.provenance import environment_of
from oat.render import Renderer
from oat.runtime.local import over_wire
from oat.seeds import Seeds
from oat.settings import Config, GoldConfig, OracleConfig, SamplingConfig, SourceConfig
from oat.stop import Stop
from oat.store import Store
from oat.tracking import Tracking
from oat.types import ENSEMBLE, Plan, Requires, Sampling
from oat.weights import Holder, Weights

__all__ = ["ALGORITHMS", "TorchEngineConfig", "build", "resolve"]

EnsembleParts = tuple[EnsembleLearning, Ensemble, Scorer]
Judges = dict[str, tuple[str, Oracle]]
"""The oracles that evaluations ask, by purpose, each with its address."""
Blame = Callable[[str], AbstractContextManager[None]]
"""`blaming`, of one configuration."""


@dataclass(frozen=True, eq=False)
class Surroundings:
    """Everything of a run that needs no weights: what is read, and who answers.

    Attributes:
        held_out: the prompts of evaluation, if there is any.
        asked: the oracle that training asks, by its address.
    """

    renderer: Renderer
    prompts: Prompts
    held_out: Prompts | None
    environment: Environment | None
    asked: dict[str, Oracle]
    judges: Judges

    @property
    def sources(self) -> list[Prompts]:
        """All that is read."""
        return [self.prompts, *([self.held_out] if self.held_out else [])]


def surround(config: Config, origins: Origins | None = None, *, folder: Path | None = None, has_opponent: bool = False) -> Surroundings:
    """What is around the models of a resolved configuration. Of the policy only its configuration is read.

    Args:
        folder: of the run, for copies of what can only be read in order.
        has_opponent: responses are compared with those of another model, so that an oracle that compares needs no references.

    Raises:
        OatError: a part cannot be made as configured.
    """
    seeds, objective, blame = Seeds(config.seed), make_objective(config), partial(blaming, config, origins or {})
    with outlines(), blame("model.path"):
        lm = load_models(config, (), seeds)["policy"]
        tokenizer = load_tokenizer(config.model.path)
    with blame("render.template"):
        renderer = make_renderer(config, lm, tokenizer)
    with blame("model.path"):
        check_tokenizer(lm, renderer)
    with blame("prompts.path"):
        prompts = _training_prompts(config, renderer, lm.context_length, seeds, folder)
    held_out: Prompts | None = None
    if config.evaluation is not None:
        with blame("evaluation.path"):
            held_out = _held_out_prompts(config, renderer, lm.context_length, seeds, folder)
    with blame("sampling.environment"):
        environment = build_environment(config.sampling.environment) if config.sampling.environment else None
    with blame("oracle.name"):
        asked, oracle = _asked(config, objective.requires)
        _check_price(config, asked)
        _check_columns(oracle, prompts)
    judges = _judges(config, oracle, blame)
    with blame("evaluation.oracle"):
        if not has_opponent and config.prompts.reference_key is None and any(judge.answers == "compare" for _, judge in judges.values()):
            raise ConfigError("evaluation by a comparing oracle is a win rate against reference responses; set prompts.reference_key")
        for _, judge in judges.values():
            if held_out is not None:
                _check_columns(judge, held_out)
    return Surroundings(renderer, prompts, held_out, environment, asked, judges)


def build(config: Config, *, directory: Path | None = None, around: Surroundings | None = None, origins: Origins | None = None) -> Run:
    """The boxes of a resolved configuration.

    Args:
        directory: where the run lives, if not in `config.run_dir`.
        around: what is around its models, if that is there already.

    Raises:
        OatError: a part cannot be made as configured.
    """
    directory = directory or Path(config.run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    if config.compute.threads:
        torch.set_num_threads(config.compute.threads)
    around, blame = around or surround(config, origins, folder=directory), partial(blaming, config, origins or {})
    seeds, wired, interruption, objective = Seeds(config.seed), partial(_wired, config), Interruption(), make_objective(config)
    explorer = make_explorer(config, objective.requires)
    renderer, prompts, asked, judges = around.renderer, around.prompts, around.asked, around.judges
    lms = _models(config, objective.requires, explorer, renderer, seeds, blame)
    with blame("explorer.name"):
        ensemble = make_ensemble(explorer, lms, seeds)
    objectives = [objective, ensemble[0]] if ensemble else [objective]
    with blame("model.path"):
        learner = wired(make_learner(config, objective, lms, renderer, seeds, ensemble, directory / "nonfinite"), tuple(type(o) for o in objectives))
        engine, scorer = wired(_engine(config, objective.requires, explorer, lms, renderer, seeds)), ensemble[2] if ensemble else None
    actor, trained = (wired(box) for box in _actors(config, objective.requires, around, engine, scorer, seeds))
    believed = {ENSEMBLE: KnownOracle(ENSEMBLE, "compare")} if ensemble else {}
    served = {name: wired(oracle) for name, oracle in {**asked, **dict(judges.values()), **believed}.items()}
    ledger = _ledger(config, directory, served, seeds, interruption.heed)

    def plans(step: int) -> Plan:
        return explorer.widen(objective.plan(step))

    last = _last_step(config, prompts, plans)
    stop = Stop(last=last, budget=_budget(config), max_hours=config.stop.max_hours)
    weights, alarms = _weights(config, engine, wired(scorer) if scorer else None), _alarms(config, objective)
    ahead: dict[str, Any] = {"plans": plans, "last": last, "max_outstanding": config.oracle.max_outstanding}
    collector = Collector(prompts, trained, explorer, OneOracle(next(iter(asked))), ledger, seeds, **ahead)
    evaluation = _evaluation(config, around, actor, ledger, seeds, directory)
    parts: dict[str, boxes.Stateful] = {"learner": learner, "weights": weights, "prompts": prompts, "collector": collector, "stop": stop}
    parts |= {"alarms": alarms, **dict(zip(("objective", ENSEMBLE), objectives, strict=False)), **({"evaluation": evaluation} if evaluation else {})}
    return Run(
        objectives=objectives,
        plans=plans,
        stop=stop,
        seeds=seeds,
        collector=collector,
        ledger=ledger,
        learner=learner,
        weights=weights,
        evaluation=evaluation,
        alarms=alarms,
        checkpoints=Checkpoints(directory / "checkpoints", **asdict(config.checkpoint)),
        tracking=_tracking(config, directory),
        parts=parts,
        start=_left_out(around.sources),
        chosen=_chosen(config, objective, learner, engine),
        notes=(*device_notes(config.compute.profile), *(note for source in around.sources for note in source.notes)),
        interruption=interruption,
    )


def _wired(config: Config, box: Any, local: tuple[type, ...] = ()) -> Any:
    return over_wire(box, local=local) if config.compute.serialise else box


def _models(config: Config, requires: Requires, explorer: Explorer, renderer: Renderer, seeds: Seeds, blame: Blame) -> dict[str, CausalLM]:
    with blame("model.reference" if config.model.reference else "model.path"):
        lms = load_models(config, needed_models(config, requires, explorer), seeds)
        if config.model.reference and "reference" in lms:
            check_reference(lms["reference"], config.model.reference, renderer)
    return lms


def _budget(config: Config) -> Budget:
    return Budget(config.stop.max_queries, config.stop.max_tokens, config.stop.max_cost)


def _left_out(sources: Sequence[Prompts]) -> dict[str, float]:
    """Of all that is read, as metrics."""
    return {"prompts/dropped": sum(source.dropped for source in sources), "prompts/skipped": sum(source.skipped for source in sources)}


def _check_price(config: Config, asked: Mapping[str, Oracle]) -> None:
    budget = _budget(config)
    for name, oracle in asked.items():
        if not names_price(oracle) and (budget.tokens is not None or budget.cost is not None):
            field = "stop.max_tokens" if budget.tokens is not None else "stop.max_cost"
            raise ConfigError(f"{field} is set, and the oracle {name} does not say what a question costs; give it a method `price`, or remove it")


def _ledger(config: Config, directory: Path, oracles: Mapping[str, Oracle], seeds: Seeds, heed: Callable[[], None]) -> Ledger:
    o, e = config.oracle, config.evaluation
    budgets = {"train": _budget(config)}
    if e is not None:
        gold = e.gold.max_queries if isinstance(e.gold, GoldConfig) else None
        budgets |= {"eval": Budget(e.max_queries), "gold": Budget(gold)}
    common: dict[str, Any] = {"labels": o.labels, "deadline_s": o.deadline_s, "max_wait_s": o.max_wait_s, "max_age": o.max_answer_age}
    common |= {"repeats": o.repeats, "keep_groups": config.tracking.keep_trajectories, "heed": heed}
    return Ledger(Store(directory / "ledger.sqlite"), oracles, seeds, budgets=budgets, **common)


def _tracking(config: Config, directory: Path) -> Tracking:
    t = config.tracking
    return Tracking(directory, samples=t.samples, environment=partial(environment_of, config.seed), tensorboard=t.tensorboard)


def _chosen(config: Config, objective: Objective, learner: Learner, engine: TorchEngine) -> dict[tuple[str, str], Any]:
    """What is found once, when a run is created, and then stays: as given, or as measured now."""
    if config.compute.threads is None and config.compute.profile == "cpu" and not is_outlined():
        torch.set_num_threads(choose_threads(learner, objective))
    return {
        ("learner", "micro_batch_tokens"): learner.micro_batch_tokens,
        ("engine", "threads"): engine.threads,
        ("compute", "threads"): torch.get_num_threads(),
    }


def _weights(config: Config, engine: TorchEngine, scorer: Scorer | None) -> Weights:
    holders: dict[str, list[Holder]] = {"sampler": [engine], "policy": [engine], **({ENSEMBLE: [scorer]} if scorer else {})}
    return Weights(holders, config.learner.sync_every, slot_dtypes(config))


def make_sampling(config: Config, requires: Requires) -> Sampling:
    """As the actor samples."""
    sampling = _plain_sampling(config)
    return replace(sampling, keep_sets=requires.ratio_based and sampling.truncates)


def make_renderer(config: Config, lm: CausalLM, tokenizer: Any = None) -> Renderer:
    """With the policy's tokenizer, unless it is given."""
    render, has_turns = config.render, config.sampling.environment is not None
    common: dict[str, Any] = {"stop": config.sampling.stop, "eos_ids": lm.eos_ids, "has_turns": has_turns}
    tokenizer = tokenizer or load_tokenizer(config.model.path)
    return Renderer(tokenizer, template=render.template, system=render.system, date=render.date, **common)


def _actors(
    config: Config, requires: Requires, around: Surroundings, engine: TorchEngine, scorer: Scorer | None, seeds: Seeds
) -> tuple[boxes.Actor, boxes.Actor]:
    """The actor that samples, for evaluation; and the one that training learns from: the same, or that of recorded responses."""
    actor = Actor(around.renderer, engine, make_sampling(config, requires), seeds, environment=around.environment, scorer=scorer)
    if not config.prompts.responses:
        return actor, actor
    return actor, RecordedActor(around.renderer, config.prompts.responses, config.prompts.score_key)


def _plain_sampling(config: Config) -> Sampling:
    names = [f.name for f in fields(Sampling) if f.name != "keep_sets"]
    return Sampling(**{name: getattr(config.sampling, name) for name in names})


def needed_slots(config: Config, requires: Requires, explorer: Explorer) -> set[str]:
    """Slots of the engine that training or evaluations ask."""
    return {*requires.slots, *explorer.needs, *([config.evaluation.slot] if config.evaluation else [])}


def needed_models(config: Config, requires: Requires, explorer: Explorer) -> set[str]:
    """Names of the models that a run has; an ensemble's features are the reference's."""
    named = {*requires.models, *needed_slots(config, requires, explorer)}
    return named | {"reference"} if ENSEMBLE in explorer.needs else named


def make_learner(
    config: Config,
    objective: Objective,
    lms: Mapping[str, CausalLM],
    renderer: Renderer,
    seeds: Seeds,
    ensemble: EnsembleParts | None,
    keep: Path | None = None,
) -> Learner:
    """The learner; a batch that stops it goes into the folder `keep`."""
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
        max_skips=c.max_skips if c.on_nonfinite == "skip" else 0,
        keep=keep,
        seeds=seeds,
    )
    if c.micro_batch_tokens == "auto":
        sampling = make_sampling(config, objective.requires)
        learner.micro_batch_tokens = measure_tokens(learner, objective, config, sampling, renderer.num_tokens)
    return learner


def _engine(config: Config, requires: Requires, explorer: Explorer, lms: Mapping[str, CausalLM], renderer: Renderer, seeds: Seeds) -> TorchEngine:
    options = TorchEngineConfig(**config.engine.options)
    engine = TorchEngine(
        load_slots(config, lms, needed_slots(config, requires, explorer), seeds),
        num_tokens=renderer.num_tokens,
        stop_ids=renderer.stop_ids,
        decode=renderer.decode,
        max_rows=options.max_rows,
        cache_gb=options.cache_gb,
        deterministic=options.deterministic,
        threads=options.threads,
    )
    if options.threads is None and config.compute.profile == "cpu" and not is_outlined():
        plan = make_objective(config).plan(0)
        engine.choose_threads(max(1, plan.prompts * sum(plan.samples.values())))
    return engine


def make_ensemble(explorer: Explorer, lms: Mapping[str, CausalLM], seeds: Seeds) -> EnsembleParts | None:
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


def _asked(config: Config, requires: Requires) -> tuple[dict[str, Oracle], Oracle]:
    """The oracle that training asks, by its address; and the one of that name, from whose scores its preferences may be made."""
    kind = requires.feedback
    assert kind != "none", "an objective without feedback asks no oracle"
    name = config.oracle.name
    oracle: Oracle = KnownOracle(name, kind) if name in BUILTIN else build_oracle(name, config.oracle.options)
    asked = {name: oracle}
    if oracle.answers == "compare" and config.oracle.scale != OracleConfig.scale:
        raise ConfigError(f"oracle.scale is {config.oracle.scale}, and {name} compares by itself; nothing reads it, remove it")
    if kind != oracle.answers:
        if kind == "score":
            raise ConfigError(f"oracle {name} compares pairs, and {config.algorithm.name} learns from scores; use a scoring oracle")
        asked = {f"{name}/preferences": Preferences(oracle, config.oracle.scale)}
    return asked, oracle


def _check_columns(oracle: Oracle, prompts: Prompts) -> None:
    """A function gets the columns that it names; of a class's methods nothing is known."""
    if isinstance(oracle, CallableOracle):
        oracle.check_columns(prompts.columns, prompts.has_references)


def _judges(config: Config, trained: Oracle, blame: Blame) -> Judges:
    """Two sections of one name and equal options are one oracle; with other options the address says whose it is."""
    made: dict[str, tuple[Mapping[str, Any], Oracle]] = {config.oracle.name: (config.oracle.options, trained)}
    found = {}
    for purpose, section in judges_of(config).items():
        name = address = section.name
        if name in made and made[name][0] != section.options:
            address = f"{name}/{purpose}"
        if address not in made:
            with blame("evaluation.gold" if purpose == "gold" else "evaluation.oracle"):
                made[address] = (section.options, KnownOracle(name, "score") if name in BUILTIN else build_oracle(name, section.options))
        found[purpose] = (address, made[address][1])
    return found


def _training_prompts(config: Config, renderer: Renderer, context: int | None, seeds: Seeds, folder: Path | None) -> Prompts:
    p = config.prompts
    entries = (SourceConfig(p.path, split=p.split),) if isinstance(p.path, str) else p.path
    sources = [Source(entry) if isinstance(entry, str) else Source(entry.path, entry.weight, entry.split) for entry in entries]
    own: dict[str, Any] = {"max_prompts": p.max_prompts, "epochs": p.epochs, "shuffle": p.shuffle, "folder": folder, **_columns(config)}
    own |= {"responses": p.responses, "score_key": p.score_key, "room": context if p.responses else _room(config.sampling, context)}
    prompts = Prompts(sources, renderer, seeds, **own)
    if UNPAIRED in prompts.formats and len(p.responses) == 1 and config.algorithm.options.get("threshold", 0) is None:
        raise ConfigError(
            f"{config.algorithm.name} would learn every response, also those whose label is false (the data are unpaired preferences); set "
            "algorithm.threshold: 1 to learn the others alone, or 0 for all"
        )
    return prompts


def _held_out_prompts(config: Config, renderer: Renderer, context: int | None, seeds: Seeds, folder: Path | None) -> Prompts:
    e = config.evaluation
    assert e is not None, "asked for where there is one"
    own: dict[str, Any] = {"room": _room(config.sampling, context), "max_prompts": e.max_prompts, "folder": folder, **_columns(config)}
    return Prompts([Source(e.path, split=e.split)], renderer, seeds, **own)


def _columns(config: Config) -> dict[str, Any]:
    p = config.prompts
    return {"prompt_key": p.prompt_key, "reference_key": p.reference_key, "max_tokens": p.max_tokens, "on_bad_record": p.on_bad_record}


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


def _alarms(config: Config, objective: Objective) -> Alarms:
    return Alarms(rules_of(config.alarms, watched_metrics(config, objective)), config.alarms.max_roll_backs)


def _evaluation(config: Config, around: Surroundings, actor: boxes.Actor, ledger: Ledger, seeds: Seeds, directory: Path) -> Evaluation | None:
    e, held_out = config.evaluation, around.held_out
    if e is None or held_out is None:
        return None
    purses = {"eval": e.max_queries, "gold": e.gold.max_queries if isinstance(e.gold, GoldConfig) else None}
    sampling = _plain_sampling(config)
    modes = []
    if e.samples:
        modes.append(Mode("sampled", e.samples, sampling))
    if e.greedy:
        modes.append(Mode("greedy", 1, Sampling(sampling.max_new_tokens, temperature=0.0, stop=sampling.stop)))
    names = {"prompt_key": config.prompts.prompt_key, "generator": Path(config.run_dir).name}
    return Evaluation(
        held_out.all(),
        actor,
        ledger,
        modes,
        [Judge(purpose, address, oracle.answers, purses[purpose]) for purpose, (address, oracle) in around.judges.items()],
        slot=e.slot,
        trigger=Trigger(e.every, e.every_queries or 0, e.every_hours or 0.0),
        wanted=Wanted(e.intervals, e.pass_at, e.success, e.majority_at, load_answers(e.answers) if e.answers else None),
        records=Records(directory / "evaluations", decode=around.renderer.decode, **names),
        seeds=seeds,
    )
