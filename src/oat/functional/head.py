"""Functionals of the logits of a linear head, such as log-probabilities, computed in chunks of tokens.

Memory holds the logits of one chunk at a time:
* The forward pass keeps each token's logsumexp, each token's entropy if the caller asked for entropies, and
  the logits of the last chunk.
* The backward pass takes the chunks in reverse order. It computes the logits of each chunk again, except
  those of the last chunk. It overwrites the logits with their gradient, and adds the chunk's part to the
  gradients of hidden states and head.

If all tokens fit into one chunk, no logits are computed twice. The gradients of the raw log-probability and
of the entropy H are computed by these formulas, without autograd:

    d logp(y) / d logits = onehot(y) - p,    d H / d logits = - p (log p + H)
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oat.errors import ConfigError, ShapeError
from oat.functional.products import add_product, linear, product

_BLOCK = 2**20
"""Largest number of logits in a block, which has the logits of one or several tokens; a block of one token
may have more. Several elementwise operations process a block before they take the next."""


def linear_functionals(
    hidden_KD: Float[Tensor, "K D"],
    weight_VD: Float[Tensor, "V D"],
    bias_V: Float[Tensor, " V"] | None,
    ids_K: Int[Tensor, " K"],
    chunk: int,
    *,
    entropy: bool = False,
    others: Mapping[str, Callable[[Tensor, slice], Tensor]] | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Compute functionals of each token's logits, `hidden @ weight.T + bias`, in at least float32.

    Args:
        hidden_KD: last hidden state of each token.
        ids_K: one id for each token, in [0, V).
        chunk: largest number of tokens whose logits are computed at a time.
        entropy: compute the entropy too.
        others: further functionals by name. Each takes the logits of a chunk, (C, V), and the slice of the K
            tokens that are in the chunk. It returns (C,) values. Autograd differentiates it.
        dtype: precision of the matrix products; None: that of the weights.
    Returns:
        Values by name, (K,) each: "raw", the log-probability of each id, nats; with `entropy` also "entropy",
        nats, where 0 log 0 = 0; and one for each of `others`.

    Raises:
        ShapeError: shapes disagree.
        ConfigError: chunk is below 1.
    """
    if (
        hidden_KD.ndim != 2
        or weight_VD.ndim != 2
        or hidden_KD.shape[1] != weight_VD.shape[1]
        or ids_K.shape != hidden_KD.shape[:1]
    ):
        raise ShapeError(
            f"hidden_KD has shape {tuple(hidden_KD.shape)}, weight_VD {tuple(weight_VD.shape)} and ids_K "
            f"{tuple(ids_K.shape)}; give (K, D), (V, D) and (K,)"
        )
    if chunk < 1:
        raise ConfigError(
            f"chunk is {chunk}; give the number of tokens whose logits fit in memory, at least 1"
        )
    others = others or {}
    values = _LinearFunctionals.apply(
        hidden_KD, weight_VD, bias_V, ids_K, chunk, entropy, list(others.values()), dtype or weight_VD.dtype
    )
    return dict(zip(("raw", *(("entropy",) if entropy else ()), *others), values, strict=True))


