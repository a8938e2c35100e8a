"""The memory that a run needs, by a formula from the shapes of its models and from its settings.

Each term is a product of a few numbers: weights, tokens of a pass, values that a token keeps
(`models/activations.py`), logits of a chunk, pages of the engine's cache. Every row of a batch counts with
the longest prompt and the longest response, so a run whose responses end early takes less. Not counted: data,
ledger and texts.

Weights that lie in pages of the model's files until they change (`ModelOutline.is_in_files`) are counted. The
system may drop such pages, so `Estimate.in_all`, which is comparable with a process's anonymous memory, is
without them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from oat.assemble.models import load_models, slot_dtypes
from oat.assemble.outline import ModelOutline, longest_sequence, outline_of
from oat.assemble.run_inputs import RunInputs
from oat.config.settings import Config
from oat.engines.kind import Load
from oat.explore.settings import ensemble_of
from oat.files import absolute
from oat.hardware.threads import LARGE
from oat.learner.limits import GB
from oat.learner.models import CHUNK_LOGITS, SHARE_FROM
from oat.models.outline_errors import NotOutlinedError
from oat.models.weight_files import described
from oat.resolve.model_starts import has_own_critic, has_own_reference, starts_alike
from oat.resolve.resolved import Resolved
from oat.resolve.sampling import make_sampling
from oat.seeds import Seeds
from oat.types import ENSEMBLE, Plan

SURE = 0.85
"""A run takes at least this share of the memory that was estimated for it."""
PROCESS = 4 * GB // 10
"""Bytes that this process has of its own: libraries, tokenizer, compiled kernels."""
_FREED, _FREED_OF_ADAPTERS = 0.15, 0.6
"""With a model that is not large, glibc keeps freed memory (`oat.hardware.allocator`): this share of the
bytes beside weights and moments, as measured with SmolLM2-135M. The products of adapters leave more gaps
between what is kept."""
_FLOAT, _HALF = 4, 2
_MOMENTS = 2
"""Number of moments of AdamW, each as large as the weights that learn."""
_OF_TRUNCATED = 5
"""Copies of a chunk's logits for the sampled log-probabilities and their gradient, if tokens are not drawn
from the softmax of all logits."""


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
        in_files: how many of the bytes of each phase lie in pages of the model's files.
        freed: bytes that were freed, and that the allocator keeps.
        is_complete: False if a model has parts whose activations are not known, and counted roughly.
    """

    parts: dict[str, int]
    phases: dict[str, int]
    state: int = 0
    in_files: Mapping[str, int] = field(default_factory=dict)
    freed: int = 0
    is_complete: bool = True

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def part(self) -> str:
        """The name of the part of a step in which most bytes are alive."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def in_all(self) -> int:
        """The peak of the process's anonymous memory: without pages of files, with `PROCESS` and `freed`."""
        anonymous = max(size - self.in_files.get(name, 0) for name, size in self.phases.items())
        return PROCESS + self.freed + anonymous


@dataclass(frozen=True)
class Lengths:
    """The lengths of a run's prompts.

    Attributes:
        prompt: number of tokens of the longest prompt of training.
        held_out: number of held-out prompts.
        held_out_prompt: number of tokens of the longest held-out prompt.
        num_tokens: number of tokens of the tokenizer; None: as many as the model has logits.
    """

    prompt: int
    held_out: int = 0
    held_out_prompt: int = 0
    num_tokens: int | None = None


@dataclass(frozen=True)
class Held:
    """A model of the learner.

    Attributes:
        own: bytes of the weights that it shares with no model before it.
        learned: bytes of its weights that learn.
        moving: bytes of its weights that change without learning: those of a reference that follows.
    """

    outline: ModelOutline
    own: int
    learned: int = 0
    moving: int = 0

    @property
    def in_files(self) -> int:
        """Bytes that lie in pages of the model's files for the whole run."""
        return max(0, self.own - self.learned - self.moving) if self.outline.is_in_files else 0


