"""From a `Resolved` to the boxes of a run. The only place that knows all of them; `build/run_inputs.py` makes
those that need no weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oat import protocols as boxes
from oat.algorithms.base import Objective
from oat.algorithms.ensemble import EnsembleLearning
from oat.build.directory import Home, unlocked_home
from oat.build.engine import make_sampling, run_engine
from oat.build.evaluation import held_out_pairs, make_evaluation
from oat.build.fingerprints import OwnFiles, versions_of
from oat.build.learner import EnsembleParts, make_ensemble, make_learner
from oat.build.models import check_reference, device_notes, load_models, slot_dtypes
from oat.build.resolve import make_objective
from oat.build.resolved import Resolved
from oat.build.run_inputs import RunInputs, gather_inputs, recorded_actor
from oat.collector import Collector
from oat.config.load import dump
from oat.config.settings import Config
from oat.control.alarms import Alarms, alarms_of
from oat.control.stop import Stop
from oat.data.prompts import Prompts
from oat.engines.torch import TorchEngine
from oat.files import seen
from oat.learner.learner import Learner
from oat.learner.limits import choose_threads
from oat.learner.replay_buffer import Buffer
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.loop import Run
from oat.models.causal_lm import CausalLM
from oat.models.lora import LoadModel, load_model
from oat.oracles.base import Oracle
from oat.oracles.builtin import KnownOracle
from oat.rollout.actor import Actor
from oat.rollout.ensemble_scorer import EnsembleScorer
from oat.rundir.checkpoints import Checkpoints
from oat.rundir.holdings import Holdings
from oat.rundir.provenance import Told, environment_of
from oat.runtime.local import over_wire
from oat.runtime.weights import Holder, Weights
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.tracking.child import SinkProcess
from oat.tracking.files import Tracking
from oat.tracking.sinks import described_sinks
from oat.types import ENSEMBLE, Plan


def build(
    resolved: Resolved,
    *,
    directory: Path | Home | None = None,
    run_inputs: RunInputs | None = None,
    load: LoadModel = load_model,
) -> Run:
    """The boxes of a run.

    Args:
        resolved: used for this run alone, whose objective is in it.
        directory: where the run lives, if not in `config.run_dir`; made where it is missing and nobody has
        opened it.
        run_inputs: what its parts read and ask, if that is there already.
        load: loads each model; `Outlines.fake` makes a run that cannot be begun.

    Raises:
        OatError: a part cannot be made as configured.
    """
    config, objective, explorer = resolved.config, resolved.objective, resolved.explorer
    home = directory if isinstance(directory, Home) else unlocked_home(directory or seen(config.run_dir))
    directory = home.directory
    if config.compute.threads:
        torch.set_num_threads(config.compute.threads)
    run_inputs = run_inputs or gather_inputs(resolved, folder=directory)
    seeds = Seeds(config.seed)
    wired = partial(_wired, config)
    renderer = run_inputs.renderer
    prompts = run_inputs.prompts
    asked = run_inputs.asked
    lms = _models(resolved, renderer, seeds, load)
    with resolved.blame("explorer.name"):
        ensemble = make_ensemble(explorer, lms, seeds)
    objectives = [objective, ensemble[0]] if ensemble else [objective]
    with resolved.blame("model.path"):
        here = make_learner(resolved, lms, renderer, seeds, ensemble, directory / "nonfinite")
        learner = _apart(config, here, ensemble)
        engine = wired(run_engine(resolved, lms, renderer, seeds, load))
    scorer = ensemble[2] if ensemble else None
    actor, trained = (wired(box) for box in _actors(resolved, run_inputs, engine, scorer, seeds))
    served = {
        name: wired(oracle) for name, oracle in _served(run_inputs, has_ensemble=bool(ensemble)).items()
    }
    ledger = _ledger(resolved, directory, served, seeds, run_inputs, home.interruption.check_interrupt)

    def plans(step: int) -> Plan:
        return explorer.widen(objective.plan(step))

    stop = Stop(
        last=_last_step(config, prompts, plans),
        budget=resolved.budgets["train"],
        max_hours=config.stop.max_hours,
    )
    weights = _weights(resolved, engine, wired(scorer) if scorer else None)
    alarms = _alarms(resolved)
    ahead: dict[str, Any] = {
        "plans": plans,
        "last": stop.last,
        "max_outstanding": config.oracle.max_outstanding,
    }
    collector = Collector(prompts, trained, explorer, next(iter(asked)), ledger, seeds, **ahead)
    evaluation = make_evaluation(
        resolved,
        run_inputs,
        actor,
        ledger,
        seeds,
        directory,
        held_out_pairs(resolved, run_inputs, learner, seeds),
    )
    parts: dict[str, boxes.Stateful] = {
        "learner": learner,
        "weights": weights,
        "prompts": prompts,
        "collector": collector,
        "stop": stop,
    }
    parts |= {
        "alarms": alarms,
        **dict(zip(("objective", ENSEMBLE), objectives, strict=False)),
        **({"evaluation": evaluation} if evaluation else {}),
    }
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
        checkpoints=Checkpoints(
            directory / "checkpoints", **asdict(config.checkpoint), standing=home.standing
        ),
        tracking=_tracking(config, home, run_inputs),
        parts=parts,
        start=_left_out(run_inputs.sources),
        chosen=_chosen(config, objective, here, engine, has_weights=lms["policy"].has_weights),
        notes=(
            *device_notes(config.compute.profile),
            *dict.fromkeys(note for source in run_inputs.sources for note in source.notes),
        ),
        interruption=home.interruption,
    )


def _served(run_inputs: RunInputs, *, has_ensemble: bool) -> dict[str, Oracle]:
    """The oracles that the ledger asks, by address."""
    believed = {ENSEMBLE: KnownOracle(ENSEMBLE, "compare")} if has_ensemble else {}
    return {**run_inputs.asked, **dict(run_inputs.judges.values()), **believed}


def _wired(config: Config, box: Any) -> Any:
    return over_wire(box) if config.compute.serialise else box


def _apart(config: Config, learner: Learner, ensemble: EnsembleParts | None) -> Learner:
    """The learner as the rest of the run sees it; over a wire with objectives of its own, which have prepared
    nothing."""
    if not config.compute.serialise:
        return learner
    believed = [EnsembleLearning(ensemble[0].config)] if ensemble else []
    return over_wire(learner, own=[make_objective(config), *believed])


def _models(resolved: Resolved, renderer: Renderer, seeds: Seeds, load: LoadModel) -> dict[str, CausalLM]:
    config = resolved.config
    with resolved.blame("model.reference" if config.model.reference else "model.path"):
        lms = load_models(config, resolved.models, seeds, load)
        if config.model.reference and "reference" in lms:
            check_reference(lms["reference"], config.model.reference, renderer)
    return lms


def _left_out(sources: Sequence[Prompts]) -> dict[str, float]:
    """Of all that is read, as metrics: what is left out, and what is cut."""
    return {
        f"prompts/{name}": float(sum(getattr(source, name) for source in sources))
        for name in ("cut", "dropped", "skipped")
    }


def _ledger(
    resolved: Resolved,
    directory: Path,
    oracles: Mapping[str, Oracle],
    seeds: Seeds,
    run_inputs: RunInputs,
    check_interrupt: Callable[[], None],
) -> Ledger:
    o = resolved.config.oracle
    common: dict[str, Any] = {
        "labels": o.labels,
        "deadline_s": o.deadline_s,
        "max_wait_s": o.max_wait_s,
        "max_age": o.max_answer_age,
    }
    common |= {
        "repeats": o.repeats,
        "keep_groups": resolved.config.tracking.keep_trajectories,
        "known_versions": versions_of(run_inputs.known, run_inputs.roles),
    }
    return Ledger(
        Store(directory / "ledger.sqlite"),
        oracles,
        seeds,
        budgets=resolved.budgets,
        check_interrupt=check_interrupt,
        release=run_inputs.close,
        **common,
    )


def _tracking(config: Config, home: Home, run_inputs: RunInputs) -> Tracking:
    t = config.tracking
    told = Told(
        home.directory / "environment.json",
        partial(environment_of, config.seed),
        run_inputs.inputs,
        OwnFiles(run_inputs.known, run_inputs.roles),
    )
    sinks = [SinkProcess(sink, home.directory, dump(config)) for sink in described_sinks(t)]
    return Tracking(home.directory, samples=t.samples, told=told, sinks=sinks, standing=home.standing)


def _chosen(
    config: Config, objective: Objective, learner: Learner, engine: TorchEngine, *, has_weights: bool
) -> dict[tuple[str, str], Any]:
    """What is found once, when a run is created, and then stays: as given, or as measured now."""
    if config.compute.threads is None and config.compute.profile == "cpu" and has_weights:
        torch.set_num_threads(choose_threads(learner, objective))
    return {
        ("learner", "micro_batch_tokens"): learner.micro_batch_tokens,
        ("engine", "threads"): engine.threads,
        ("compute", "threads"): torch.get_num_threads(),
    }


def _weights(resolved: Resolved, engine: TorchEngine, scorer: EnsembleScorer | None) -> Weights:
    config = resolved.config
    holders: dict[str, list[Holder]] = {
        "sampler": [engine],
        "policy": [engine],
        **({ENSEMBLE: [scorer]} if scorer else {}),
    }
    if config.model.reference_update is not None and "reference" in resolved.slots:
        holders["reference"] = [engine]
    return Weights(holders, config.learner.sync_every, slot_dtypes(resolved.engine.dtype))


def _actors(
    resolved: Resolved,
    run_inputs: RunInputs,
    engine: TorchEngine,
    scorer: EnsembleScorer | None,
    seeds: Seeds,
) -> tuple[boxes.Actor, boxes.Actor]:
    """The actor that samples, for evaluation; and the one that training learns from: the same, or that of
    recorded responses."""
    actor = Actor(
        run_inputs.renderer,
        engine,
        make_sampling(resolved),
        seeds,
        environment=run_inputs.environment,
        scorer=scorer,
    )
    return actor, recorded_actor(resolved, run_inputs) or actor


def _last_step(config: Config, prompts: Prompts, plans: Callable[[int], Plan]) -> int | None:
    """The run's number of steps: `stop.max_steps`, or fewer where the prompts are used up before."""
    if config.prompts.epochs is None:
        return config.stop.max_steps
    left, step = prompts.size * config.prompts.epochs, 0
    while left > 0 and (config.stop.max_steps is None or step < config.stop.max_steps):
        left -= plans(step).prompts
        step += 1
    return step


def _alarms(resolved: Resolved) -> Alarms:
    config = resolved.config
    return Alarms(
        alarms_of(config.alarms, resolved.watched), config.alarms.max_roll_backs, oracle=config.oracle.name
    )
