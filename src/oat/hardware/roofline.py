"""Roofline model: the share of this machine's limits that a computation reached (Williams, Waterman,
Patterson 2009, doi:10.1145/1498765.1498785).

A pass through a model has two lower bounds on its time. One is the bytes that it must read, divided by the
bandwidth. The other is its operations, divided by the rate of matrix products. The least time of an engine's
pass is the larger bound. The least time of a learner's pass is the second bound. The share reached is the sum
of the passes' least times, divided by the time that the passes took.

Rates are the best of several rounds, since a disturbance only slows a round:

* Bandwidth: a float32 tensor is summed; its bytes are divided by the seconds. Weights that fit into a
  processor's cache are read from there, so the tensor is about as large as the model's weights. Its bytes are
  the weights' bytes rounded down to a power of two, but at least 1 MiB and at most 256 MiB.
* Matrix rate: 2 n^3 is divided by the seconds of a product of two n x n matrices. n is doubled until a
  product takes 2 ms.

Operations counted:

* 2 for each token and each element of every matrix with which the token is multiplied. A matrix of a mixture
  of experts counts by the share of experts that a token goes through.
* 4 x head width for each head, each layer and each pair of a token and a token that it attends to.

Bytes counted: the matrices, and the keys and values to which the tokens attend. Keys and values that several
rows share count once.

Not counted: embeddings that are looked up, norms, activations, softmax, sampling, writes, padding, the
optimiser, and everything that the backward pass computes a second time. So a share can be below 1 although
nothing can be made faster. A share above 1 means that the machine was slower while its rates were measured
than later.
"""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from oat.functional.products import product
from oat.hardware.threads import on_threads
from oat.models.causal_lm import CausalLM, is_adapter, number_in
from oat.models.nf4 import count
from oat.types import Work

LARGEST = 2**28
"""Bytes of the largest tensor that is read to measure a bandwidth: more than the cache of most processors."""
_SMALLEST = 2**20
_ROUNDS = 3
"""Least number of timed rounds of a measurement, after one to warm up."""
_SECONDS = 0.05
"""Least total time of a measurement's timed rounds, in seconds."""
_PRODUCT_S = 0.002
_WIDEST = 8192
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
"""Names that configurations give to the number of experts, and to the number that a token goes through."""


@dataclass(frozen=True)
class Rates:
    """The limits of a machine.

    Attributes:
        bandwidth: bytes per second.
        matrix: floating-point operations per second, in matrix products.
    """

    bandwidth: float
    matrix: float