def lengths_of(run_inputs: RunInputs) -> Lengths:
    """Return the lengths of the prompts that a run reads."""
    held_out = run_inputs.held_out
    of_held_out = (held_out.size, held_out.longest) if held_out else (0, 0)
    return Lengths(run_inputs.prompts.longest, *of_held_out, run_inputs.renderer.num_tokens)


def most_questions(config: Config, plan: Plan) -> int:
    """Return the largest number of questions that a step learns from."""
    return max(plan.prompts, config.learner.buffer.questions if config.learner.buffer else 0)


def estimate(resolved: Resolved, lengths: Lengths, policy: ModelOutline | None = None) -> Estimate:
    """Estimate the memory of the process that learns: the run's own, or, with `compute.learner: actor`,
    another one. It has no engine if actors have processes of their own (`estimate_actor`).

    Args:
        policy: the outline of the policy; None: it is made here.

    Raises:
        NotOutlinedError: the outline of a model does not tell its memory.
        ConfigError, ModelError: a model cannot be made as configured.
    """
    config, engine = resolved.config, resolved.engine
    held = held_models(resolved, policy or outlined_model(resolved, "policy"))
    policy = held["policy"].outline
    is_apart = config.compute.runtime != "local"
    copies = {} if is_apart else slot_copies(resolved, held)
    if config.learner.sync_every > 1 and _sends(config):
        copies["older weights"] = policy.learned
    networks, of_ensemble = ensemble_bytes(resolved, policy)
    learned = sum(model.learned for model in held.values()) + of_ensemble
    weights = sum(model.own for model in held.values()) + sum(copies.values()) + networks
    moments = _MOMENTS * learned
    loads = {} if is_apart else loads_of(resolved, lengths, policy)
    work = {name: sampling_bytes(resolved, policy, load) for name, load in loads.items()}

    has_one_step = config.stop.max_steps == 1
    first = {"sampling", "prepare", "forward and backward"} if has_one_step else set[str]()
    of_passes, of_backward = _learning(resolved, lengths, held)
    work |= of_passes
    phases = {name: weights + size + (0 if name in first else moments) for name, size in work.items()}
    if config.learner.micro_batch_tokens == "auto" and config.compute.memory_gb is not None:
        # as many rows as fit are measured when the run is created
        limit = max(int(config.compute.memory_gb * GB), weights + moments)
        phases |= {name: min(phases[name], limit) for name in ("prepare", "forward and backward")}
    phases["optimiser"] = weights + moments + learned
    if copies.keys() - {"older weights"}:
        phases["new weights"] = weights + moments + max(copies.values())
    elif is_apart and slot_dtypes(engine) and _sends(config):
        phases["new weights"] = weights + moments + sent_bytes(resolved, policy)
    in_files = sum(model.in_files for model in held.values())
    before = sum(model.learned for model in held.values() if model.outline.is_in_files)
    of_files = {name: in_files + (before if name in first else 0) for name in phases}
    state = learned + moments + sum(model.moving for model in held.values())
    if saves_in_background(config) and _sends(config):
        largest = max(phases, key=lambda name: phases[name])
        phases["beside a checkpoint"] = phases[largest] + state + copies.get("older weights", 0)
        of_files["beside a checkpoint"] = in_files
    parts = {
        "weights that learn": learned,
        "other weights": weights - learned,
        "moments of AdamW": moments,
        "keys and values": max((cache_bytes(resolved, policy, load) for load in loads.values()), default=0),
        **of_backward,
    }
    is_complete = all(model.outline.activations.is_complete for model in held.values())
    is_small = policy.weights <= LARGE and config.compute.profile == "cpu"
    share = _FREED_OF_ADAPTERS if policy.adapter else _FREED
    freed = int(share * max(work.values())) if is_small else 0
    return Estimate(parts, phases, state, of_files, freed, is_complete)


