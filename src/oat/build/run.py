"""From a resolved configuration to boxes. The only place that knows all; `build/resolve.py` resolves, and `build/run_inputs.py` makes what needs no
weight."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oat import protocols as boxes
from oat.algorithms.base import Objective
from oat.algorithms.ensemble import EnsembleConfig, EnsembleLearning
from oat.build.cross_checks import purses_of, watched_metrics
from oat.build.fingerprints import OwnFiles, versions_of
from oat.build.models import check_reference, device_notes, load_models, load_slots, needed_models, needed_slots, slot_dtypes
from oat.build.resolve import make_explorer, make_objective, resolve
from oat.build.run_inputs import Blame, Surroundings, budget_of, pair_columns, surround
from oat.collector import Collector
from oat.config.load import Origins, blaming, dump
from oat.config.settings import Config, TorchEngineConfig
from oat.control.alarms import Alarms, rules_of
from oat.control.interruption import Interruption
from oat.control.stop import Stop
from oat.data.prompts import Prompts
from oat.engines.torch import TorchEngine
from oat.errors import ConfigError
from oat.evaluation.evaluation import Evaluation, Judge, Mode, Records, Trigger, Wanted
from oat.evaluation.held_out import HeldOutPairs, OnlyPairs
from oat.explore.base import Explorer
from oat.files import Standing, seen
from oat.learner.buffer import Buffer
from oat.learner.following import Following
from oat.learner.learner import Learner
from oat.learner.limits import choose_threads, measure_tokens
from oat.learner.models import Critic, LanguageModel, Model, RewardModel
from oat.learner.optim import OptimiserSettings
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.loop import Run
from oat.models.causal_lm import CausalLM
from oat.models.ensemble import Ensemble
from oat.models.loading import is_outlined
from oat.models.sequence_classifier import check_backbone
from oat.oracles.answers import load_answers
from oat.oracles.base import Oracle
from oat.oracles.builtin import KnownOracle
from oat.oracles.router import OneOracle
from oat.rollout.actor import Actor, RecordedActor
from oat.rollout.ensemble_scorer import Scorer
from oat.rundir.checkpoints import Checkpoints
from oat.rundir.holdings import Holdings
from oat.rundir.provenance import Told, environment_of
from oat.runtime.local import over_wire
from oat.runtime.weights import Holder, Weights
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.tracking.child import SinkProcess
from oat.tracking.files import Tracking
from oat.tracking.registry import described_sinks
from oat.types import ENSEMBLE, Plan, Requires, Sampling

__all__ = ["build", "resolve"]

EnsembleParts = tuple[EnsembleLearning, Ensemble, Scorer]


@dataclass(frozen=True, eq=False)
class Home:
    """Where a run lives that somebody has opened.

    Attributes:
        standing: what of the directory must stay what it is.
        interruption: what has been heard of signals since it began to start.
    """

    directory: Path
    standing: Standing
    interruption: Interruption


def build(config: Config, *, directory: Path | Home | None = None, around: Surroundings | None = None, origins: Origins | None = None) -> Run:
    """The boxes of a resolved configuration.

    Args:
        directory: where the run lives, if not in `config.run_dir`; made where it is missing and nobody has opened it.
        around: what is around its models, if that is there already.

    Raises:
        OatError: a part cannot be made as configured.
    """
    home = directory if isinstance(directory, Home) else _home(directory or seen(config.run_dir))
    directory = home.directory
    if config.compute.threads:
        torch.set_num_threads(config.compute.threads)
    around, blame = around or surround(config, origins, folder=directory), partial(blaming, config, origins or {})
    seeds, wired, objective = Seeds(config.seed), partial(_wired, config), make_objective(config)
    explorer = make_explorer(config, objective.requires)
    renderer, prompts, asked = around.renderer, around.prompts, around.asked
    lms = _models(config, objective.requires, explorer, renderer, seeds, blame)
    with blame("explorer.name"):
        ensemble = make_ensemble(explorer, lms, seeds)
    objectives = [objective, ensemble[0]] if ensemble else [objective]
    with blame("model.path"):
        learner = wired(make_learner(config, objective, lms, renderer, seeds, ensemble, directory / "nonfinite"), tuple(type(o) for o in objectives))
        engine, scorer = wired(_engine(config, objective.requires, explorer, lms, renderer, seeds)), ensemble[2] if ensemble else None
    actor, trained = (wired(box) for box in _actors(config, objective.requires, around, engine, scorer, seeds))
    served = {name: wired(oracle) for name, oracle in _served(around, has_ensemble=bool(ensemble)).items()}
    ledger = _ledger(config, directory, served, seeds, around, home.interruption.heed)

    def plans(step: int) -> Plan:
        return explorer.widen(objective.plan(step))

    stop = Stop(last=_last_step(config, prompts, plans), budget=budget_of(config), max_hours=config.stop.max_hours)
    weights, alarms = _weights(config, engine, objective.requires, explorer, wired(scorer) if scorer else None), _alarms(config, objective)
    ahead: dict[str, Any] = {"plans": plans, "last": stop.last, "max_outstanding": config.oracle.max_outstanding}
    collector = Collector(prompts, trained, explorer, OneOracle(next(iter(asked))), ledger, seeds, **ahead)
    evaluation = _evaluation(config, around, actor, ledger, seeds, directory, _pairs(config, around, objective, learner, seeds))
    parts: dict[str, boxes.Stateful] = {"learner": learner, "weights": weights, "prompts": prompts, "collector": collector, "stop": stop}
    parts |= {"alarms": alarms, **dict(zip(("objective", ENSEMBLE), objectives, strict=False)), **({"evaluation": evaluation} if evaluation else {})}
    return Run(
        objectives=objectives,
        plans=plans,
        stop=stop,
        seeds=seeds,
        collector=collector,
        ledger=ledger,
        holdings=Holdings(ledger.store),
        buffer=Buffer(ledger, config.learner.buffer, plans(0).questions),
        learner=learner,
        weights=weights,
        evaluation=evaluation,
        alarms=alarms,
        checkpoints=Checkpoints(directory / "checkpoints", **asdict(config.checkpoint), standing=home.standing),
        tracking=_tracking(config, home, around),
        parts=parts,
        start=_left_out(around.sources),
        chosen=_chosen(config, objective, learner, engine),
        notes=(*device_notes(config.compute.profile), *dict.fromkeys(note for source in around.sources for note in source.notes)),
        interruption=home.interruption,
    )


def _served(around: Surroundings, *, has_ensemble: bool) -> dict[str, Oracle]:
    """The oracles that the ledger asks, by address."""
    believed = {ENSEMBLE: KnownOracle(ENSEMBLE, "compare")} if has_ensemble else {}
    return {**around.asked, **dict(around.judges.values()), **believed}


def _home(directory: Path) -> Home:
    """Of a run that nobody has opened."""
    directory.mkdir(parents=True, exist_ok=True)
    return Home(directory, Standing(), Interruption())


def _wired(config: Config, box: Any, local: tuple[type, ...] = ()) -> Any:
    return over_wire(box, local=local) if config.compute.serialise else box


def _models(config: Config, requires: Requires, explorer: Explorer, renderer: Renderer, seeds: Seeds, blame: Blame) -> dict[str, CausalLM]:
    with blame("model.reference" if config.model.reference else "model.path"):
        lms = load_models(config, needed_models(config, requires, explorer), seeds)
        if config.model.reference and "reference" in lms:
            check_reference(lms["reference"], config.model.reference, renderer)
    return lms


def _left_out(sources: Sequence[Prompts]) -> dict[str, float]:
    """Of all that is read, as metrics: what is left out, and what is cut."""
    return {f"prompts/{name}": float(sum(getattr(source, name) for source in sources)) for name in ("cut", "dropped", "skipped")}


def _ledger(config: Config, directory: Path, oracles: Mapping[str, Oracle], seeds: Seeds, around: Surroundings, heed: Callable[[], None]) -> Ledger:
    o, budgets = config.oracle, {"train": budget_of(config), **purses_of(config)}
    common: dict[str, Any] = {"labels": o.labels, "deadline_s": o.deadline_s, "max_wait_s": o.max_wait_s, "max_age": o.max_answer_age}
    common |= {"repeats": o.repeats, "keep_groups": config.tracking.keep_trajectories, "known_versions": versions_of(around.known, around.roles)}
    return Ledger(Store(directory / "ledger.sqlite"), oracles, seeds, budgets=budgets, heed=heed, release=around.close, **common)


def _tracking(config: Config, home: Home, around: Surroundings) -> Tracking:
    t = config.tracking
    told = Told(home.directory / "environment.json", partial(environment_of, config.seed), around.inputs, OwnFiles(around.known, around.roles))
    sinks = [SinkProcess(sink, home.directory, dump(config)) for sink in described_sinks(t)]
    return Tracking(home.directory, samples=t.samples, told=told, sinks=sinks, standing=home.standing)


def _chosen(config: Config, objective: Objective, learner: Learner, engine: TorchEngine) -> dict[tuple[str, str], Any]:
    """What is found once, when a run is created, and then stays: as given, or as measured now."""
    if config.compute.threads is None and config.compute.profile == "cpu" and not is_outlined():
        torch.set_num_threads(choose_threads(learner, objective))
    return {
        ("learner", "micro_batch_tokens"): learner.micro_batch_tokens,
        ("engine", "threads"): engine.threads,
        ("compute", "threads"): torch.get_num_threads(),
    }


def _weights(config: Config, engine: TorchEngine, requires: Requires, explorer: Explorer, scorer: Scorer | None) -> Weights:
    holders: dict[str, list[Holder]] = {"sampler": [engine], "policy": [engine], **({ENSEMBLE: [scorer]} if scorer else {})}
    if config.model.reference_update is not None and "reference" in needed_slots(config, requires, explorer):
        holders["reference"] = [engine]
    return Weights(holders, config.learner.sync_every, slot_dtypes(config))


def make_sampling(config: Config, requires: Requires) -> Sampling:
    """As the actor samples."""
    sampling = plain_sampling(config)
    return replace(sampling, keep_sets=requires.ratio_based and sampling.truncates)


def _actors(
    config: Config, requires: Requires, around: Surroundings, engine: TorchEngine, scorer: Scorer | None, seeds: Seeds
) -> tuple[boxes.Actor, boxes.Actor]:
    """The actor that samples, for evaluation; and the one that training learns from: the same, or that of recorded responses."""
    actor = Actor(around.renderer, engine, make_sampling(config, requires), seeds, environment=around.environment, scorer=scorer)
    if not config.prompts.responses:
        return actor, actor
    return actor, RecordedActor(around.prompts.fit, config.prompts.responses, config.prompts.score_key)


def plain_sampling(config: Config) -> Sampling:
    """As the actor samples for an evaluation."""
    names = [f.name for f in fields(Sampling) if f.name != "keep_sets"]
    return Sampling(**{name: getattr(config.sampling, name) for name in names})


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
        elif name == "reward":
            check_backbone(lms[name])
            models[name] = RewardModel(lms[name], seeds.at("init", name), trailing=renderer.trailing, autocast=c.autocast is not None)
        else:
            models[name] = LanguageModel(lms[name], num_tokens=renderer.num_tokens, chunk=c.logits_chunk, autocast=c.autocast is not None)
        if c.gradient_checkpointing and name in objective.wants:
            lms[name].checkpoint_gradients()
    rates = dict.fromkeys(("policy", "reward", "critic"), c.learning_rate)
    if c.critic_learning_rate is not None:
        rates["critic"] = c.critic_learning_rate
    common: dict[str, Any] = {"schedule": c.schedule, "warmup_steps": c.warmup_steps, "schedule_steps": c.schedule_steps or 1}
    common["max_grad_norm"] = c.max_grad_norm
    optimisers = {name: OptimiserSettings(rates[name], c.betas, c.weight_decay, **common) for name in objective.wants}
    if ensemble:
        models[ENSEMBLE] = ensemble[1]
        optimisers[ENSEMBLE] = ensemble_optimiser(ensemble[0].config)
    learner = Learner(
        models,
        optimisers,
        micro_batch_size=c.micro_batch_size,
        micro_batch_tokens=None if c.micro_batch_tokens == "auto" else c.micro_batch_tokens,
        gradient_checkpointing=c.gradient_checkpointing,
        max_updates=c.max_updates,
        max_skips=c.max_skips if c.on_nonfinite == "skip" else 0,
        following=Following(update.every, update.mix) if (update := config.model.reference_update) else None,
        keep=keep,
        seeds=seeds,
    )
    if c.micro_batch_tokens == "auto":
        sampling = make_sampling(config, objective.requires)
        learner.micro_batch_tokens = measure_tokens(learner, objective, config, sampling, renderer.num_tokens)
    return learner


def ensemble_optimiser(config: EnsembleConfig) -> OptimiserSettings:
    """Adam at a constant rate, as the sources' code has it."""
    norm = math.inf if config.max_grad_norm is None else config.max_grad_norm
    return OptimiserSettings(config.learning_rate, config.betas, config.weight_decay, config.eps, decoupled=False, max_grad_norm=norm)


