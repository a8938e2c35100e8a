"""Functions that refuse a run that does not fit into memory, and make the table of `oat check CONFIG
--memory`."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch

from oat.assemble.outline import ModelOutline, longest_sequence
from oat.config.load import where
from oat.config.parts import filled
from oat.config.settings import Config, LoraConfig, Part
from oat.errors import ConfigError, OatError
from oat.forecast.estimate import PROCESS, SURE, Estimate, Lengths, estimate
from oat.forecast.memory_apart import estimate_actor, needs_of
from oat.forecast.rows import Row
from oat.hardware.memory import free_memory
from oat.learner.limits import GB
from oat.models.outline_errors import NotOutlinedError, not_estimated
from oat.resolve.model_starts import has_own_critic
from oat.resolve.resolved import Resolved

TOGETHER = "all of these together"
_OF_PASSES = "learner.micro_batch_size, learner.micro_batch_tokens"
_SETTINGS = {
    "weights": "model.path, engine.dtype",
    "weights on the way": "model.path, engine.dtype",
    "weights that learn": "model.path, model.lora, model.frozen",
    "gradients": "model.lora, model.frozen",
    "activations": _OF_PASSES + ", learner.gradient_checkpointing, learner.autocast",
    "logits of a chunk": "learner.logits_chunk, sampling.temperature",
    "other weights": "model.path, model.reference, model.critic, engine.dtype, learner.sync_every",
    "moments of AdamW": "model.lora, model.frozen",
    "keys and values": "engine.cache_gb, engine.max_rows, sampling.max_new_tokens",
    "loading": "model.path",
    "sampling": "engine.max_rows, sampling",
    "evaluation": "engine.max_rows, evaluation",
    "prepare": _OF_PASSES,
    "forward and backward": "gradients, activations and logits",
    "optimiser": "model.lora, model.frozen",
    "new weights": "engine.dtype, learner.sync_every",
    "beside a checkpoint": "checkpoint.background",
}
"""The settings from which each part and each phase of an `Estimate` follow."""


def refuse_too_large(resolved: Resolved, lengths: Lengths, policy: ModelOutline) -> str:
    """Refuse a run whose estimated memory is clearly larger than the limit. The limit is `compute.memory_gb`
    or, if this is not set, the free memory. Nothing is compared if `learner.micro_batch_tokens` is "auto", if
    the limit is not known, or if an outline does not tell the memory of a model.

    Args:
        policy: the outline of the policy.

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
    with resolved.error_context("model.critic" if has_own_critic(config.model) else "model.reference"):
        found = estimate(resolved, lengths, policy)
    if config.compute.address and config.compute.learner == "actor":
        needs_of(resolved, lengths, found).refuse_too_large(resolved, limit, has)
        return f"not compared on the machines of the cluster; here {has}"
    if SURE * found.peak <= limit:
        if config.compute.runtime != "local":
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
    with resolved.error_context(engine.memory.cache_setting):
        longest = longest_sequence(policy, max(prompts), config.sampling.max_new_tokens)
        engine.memory.refuse_long(longest, page_bytes)
        if config.sampling.environment is not None and policy.context_length and not is_begun:
            engine.memory.refuse_long(policy.context_length, page_bytes, of_episode=True)


def memory_rows(resolved: Resolved, lengths: Lengths, policy: ModelOutline) -> list[Row | str]:
    """Return the estimated memory of the process that learns, and of one actor if actors have processes of
    their own. If the memory cannot be estimated, a note says so.

    Args:
        policy: the outline of the policy.
    """
    try:
        found = _rows("", estimate(resolved, lengths, policy))
        if resolved.config.compute.runtime != "local":
            found += _rows("an actor: ", estimate_actor(resolved, lengths, policy))
    except NotOutlinedError as error:
        return [not_estimated(str(error))]
    return [*found]


def _rows(of: str, found: Estimate) -> list[Row]:
    def row(name: str, size: int, setting: str) -> Row:
        return Row(of + name, size / GB, "GB", setting)

    roughly = "" if found.is_complete else ", roughly: the model has parts whose activations are not known"
    held = [
        row(name, size, _SETTINGS[name] + roughly * (name == "activations"))
        for name, size in found.parts.items()
        if size
    ]
    phases = [row(f"at {name}", size, _SETTINGS[name]) for name, size in found.phases.items()]
    return [
        *held,
        *phases,
        row("peak", found.peak, f"the largest of these, at {found.part}"),
        row(
            "of it in pages of the model's files",
            found.in_files.get(found.part, 0),
            "model.path, model.dtype",
        ),
        *([row("freed, kept by the allocator", found.freed, "model.path")] if found.freed else []),
        row("the process itself", PROCESS, "libraries, tokenizer"),
        row("anonymous peak", found.in_all, "without pages of files, with the process"),
    ]


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
        assert isinstance(config.engine, Part), "a resolved configuration has its parts"
        changed = replace(changed, engine=filled(config.engine, smaller))
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