def outlined_model(resolved: Resolved, name: str) -> ModelOutline:
    """Return the outline of a model of the learner.

    Raises:
        NotOutlinedError: it does not tell the model's memory.
    """
    config = resolved.config
    lms = load_models(config, {name} - {"policy"}, Seeds(config.seed), resolved.outlines.on_meta)
    return _telling(outline_of(lms[name], config.compute.profile))


def held_models(resolved: Resolved, policy: ModelOutline) -> dict[str, Held]:
    """Return the learner's models by name. With an adapter they share the policy's frozen weights, except a
    reference or critic that starts from another model.

    Raises:
        NotOutlinedError: an outline does not tell a model's memory.
    """
    model, wants = resolved.config.model, resolved.objective.wants
    held = {"policy": Held(_telling(policy), policy.bytes, policy.learned if "policy" in wants else 0)}
    a_copy = policy.adapter or policy.bytes
    if "reference" in resolved.models:
        of_start = policy
        if not has_own_reference(model):
            is_moving = model.reference_update is not None
            has_adapter = is_moving or model.adapter is not None or not starts_alike(model)
            own = a_copy if has_adapter else 0
        elif starts_alike(model):
            own = policy.bytes * (_HALF if model.reference_dtype == "bfloat16" else policy.itemsize)
            own //= policy.itemsize
            is_same = model.reference_dtype in (None, model.dtype)
            of_start = replace(policy, is_in_files=policy.is_in_files and is_same)
        else:
            of_start = outlined_model(resolved, "reference")
            own = of_start.bytes
        moving = policy.learned if model.reference_update is not None else 0
        held["reference"] = Held(of_start, own, moving=moving)
    for name in sorted({"critic", "reward"} & resolved.models):
        if name == "critic" and has_own_critic(model):
            outline = outlined_model(resolved, name)
            own, learned = outline.bytes, outline.learned
        else:  # without the policy's head
            outline, headless = policy, 0 if policy.adapter else policy.head
            own, learned = a_copy - headless, policy.learned - headless
        score = _FLOAT * outline.activations.width
        held[name] = Held(outline, own + score, learned + score if name in wants else 0)
    return held


def slot_copies(resolved: Resolved, held: Mapping[str, Held]) -> dict[str, int]:
    """Return the bytes of the engine's slots that have weights of their own."""
    policy, is_late = held["policy"].outline, resolved.config.learner.sync_every > 1
    if resolved.engine.capabilities.shares_weights:
        return {"sampler": policy.adapter or policy.bytes} if is_late else {}
    a_model = sent_bytes(resolved, policy)
    copies = {"sampler": a_model, **({"policy": a_model} if is_late else {})}
    reference = held.get("reference")
    if reference is not None and "reference" in resolved.slots and has_own_reference(resolved.config.model):
        copies["reference"] = sent_bytes(resolved, reference.outline)
    return copies


def ensemble_bytes(resolved: Resolved, policy: ModelOutline) -> tuple[int, int]:
    """Return the bytes of all weights of the explorer's ensemble and of the backbone of its features, and of
    those that learn. Learner and actor have copies; each has the weights and those from which they began."""
    settings = ensemble_of(resolved.explorer) if ENSEMBLE in resolved.explorer.needs else None
    if settings is None:
        return 0, 0
    features, hidden, width = resolved.features, settings.hidden, policy.activations.width
    backbone = 0
    if features is not None:
        width *= policy.activations.layers if features.layer == "all" else 1
        if features.is_own and absolute(features.backbone).is_dir():
            backbone = sum(_FLOAT * tensor.numel() for tensor in described(features.backbone).values())
    weights = _FLOAT * settings.members * (width * hidden + hidden * hidden + 3 * hidden + 1)
    return 4 * weights + backbone, weights if settings.learn else 0


def sent_bytes(resolved: Resolved, model: ModelOutline) -> int:
    """Return the bytes of the weights of a model in the form in which slots get them."""
    dtype = slot_dtypes(resolved.engine).get("sampler")
    return model.bytes if dtype is None else model.bytes * dtype.itemsize // model.itemsize


