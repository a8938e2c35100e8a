"""Log-probabilities and entropies of logits, in chunks, so that the matrix of logits is never whole.

Everything here computes in at least float32, whatever the precision of the logits; float64 stays float64.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from oat.errors import ConfigError, ShapeError
from oat.functional._checks import check_same_shape
from oat.functional.segments import segment_sum

KeptTokens: TypeAlias = tuple[Int64[Tensor, " S"], Int64[Tensor, " S"]]
"""(S,) kept ids of K tokens, and for each the token, in [0, K), to whose kept set it belongs."""


def token_logps(logits_KV: Float[Tensor, "K V"], ids_K: Int[Tensor, " K"]) -> Float[Tensor, " K"]:
    """The raw log-probability of one id a token: the id's logit minus the logsumexp of the row. A logit of
    -inf is a probability of 0.

    Args:
        logits_KV: any floating-point type, with grad.
        ids_K: in [0, V).
    Returns:
        (K,) float32 nats.

    Raises:
        ShapeError: not one id a row of logits.
    """
    _check_one_a_row(logits_KV, ids_K=ids_K)
    logits_KV = _at_least_float32(logits_KV)
    return _at(logits_KV, ids_K) - logits_KV.logsumexp(-1)


def token_entropy(logits_KV: Float[Tensor, "K V"]) -> Float[Tensor, " K"]:
    """The entropy of each token's raw distribution, - sum of p log p, with 0 log 0 = 0. It is finite, as is
    its gradient, also with logits of -inf.

    Args:
        logits_KV: any floating-point type, with grad; at least one finite logit a row.
    Returns:
        (K,) float32 nats.

    Raises:
        ShapeError: the logits are not a matrix.
    """
    _check_one_a_row(logits_KV)
    logps_KV = _at_least_float32(logits_KV).log_softmax(-1)
    return -(logps_KV.exp() * logps_KV.masked_fill(logps_KV.isneginf(), 0.0)).sum(-1)


def sampled_logps(
    logits_KV: Float[Tensor, "K V"],
    ids_K: Int[Tensor, " K"],
    temperature_K: Float[Tensor, " K"],
    num_tokens: int,
    kept: KeptTokens | None = None,
) -> Float[Tensor, " K"]:
    """The log-probability of one id a token under the distribution that was drawn from: logits over
    temperature, renormalised over the ids that the sampler's top-k, top-p and min-p left.

    Args:
        logits_KV: any floating-point type, with grad.
        ids_K: in [0, num_tokens).
        temperature_K: of each token, positive.
        num_tokens: size of the tokenizer's vocabulary; further columns are padding of the LM head and do not
            count.
        kept: the ids that could be drawn, with their tokens, each pair once. For a token without a kept id,
            and for all if this is None, the whole vocabulary could be drawn.
    Returns:
        (K,) float32 nats; -inf, without gradient, for an id outside the kept ids of its token.

    Raises:
        ShapeError: shapes disagree, or num_tokens is not in [1, V].
        ConfigError: a temperature is not positive.
    """
    _check_one_a_row(logits_KV, ids_K=ids_K, temperature_K=temperature_K)
    if not 1 <= num_tokens <= logits_KV.shape[1]:
        raise ShapeError(
            f"num_tokens is {num_tokens} but the logits have {logits_KV.shape[1]} columns; give the "
            "tokenizer's size, at most that"
        )
    if not bool((temperature_K > 0).all()):
        raise ConfigError(
            "a temperature is not positive: greedy tokens (temperature 0) have no log-probability ratio; "
            "sample at a temperature above 0"
        )
    logits_KV = logits_KV[:, :num_tokens]
    chosen_K = _at_least_float32(_at(logits_KV, ids_K)) / temperature_K
    if kept is None:
        return chosen_K - (_at_least_float32(logits_KV) / temperature_K[:, None]).logsumexp(-1)
    kept_ids_S, token_of_S = kept
    check_same_shape(kept_ids_S=kept_ids_S, token_of_S=token_of_S)
    whole_K = torch.ones_like(ids_K, dtype=torch.bool).index_fill(0, token_of_S, False)
    whole_W = whole_K.nonzero().squeeze(1)
    kept_S = _at_least_float32(logits_KV[token_of_S, kept_ids_S]) / temperature_K[token_of_S]
    normaliser_W = (_at_least_float32(logits_KV[whole_W]) / temperature_K[whole_W, None]).logsumexp(-1)
    normaliser_K = _segment_logsumexp(
        torch.cat([kept_S, normaliser_W]), torch.cat([token_of_S, whole_W]), len(ids_K)
    )
    drawable_K = whole_K.index_fill(0, token_of_S[kept_ids_S == ids_K[token_of_S]], True)
    return torch.where(drawable_K, chosen_K - normaliser_K, -torch.inf)


def chunked_head(
    hidden_KD: Float[Tensor, "K D"],
    head: Callable[[Tensor], Tensor],
    functionals: Mapping[str, Callable[[Tensor, slice], Tensor]],
    chunk: int,
) -> dict[str, Tensor]:
    """Functionals of the logits of K tokens, `chunk` tokens at a time, so that the (K, V) matrix is never
    whole.

    With gradients enabled and more than one chunk, no chunk is kept: the backward pass computes each again.

    Args:
        hidden_KD: last hidden states, with grad.
        head: maps (C, D) hidden states to (C, V) logits; deterministic.
        functionals: by name, a function of (C, V) float32 logits and the slice of the K tokens to which they
            belong, which gives (C,) values.
        chunk: most tokens at a time.
    Returns:
        By name, (K,). With K = 0, empty tensors of the same graph.

    Raises:
        ShapeError: the hidden states are not a matrix, or the head or a functional does not give one row, or
        one value, a token.
        ConfigError: chunk is below 1.
    """
    if hidden_KD.ndim != 2:
        raise ShapeError(
            f"hidden_KD has shape {tuple(hidden_KD.shape)}; give a (tokens, width) matrix of the trained "
            "tokens only"
        )
    if chunk < 1:
        raise ConfigError(
            f"chunk is {chunk}; give the number of tokens whose logits fit in memory, at least 1"
        )
    values_of = functools.partial(_chunk_values, head, functionals)
    starts = range(0, max(len(hidden_KD), 1), chunk)
    spans = [slice(start, min(start + chunk, len(hidden_KD))) for start in starts]
    if torch.is_grad_enabled() and len(spans) > 1:
        parts = [
            checkpoint(values_of, hidden_KD[span], span, use_reentrant=False, preserve_rng_state=False)
            for span in spans
        ]
    else:
        parts = [values_of(hidden_KD[span], span) for span in spans]
    return {
        name: torch.cat(columns) for name, columns in zip(functionals, zip(*parts, strict=True), strict=True)
    }


def _chunk_values(
    head: Callable[[Tensor], Tensor],
    functionals: Mapping[str, Callable[[Tensor, slice], Tensor]],
    hidden_CD: Tensor,
    span: slice,
) -> tuple[Tensor, ...]:
    """(C,) values of each functional for the C tokens of one chunk.

    Raises:
        ShapeError: the head does not give one row a token, or a functional one value.
    """
    logits_CV = head(hidden_CD)
    if logits_CV.ndim != 2 or len(logits_CV) != len(hidden_CD):
        raise ShapeError(
            f"the head made {tuple(logits_CV.shape)} of {tuple(hidden_CD.shape)}; it must give one row of "
            "logits a token"
        )
    logits_CV = _at_least_float32(logits_CV)
    values = {name: functional(logits_CV, span) for name, functional in functionals.items()}
    for name, value in values.items():
        if value.shape != hidden_CD.shape[:1]:
            raise ShapeError(
                f"functional `{name}` gave {tuple(value.shape)} for {len(hidden_CD)} tokens; it must give "
                "one value a token"
            )
    return tuple(values.values())


def _check_one_a_row(logits_KV: Tensor, **columns: Tensor) -> None:
    if logits_KV.ndim != 2:
        raise ShapeError(
            f"logits_KV has shape {tuple(logits_KV.shape)}; give a (tokens, vocabulary) matrix without "
            "padding"
        )
    for name, column in columns.items():
        if column.shape != logits_KV.shape[:1]:
            raise ShapeError(
                f"{name} has shape {tuple(column.shape)} and logits_KV {tuple(logits_KV.shape)}; give one "
                "value a row of logits"
            )


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _at(logits_KV: Tensor, ids_K: Tensor) -> Tensor:
    return logits_KV.gather(1, ids_K.long().unsqueeze(1)).squeeze(1)


def _segment_logsumexp(values_S: Tensor, row_of_S: Tensor, num_rows: int) -> Tensor:
    """logsumexp of the values of each row; every row has a finite one."""
    largest_K = values_S.new_full((num_rows,), -torch.inf).scatter_reduce(
        0, row_of_S, values_S.detach(), "amax"
    )
    return segment_sum((values_S - largest_K[row_of_S]).exp(), row_of_S, num_rows).log() + largest_K
