"""Functions that make the boxes of a run from a `Resolved`.

`assemble/run_inputs.py` makes the data, the oracles and the other inputs that need no weights.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from oat import protocols as boxes
from oat.algorithms.base import Objective, usable_by
from oat.assemble.actor_side import ActorPlan, ActorSide, context_of, make_actor_side
from oat.assemble.apart import Processes, oracles_of, process_notes, start_processes
from oat.assemble.changes import known_changes
from oat.assemble.engine import engine_notes, weights_proof
from oat.assemble.ensemble import ensemble_learning
from oat.assemble.evaluation import held_out_pairs, make_evaluation
from oat.assemble.fingerprints import OwnFiles, versions_of
from oat.assemble.learner_side import LearnerPlan, LearnerSide, make_learner_side, own_objectives
from oat.assemble.models import (
    device_notes,
    shared_slots,
    slot_dtypes,
    slot_sources,
)
from oat.assemble.outline import longest_sequence
from oat.assemble.run_directory import RunDirectory, unlocked_directory
from oat.assemble.run_inputs import RunInputs, gather_inputs, recorded_actor
from oat.collector import Collector, Refill
from oat.config.load import dump
from oat.config.settings import Config
from oat.control.alarms import Alarms, alarms_of
from oat.control.stages import tell_stage
from oat.control.stop import Stop, conditions_of
from oat.data.formats import TEXT
from oat.data.prompts import Prompts
from oat.evaluation.evaluation import Evaluation
from oat.evaluation.held_out import OnlyPairs
from oat.explore.base import Explorer
from oat.files import absolute
from oat.learner.replay_buffer import Buffer
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.loop import Run
from oat.models.lora import LoadModel, load_model
from oat.oracles.base import Oracle
from oat.oracles.builtin import BUILTIN, BeliefOracle
from oat.protocols import Plans
from oat.resolve.placement import placement_notes
from oat.resolve.resolved import Resolved
from oat.rundir.checkpoints import Checkpoints
from oat.rundir.holdings import LedgerRequirements
from oat.rundir.provenance import ProvenanceWriter, environment_of, first_seed
from oat.runtime.local import over_wire
from oat.runtime.probe import Probing
from oat.runtime.remote_learner import RemoteLearner
from oat.runtime.weights import Weights
from oat.runtime.worker_group import WorkerGroup
from oat.seeds import Seeds
from oat.text.chat_template import has_template, proposal
from oat.text.turns import Turns
from oat.tracking.files import Tracking
from oat.tracking.sink_process import SinkProcess
from oat.tracking.sinks import described_sinks
from oat.types import ENSEMBLE, Plan

_SOME = 8
"""The number of prompts that are read to see whether the data are messages."""


@dataclass(frozen=True, eq=False)
class _Computing:
    """The boxes that compute with models.

    Attributes:
        learner: the learner as the other boxes call it.
        objectives: the algorithm's objective; then that of the ensemble, if the explorer has one.
        side: the boxes that sample.
        proof: how they prove which weights they compute with.
        chosen: see `Run`.
    """

    learner: boxes.Learner
    side: ActorSide
    proof: Literal["all", "sample"] | Probing
    objectives: list[Objective]
    chosen: dict[tuple[str, str], Any]


def build(
    resolved: Resolved,
    *,
    directory: Path | RunDirectory | None = None,
    run_inputs: RunInputs | None = None,
    seeds: Seeds | None = None,
    load: LoadModel = load_model,
) -> Run:
    """Make the boxes of a run.

    Args:
        resolved: the configuration; for one run only, because the run uses its object `objective`.
        directory: a run directory, which is made if it is missing, or its `RunDirectory`; None:
            `config.run_dir`.
        run_inputs: the data, oracles and renderer of the run; None: `build` makes them.
        seeds: of the run; None: its own seed, and the seed with which the run in the directory began.
        load: function that loads each model. With `Outlines.fake`, the run cannot be started.

    Raises:
        OatError: a part cannot be made as configured.
    """
    config = resolved.config
    home = (
        directory
        if isinstance(directory, RunDirectory)
        else unlocked_directory(directory or absolute(config.run_dir))
    )
    if config.compute.threads:
        torch.set_num_threads(config.compute.threads)
    run_inputs = run_inputs or gather_inputs(resolved, folder=home.directory)
    seeds = seeds or Seeds(config.seed, first_seed(home.directory, config.seed))
    computing = _computing(resolved, run_inputs, home, seeds, load)
    ledger = _ledger(resolved, home, run_inputs, seeds, has_ensemble=ENSEMBLE in computing.side.inboxes)
    plans = _plans(resolved.objective, resolved.explorer)
    stop = _stop(resolved, run_inputs.prompts)
    collector, evaluation = _asking(resolved, home, run_inputs, computing, ledger, seeds, plans, stop)
    weights, alarms = _weights(resolved, computing), _alarms(resolved)
    return Run(
        objectives=computing.objectives,
        plans=plans,
        stop=stop,
        seeds=seeds,
        collector=collector,
        ledger=ledger,
        holdings=LedgerRequirements(ledger.store),
        buffer=Buffer(ledger, config.learner.buffer, plans(0).questions),
        learner=computing.learner,
        weights=weights,
        evaluation=evaluation,
        alarms=alarms,
        checkpoints=_checkpoints(config, home),
        tracking=_tracking(config, home, run_inputs),
        parts=_parts(computing, run_inputs, weights, collector, stop, alarms, evaluation),
        start=_left_out(run_inputs.sources),
        chosen=computing.chosen,
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
    resolved: Resolved, run_inputs: RunInputs, home: RunDirectory, seeds: Seeds, load: LoadModel
) -> _Computing:
    config = resolved.config
    learning = LearnerPlan(
        {},
        seeds.first,
        str(home.directory / "nonfinite"),
        _longest(resolved, run_inputs),
        run_inputs.known is not None,
    )
    sampling = ActorPlan({}, seeds.first, run_inputs.has_character_steps)
    processes = None
    if load is load_model:  # outlines of models work for nobody
        processes = start_processes(resolved, run_inputs, home, sampling, learning)
    if processes is not None:
        run_inputs.closing.append(processes.close)
        if processes.learner is not None:
            return _computing_apart(resolved, run_inputs, processes, processes.learner)
    weights = run_inputs.outline.weights
    if load is load_model:
        tell_stage(f"reading {weights / 1e6:.0f} million weights", weights)
    own = make_learner_side(resolved, run_inputs.renderer, seeds, learning, load)
    if processes is not None:
        side = processes.side(resolved)
        run_inputs.clients.update(oracles_of(processes, run_inputs))
    else:
        if own.lms["policy"].has_weights:
            tell_stage(_trying(config), weights)
        side = _side_beside(own, resolved, run_inputs, seeds, load)
    has_weights, threads = own.lms["policy"].has_weights, torch.get_num_threads()
    if config.compute.threads is None and config.compute.profile == "cpu" and has_weights:
        torch.set_num_threads(threads := own.threads(resolved.objective))
    return _Computing(
        learner=_apart(resolved, own),
        side=side,
        proof=weights_proof(resolved, own.context, run_inputs.renderer.num_tokens),
        objectives=[resolved.objective, *own.ensemble_objective],
        chosen=_chosen(own.learner.micro_batch_tokens, side.threads, threads),
    )


def _computing_apart(
    resolved: Resolved, run_inputs: RunInputs, processes: Processes, learner: WorkerGroup
) -> _Computing:
    """Make the boxes of a run whose learner works in a process of its own."""
    resolved.objective.end_ids = run_inputs.renderer.stop_ids
    side = processes.side(resolved)
    run_inputs.clients.update(oracles_of(processes, run_inputs))
    learner.ready()
    remote = RemoteLearner(learner.members[0])
    ensemble = ensemble_learning(resolved.explorer, remote.facts["features"])
    return _Computing(
        learner=remote,
        side=side,
        proof=weights_proof(resolved, remote.facts["context"], run_inputs.renderer.num_tokens),
        objectives=[resolved.objective, *([ensemble] if ensemble is not None else [])],
        chosen=_chosen(remote.micro_batch_tokens, side.threads, remote.facts["threads"]),
    )


def _trying(config: Config) -> str:
    """Return what is done with weights once they are read, for people."""
    is_measured = config.compute.threads is None and config.compute.profile == "cpu"
    return "trying the model" + (
        ", and measuring how many threads are fastest (compute.threads: N)" if is_measured else ""
    )


def _side_beside(
    own: LearnerSide, resolved: Resolved, run_inputs: RunInputs, seeds: Seeds, load: LoadModel
) -> ActorSide:
    """Make the side that samples beside that of the learner. It shares the learner's models."""
    return make_actor_side(
        resolved,
        slot_sources(resolved, seeds, own.lms, load),
        run_inputs.renderer,
        run_inputs.environment,
        seeds,
        context=context_of(resolved, own.lms),
        scorer=own.ensemble.scorer if own.ensemble else None,
        features=own.features,
        records_text_ends=run_inputs.has_character_steps,
    )


