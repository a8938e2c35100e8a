"""Limits that are measured once, when a run is created, and stored in the run's configuration:

* The number of tokens of a forward and backward pass that fits in memory, if `learner.micro_batch_tokens` is
  `auto`.
* The number of threads, if the run computes on the CPU and `compute.threads` is not set.

Memory is counted as the bytes of tensors that are alive at once, not as the memory of the process. So the
count is the same on every machine and at every attempt. Two passes, of one row and of two rows, show how many
bytes a row takes, and so how many rows should fit. A pass of that number of rows is then tried. If the pass
does not fit, passes of fewer and fewer rows are tried until one fits.

Not counted: the interpreter and its libraries (about half a gigabyte), the engine's KV cache (in memory only
while the engine decodes), and scratch memory within an operation.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oat.algorithms.base import Objective
from oat.errors import ConfigError
from oat.hardware.threads import candidates, fastest, measured_tokens
from oat.learner.learner import Learner
from oat.models.outline_errors import shaped
from oat.types import KeptSets, Sampling, Segment, Trajectory

GB = 10**9
_MEASURED_TOKENS, _MEASURED_ROWS = 32, 8
"""Number of tokens in a row, and number of rows, in the pass that is timed to choose the number of
threads."""


class LiveBytes(TorchDispatchMode):
    """A context that counts the bytes of tensors that were made in it and are not yet freed. Tensors without
    memory (`oat.models.outline`) are counted too. Code that reads a value of such a tensor gets 1.

    Within the context, a backward pass stays in the thread that calls it. With tensors of a GPU, autograd
    would otherwise have a thread for each device; neither this count nor torch's tensors without memory bear
    that.

    Attributes:
        live: number of bytes at present.
        peak: highest value that `live` has had. To measure from now on, a caller may set it to `live`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._in_one_thread: Any = None

    def __enter__(self) -> Self:
        self._in_one_thread = torch.autograd.set_multithreading_enabled(False)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._in_one_thread.__exit__(*raised)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0
        made = shaped(func, args, kwargs or {})
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(made):
            place = storage._cdata
            if place not in self._sizes and place not in given:
                self._sizes[place] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, place)
        return made

    def _free(self, place: int) -> None:
        self.live -= self._sizes.pop(place)


@contextmanager
def without_memory() -> Iterator[LiveBytes]:
    """A context in which a run is imitated with tensors that have no memory (`oat.models.outline`), and which
    counts their bytes.

    Autograd finds the devices of the machine in its first backward pass, which is thus made before. Within
    a `FakeTensorMode`, torch's build for CUDA claims a device also where there is none. Autograd would start
    a thread for it, and no child that the process forks later could compute gradients.
    """
    torch.zeros(1, requires_grad=True).sum().backward()
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        yield live


@dataclass(frozen=True)
class Limits:
    """The bounds of one pass.

    Attributes:
        memory_gb: memory that the learner and the pass may take together, in units of 10^9 bytes.
        response_tokens: largest number of tokens in a response.
        prompt_tokens: largest number of tokens in a prompt; None: as many as in a response.
        rows: largest number of rows in a pass; None: as many as a step has.
    """

    memory_gb: float
    response_tokens: int
    prompt_tokens: int | None = None
    rows: int | None = None


def measure_tokens(
    learner: Learner, objective: Objective, limits: Limits, sampling: Sampling, num_tokens: int
) -> int:
    """Return the largest number of tokens that one pass of an objective can have within `limits.memory_gb`.

    Every measured row has the longest prompt and the longest response that are allowed, cut to the context
    length. At most the rows of one step are tried.

    Args:
        sampling: how the responses are sampled; the temperature and the kept sets influence the memory.
        num_tokens: number of tokens that the tokenizer has.

    Raises:
        ConfigError: one row does not fit.
    """
    response, plan = limits.response_tokens, objective.plan(0)
    width = (limits.prompt_tokens or response) + response
    contexts = [model.lm.context_length for model in learner.models.values() if hasattr(model, "lm")]
    width = min([width, *(context for context in contexts if context is not None)])
    trained = min(response, width - 1)
    step = plan.prompts * plan.responses
    most_rows = max(1, min(step, limits.rows or step))
    budget = int(limits.memory_gb * GB) - _held(learner)
    most_kept = sampling.most_kept(num_tokens)

    def attempt(rows: int) -> int:
        return _pass_bytes(
            learner,
            objective,
            [row_of(width, trained, number, sampling, most_kept) for number in range(rows)],
        )

    rows = most_within(attempt, most_rows, budget)
    if rows == 0:
        needed = (attempt(1) + _held(learner)) / GB
        raise ConfigError(
            f"compute.memory_gb is {limits.memory_gb:g}, and one row of {width} tokens takes "
            f"{needed:.3g} GB with weights and optimiser; raise it, or set learner.gradient_checkpointing, "
            "model.lora or a lower learner.logits_chunk"
        )
    return rows * width


