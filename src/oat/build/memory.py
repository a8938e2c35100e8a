"""How much memory a run needs, before it begins: `oat check CONFIG --memory`, and the refusal of what clearly
does not fit.

The run's own models, learner and engine are made of tensors that have a shape and no memory
(`oat.models.outline`), and do what a step does with its longest rows; what is alive at once is
counted. Nothing is loaded, so the answer takes seconds for any model.

Counted in bytes of tensors, beyond what the process holds after its imports. Not counted: the interpreter and
its libraries; scratch memory within an operation; what the allocator keeps of freed memory (with large models
it gives all back, `oat.hardware.allocator`); data, ledger, texts.

The estimate does a step instead of keeping formulas, so whatever changes in the learner is in it. The
engine's work depends on values, so only its two largest moments are done: a pass over prompts, and a draw.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from oat.algorithms.base import Objective
from oat.build.engine import make_sampling
from oat.build.learner import make_ensemble, make_learner
from oat.build.models import ModelOutline, keys_of, load_models, load_slots, outline_of
from oat.build.parts import settings_of
from oat.build.resolved import Resolved
from oat.build.run_inputs import RunInputs, make_renderer
from oat.config.load import where
from oat.config.settings import Config, LoraConfig
from oat.engines.decoding import cache_dtype, cache_dtype_on, filled_up
from oat.engines.decoding import passes as in_passes
from oat.engines.paged_cache import PAGE
from oat.engines.torch import fixed_rows, refuse_small_cache
from oat.errors import ConfigError, OatError
from oat.functional.logprobs import token_logps
from oat.functional.sampling import inverse_cdf
from oat.learner.batching import micro_batches
from oat.learner.learner import Learner
from oat.learner.limits import GB, LiveBytes, row_of
from oat.models.causal_lm import CausalLM
from oat.seeds import Seeds
from oat.types import Batch, Plan, Sampling, Trajectory

SURE = 0.85
"""Of an estimate: a run takes at least as much."""
TOGETHER = "all of these together"
_COPIES, _SAVED = 20, 16
"""More copies of the weights than a run has, and of what goes into and comes out of every matrix than a pass
keeps."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of tensors.

    Attributes:
        parts: what is held, by name.
        phases: the most that is alive at once, by part of a step; and by any part while a checkpoint is
        written.
    """

    parts: dict[str, int]
    phases: dict[str, int]

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def part(self) -> str:
        """Where the most is alive."""
        return max(self.phases, key=lambda name: self.phases[name])


@dataclass(frozen=True)
class Lengths:
    """Of a run's prompts: tokens of the longest; and of those held out, their number and tokens of the
    longest."""

    prompt: int
    held_out: int = 0
    held_out_prompt: int = 0


def lengths_of(run_inputs: RunInputs) -> Lengths:
    """Of the prompts that a run reads."""
    held_out = run_inputs.held_out
    return Lengths(run_inputs.prompts.longest, *((held_out.size, held_out.longest) if held_out else ()))


def refuse_too_large(resolved: Resolved, lengths: Lengths, policy: ModelOutline) -> str:
    """Hold the estimate against `compute.memory_gb`, or against the memory that is free. A small run is not
    even estimated.

    Args:
        policy: its outline.

    Returns:
        What is known of both, for people.

    Raises:
        ConfigError: it clearly does not fit; says which settings would make it fit, and how to go on all the
        same.
    """
    config = resolved.config
    given = config.compute.memory_gb
    limit = free_memory(config.compute.profile) if given is None else int(given * GB)
    if config.learner.micro_batch_tokens == "auto" or limit is None:
        return "not compared with what is free; --memory estimates it"
    has = (
        f"{limit / GB:.3g} GB of memory are free"
        if given is None
        else f"compute.memory_gb is {limit / GB:.3g}"
    )
    with resolved.blame("model.reference"):
        if _at_most(resolved, lengths, policy) <= limit:
            return f"small for the machine ({has}); --memory estimates it"
    found = estimate(resolved, lengths)
    if SURE * found.peak <= limit:
        return f"about {found.peak / GB:.3g} GB for tensors ({found.part}), and {has}"
    peaks: dict[str, int] = {}
    fits: list[str] = []
    for changes, smaller in _smaller(config, lengths, found.part):
        if changes == TOGETHER and fits:
            break
        with suppress(OatError):  # what this model, or this installation, cannot
            peaks[changes] = estimate(replace(resolved, config=smaller), lengths).peak
            fits += [f"{changes} ({peaks[changes] / GB:.3g} GB)"] if SURE * peaks[changes] <= limit else []
    least = min(peaks.values(), default=found.peak) / GB
    advice = (
        f"it would fit with {', or with '.join(fits)}"
        if fits
        else f"it would not fit with {', '.join(peaks)} either ({least:.3g} GB); take a smaller model"
    )
    raise ConfigError(
        f"{where(('compute', 'memory_gb'), resolved.origins)}: {has}, and this run needs about "
        f"{found.peak / GB:.3g} GB for "
        f"tensors ({found.part}): {advice}; to go on all the same, set compute.memory_gb to "
        f"{1.1 * found.peak / GB:.3g} or more"
    )


def refuse_short_cache(resolved: Resolved, lengths: Lengths, policy: ModelOutline) -> None:
    """Hold the longest sequence that is sampled against `engine.cache_gb`. Of episodes it is the first turn.

    Args:
        policy: its outline.

    Raises:
        EngineError: as the engine, when it is asked for such a sequence.
    """
    config, options = resolved.config, resolved.engine
    prompts = [
        *([] if config.prompts.responses else [lengths.prompt]),
        *([lengths.held_out_prompt] if lengths.held_out else []),
    ]
    if not prompts:
        return
    page_bytes = PAGE * policy.keys * cache_dtype_on(policy.device, getattr(torch, options.dtype)).itemsize
    rows = fixed_rows(options.max_rows) if options.deterministic else None
    with resolved.blame("engine.cache_gb"):
        refuse_small_cache(
            _width(policy, max(prompts), config.sampling.max_new_tokens),
            int(options.cache_gb * GB / page_bytes),
            page_bytes,
            rows,
        )


def free_memory(profile: str) -> int | None:
    """Bytes that a run may still take on its device; None where nobody says."""
    if profile == "gpu":
        return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None
    try:
        free = re.search(
            r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE
        )
    except OSError:
        return None
    return min([int(free[1]) * 1024, *_free_in_group()]) if free else None


def _free_in_group() -> list[int]:
    """What the limit of a container leaves, where there is one."""
    group = Path("/sys/fs/cgroup")
    try:
        most, used, stat = (
            (group / f"memory.{name}").read_text(encoding="ascii") for name in ("max", "current", "stat")
        )
        droppable = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)
        return [int(most) - int(used) + int(droppable[1] if droppable else 0)]
    except (OSError, ValueError):  # there is no such group, or "max": it has no limit
        return []


def _at_most(resolved: Resolved, lengths: Lengths, policy: ModelOutline) -> int:
    """More bytes than a run takes, from the shapes of its matrices; in a moment, and many times too much."""
    config, options = resolved.config, resolved.engine
    weights, a_token = policy.weights, policy.a_token
    if config.model.reference:
        lms = load_models(config, {"reference"}, Seeds(config.seed), resolved.outlines.on_meta)
        reference = outline_of(lms["reference"], config.compute.profile)
        weights, a_token = weights + reference.weights, a_token + reference.a_token
    plan = resolved.plan
    rows = _questions(config, plan) * max(sum(plan.samples.values()), len(config.prompts.responses))
    evaluated = lengths.held_out * max(config.answering.samples, 1) if config.answering else 0
    width = max(lengths.prompt, lengths.held_out_prompt) + config.sampling.max_new_tokens
    recorded = (policy.context_length or width) if config.prompts.responses else 0
    width = max(width, recorded)
    tokens = max(rows, evaluated, fixed_rows(options.max_rows) if options.deterministic else 0) * width
    return 4 * (_COPIES * weights + _SAVED * tokens * (a_token + width * policy.heads))


def _smaller(config: Config, lengths: Lengths, part: str) -> Iterator[tuple[str, Config]]:
    """The run with less alive in that part of a step, with what is changed; then with all of it changed."""
    learner = config.learner
    row = lengths.prompt + config.sampling.max_new_tokens
    changed = config
    if part in ("sampling", "evaluation"):
        fewer = {**config.engine.options, "max_rows": 16}
        changed = replace(changed, engine=replace(config.engine, options=fewer))
        yield "engine.max_rows: 16", changed
    else:
        changed = replace(changed, learner=replace(learner, micro_batch_tokens=row))
        yield f"learner.micro_batch_tokens: {row}", changed
        if not learner.gradient_checkpointing:
            yield (
                "learner.gradient_checkpointing: true",
                replace(config, learner=replace(learner, gradient_checkpointing=True)),
            )
            changed = replace(changed, learner=replace(changed.learner, gradient_checkpointing=True))
    if config.model.lora is None:
        lora = replace(config.model, lora=LoraConfig())
        yield "model.lora: {rank: 8}", replace(config, model=lora)
        changed = replace(changed, model=lora)
    if part == "beside a checkpoint":
        waiting = replace(config.checkpoint, background=False)
        yield "checkpoint.background: false", replace(config, checkpoint=waiting)
        changed = replace(changed, checkpoint=waiting)
    yield TOGETHER, changed


def estimate(resolved: Resolved, lengths: Lengths) -> Estimate:
    """The memory of a run.

    Raises:
        ConfigError, ModelError: a part cannot be made as configured.
    """
    config, objective = resolved.config, resolved.objective
    seeds = Seeds(config.seed)
    load = resolved.outlines.fake
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        lms = load_models(config, resolved.models, seeds, load)
        ensemble = make_ensemble(resolved.explorer, lms, seeds)
        learner = make_learner(resolved, lms, make_renderer(config, lms["policy"]), seeds, ensemble)
        learned = sum(
            parameter.nbytes
            for name in learner.trained
            for parameter in learner.models[name].trainable().values()
        )
        slots = load_slots(resolved, lms, seeds, load)
        sampling = make_sampling(resolved)
        loads = _loads(config, resolved.widened, lengths, lms["policy"])
        kept = (
            [tensor.clone() for tensor in lms["policy"].trainable().values()]
            if config.learner.sync_every > 1
            else []
        )
        weights, has_one_step = live.live, config.stop.max_steps == 1
        first = {name: load for name, load in loads.items() if name == "sampling" and has_one_step}
        phases = _sampling(config, sampling, slots["sampler"], first, live)
        for _ in range(1 if has_one_step else 2):
            plan, rows = resolved.plan, partial(_rows, sampling, resolved.plan, lms["policy"], lengths)
            prepared, passes = (
                _micro_batches(learner, objective, rows(count))
                for count in (_questions(config, plan), plan.prompts)
            )
            phases |= _learning(learner, objective, prepared[0], passes, live)
        if slots["sampler"] is not lms["policy"]:
            phases["new weights"] = live.live + sum(
                tensor.nbytes for tensor in slots["sampler"].tensors().values()
            )
        later = {name: load for name, load in loads.items() if name not in phases}
        phases |= _sampling(config, sampling, slots["sampler"], later, live)
        if config.checkpoint.background and (
            config.stop.max_steps is None or config.checkpoint.every < config.stop.max_steps
        ):
            moving = lms["reference"].trainable().values() if learner.following is not None else ()
            copied = (
                sum(parameter.nbytes for parameter in moving)
                + learned
                + live.live
                - weights
                + sum(tensor.nbytes for tensor in kept)
            )
            phases["beside a checkpoint"] = max(phases.values()) + copied
        parts = {
            "weights that learn": learned,
            "other weights": weights - learned,
            "moments of AdamW": live.live - weights,
        }
        parts["keys and values"] = max(
            (_cache_bytes(config, slots["sampler"], load) for load in loads.values()), default=0
        )
        del kept
    return Estimate(parts, phases)


@dataclass(frozen=True)
class _Load:
    """What the engine is given at once: so many prompts, samples of each, and tokens of each prompt and of
    each response."""

    prompts: int
    samples: int
    prompt: int
    response: int


def _loads(config: Config, plan: Plan, lengths: Lengths, lm: CausalLM) -> dict[str, _Load]:
    """By part of a step."""

    def load(prompts: int, samples: int, prompt: int) -> _Load:
        return _Load(prompts, samples, prompt, _width(lm, prompt, config.sampling.max_new_tokens) - prompt)

    loads = (
        {}
        if config.prompts.responses
        else {"sampling": load(plan.prompts, sum(plan.samples.values()), lengths.prompt)}
    )
    if config.answering is not None and lengths.held_out:
        loads["evaluation"] = load(
            lengths.held_out, max(config.answering.samples, 1), lengths.held_out_prompt
        )
    return loads


def _width(lm: CausalLM | ModelOutline, prompt: int, response: int) -> int:
    """Tokens of a sequence when it is at its longest."""
    return prompt + response if lm.context_length is None else min(prompt + response, lm.context_length)


def _questions(config: Config, plan: Plan) -> int:
    """Those that a step learns from, at most."""
    return max(plan.prompts, config.learner.buffer.questions if config.learner.buffer else 0)


def _rows(sampling: Sampling, plan: Plan, lm: CausalLM, lengths: Lengths, questions: int) -> list[Trajectory]:
    """The rows of so many questions, each as long as it can get, with the prompts of their groups in common.

    What is computed of kept sets depends on values; another temperature takes as much.
    """
    width = _width(lm, lengths.prompt, sampling.max_new_tokens)
    samples = sum(plan.samples.values())
    drawn = replace(sampling, temperature=0.5) if sampling.keep_sets else sampling
    return [
        row_of(width, width - lengths.prompt, number // samples, drawn)
        for number in range(questions * samples)
    ]


def _micro_batches(
    learner: Learner, objective: Objective, rows: Sequence[Trajectory]
) -> list[list[Trajectory]]:
    """The rows of the first two forward passes of an update; of one, if there are no more."""
    units = np.arange(len(rows)) // (2 if objective.requires.feedback == "compare" else 1)
    cuts = micro_batches(
        Batch(tuple(rows), units, units), learner.micro_batch_size, learner.micro_batch_tokens
    )
    return [[rows[row] for row in cut] for cut in list(cuts)[:2]]


def _learning(
    learner: Learner,
    objective: Objective,
    prepared: list[Trajectory],
    passes: Sequence[list[Trajectory]],
    live: LiveBytes,
) -> dict[str, int]:
    """A pass of `prepare`, those of an update, of which a second one adds to the gradients of the first, and
    the optimisers' step."""
    live.peak = live.live
    if "reference" in learner.models:
        with torch.no_grad():
            learner.models["reference"].outputs(prepared, {}, {"raw"})
    phases = {"prepare": live.peak}
    live.peak = live.live
    for rows in passes:
        with learner.learning(objective):
            outputs = [
                learner.models[name].outputs(rows, {}, wants) for name, wants in objective.wants.items()
            ]
            torch.stack([values.sum() for output in outputs for values in output.values()]).sum().backward()
        del outputs
    phases["forward and backward"] = live.peak
    live.peak = live.live
    for part in (learner.trained[name] for name in objective.wants):
        parameters = [parameter for group in part.optimiser.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, part.settings.max_grad_norm)
        part.optimiser.step()
        part.optimiser.zero_grad(set_to_none=True)
    return {**phases, "optimiser": live.peak}