def _longest(resolved: Resolved, run_inputs: RunInputs) -> int | None:
    """Return the largest number of tokens of a prompt with its response; None if no limit is known."""
    config, outline = resolved.config, run_inputs.outline
    if config.prompts.responses or config.sampling.environment is not None:
        return outline.context_length
    return longest_sequence(outline, run_inputs.prompts.longest, config.sampling.max_new_tokens)


def _wired(config: Config, box: Any) -> Any:
    """Return the box. If `compute.serialise` is set, return it behind the wire encoding: arguments and
    results of its methods are encoded and decoded."""
    return over_wire(box) if config.compute.serialise else box


def _apart(resolved: Resolved, own: LearnerSide) -> boxes.Learner:
    """Return the learner as other boxes call it. With `compute.serialise` it is behind the wire encoding, and
    has its own copies of the objectives. So it cannot read what `prepare` stored in the run's objectives."""
    if not resolved.config.compute.serialise:
        return own.learner
    return over_wire(own.learner, own=own_objectives(resolved, own))


def _asking(
    resolved: Resolved,
    home: RunDirectory,
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
    resolved: Resolved, home: RunDirectory, run_inputs: RunInputs, seeds: Seeds, *, has_ensemble: bool
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


def _weights(resolved: Resolved, computing: _Computing) -> Weights:
    config, side = resolved.config, computing.side
    slots = {"sampler", "policy", ENSEMBLE} & side.inboxes.keys()
    if config.model.reference_update is not None and "reference" in resolved.slots:
        slots.add("reference")
    return Weights(
        {slot: _wired(config, inbox) for slot, inbox in side.inboxes.items() if slot in slots},
        config.learner.sync_every,
        slot_dtypes(resolved.engine),
        shared=shared_slots(config),
        versions=side.versions,
        proof=computing.proof,
    )


def _alarms(resolved: Resolved) -> Alarms:
    config = resolved.config
    return Alarms(
        alarms_of(config.alarms, resolved.watched), config.alarms.max_roll_backs, oracle=config.oracle.name
    )


def _checkpoints(config: Config, home: RunDirectory) -> Checkpoints:
    return Checkpoints(home.directory / "checkpoints", **asdict(config.checkpoint), standing=home.standing)


def _tracking(config: Config, home: RunDirectory, run_inputs: RunInputs) -> Tracking:
    t = config.tracking
    told = ProvenanceWriter(
        home.directory / "environment.json",
        partial(_environment, config.seed),
        run_inputs.inputs,
        OwnFiles(run_inputs.known, run_inputs.roles),
        run_inputs.news,
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


def _environment(seed: int) -> dict[str, Any]:
    """Return the entry of this process for `environment.json`."""
    return {**environment_of(seed), "changes": known_changes()}


def _left_out(sources: Sequence[Prompts]) -> dict[str, float]:
    """Return, as metrics of row 0, how many prompts and pairs were left out or cut."""
    return {
        f"prompts/{name}": float(sum(getattr(source, name) for source in sources))
        for name in ("cut", "dropped", "skipped")
    }


def _chosen(
    micro_batch_tokens: int | None, engine_threads: int | None, threads: int
) -> dict[tuple[str, str], Any]:
    """Return, by section and name, the settings that a run fixes when it is created, each with the value that
    was set or measured."""
    return {
        ("learner", "micro_batch_tokens"): micro_batch_tokens,
        ("engine", "threads"): engine_threads,
        ("compute", "threads"): threads,
    }


def _notes(resolved: Resolved, run_inputs: RunInputs) -> tuple[str, ...]:
    """Return sentences for people that are shown before the first step."""
    config = resolved.config
    of_data = dict.fromkeys(note for source in run_inputs.sources for note in source.notes)
    of_devices = (*device_notes(config.compute.profile), *placement_notes(config.compute))
    frozen = run_inputs.outline.frozen
    of_model = [f"model.frozen: {frozen} are not trained"] if frozen else []
    of_oracle = []
    if config.render.system is not None and config.oracle.name not in BUILTIN:
        of_oracle = ["render.system: only the policy reads this message; the oracle gets prompts without it"]
    of_run = (*process_notes(config), *of_devices, *engine_notes(resolved))
    return (*of_model, *of_run, *_note_of_template(resolved, run_inputs), *of_data, *of_oracle)


def _note_of_template(resolved: Resolved, run_inputs: RunInputs) -> list[str]:
    """Return a note if a new run writes prompts as plain text, and its model or its data are made for a chat.
    Who sets `render.template: null` wants this, and gets none."""
    render, tokenizer = resolved.config.render, run_inputs.renderer.tokenizer
    is_wanted = ("render", "template") in resolved.origins or render.question is not None
    is_text = run_inputs.prompts.formats == {TEXT}
    if render.template is not None or is_wanted or is_text or run_inputs.known is not None:
        return []
    has_messages = any(prompt.is_chat for prompt in run_inputs.prompts.spread(_SOME))
    if not has_messages and not has_template(tokenizer):
        return []
    what = (
        "prompts are messages, and their contents are continued as plain text, without roles"
        if has_messages
        else "prompts are continued as plain text, although the model has a chat template"
    )
    advice = "for a chat model set render.template: tokenizer"
    advice = advice if has_template(tokenizer) else proposal(tokenizer)
    return [f"{what}; {advice}; render.template: null leaves this note out"]