def choose_threads(learner: Learner, objective: Objective) -> int:
    """Return the number of threads with which a small forward and backward pass is fastest. All ranks make
    the passes, and rank 0 measures the time."""
    parameters = sum(
        parameter.numel() for part in learner.trained.values() for parameter in part.model.module.parameters()
    )
    tokens = measured_tokens(parameters, _MEASURED_ROWS * _MEASURED_TOKENS)
    rows = [
        row_of(_MEASURED_TOKENS, _MEASURED_TOKENS // 2, number)
        for number in range(-(-tokens // _MEASURED_TOKENS))
    ]
    counts = learner.ranks.agreed(lambda: candidates(parameters))
    clock = partial(learner.ranks.agreed, time.perf_counter)
    return fastest(lambda: _pass(learner, objective, rows), counts, clock)


def most_within(attempt: Callable[[int], int], most: int, budget: int) -> int:
    """Return a number of rows, at most `most`, that fits into the budget and nearly fills it. Return 0 if one
    row does not fit.

    Args:
        attempt: function that returns the bytes of a number of rows; the bytes grow about linearly.
        budget: bytes.
    """
    one = attempt(1)
    if one > budget:
        return 0
    if most == 1:
        return 1
    a_row = max(1, attempt(2) - one)
    rows = min(most, 1 + (budget - one) // a_row)
    while rows > 1 and attempt(rows) > budget:
        rows = rows * 9 // 10
    return rows


def _pass_bytes(learner: Learner, objective: Objective, rows: list[Trajectory]) -> int:
    """Return the peak of memory in one forward and backward pass, with gradients, in bytes: that of the rank
    that needs most."""
    with LiveBytes() as counter:
        _pass(learner, objective, rows)
    return max(learner.ranks.joined(counter.peak))


def _pass(learner: Learner, objective: Objective, rows: list[Trajectory]) -> None:
    """Make one forward and backward pass. No weight changes."""
    with learner.learning(objective):
        outputs = [
            learner.trained[name].model.outputs(rows, {}, wants) for name, wants in objective.wants.items()
        ]
        torch.stack([values.sum() for output in outputs for values in output.values()]).sum().backward()
    for name in objective.wants:
        learner.trained[name].optimiser.zero_grad(set_to_none=True)


def _held(learner: Learner) -> int:
    """Return the bytes of the learner at rest, on the rank that has most: those of all models, each tensor
    counted once, and of Adam's two moments for every trained parameter."""
    tensors = [
        tensor
        for model in learner.models.values()
        for tensor in (*model.module.parameters(), *model.module.buffers())
    ]
    # not by address: tensors without memory all have the address 0
    weights = {storage._cdata: storage.nbytes() for storage in _storages(tensors)}
    moments = [
        parameter.nbytes for part in learner.trained.values() for parameter in part.model.trainable().values()
    ]
    return max(learner.ranks.joined(sum(weights.values()) + 2 * sum(moments)))


def row_of(
    width: int,
    trained: int,
    number: int,
    sampling: Sampling | None = None,
    kept: int = 0,
) -> Trajectory:
    """Make an artificial row. Rows with different `number` are different, and so are their prompts if they
    have enough tokens. All ids are 0 and 1.

    Args:
        width: number of tokens in the row.
        trained: number of trained tokens, which are the last ones.
        sampling: the settings of sampling that the row records; None: temperature 1.
        kept: number of ids in the kept set of each trained token; 0: no sets are recorded.
    """
    digits = np.array([number >> min(place, 62) & 1 for place in range(width)], dtype=np.int32)
    prompt, ids = digits[: width - trained], digits[width - trained :]
    zeros = np.zeros(trained, dtype=np.float32)
    sets = (
        KeptSets(np.tile(np.arange(kept, dtype=np.int32), trained), np.arange(trained + 1) * kept)
        if kept
        else None
    )
    response = Segment(
        "model", ids, np.ones(trained, dtype=bool), np.zeros(trained, dtype=np.int32), zeros, zeros, sets
    )
    drawn = sampling or Sampling(trained)
    return drawn.trajectory("sampler", (Segment("context", prompt), response), "length", "")


def _storages(values: Any) -> Iterable[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
