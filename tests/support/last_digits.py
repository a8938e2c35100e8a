"""A measure of what decides the last digits of a run: the bits of a fixed computation.

Numbers that are stored with all their digits are bitwise the same where this computation is. The names of
processors, vector sets and versions would not say so: limits of libraries (`ATEN_CPU_CAPABILITY`,
`ONEDNN_MAX_CPU_ISA`, `MKL_CBWR`), other builds of torch, and Python's `sum` (compensated from 3.12 on) change
digits too, and many machines with other names do not.
"""

import functools
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_VOCABULARY = 18
_WIDTHS = (8, 16)
"""Widths of the models whose runs are stored."""
_COUNTS = (1, 2, 3, 5, 6, 8, 9, 11, 12, 16, 19, 24, 33)
"""Numbers of tokens: vector instructions have other code for what is left over at the end."""


@functools.cache
def machine() -> dict[str, str]:
    """Return digests, by part, of what this process computes with one thread. Nothing of `oat` is used, so a
    change of the program is no other machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {
            "functions": _digest(_functions()),
            "products": _digest(_products()),
            "training": _digest(tensor for width in _WIDTHS for tensor in _training(width)),
            "numpy and python": _digest(_plain()),
        }
    finally:
        torch.set_num_threads(threads)


def _digest(parts: Iterator[Any]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part.detach().contiguous().numpy().tobytes() if isinstance(part, Tensor) else part)
    return found.hexdigest()[:16]


def _numbers(*shape: int, seed: int = 1) -> Tensor:
    """Return numbers in [-1, 1) that are exact in float32, and so the same everywhere."""
    places = torch.arange(math.prod(shape), dtype=torch.int64) + seed * 7919
    return ((places * 2654435761 % 65521) % 4096).float().div(2048).sub(1).view(shape)


def _functions() -> Iterator[Tensor]:
    for count in _COUNTS:
        x = 4 * _numbers(count, _VOCABULARY)
        for dtype in (torch.float32, torch.float64):
            y = x.to(dtype)
            yield from (y.exp(), y.expm1(), y.abs().log1p(), (y.abs() + 0.1).log(), y.sigmoid(), y.tanh())
            yield from (y.sin(), y.cos(), F.silu(y), F.logsigmoid(y), F.gelu(y), (y.square() + 1e-6).rsqrt())
            yield from (y.softmax(-1), y.log_softmax(-1), y.logsumexp(-1), y.pow(3), y / (y.abs() + 0.3))
            yield from (y.sum(), y.sum(0), y.sum(1), y.mean(), y.std(), y.var(-1), y.flatten().cumsum(0))
            yield from (y.norm(), y.flatten().dot(y.flatten().flip(0)), y.double().norm())
            yield from torch._foreach_norm([y, y[:, 0], y.T.contiguous()])
            rows = torch.arange(count) % 3
            yield torch.zeros(3, dtype=dtype).index_add(0, rows, y[:, 0])
            yield torch.zeros(3, dtype=dtype).scatter_add(0, rows, y[:, 1])
        yield x.bfloat16().float().exp().bfloat16().float()
    yield torch.empty(_VOCABULARY, 16).normal_(generator=torch.Generator().manual_seed(0))
    yield torch.empty(33).uniform_(generator=torch.Generator().manual_seed(0))


def _products() -> Iterator[Tensor]:
    """Products by MKL, and by oneDNN where this build has it."""
    sizes = [(width, out) for width in _WIDTHS for out in (width, 2 * width, _VOCABULARY)]
    for width, out in [*sizes, (64, 64)]:
        weight = _numbers(out, width)
        for count in _COUNTS:
            x, slope = _numbers(count, width, seed=2), _numbers(count, out, seed=3)
            yield from (x @ weight.T, slope @ weight, slope.T @ x, F.linear(x, weight, weight[:, 0]))
            yield torch.zeros(out, width).addmm_(slope.T, x)
            if torch.backends.mkldnn.is_available():
                yield torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    x, weight = _numbers(3, 5, 16), _numbers(3, 16, 7, seed=2)
    yield from (x @ weight, x.double() @ weight.double(), (x.bfloat16() @ weight.bfloat16()).float())


def _training(width: int) -> Iterator[Tensor]:
    """A few optimiser steps of a small language model, as the stored runs make them."""
    shapes = [(_VOCABULARY, width), *[(width, width)] * 4, *[(2 * width, width)] * 2, (width, 2 * width)]
    weights = [_numbers(*shape, seed=n).mul(0.3) for n, shape in enumerate((*shapes, (_VOCABULARY, width)))]
    parameters = [torch.nn.Parameter(weight) for weight in (*weights, torch.ones(width))]
    optimiser = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01, fused=True)
    for step, count in enumerate(_COUNTS):
        ids = (torch.arange(2 * count) * 7 + step) % _VOCABULARY
        loss, logps = _loss(parameters, ids.view(2, count))
        optimiser.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        torch._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        optimiser.step()
        yield from (loss, logps, norm)
    yield from parameters


def _loss(parameters: list[torch.nn.Parameter], ids: Tensor) -> tuple[Tensor, Tensor]:
    embeddings, query, key, value, out, gate, up, down, head, scale = parameters
    rows, count = ids.shape
    hidden = F.embedding(ids, embeddings)
    normed = hidden * (hidden.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale
    half = len(scale) // 4
    frequencies = 1e4 ** -(torch.arange(half).float() / half)
    angles = torch.outer(torch.arange(count).float(), frequencies).repeat(1, 2)

    def heads(weight: Tensor, is_turned: bool) -> Tensor:
        x = (normed @ weight.T).view(rows, count, 2, -1).transpose(1, 2)
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * angles.cos() + turned * angles.sin() if is_turned else x

    mixed = F.scaled_dot_product_attention(
        heads(query, True), heads(key, True), heads(value, False), is_causal=True
    )
    hidden = hidden + mixed.transpose(1, 2).reshape(rows, count, -1) @ out.T
    hidden = hidden + (F.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T
    logits = (hidden @ head.T).flatten(0, 1)
    logps = logits.gather(1, ids.flatten()[:, None])[:, 0] - logits.logsumexp(-1)
    sums = torch.zeros(rows).index_add(0, torch.arange(rows).repeat_interleave(count), logps)
    entropy = -(logits.log_softmax(-1).exp() * logits.log_softmax(-1)).sum(-1)
    return -F.logsigmoid(0.3 * (sums[0] - sums[1])) - 0.1 * logps.exp().mean() - 0.01 * entropy.sum(), logps


def _plain() -> Iterator[bytes]:
    x = _numbers(7, 33).double().numpy()
    for y in (x, x.astype(np.float32)):
        found = (np.exp(y), np.log(np.abs(y) + 0.1), np.sqrt(np.abs(y)), np.tanh(y), y.sum(1), y.mean(0))
        found += (y.std(), y @ y.T, y.var(axis=0, ddof=1), np.cumsum(y))
        yield from (np.ascontiguousarray(part).tobytes() for part in found)
    generator = np.random.default_rng(0)
    yield generator.normal(size=100).tobytes() + generator.beta(2.0, 3.0, 100).tobytes()
    values = x.ravel().tolist()
    numbers = [sum(values), sum([0.1] * 10), *map(math.exp, values), *map(math.tanh, values)]
    numbers += [math.log(abs(value) + 0.1) for value in values] + [abs(value) ** 0.3 for value in values]
    yield np.array(numbers).tobytes()
