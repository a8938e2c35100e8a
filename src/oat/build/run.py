"""Functions that make the boxes of a run from a `Resolved`.

`build/run_inputs.py` makes the data, the oracles and the other inputs that need no weights.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oat import protocols as boxes
from oat.algorithms.base import Objective, usable_by
from oat.algorithms.ensemble import EnsembleLearning
from oat.build.actor_side import ActorSide, make_actor_side
from oat.build.apart import hire_processes, oracles_of, side_of
from oat.build.directory import Home, unlocked_home
from oat.build.engine import engine_notes
from oat.build.ensemble import EnsembleParts, make_ensemble, make_features
from oat.build.estimate import longest_sequence
from oat.build.evaluation import held_out_pairs, make_evaluation
from oat.build.fingerprints import OwnFiles, versions_of
from oat.build.fork import first_seed
from oat.build.learner import make_learner
from oat.build.models import (
    check_critic,
    check_reference,
    critic_model,
    device_notes,
    has_own_critic,
    load_models,
    shared_slots,
    slot_dtypes,
)
from oat.build.resolve import make_objective
from oat.build.resolved import Resolved
from oat.build.run_inputs import RunInputs, gather_inputs, recorded_actor
from oat.collector import Collector, Refill
from oat.config.load import dump
from oat.config.settings import Config
from oat.control.alarms import Alarms, alarms_of
from oat.control.stop import Stop, conditions_of
from oat.data.prompts import Prompts
from oat.evaluation.evaluation import Evaluation
from oat.evaluation.held_out import OnlyPairs
from oat.explore.base import Explorer
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
from oat.oracles.builtin import BUILTIN, BeliefOracle
from oat.protocols import Plans
from oat.rundir.checkpoints import Checkpoints
from oat.rundir.holdings import Holdings
from oat.rundir.provenance import Told, environment_of
from oat.runtime.local import over_wire
from oat.runtime.weights import Weights
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.text.turns import Turns
from oat.tracking.child import SinkProcess
from oat.tracking.files import Tracking
from oat.tracking.sinks import described_sinks
from oat.types import ENSEMBLE, Plan


@dataclass(frozen=True, eq=False)
class _Computing:
    """The boxes that compute with models.

    Attributes:
        learner: the learner as the other boxes call it. With `compute.serialise` it is behind the wire
            encoding.
        own_learner: the same learner, always called directly.
        objectives: the algorithm's objective; then that of the ensemble, if the explorer has one.
        side: the boxes that sample.
        has_weights: False if the models are made without weights.
    """

    learner: Learner
    own_learner: Learner
    side: ActorSide
    objectives: list[Objective]
    has_weights: bool


def build(
    resolved: Resolved,
    *,
    directory: Path | Home | None = None,
    run_inputs: RunInputs | None = None,
    seeds: Seeds | None = None,
    load: LoadModel = load_model,
) -> Run:
    """Make the boxes of a run.

    Args:
        resolved: the configuration; for one run only, because the run uses its object `objective`.
        directory: a run directory, which is made if it is missing, or its `Home`; None: `config.run_dir`.
        run_inputs: the data, oracles and renderer of the run; None: `build` makes them.
        seeds: of the run; None: its own seed, and the seed with which the run in the directory began.
        load: function that loads each model. With `Outlines.fake`, the run cannot be started.

    Raises:
        OatError: a part cannot be made as configured.
    """
    config = resolved.config
    home = directory if isinstance(directory, Home) else unlocked_home(directory or seen(config.run_dir))
    if config.compute.threads:
        torch.set_num_threads(config.compute.threads)
    run_inputs = run_inputs or gather_inputs(resolved, folder=home.directory)
    seeds = seeds or Seeds(config.seed, first_seed(home.directory, config.seed))
    computing = _computing(resolved, run_inputs, home.directory, seeds, load)
    ledger = _ledger(resolved, home, run_inputs, seeds, has_ensemble=ENSEMBLE in computing.side.inboxes)
    plans = _plans(resolved.objective, resolved.explorer)
    stop = _stop(resolved, run_inputs.prompts)
    collector, evaluation = _asking(resolved, home, run_inputs, computing, ledger, seeds, plans, stop)
    weights, alarms = _weights(resolved, computing.side), _alarms(resolved)
    return Run(
        objectives=computing.objectives,
        plans=plans,
        stop=stop,
        seeds=seeds,
        collector=collector,
        ledger=ledger,
        holdings=Holdings(ledger.store),
        buffer=Buffer(ledger, config.learner.buffer, plans(0).questions),
        learner=computing.learner,
        weights=weights,
        evaluation=evaluation,
        alarms=alarms,
        checkpoints=_checkpoints(config, home),
        tracking=_tracking(config, home, run_inputs),
        parts=_parts(computing, run_inputs, weights, collector, stop, alarms, evaluation),
        start=_left_out(run_inputs.sources),
        chosen=_chosen(config, computing),
        notes=_notes(resolved, run_inputs),
        interruption=home.interruption,
    )


def _parts(
    computing: _Computing,
    run_inputs: RunInputs,
    weights: Weights,
    collector: Collector,
    stop: Stop,
    alarms: Alarms | None,
    evaluation: Evaluation | OnlyPairs | None,
) -> dict[str, Any]:
    """Return the parts of a run whose state checkpoints keep, by name."""
    return {
        "learner": computing.learner,
        "weights": weights,
        "prompts": run_inputs.prompts,
        "collector": collector,
        "stop": stop,
        "alarms": alarms,
        **_of_objectives(computing.objectives),
        **({"evaluation": evaluation} if evaluation else {}),
    }


def _computing(
    resolved: Resolved, run_inputs: RunInputs, directory: Path, seeds: Seeds, load: LoadModel
) -> _Computing:
    config, renderer = resolved.config, run_inputs.renderer
    resolved.objective.end_ids = renderer.stop_ids
    processes = None
    if load is load_model:  # outlines of models work for nobody
        processes = hire_processes(resolved, run_inputs, directory, seeds)
    if processes is not None:
        run_inputs.closing.append(processes.close)
    lms = _models(resolved, renderer, seeds, load)
    if has_own_critic(config.model) and "critic" in lms:
        with resolved.blame("model.critic"):
            longest = _longest(resolved, run_inputs, lms["policy"])
            check_critic(lms["critic"], critic_model(config.model).path, renderer, longest)
    with resolved.blame("explorer.name"):
        features = make_features(lms, resolved.features) if resolved.features else None
        ensemble = make_ensemble(
            resolved.explorer,
            features,
            seeds,
            has_weights=lms["policy"].has_weights,
            is_begun=run_inputs.known is not None,
        )
    with resolved.blame("model.path"):
        learner = make_learner(resolved, lms, renderer, seeds, ensemble, directory / "nonfinite")
    if processes is not None:
        side = side_of(processes, resolved)
        run_inputs.clients.update(oracles_of(processes, run_inputs))
    else:
        side = make_actor_side(
            resolved,
            lms,
            renderer,
            run_inputs.environment,
            seeds,
            scorer=ensemble.scorer if ensemble else None,
            features=features,
            records_text_ends=run_inputs.has_character_steps,
            load=load,
        )
    return _Computing(
        learner=_apart(config, learner, ensemble),
        own_learner=learner,
        side=side,
        objectives=[resolved.objective, *_own_objective(ensemble)],
        has_weights=lms["policy"].has_weights,
    )


def _models(resolved: Resolved, renderer: Renderer, seeds: Seeds, load: LoadModel) -> dict[str, CausalLM]:
    config = resolved.config
    with resolved.blame("model.reference" if config.model.reference else "model.path"):
        lms = load_models(config, resolved.models, seeds, load)
        if config.model.reference and "reference" in lms:
            check_reference(lms["reference"], config.model.reference, renderer)
    return lms


def _longest(resolved: Resolved, run_inputs: RunInputs, policy: CausalLM) -> int | None:
    """Return the largest number of tokens of a prompt with its response; None if no limit is known."""
    config = resolved.config
    if config.prompts.responses or config.sampling.environment is not None:
        return policy.context_length
    return longest_sequence(policy, run_inputs.prompts.longest, config.sampling.max_new_tokens)


def _wired(config: Config, box: Any) -> Any:
    """Return the box. If `compute.serialise` is set, return it behind the wire encoding: arguments and
    results of its methods are encoded and decoded."""
    return over_wire(box) if config.compute.serialise else box


def _apart(config: Config, learner: Learner, ensemble: EnsembleParts | None) -> Learner:
    """Return the learner as other boxes call it. With `compute.serialise` it is behind the wire encoding, and
    has its own copies of the objectives. So it cannot read what `prepare` stored in the run's objectives."""
    if not config.compute.serialise:
        return learner
    own = [EnsembleLearning(each.config, each.features) for each in _own_objective(ensemble)]
    return over_wire(learner, own=[make_objective(config), *own])


