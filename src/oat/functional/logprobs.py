"""Log-probabilities and entropies of tokens from their logits. `chunked_head` computes them a chunk of tokens
at a time, to save memory.

Every function computes in at least float32: float32 for logits of lower precision, float64 for float64.
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
"""The kept sets of K tokens, as two tensors (S,). The first has all kept ids. The second has, for each of
these ids, the index in [0, K) of the token to whose kept set the id belongs."""


def token_logps(logits_KV: Float[Tensor, "K V"], ids_K: Int[Tensor, " K"]) -> Float[Tensor, " K"]:
    """Return the raw log-probability of one id for each token: the id's logit minus the logsumexp of the
    token's logits. A logit of -inf means a probability of 0.

    Args:
        logits_KV: any floating-point type, with grad.
        ids_K: in [0, V).
    Returns:
        (K,) nats, in at least float32.

    Raises:
        ShapeError: the logits are not a matrix, or there is not one id for each of its rows.
    """
    _check_one_a_row(logits_KV, ids_K=ids_K)
    logits_KV = _at_least_float32(logits_KV)
    return _at(logits_KV, ids_K) - logits_KV.logsumexp(-1)


def token_entropy(logits_KV: Float[Tensor, "K V"]) -> Float[Tensor, " K"]:
    """Return the entropy of each token's raw distribution, - sum of p log p, with 0 log 0 = 0. Entropy and
    gradient are finite even if some logits are -inf.

    Args:
        logits_KV: any floating-point type, with grad; at least one finite logit in each row.
    Returns:
        (K,) nats, in at least float32.

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
    """Return the sampled log-probability of each token's id in `ids_K`. The distribution is the softmax of
    the logits divided by the temperature, over the token's kept set.

    Args:
        logits_KV: any floating-point type, with grad.
        ids_K: in [0, num_tokens).
        temperature_K: temperature at which each token was drawn, positive.
        num_tokens: size of the tokenizer's vocabulary. Further columns of the logits are padding of the head
            and are ignored.
        kept: the kept sets; no set has an id twice. If no id is listed for a token, its kept set is the
            complete vocabulary. None: every token's kept set is the complete vocabulary.
    Returns:
        (K,) nats, in at least float32; -inf, without gradient, for an id outside its token's kept set.

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
    """Compute functionals of the logits of K tokens, `chunk` tokens at a time.

    If gradients are enabled and there is more than one chunk, no logits are kept for the backward pass, which
    computes each chunk again.

    Args:
        hidden_KD: last hidden states, with grad.
        head: maps (C, D) hidden states to (C, V) logits; deterministic.
        functionals: functions by name. Each takes the logits of a chunk, (C, V), in at least float32, and the
            slice of the K tokens that are in the chunk. It returns (C,) values.
        chunk: largest number of tokens whose logits are computed at a time.
    Returns:
        The values of each functional by name, (K,). If K is 0, they are empty tensors with the same autograd
        graph.

    Raises:
        ShapeError: the hidden states are not a matrix; the head does not return one row of logits for each
            token; or a functional does not return one value for each token.
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
    """Return the (C,) values of each functional for the C tokens of one chunk.

    Raises:
        ShapeError: the head does not return one row of logits for each token, or a functional does not return
            one value for each token.
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
    """Return the logsumexp of the values of each token, (`num_rows`,). Every token must have at least one
    finite value.

    Args:
        values_S: the values of all tokens.
        row_of_S: for each value, the index of its token.
        num_rows: number of tokens.
    """
    largest_K = values_S.new_full((num_rows,), -torch.inf).scatter_reduce(
        0, row_of_S, values_S.detach(), "amax"
    )
    return segment_sum((values_S - largest_K[row_of_S]).exp(), row_of_S, num_rows).log() + largest_K