class _LinearFunctionals(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        chunk: int,
        entropy: bool,
        others: list[Any],
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.chunk = chunk
        ctx.entropy = entropy
        ctx.others = others
        ctx.dtype = dtype
        wide = torch.promote_types(
            hidden.dtype if hidden.dtype == weight.dtype else torch.float32, torch.float32
        )
        columns = [hidden.new_empty(len(hidden), dtype=wide) for _ in range(1 + entropy + len(others))]
        total = hidden.new_empty(len(hidden), dtype=wide)
        narrow = weight.to(dtype)

        for span in _spans(len(hidden), chunk):
            ctx.last = logits = None  # frees the logits of the chunk before
            logits = _logits(hidden[span], narrow, bias)
            for column, other in zip(columns[1 + entropy :], others, strict=True):
                column[span] = other(logits, span)
            for rows in _blocks(logits):
                place = slice(span.start + rows.start, span.start + rows.stop)
                chosen = logits[rows].gather(1, ids[place, None].long())[:, 0]
                total[place], entropies = _normalised(logits[rows], entropy)
                columns[0][place] = chosen - total[place]
                if entropies is not None:
                    columns[1][place] = entropies
            ctx.last = logits
        ctx.save_for_backward(hidden, weight, bias, ids, total, *columns[1 : 1 + entropy])
        return tuple(columns)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, total, *entropies = ctx.saved_tensors
        raw, of_entropy = gradients[0], gradients[1] if ctx.entropy else None
        of_others = gradients[1 + ctx.entropy :]
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        to_weight = (
            torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
            if needs_weight
            else None
        )
        to_bias = torch.zeros_like(bias) if needs_bias else None
        narrow = weight.to(ctx.dtype)

        for span in reversed(_spans(len(hidden), ctx.chunk)):
            logits, ctx.last = _logits(hidden[span], narrow, bias) if ctx.last is None else ctx.last, None
            slopes = _slopes_of_others(logits, span, ctx.others, of_others)
            for rows in _blocks(logits):
                place = slice(span.start + rows.start, span.start + rows.stop)
                _turn_into_slope(
                    logits[rows],
                    ids[place],
                    total[place],
                    *(None if g is None else g[place] for g in (raw, of_entropy, *entropies)),
                )
            if slopes is not None:
                logits += slopes
            if to_bias is not None:
                to_bias.add_(logits.sum(0))
            slope = logits.to(ctx.dtype)
            if to_hidden is not None:
                to_hidden[span] = product(slope, narrow.T)
            if to_weight is not None:
                add_product(to_weight, slope.T, hidden[span].to(ctx.dtype).T)
            del logits, slope, slopes  # frees them before the logits of the next chunk
        return (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            to_bias,
            None,
            None,
            None,
            None,
            None,
        )


def _normalised(logits: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Return the logsumexp of each row of logits, and the entropy of each row's softmax. Without `entropy`,
    the second value is None.

    The entropy is the sum of log(sum of e^x) and of - sum of p x, with x the distance to the largest logit.
    Neither is negative, so no digits cancel.
    """
    top = logits.amax(-1)
    weights = (logits - top[:, None]).exp_()
    normaliser = weights.sum(-1)
    total = top + normaliser.log()
    if not entropy:
        return total, None
    below = (logits - top[:, None]).masked_fill_(weights == 0, 0.0).mul_(weights).sum(-1)
    return total, normaliser.log() - below / normaliser


def _turn_into_slope(
    logits: Tensor,
    ids: Tensor,
    total: Tensor,
    of_raw: Tensor | None,
    of_entropy: Tensor | None,
    entropies: Tensor | None = None,
) -> None:
    """Overwrite logits, which have a row per token, with the part of their gradient that comes from the
    tokens' log-probabilities and entropies.

    Args:
        total: logsumexp of each token's logits.
        of_raw: gradient of the loss with respect to each token's log-probability; None: zero.
        of_entropy: gradient of the loss with respect to each token's entropy; None: zero.
        entropies: entropy of each token; needed with `of_entropy`.
    """
    scores = logits.sub_(total[:, None])
    if of_entropy is not None and entropies is not None:
        inner = (scores + entropies[:, None]).mul_(of_entropy[:, None])
        if of_raw is not None:
            inner += of_raw[:, None]
        inner.masked_fill_(scores == -torch.inf, 0.0)
        scores.exp_().mul_(inner).neg_()
    elif of_raw is not None:
        scores.exp_().mul_(-of_raw[:, None])
    else:
        scores.zero_()
    if of_raw is not None:
        scores.scatter_add_(1, ids[:, None].long(), of_raw[:, None])


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Divide the rows into blocks, and yield a slice for each. The logits of a block fit into the processor's
    cache (`_BLOCK`)."""
    size = max(1, _BLOCK // logits.shape[1])
    for start in range(0, len(logits), size):
        yield slice(start, min(start + size, len(logits)))


def _spans(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def _logits(hidden: Tensor, narrow: Tensor, bias: Tensor | None) -> Tensor:
    """Return the logits of hidden states, in at least float32. The caller may overwrite them."""
    logits = linear(hidden.to(narrow.dtype), narrow, None if bias is None else bias.to(narrow.dtype))
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _slopes_of_others(
    logits: Tensor, span: slice, others: list[Any], gradients: tuple[Tensor | None, ...]
) -> Tensor | None:
    """Return the gradient of a chunk's logits from the functionals `others`, by autograd; None if none of
    these functionals has a gradient."""
    wanted = [
        (other, gradient[span])
        for other, gradient in zip(others, gradients, strict=True)
        if gradient is not None
    ]
    if not wanted:
        return None
    with torch.enable_grad():
        leaf = logits.detach().clone().requires_grad_()
        values = [other(leaf, span) for other, _ in wanted]
    return torch.autograd.grad(values, leaf, [gradient for _, gradient in wanted])[0]