def _own_objective(ensemble: EnsembleParts | None) -> list[EnsembleLearning]:
    """Return the objective of the ensemble, in a list that is empty if there is none."""
    return [ensemble.objective] if ensemble is not None and ensemble.objective is not None else []


def _asking(
    resolved: Resolved,
    home: Home,
    run_inputs: RunInputs,
    computing: _Computing,
    ledger: Ledger,
    seeds: Seeds,
    plans: Plans,
    stop: Stop,
) -> tuple[Collector, Evaluation | OnlyPairs | None]:
    """Make the two boxes that get responses and ask about them: the collector for training, and the
    evaluation. The second is None if the run has no evaluation."""
    config, actor = resolved.config, computing.side.actor
    collector = Collector(
        run_inputs.prompts,
        _wired(config, recorded_actor(resolved, run_inputs) or actor),
        resolved.explorer,
        run_inputs.training_oracle[0],
        ledger,
        seeds,
        plans=plans,
        last=stop.last,
        max_outstanding=config.oracle.max_outstanding,
        refill=_refill(resolved),
        reads_text=config.oracle.name not in BUILTIN,
    )
    pairs = held_out_pairs(resolved, run_inputs, computing.learner, seeds)
    evaluation = make_evaluation(
        resolved, run_inputs, _wired(config, actor), ledger, seeds, home.directory, pairs
    )
    return collector, evaluation