def _sampling(
    config: Config, sampling: Sampling, lm: CausalLM, loads: Mapping[str, _Load], live: LiveBytes
) -> dict[str, int]:
    """By load: a pass over as many prompts as go together, then the draws of all rows at once, both beside
    the cache."""
    phases = {}
    for name, load in loads.items():
        cache, rows = _cache_bytes(config, lm, load), _together(config, load)
        live.peak = live.live
        some = next(iter(in_passes(np.full(-(-rows // load.samples), load.prompt))))
        with torch.no_grad():
            lm.hidden_of([np.zeros(load.prompt, dtype=np.int32)] * len(some))
            width = lm.module.get_output_embeddings().in_features
            hidden = torch.zeros(
                filled_up(rows), width, device=lm.device, dtype=next(lm.module.parameters()).dtype
            )
            _draw(lm.head(hidden)[:rows].float(), sampling)
        phases[name] = live.peak + cache
    return phases


def _draw(logits_RV: Tensor, sampling: Sampling) -> None:
    """As the engine does it; which tokens truncation leaves depends on values, so the tensors that find them
    are imitated."""
    drawable_RV = logits_RV / 2 if sampling.truncates or sampling.temperature != 1 else logits_RV
    if sampling.truncates:
        some_RV = drawable_RV.clone()
        if sampling.top_p < 1 and sampling.top_k == 0:
            ranked = some_RV.sort(dim=-1, descending=True, stable=True)
            held = [
                ranked,
                exact_RV := ranked.values.double(),
                mass_RV := exact_RV.exp(),
                mass_RV.cumsum(-1),
                mass_RV - exact_RV,
            ]
            del ranked, exact_RV, mass_RV, held
        drawable_RV = torch.full_like(some_RV, 0).scatter(
            1, logits_RV.new_zeros(len(logits_RV), 1, dtype=torch.long), 0
        )
    token_logps(logits_RV, inverse_cdf(drawable_RV, logits_RV.new_zeros(len(logits_RV), dtype=torch.float64)))


def _together(config: Config, load: _Load) -> int:
    """Rows that are decoded at once."""
    options = settings_of(config, "engine")
    return (
        fixed_rows(options.max_rows)
        if options.deterministic
        else min(load.prompts * load.samples, options.max_rows)
    )


def _cache_bytes(config: Config, lm: CausalLM, load: _Load) -> int:
    """Pages of rows that are all at their longest, within `engine.cache_gb`; a common prompt's full pages
    once, if any are shared."""
    options, rows = settings_of(config, "engine"), _together(config, load)
    whole = -(-(load.prompt + load.response) // PAGE)
    shared = load.prompt // PAGE if load.samples > 1 and not options.deterministic else 0
    pages = rows * (whole - shared) + -(-rows // load.samples) * shared
    return min(int(options.cache_gb * GB), pages * PAGE * keys_of(lm) * cache_dtype(lm).itemsize)


def memory_lines(resolved: Resolved, lengths: Lengths) -> list[str]:
    """The estimate as a table."""
    found = estimate(resolved, lengths)
    lines = ["memory of tensors, GB (10^9 bytes), beyond the process after its imports (about 0.5)"]
    for title, sizes in (("held", found.parts), ("most at once", found.phases)):
        lines += [f"  {title}", *(f"    {name:<22}{size / GB:9.3f}" for name, size in sizes.items() if size)]
    return [*lines, f"  peak{found.peak / GB:22.3f}"]