def _engine(config: Config, requires: Requires, explorer: Explorer, lms: Mapping[str, CausalLM], renderer: Renderer, seeds: Seeds) -> TorchEngine:
    options = TorchEngineConfig(**config.engine.options)
    threads = options.threads or (config.compute.threads if config.compute.profile == "cpu" else None)
    engine = make_engine(load_slots(config, lms, needed_slots(config, requires, explorer), seeds), renderer, options, threads)
    if threads is None and config.compute.profile == "cpu" and not is_outlined():
        plan = make_objective(config).plan(0)
        engine.choose_threads(max(1, plan.prompts * sum(plan.samples.values())))
    return engine


def make_engine(slots: Mapping[str, CausalLM], renderer: Renderer, options: TorchEngineConfig, threads: int | None) -> TorchEngine:
    """The engine in this process, with the models of its slots.

    Args:
        threads: of torch while the engine works; None: as the process has them.
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
    )


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
    return Alarms(rules_of(config.alarms, watched_metrics(config, objective)), config.alarms.max_roll_backs, oracle=config.oracle.name)


def _pairs(config: Config, around: Surroundings, objective: Objective, learner: Learner, seeds: Seeds) -> HeldOutPairs | None:
    if around.pairs is None:
        return None
    actor = RecordedActor(around.pairs.fit, pair_columns(config), config.prompts.score_key)
    return HeldOutPairs(objective, around.pairs.all(), actor, learner, seeds)


def _evaluation(
    config: Config, around: Surroundings, actor: boxes.Actor, ledger: Ledger, seeds: Seeds, directory: Path, pairs: HeldOutPairs | None
) -> Evaluation | OnlyPairs | None:
    e, held_out = config.evaluation, around.held_out
    if e is None:
        return None
    trigger = Trigger(e.every, e.every_queries or 0, e.every_hours or 0.0)
    if held_out is None:
        assert pairs is not None, "cross_checks.py refuses an evaluation of nothing"
        return OnlyPairs(pairs, trigger)
    purses, sampling = purses_of(config), plain_sampling(config)
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
        trigger=trigger,
        wanted=Wanted(e.kl, e.intervals, e.pass_at, e.success, e.majority_at, load_answers(e.answers) if e.answers else None, e.online),
        records=Records(directory / "evaluations", decode=around.renderer.decode, **names),
        seeds=seeds,
        **({} if pairs is None else {"measured": pairs.measure}),
    )