def _of_objectives(objectives: Sequence[Objective]) -> dict[str, boxes.Stateful]:
    """Return the objectives by the names under which their states are saved."""
    return dict(zip(("objective", ENSEMBLE), objectives, strict=False))


def _ledger(
    resolved: Resolved, home: Home, run_inputs: RunInputs, seeds: Seeds, *, has_ensemble: bool
) -> Ledger:
    config, o = resolved.config, resolved.config.oracle
    believed = {ENSEMBLE: BeliefOracle()} if has_ensemble else {}
    asked: dict[str, Oracle] = {**run_inputs.oracles, **run_inputs.clients, **believed}
    return Ledger(
        Store(home.directory / "ledger.sqlite"),
        {address: _wired(config, oracle) for address, oracle in asked.items()},
        seeds,
        budgets=resolved.budgets,
        labels=o.labels,
        deadline_s=o.deadline_s,
        max_wait_s=o.max_wait_s,
        max_age=o.max_answer_age,
        repeats=o.repeats,
        keep_groups=config.tracking.keep_trajectories,
        known_versions=versions_of(run_inputs.known, run_inputs.roles),
        check_interrupt=home.interruption.check_interrupt,
        release=run_inputs.close,
    )


def _refill(resolved: Resolved) -> Refill | None:
    further = resolved.config.sampling.refill_rounds
    return Refill(usable_by(resolved.objective), further) if further else None


def _plans(objective: Objective, explorer: Explorer) -> Plans:
    """Return a function that returns the plan of a step, with the numbers of prompts and samples that the
    explorer chooses from."""

    def plans(step: int) -> Plan:
        return explorer.widen(objective.plan(step))

    return plans


def _stop(resolved: Resolved, prompts: Prompts) -> Stop:
    return Stop(
        last=resolved.last_step(prompts.size),
        budget=resolved.budgets["train"],
        max_hours=resolved.config.stop.max_hours,
        when=conditions_of(resolved.config.stop.when),
    )


def _weights(resolved: Resolved, side: ActorSide) -> Weights:
    config = resolved.config
    slots = {"sampler", "policy", ENSEMBLE} & side.inboxes.keys()
    if config.model.reference_update is not None and "reference" in resolved.slots:
        slots.add("reference")
    return Weights(
        {slot: [_wired(config, inbox)] for slot, inbox in side.inboxes.items() if slot in slots},
        config.learner.sync_every,
        slot_dtypes(resolved.engine),
        shared=shared_slots(config),
        versions=side.versions,
    )


def _alarms(resolved: Resolved) -> Alarms:
    config = resolved.config
    return Alarms(
        alarms_of(config.alarms, resolved.watched), config.alarms.max_roll_backs, oracle=config.oracle.name
    )


def _checkpoints(config: Config, home: Home) -> Checkpoints:
    return Checkpoints(home.directory / "checkpoints", **asdict(config.checkpoint), standing=home.standing)


def _tracking(config: Config, home: Home, run_inputs: RunInputs) -> Tracking:
    t = config.tracking
    told = Told(
        home.directory / "environment.json",
        partial(environment_of, config.seed),
        run_inputs.inputs,
        OwnFiles(run_inputs.known, run_inputs.roles),
    )
    sinks = [SinkProcess(sink, home.directory, dump(config)) for sink in described_sinks(t)]
    return Tracking(
        home.directory,
        samples=t.samples,
        turns=Turns(run_inputs.renderer),
        told=told,
        sinks=sinks,
        standing=home.standing,
    )


def _left_out(sources: Sequence[Prompts]) -> dict[str, float]:
    """Return, as metrics of row 0, how many prompts and pairs were left out or cut."""
    return {
        f"prompts/{name}": float(sum(getattr(source, name) for source in sources))
        for name in ("cut", "dropped", "skipped")
    }


def _chosen(config: Config, computing: _Computing) -> dict[tuple[str, str], Any]:
    """Return, by section and name, the settings that a run fixes when it is created, each with the value that
    was set or measured. If `compute.threads` is not set, a run with weights on a CPU measures it here."""
    learner = computing.own_learner
    if config.compute.threads is None and config.compute.profile == "cpu" and computing.has_weights:
        torch.set_num_threads(choose_threads(learner, computing.objectives[0]))
    return {
        ("learner", "micro_batch_tokens"): learner.micro_batch_tokens,
        ("engine", "threads"): computing.side.threads,
        ("compute", "threads"): torch.get_num_threads(),
    }


def _notes(resolved: Resolved, run_inputs: RunInputs) -> tuple[str, ...]:
    """Return sentences for people that are shown before the first step."""
    config = resolved.config
    of_data = dict.fromkeys(note for source in run_inputs.sources for note in source.notes)
    return (*device_notes(config.compute.profile), *engine_notes(resolved), *of_data)
