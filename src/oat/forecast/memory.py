"""Functions that refuse a run that does not fit into memory, and make the table of `oat check CONFIG
--memory`."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch

from oat.assemble.models import load_models
from oat.assemble.outline import ModelOutline, longest_sequence, outline_of
from oat.config.load import where
from oat.config.settings import Config, LoraConfig
from oat.control.stages import tell_stage
from oat.errors import ConfigError, OatError
from oat.forecast.estimate import SURE, Estimate, Lengths, estimate, most_questions
from oat.forecast.memory_apart import estimate_actor, needs_of, of_all_here
from oat.hardware.memory import free_memory
from oat.learner.limits import GB
from oat.models.outline_errors import NotOutlinedError, not_estimated
from oat.resolve.model_starts import has_own_critic
from oat.resolve.resolved import Resolved
from oat.seeds import Seeds

TOGETHER = "all of these together"
_COPIES = 20
"""More copies of the weights than any run holds."""
_SAVED = 16
"""More copies of the inputs and outputs of all matrices than any pass holds."""


def refuse_too_large(resolved: Resolved, lengths: Lengths, policy: ModelOutline) -> str:
    """Refuse a run whose estimated memory is clearly larger than the limit. The limit is `compute.memory_gb`
    or, if this is not set, the free memory.

    If a rough bound (`_at_most`) shows that the run fits, its memory is not estimated. If
    `learner.micro_batch_tokens` is "auto", or if the limit is not known, nothing is compared.

    Args:
        policy: the outline of the policy.

    If an outline does not tell the memory of a model, nothing is compared either.

    Returns:
        A text for people. It names the limit and, if the memory was estimated, the estimate; or it says that
        nothing was compared.

    Raises:
        ConfigError: `SURE` times the estimate is larger than the limit. The message says which settings would
            make the run fit, and how to start it nevertheless.
    """
    try:
        return _refuse_too_large(resolved, lengths, policy)
    except NotOutlinedError as error:
        return not_estimated(str(error))


def _refuse_too_large(resolved: Resolved, lengths: Lengths, policy: ModelOutline) -> str:
    """See `refuse_too_large`.

    Raises:
        NotOutlinedError: an outline does not tell the memory of a model.
    """
    config = resolved.config
    if not policy.tells_memory:
        raise NotOutlinedError(policy.unknown)
    given = config.compute.memory_gb
    limit = _free_memory(config) if given is None else int(given * GB)
    if config.learner.micro_batch_tokens == "auto" or limit is None:
        return "not compared with what is free; --memory estimates it"
    has = (
        f"{limit / GB:.3g} GB of memory are free"
        if given is None
        else f"compute.memory_gb is {limit / GB:.3g}"
    )
    with resolved.blame("model.critic" if has_own_critic(config.model) else "model.reference"):
        if of_all_here(config.compute, _at_most(resolved, lengths, policy)) <= limit:
            return f"small for the machine ({has}); --memory estimates it"
    tell_stage("estimating the memory of a step", policy.weights)
    found = estimate(resolved, lengths)
    if config.compute.address and config.compute.learner == "actor":
        needs_of(resolved, lengths, found).refuse_too_large(resolved, limit, has)
        return f"not compared on the machines of the cluster; here {has}"
    if SURE * found.peak <= limit:
        if config.compute.runtime == "ray":
            needs_of(resolved, lengths, found).refuse_too_large(resolved, limit, has)
        return f"about {found.peak / GB:.3g} GB for tensors ({found.part}), and {has}"
    advice = _advice(resolved, lengths, found, limit)
    raise ConfigError(
        f"{where(('compute', 'memory_gb'), resolved.origins)}: {has}, and this run needs about "
        f"{found.peak / GB:.3g} GB for tensors ({found.part}): {advice}; to go on all the same, set "
        f"compute.memory_gb to {1.1 * found.peak / GB:.3g} or more"
    )


def _free_memory(config: Config) -> int | None:
    """Return the bytes that are free for a run. Return None if they are not known, as on the GPU that a
    cluster is going to give the learner."""
    return None if config.compute.gpus else free_memory(config.compute.profile)


def refuse_short_cache(
    resolved: Resolved, lengths: Lengths, policy: ModelOutline, *, is_begun: bool = False
) -> None:
    """Refuse a cache of the engine that is too small for the longest sequence that the run may sample. An
    episode with an environment may fill the model's context. If the outline does not tell the size of a
    token's keys and values, nothing is refused here.

    Args:
        policy: the outline of the policy.
        is_begun: True if the run is continued. It cannot change its cache, and its episodes may be short, so
            only the first turn of an episode is counted.

    Raises:
        EngineError: the sequence does not fit. The engine would raise the same error later.
    """
    config, engine = resolved.config, resolved.engine
    prompts = [
        *([] if config.prompts.responses else [lengths.prompt]),
        *([lengths.held_out_prompt] if lengths.held_out else []),
    ]
    if not prompts:
        return
    page_bytes = policy.page_bytes(getattr(torch, engine.dtype))
    if page_bytes is None:
        return
    with resolved.blame(engine.memory.cache_setting):
        longest = longest_sequence(policy, max(prompts), config.sampling.max_new_tokens)
        engine.memory.refuse_long(longest, page_bytes)
        if config.sampling.environment is not None and policy.context_length and not is_begun:
            engine.memory.refuse_long(policy.context_length, page_bytes, of_episode=True)


def memory_lines(resolved: Resolved, lengths: Lengths, policy: ModelOutline) -> list[str]:
    """Return the lines of the tables of estimated memory: of the process that learns, and of one actor if
    actors have processes of their own. If the memory cannot be estimated, return a line that says so."""
    tell_stage("estimating the memory of a step", policy.weights)
    try:
        lines = _table(estimate(resolved, lengths), "memory of tensors")
        if resolved.config.compute.runtime == "ray":
            lines += _table(estimate_actor(resolved, lengths), "memory of the tensors of one actor")
    except NotOutlinedError as error:
        return [not_estimated(str(error))]
    return lines


def _table(found: Estimate, what: str) -> list[str]:
    lines = [f"{what}, GB (10^9 bytes), beyond the process after its imports (about 0.5)"]
    for title, sizes in (("held", found.parts), ("most at once", found.phases)):
        lines += [f"  {title}", *(f"    {name:<22}{size / GB:9.3f}" for name, size in sizes.items() if size)]
    return [*lines, f"  peak{found.peak / GB:22.3f}"]


def _at_most(resolved: Resolved, lengths: Lengths, policy: ModelOutline) -> int:
    """Return a number of bytes that is larger than a run can need, often many times larger. A formula gives
    it from the sizes of the models and the batches; `estimate` is not called.

    Raises:
        NotOutlinedError: an outline does not tell the memory of a model.
    """
    config, plan = resolved.config, resolved.plan
    weights, a_token = policy.weights, policy.a_token
    others = {"reference"} if config.model.reference else set()
    others |= {"critic"} if has_own_critic(config.model) else set()
    if others:
        lms = load_models(config, others, Seeds(config.seed), resolved.outlines.on_meta)
        for name in others:
            other = outline_of(lms[name], config.compute.profile)
            if not other.tells_memory:
                raise NotOutlinedError(other.unknown)
            weights += other.weights
            a_token += other.a_token
    rows = most_questions(config, plan) * max(plan.most_candidates, len(config.prompts.responses))
    evaluated = lengths.held_out * max(config.answering.samples, 1) if config.answering else 0
    width = max(lengths.prompt, lengths.held_out_prompt) + config.sampling.max_new_tokens
    recorded = (policy.context_length or width) if config.prompts.responses else 0
    width = max(width, recorded)
    tokens = max(rows, evaluated, resolved.engine.memory.least_rows) * width
    return 4 * (_COPIES * weights + _SAVED * tokens * (a_token + width * policy.heads))


def _advice(resolved: Resolved, lengths: Lengths, found: Estimate, limit: int) -> str:
    """Return a text that names the settings with which the run would fit, or says that there are none."""
    peaks: dict[str, int] = {}
    fits: list[str] = []
    for changes, smaller in _smaller(resolved, lengths, found.part):
        if changes == TOGETHER and fits:
            break
        with suppress(
            OatError, NotOutlinedError
        ):  # this model, or this installation, may not allow the change
            peaks[changes] = estimate(replace(resolved, config=smaller), lengths).peak
            fits += [f"{changes} ({peaks[changes] / GB:.3g} GB)"] if SURE * peaks[changes] <= limit else []
    if fits:
        return f"it would fit with {', or with '.join(fits)}"
    least = min(peaks.values(), default=found.peak) / GB
    return f"it would not fit with {', '.join(peaks)} either ({least:.3g} GB); take a smaller model"


def _smaller(resolved: Resolved, lengths: Lengths, part: str) -> Iterator[tuple[str, Config]]:
    """Yield pairs (changes in words, changed configuration). A change may lower the memory of `part`, a
    part of a step. Each configuration has one of the changes, but the last one has all of them."""
    config, learner = resolved.config, resolved.config.learner
    row = lengths.prompt + config.sampling.max_new_tokens
    changed = config
    if part in ("sampling", "evaluation"):
        smaller = resolved.engine.memory.smaller
        options = {**config.engine.options, **smaller}
        changed = replace(changed, engine=replace(config.engine, options=options))
        yield ", ".join(f"engine.{name}: {value}" for name, value in smaller.items()), changed
    else:
        changed = replace(changed, learner=replace(learner, micro_batch_tokens=row))
        yield f"learner.micro_batch_tokens: {row}", changed
        if not learner.gradient_checkpointing:
            yield (
                "learner.gradient_checkpointing: true",
                replace(config, learner=replace(learner, gradient_checkpointing=True)),
            )
            changed = replace(changed, learner=replace(changed.learner, gradient_checkpointing=True))
    if config.model.lora is None and not config.model.frozen:
        lora = replace(config.model, lora=LoraConfig())
        yield "model.lora: {rank: 8}", replace(config, model=lora)
        changed = replace(changed, model=lora)
    if part == "beside a checkpoint":
        waiting = replace(config.checkpoint, background=False)
        yield "checkpoint.background: false", replace(config, checkpoint=waiting)
        changed = replace(changed, checkpoint=waiting)
    yield TOGETHER, changed
