"""An estimate of the memory that a run needs, made before the run begins.

The models and the learner of the run are made of tensors that have a shape and no memory
(`oat.models.outline`). They compute a step in which every row has the largest length. Meanwhile the bytes of
all tensors that are alive are counted. No weights are loaded, so the estimate takes seconds for any model.

The engine's work depends on the values of tensors, which are missing here. So the engine imitates only the
operations that need most memory (`EngineMemory.imitate`).

The estimate does not count:
* the memory that the process has after its imports;
* scratch memory within an operation;
* freed memory that the allocator keeps (with large models it keeps none, `oat.hardware.memory`);
* data, ledger and texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from oat.algorithms.base import Objective
from oat.assemble.ensemble import EnsembleParts, make_ensemble, make_features
from oat.assemble.learner import make_learner
from oat.assemble.models import load_models, load_slots, slot_dtypes
from oat.assemble.outline import longest_sequence
from oat.assemble.run_inputs import RunInputs, make_renderer
from oat.config.settings import Config
from oat.engines.kind import EngineMemory, Load
from oat.learner.batching import micro_batches
from oat.learner.learner import Learner
from oat.learner.limits import LiveBytes, row_of, without_memory
from oat.models.causal_lm import CausalLM
from oat.models.outline_errors import outlining
from oat.resolve.resolved import Resolved
from oat.resolve.sampling import make_sampling
from oat.seeds import Seeds
from oat.types import Batch, Plan, Sampling, Trajectory

SURE = 0.85
"""A run takes at least this share of the memory that was estimated for it."""


@dataclass(frozen=True)
class Estimate:
    """The estimated bytes of tensors.

    Attributes:
        parts: the bytes of each kind of tensors, such as "weights that learn".
        phases: the most bytes that are alive at once, by part of a step. If a step goes on while a checkpoint
            is written, there is an entry "beside a checkpoint": the largest of the other entries, plus the
            bytes of the weights and moments that a checkpoint copies. There is none if the learner has a
            process of its own, since another process writes checkpoints.
        state: bytes of the tensors of the learner's state, which is what a checkpoint has of it.
    """

    parts: dict[str, int]
    phases: dict[str, int]
    state: int = 0

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def part(self) -> str:
        """The name of the part of a step in which most bytes are alive."""
        return max(self.phases, key=lambda name: self.phases[name])


@dataclass(frozen=True)
class Lengths:
    """The lengths of a run's prompts.

    Attributes:
        prompt: number of tokens of the longest prompt of training.
        held_out: number of held-out prompts.
        held_out_prompt: number of tokens of the longest held-out prompt.
    """

    prompt: int
    held_out: int = 0
    held_out_prompt: int = 0


@dataclass(frozen=True, eq=False)
class _Imitated:
    """The learner and the models with which a step is imitated, made without weights.

    Attributes:
        sampler: the model of the engine's slot `sampler`; the policy if the engine is in other processes.
        kept: older weights of the policy that the run's own process keeps for the sampler
            (`learner.sync_every` above 1); empty if there are none, or if another process learns.
        ensemble: not read; this field keeps the ensemble's tensors alive.
    """

    lms: dict[str, CausalLM]
    learner: Learner
    sampler: CausalLM
    kept: list[Tensor]
    ensemble: EnsembleParts | None


def lengths_of(run_inputs: RunInputs) -> Lengths:
    """Return the lengths of the prompts that a run reads."""
    held_out = run_inputs.held_out
    return Lengths(run_inputs.prompts.longest, *((held_out.size, held_out.longest) if held_out else ()))


def most_questions(config: Config, plan: Plan) -> int:
    """Return the largest number of questions that a step learns from."""
    return max(plan.prompts, config.learner.buffer.questions if config.learner.buffer else 0)


def estimate(resolved: Resolved, lengths: Lengths) -> Estimate:
    """Estimate the memory of the process that learns: the run's own, or, with `compute.learner: actor`,
    another one. It has no engine if actors have processes of their own (`estimate_actor`).

    Raises:
        NotOutlinedError: the models' code cannot be imitated without weights.
        ConfigError, ModelError: a part cannot be made as configured.
    """
    with outlining(), without_memory() as live:
        run = _imitated(resolved)
        learned = sum(
            parameter.nbytes
            for name in run.learner.trained
            for parameter in run.learner.models[name].trainable().values()
        )
        weights = live.live
        loads = {} if _is_apart(resolved) else loads_of(resolved, lengths, run.sampler)
        phases = _phases(resolved, lengths, run, loads, live)
        state = learned + live.live - weights + _followed(run)
        if saves_in_background(resolved.config) and _sends(resolved.config):
            kept = sum(tensor.nbytes for tensor in run.kept)
            phases["beside a checkpoint"] = max(phases.values()) + state + kept
        memory = resolved.engine.memory
        cached = (memory.cache_bytes(run.sampler, load) for load in loads.values())
        parts = {
            "weights that learn": learned,
            "other weights": weights - learned,
            "moments of AdamW": live.live - weights,
            "keys and values": max(cached, default=0),
        }
        del run
    return Estimate(parts, phases, state)


def _imitated(resolved: Resolved) -> _Imitated:
    config, load = resolved.config, resolved.outlines.fake
    seeds = Seeds(config.seed)
    lms = load_models(config, resolved.models, seeds, load)
    features = make_features(lms, resolved.features) if resolved.features else None
    ensemble = make_ensemble(resolved.explorer, features, seeds, has_weights=False)
    learner = make_learner(resolved, lms, make_renderer(config, lms["policy"]), seeds, ensemble)
    sampler = lms["policy"] if _is_apart(resolved) else load_slots(resolved, lms, seeds, load)["sampler"]
    is_late = config.learner.sync_every > 1 and _sends(config)
    kept = [tensor.clone() for tensor in lms["policy"].trainable().values()] if is_late else []
    return _Imitated(lms, learner, sampler, kept, ensemble)


def _sends(config: Config) -> bool:
    """Return True if the process that learns is the run's own, which sends weights and writes checkpoints."""
    return config.compute.learner == "driver"