@functools.cache
def bandwidth(device: str, threads: int, size: int = LARGEST) -> float:
    """Measure the bytes per second that `threads` threads read from a tensor of `size` bytes. A measurement
    takes about a tenth of a second, and the time to make the tensor. Its result is cached in the process."""
    with on_threads(threads):
        tensor = torch.ones(size // 4, device=device)
        return tensor.nbytes / _least_s(tensor.sum, device)


@functools.cache
def matrix_rate(device: str, threads: int, dtype: torch.dtype) -> float:
    """Measure the floating-point operations per second of `threads` threads in matrix products, under the
    present settings of torch. A measurement takes about a tenth of a second. Its result is cached in the
    process."""
    with on_threads(threads):
        width = 256
        seconds = 0.0
        best = 0.0
        while seconds < _PRODUCT_S and width < _WIDEST:
            width *= 2
            matrix = torch.linspace(-1, 1, width * width, device=device).view(width, width).to(dtype)
            seconds = _least_s(functools.partial(product, matrix, matrix), device)
            best = max(best, 2 * width**3 / seconds)
        return best


def synchronise(device: torch.device | str) -> None:
    """Wait until the device has finished its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _least_s(work: Callable[[], object], device: str) -> float:
    """Return the seconds of the fastest timed round of `work`. The first round warms up and is not timed."""
    times: list[float] = []
    with torch.inference_mode():
        while len(times) <= _ROUNDS or sum(times[1:]) < _SECONDS:
            begin = time.perf_counter()
            work()
            synchronise(device)
            times.append(time.perf_counter() - begin)
    return min(times[1:])


@dataclass(frozen=True)
class Cost:
    """Sizes of a model, from which the least bytes and operations of a pass follow.

    Attributes:
        backbone, head: number of elements of the matrices with which a token is multiplied, in the backbone
            and in the head.
        trained_backbone, trained_head: number of those elements that learning changes.
        attention: floating-point operations, in all layers, for one token that attends to one token.
        dtype: precision of the weights.
    """

    backbone: int
    head: int
    trained_backbone: int
    trained_head: int
    attention: int
    dtype: torch.dtype

    @property
    def weight_bytes(self) -> int:
        return (self.backbone + self.head) * self.dtype.itemsize

    def flops(self, tokens: int, pairs: int, heads: int, *, learning: bool = False) -> int:
        """Return the floating-point operations of one pass.

        Args:
            tokens: number of tokens that go through the backbone.
            pairs: number of pairs of a token and a token that it attends to; each token also attends to
                itself.
            heads: number of tokens that go through the head.
            learning: True: count the backward pass too. The gradient of a matrix's input takes as many
                operations as the forward pass. If learning changes the matrix, its own gradient takes as many
                again.
        """
        matrices, attention = 2 * (self.backbone * tokens + self.head * heads), self.attention * pairs
        if not learning:
            return matrices + attention
        return 2 * matrices + 2 * (self.trained_backbone * tokens + self.trained_head * heads) + 3 * attention


def cost_of(lm: CausalLM) -> Cost:
    """Return the cost of a model. If `lm.is_base`, an adapter's matrices are not counted. What the model's
    configuration does not say in numbers is left out: attention that has no heads or differs from layer to
    layer, and the share of experts."""
    heads = number_in(lm, "num_attention_heads")
    head_width = number_in(lm, "head_dim") or number_in(lm, "hidden_size") // max(1, heads)
    experts, chosen = number_in(lm, *_EXPERTS), number_in(lm, *_CHOSEN_EXPERTS)
    experts_share = min(1.0, chosen / experts) if experts and chosen else 1.0
    of_head = set(map(id, lm.module.get_output_embeddings().parameters()))
    looked_up = {
        id(module.weight) for module in lm.module.modules() if isinstance(module, torch.nn.Embedding)
    } - of_head
    in_head = set()
    elements = {}
    numbers = count(lm)
    for name, parameter in lm.module.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in looked_up and not (lm.is_base and is_adapter(name)):
            elements[name] = round(numbers[name] * (experts_share if ".experts." in name else 1.0))
            in_head |= {name} if id(parameter) in of_head else set()

    def total(names: Iterable[str]) -> int:
        return sum(elements[name] for name in names)

    backbone, trained = elements.keys() - in_head, elements.keys() & lm.trainable().keys()
    return Cost(
        backbone=total(backbone),
        head=total(in_head),
        trained_backbone=total(backbone & trained),
        trained_head=total(in_head & trained),
        attention=4 * number_in(lm, "num_hidden_layers") * heads * head_width,
        dtype=next(lm.module.parameters()).dtype,
    )


def rates_of(device: torch.device, threads: int, cost: Cost) -> Rates:
    """Return the limits of the machine for a model. The bandwidth is measured with a tensor about as large as
    the model's weights."""
    size = min(LARGEST, max(_SMALLEST, 1 << cost.weight_bytes.bit_length() - 1))
    return Rates(bandwidth(str(device), threads, size), matrix_rate(str(device), threads, cost.dtype))


class Meter:
    """The sum of the work that an engine does with one model.

    Args:
        key_bytes: bytes that the keys and values of one token take in the KV cache, in all layers.

    Attributes:
        rates: limits of the machine; nothing is counted while this is None.
    """

    def __init__(self, lm: CausalLM, key_bytes: float):
        self.cost = cost_of(lm)
        self.key_bytes = key_bytes
        self.device = lm.device
        self.rates: Rates | None = None
        self._done = Work()

    def work(self, threads: int) -> Work:
        """Return the work counted since the first call of this method. Every call sets `rates` to the
        machine's limits with `threads` threads."""
        self.rates = rates_of(self.device, threads, self.cost)
        return self._done

    def backbone(self, tokens: int, pairs: int, *, seen: int = 0, keys: int = 0) -> None:
        """Count a pass through the backbone.

        Args:
            tokens, pairs: see `Cost.flops`.
            seen: number of cached tokens whose keys and values the rows need; a token that several rows
                share counts once.
            keys: number of places for tokens in the pages that the pass reads, including empty places;
                `keys - seen` counts as padding.
        """
        self._add(
            self.cost.backbone * self.cost.dtype.itemsize + seen * self.key_bytes,
            self.cost.flops(tokens, pairs, 0),
        )
        self._count(Work(keys=keys, padded_keys=keys - seen))

    def head(self, tokens: int) -> None:
        """Count a pass of `tokens` tokens through the head."""
        self._add(self.cost.head * self.cost.dtype.itemsize, self.cost.flops(0, 0, tokens))

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Count the seconds that the body takes."""
        begin = time.perf_counter()
        yield
        self._count(Work(seconds=time.perf_counter() - begin))

    def _add(self, size: float, flops: int) -> None:
        if self.rates is not None:
            self._count(Work(least_s=max(size / self.rates.bandwidth, flops / self.rates.matrix)))

    def _count(self, work: Work) -> None:
        if self.rates is not None:
            self._done += work


class WorkCounter:
    """A counter of the operations of a learner's passes through one model.

    Attributes:
        flops: floating-point operations counted since this attribute was last set to 0. If gradients are
            enabled, a pass counts with its backward pass.
    """

    def __init__(self, lm: CausalLM, *, autocast: bool):
        self.cost = cost_of(lm)
        self.device = lm.device
        self.flops = 0
        self.dtype = torch.bfloat16 if autocast else self.cost.dtype

    def add(self, places: Sequence[np.ndarray], heads: int) -> None:
        """Count a pass.

        Args:
            places: for each sequence, the indices of its tokens in the pass. Sequences that share a token
                have the same index for it.
            heads: number of tokens that go through the head.
        """
        seen_T = np.zeros(1 + max(int(place[-1]) for place in places), dtype=np.int64)
        for place in places:
            seen_T[place] = np.arange(1, len(place) + 1)
        self.flops += self.cost.flops(
            int(np.count_nonzero(seen_T)), int(seen_T.sum()), heads, learning=torch.is_grad_enabled()
        )


class Stopwatch:
    """A clock for a learner's passes. Every `with` block adds its seconds and operations to the present
    measurement. `end` ends this measurement and begins the next."""

    def __init__(self, work_counters: Sequence[WorkCounter]):
        self.work_counters = work_counters
        self._seconds = self._least_s = self._begin = 0.0

    def __enter__(self) -> None:
        for work_counter in self.work_counters:
            work_counter.flops = 0
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        for work_counter in self.work_counters:
            synchronise(work_counter.device)
        self._seconds += time.perf_counter() - self._begin
        for work_counter in self.work_counters:
            if work_counter.flops:
                self._least_s += work_counter.flops / matrix_rate(
                    str(work_counter.device), torch.get_num_threads(), work_counter.dtype
                )

    def end(self) -> float | None:
        """End the present measurement. Return the share of the machine's matrix rate that was reached, or
        None if no operation was counted."""
        share = self._least_s / self._seconds if self._least_s else None
        self._seconds = self._least_s = 0.0
        return share