def loads_of(resolved: Resolved, lengths: Lengths, policy: ModelOutline, engines: int = 1) -> dict[str, Load]:
    """Return the numbers and lengths of prompts and responses in two parts of a step, "sampling" and
    "evaluation". A part in which the engine generates nothing is left out.

    Args:
        engines: number of engines that share the prompts.
    """
    config, plan = resolved.config, resolved.widened

    def load(prompts: int, samples: int, prompt: int) -> Load:
        longest = longest_sequence(policy, prompt, config.sampling.max_new_tokens)
        return Load(-(-prompts // engines), samples, prompt, longest - prompt)

    loads = {}
    if not config.prompts.responses:
        loads["sampling"] = load(plan.prompts, plan.most_candidates, lengths.prompt)
    if config.answering is not None and lengths.held_out:
        samples = max(config.answering.samples, 1)
        loads["evaluation"] = load(lengths.held_out, samples, lengths.held_out_prompt)
    return loads


def cache_bytes(resolved: Resolved, policy: ModelOutline, load: Load) -> int:
    """Return the bytes of the engine's keys and values at their peak."""
    page_bytes = policy.page_bytes(getattr(torch, resolved.engine.dtype))
    assert page_bytes is not None, "an outline that tells the memory tells the size of a page"
    return resolved.engine.memory.cache_bytes(page_bytes, load)


def sampling_bytes(resolved: Resolved, policy: ModelOutline, load: Load) -> int:
    """Return the bytes of keys and values, and of the engine's other work at its peak."""
    itemsize = slot_dtypes(resolved.engine).get("sampler")
    size = policy.itemsize if itemsize is None else itemsize.itemsize
    a_token = size * (policy.activations.largest + policy.activations.width)
    work = resolved.engine.memory.work_bytes(a_token, policy.vocabulary, load, make_sampling(resolved))
    return cache_bytes(resolved, policy, load) + work


def saves_in_background(config: Config) -> bool:
    """Return True if a step goes on while a checkpoint is written."""
    last = config.stop.max_steps
    return config.checkpoint.background and (last is None or config.checkpoint.every < last)


@dataclass(frozen=True)
class _Pass:
    """A micro-batch of the longest rows.

    Attributes:
        tokens: number of tokens that are computed; a prompt that rows share counts once.
        keys: number of tokens whose keys are kept; a shared prompt counts for each row.
        trained: number of trained tokens.
        has_more: True if the update has further micro-batches, whose gradients are added up.
    """

    tokens: int
    keys: int
    trained: int
    has_more: bool


def _learning(
    resolved: Resolved, lengths: Lengths, held: Mapping[str, Held]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes beside weights and moments, of `prepare` and of the forward and backward passes of an
    update; and those of each kind of tensors in the latter."""
    config, plan = resolved.config, resolved.plan
    prepared = _passes(resolved, lengths, held, most_questions(config, plan), 1)
    learned = _passes(resolved, lengths, held, plan.prompts, resolved.step.minibatches)
    frozen = [held[name] for name in ("reference", "critic") if name in held]
    prepare = max((_without_gradients(resolved, model, prepared) for model in frozen), default=0)
    backward, parts = _with_gradients(resolved, lengths, held, learned)
    return {"prepare": prepare, "forward and backward": backward}, parts


def _without_gradients(resolved: Resolved, model: Held, some: _Pass) -> int:
    """Return the bytes of a pass that computes log-probabilities or values and keeps nothing: those of one
    layer, or the hidden states and a chunk of logits."""
    outline = model.outline
    width = outline.itemsize * outline.activations.width
    layer = outline.itemsize * outline.activations.largest
    logits = 0 if model.learned else _FLOAT * _chunk(resolved, outline, some) * outline.vocabulary
    return max((layer + width) * some.tokens, width * (some.tokens + some.trained) + logits)


def _with_gradients(
    resolved: Resolved, lengths: Lengths, held: Mapping[str, Held], some: _Pass
) -> tuple[int, dict[str, int]]:
    """Return the bytes of a forward and backward pass, and of its parts. The peak is at the beginning of the
    backward pass: all that is kept, the head's logits and its gradient, and the gradients of earlier passes.
    Or it is at the end, with all gradients: an embedding that is the head too has one of each, and their sum.
    """
    c, wants = resolved.config.learner, resolved.objective.wants
    casts = c.autocast is not None
    activations = logits = head = gradients = embeddings = 0
    for name in wants.keys() & held.keys():
        outline, learned = held[name].outline, held[name].learned
        shape = outline.activations
        activations += some.tokens * shape.kept_bytes(
            outline.itemsize, autocast=casts, checkpointing=c.gradient_checkpointing
        )
        if not c.gradient_checkpointing:
            activations += (some.keys - some.tokens) * (outline.keys or 0) * outline.itemsize
        activations += _HALF * learned // _FLOAT if casts else 0
        gradients += learned
        if name == "policy":
            head = 0 if outline.adapter else _FLOAT * outline.vocabulary * shape.width
            embeddings = 0 if outline.head else 2 * head
            is_drawn = _draws_from_all(resolved, lengths, outline) or "sampled" not in wants[name]
            a_logit = _FLOAT * (1 if is_drawn else 1 + _OF_TRUNCATED) + (_HALF if casts else 0)
            logits = a_logit * _chunk(resolved, outline, some) * outline.vocabulary
            logits += _HALF * outline.vocabulary * shape.width if casts else 0
            activations += _FLOAT * shape.width * some.trained
    start = activations + logits + head + (gradients if some.has_more else 0)
    parts = {"gradients": gradients, "activations": activations, "logits of a chunk": logits}
    return max(start, gradients + embeddings), parts


def _draws_from_all(resolved: Resolved, lengths: Lengths, policy: ModelOutline) -> bool:
    """Return True if tokens are drawn from the softmax of all logits."""
    is_whole = lengths.num_tokens in (None, policy.vocabulary)
    return is_whole and not make_sampling(resolved).changes_logits


def _chunk(resolved: Resolved, outline: ModelOutline, some: _Pass) -> int:
    """Return the number of tokens of a chunk of logits."""
    chunk = resolved.config.learner.logits_chunk or max(1, CHUNK_LOGITS // outline.vocabulary)
    return min(chunk, some.trained)


def _passes(
    resolved: Resolved, lengths: Lengths, held: Mapping[str, Held], questions: int, parts: int
) -> _Pass:
    """Return the largest micro-batch of a mini-batch.

    Args:
        questions: number of questions of the batch.
        parts: number of mini-batches. The units of one are taken from all groups.
    """
    c, sampling, samples = resolved.config.learner, resolved.config.sampling, resolved.plan.responses
    width = longest_sequence(held["policy"].outline, lengths.prompt, sampling.max_new_tokens)
    unit = 2 if resolved.objective.requires.feedback == "compare" else 1
    units = -(-questions * samples // unit // parts)
    most = [units]
    if c.micro_batch_size is not None:
        most.append(c.micro_batch_size // unit)
    if isinstance(c.micro_batch_tokens, int):
        most.append(c.micro_batch_tokens // (unit * width))
    rows = unit * max(1, min(most))
    prompts = min(rows, -(-rows * parts // samples))
    response = width - lengths.prompt
    whole, shared = rows * width, prompts * lengths.prompt + rows * response
    tokens = shared if whole > SHARE_FROM * shared else whole
    return _Pass(tokens, whole, rows * response, has_more=rows < unit * units)


def _sends(config: Config) -> bool:
    """Return True if the process that learns is the run's own, which sends weights and writes checkpoints."""
    return config.compute.learner == "driver"


def _telling(outline: ModelOutline) -> ModelOutline:
    if not outline.tells_memory:
        raise NotOutlinedError(outline.unknown)
    return outline