def sent_bytes(resolved: Resolved, lm: CausalLM) -> int:
    """Return the bytes of the weights of a model in the form in which slots get them."""
    dtype = slot_dtypes(resolved.engine).get("sampler")
    return sum(
        tensor.numel() * dtype.itemsize if dtype and tensor.is_floating_point() else tensor.nbytes
        for tensor in lm.tensors().values()
    )


def _is_apart(resolved: Resolved) -> bool:
    return resolved.config.compute.runtime != "local"


def loads_of(resolved: Resolved, lengths: Lengths, lm: CausalLM, engines: int = 1) -> dict[str, Load]:
    """Return the numbers and lengths of prompts and responses in two parts of a step, "sampling" and
    "evaluation". A part in which the engine generates nothing is left out.

    Args:
        engines: number of engines that share the prompts.
    """
    config, plan = resolved.config, resolved.widened

    def load(prompts: int, samples: int, prompt: int) -> Load:
        longest = longest_sequence(lm, prompt, config.sampling.max_new_tokens)
        return Load(-(-prompts // engines), samples, prompt, longest - prompt)

    loads = {}
    if not config.prompts.responses:
        loads["sampling"] = load(plan.prompts, plan.most_candidates, lengths.prompt)
    if config.answering is not None and lengths.held_out:
        samples = max(config.answering.samples, 1)
        loads["evaluation"] = load(lengths.held_out, samples, lengths.held_out_prompt)
    return loads


def _phases(
    resolved: Resolved,
    lengths: Lengths,
    run: _Imitated,
    loads: Mapping[str, Load],
    live: LiveBytes,
) -> dict[str, int]:
    """Return the peak bytes of each phase of a step, by name.

    The phases are imitated in this order: an update, sampling, evaluation. The optimiser's moments exist from
    the first update on, so the phases of an update are those of a later one. If `stop.max_steps` is 1, the
    order is: sampling, the only update, evaluation.
    """
    sampling, engine = make_sampling(resolved), resolved.engine.memory
    has_one_step = resolved.config.stop.max_steps == 1
    first = {name: load for name, load in loads.items() if name == "sampling" and has_one_step}
    phases = sampling_phases(engine, sampling, run.sampler, first, live)
    phases |= _learning(resolved, lengths, run, sampling, live)
    if run.sampler is not run.lms["policy"]:
        phases["new weights"] = live.live + sum(tensor.nbytes for tensor in run.sampler.tensors().values())
    elif _is_apart(resolved) and slot_dtypes(resolved.engine) and _sends(resolved.config):
        phases["new weights"] = live.live + sent_bytes(resolved, run.sampler)
    later = {name: load for name, load in loads.items() if name not in phases}
    return phases | sampling_phases(engine, sampling, run.sampler, later, live)


def saves_in_background(config: Config) -> bool:
    """Return True if a step goes on while a checkpoint is written."""
    last = config.stop.max_steps
    return config.checkpoint.background and (last is None or config.checkpoint.every < last)


def _followed(run: _Imitated) -> int:
    """Return the bytes of a reference that follows the policy; 0: there is none."""
    moving = run.lms["reference"].trainable().values() if run.learner.following is not None else ()
    return sum(tensor.nbytes for tensor in moving)


def _learning(
    resolved: Resolved, lengths: Lengths, run: _Imitated, sampling: Sampling, live: LiveBytes
) -> dict[str, int]:
    """Return the peak bytes of three parts of a step: the forward pass of `prepare`, two backward passes that
    accumulate gradients (or the only one), and the optimiser step. Only the second step of a run and later
    ones have the optimiser's moments from their beginning."""
    learner, plan = run.learner, resolved.plan
    objective = resolved.objective
    prepared, passes = (
        _micro_batches(learner, objective, _rows(sampling, plan, run.lms["policy"], lengths, count), parts)
        for count, parts in (
            (most_questions(resolved.config, plan), 1),
            (plan.prompts, resolved.step.minibatches),
        )
    )
    trained = [learner.trained[name] for name in objective.wants]
    live.peak = live.live
    for name, want in (("reference", "raw"), ("critic", "value")):
        if name in learner.models:
            with torch.no_grad():
                learner.models[name].outputs(prepared[0], {}, {want})
    prepare = live.peak
    if len({len(rows) for rows in passes}) < len(passes):  # the first pass leaves gradients, and takes less
        del passes[0]
        for parameter in (each for part in trained for each in part.model.trainable().values()):
            parameter.grad = torch.zeros_like(parameter)
    live.peak = live.live
    for rows in passes:
        with learner.learning(objective):
            outputs = [
                learner.models[name].outputs(rows, {}, wants) for name, wants in objective.wants.items()
            ]
            torch.stack([values.sum() for output in outputs for values in output.values()]).sum().backward()
        del outputs
    backward, before = live.peak, live.live
    if resolved.config.stop.max_steps != 1:
        for part in trained:
            part.optimiser.step()
    moments = live.live - before
    live.peak = live.live
    for part in trained:
        part.optimiser.step()  # the clip before it takes no memory worth counting
        part.optimiser.zero_grad(set_to_none=True)
    return {
        "prepare": prepare + moments,
        "forward and backward": backward + moments,
        "optimiser": live.peak,
    }


def _rows(sampling: Sampling, plan: Plan, lm: CausalLM, lengths: Lengths, questions: int) -> list[Trajectory]:
    """Return the rows of a number of questions. Every row has the longest prompt and the longest response,
    cut to the context length. Rows of one group have the same prompt, and different responses.

    Rows have no kept sets here, since kept sets depend on the values of tensors. If the run has kept sets,
    the rows have a temperature of 0.5 instead, which takes as much memory.
    """
    width = longest_sequence(lm, lengths.prompt, sampling.max_new_tokens)
    samples = plan.responses
    drawn = replace(sampling, temperature=0.5) if sampling.keep_sets else sampling
    return [
        row_of(width, width - lengths.prompt, number // samples, drawn, sample=number % samples)
        for number in range(questions * samples)
    ]


def _micro_batches(
    learner: Learner, objective: Objective, rows: Sequence[Trajectory], parts: int
) -> list[list[Trajectory]]:
    """Return the rows of the first two micro-batches of an update. If the update has only one, return this
    one.

    Args:
        parts: number of mini-batches in which the rows are learned. The units of one are taken from all
            groups, so that few of them share a prompt.
    """
    size = 2 if objective.requires.feedback == "compare" else 1
    rows = [row for place, row in enumerate(rows) if place // size % parts == 0]
    units = np.arange(len(rows)) // size
    cuts = micro_batches(
        Batch(tuple(rows), units, units), learner.micro_batch_size, learner.micro_batch_tokens
    )
    return [[rows[row] for row in cut] for cut in list(cuts)[:2]]


def sampling_phases(
    engine: EngineMemory, sampling: Sampling, lm: CausalLM, loads: Mapping[str, Load], live: LiveBytes
) -> dict[str, int]:
    """Return the peak bytes of each load: the KV cache plus the peak of the engine's other work.

    Args:
        loads: by name, what the engine gets in one call.
    """
    phases = {}
    for name, load in loads.items():
        cache = engine.cache_bytes(lm, load)
        live.peak = live.live
        engine.imitate(lm, load, sampling)
        phases[name] = live.peak + cache
    return phases
