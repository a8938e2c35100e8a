"""The distribution from which tokens are drawn, and the draw of a token from it."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oat.errors import ShapeError

_NUCLEUS_WIDTH = 1024
"""Number of most probable tokens among which top-p first searches for the nucleus (its kept set), if top-k is
off. If the nucleus is larger, the complete vocabulary is sorted."""


def truncated_logits(
    logits_RV: Float[Tensor, "R V"],
    temperature_R: Float[Tensor, " R"],
    top_k_R: Int[Tensor, " R"],
    top_p_R: Float[Tensor, " R"],
    min_p_R: Float[Tensor, " R"],
) -> Float[Tensor, "R V"]:
    """Divide logits by temperature, and set the logits of tokens that cannot be drawn to -inf. A row's token
    is then drawn from the softmax of the row.

    Three truncations apply in this order, each to the tokens that are left:
    * Top-k keeps the k most probable tokens.
    * Top-p (arXiv:1904.09751, Sec. 3.1) keeps the smallest set of most probable tokens whose renormalised
      mass reaches p, at least one token.
    * Min-p (arXiv:2407.01082, Sec. 3) keeps tokens whose probability is at least min_p times that of the most
      probable token.

    Of two tokens with equal logits, the token with the lower id counts as more probable.

    Args:
        logits_RV: raw logits of R rows; -inf for a token that must not be drawn. Each row has at least one
            finite logit.
        temperature_R: 0 or more. At 0 only the most probable token is kept, and its logit becomes 0.
        top_k_R: 0 keeps all tokens.
        top_p_R: in (0, 1]; 1 keeps all tokens.
        min_p_R: in [0, 1]; 0 keeps all tokens.
    Returns:
        (R, V) float32.

    Raises:
        ShapeError: the logits are not a matrix, or a setting does not have one value for each row.
    """
    if logits_RV.ndim != 2:
        raise ShapeError(f"logits_RV has shape {tuple(logits_RV.shape)}; give a (rows, vocabulary) matrix")
    for name, setting_R in {
        "temperature_R": temperature_R,
        "top_k_R": top_k_R,
        "top_p_R": top_p_R,
        "min_p_R": min_p_R,
    }.items():
        if setting_R.shape != logits_RV.shape[:1]:
            raise ShapeError(
                f"{name} has shape {tuple(setting_R.shape)} and logits_RV {tuple(logits_RV.shape)}; give one "
                "setting a row"
            )
    vocabulary = logits_RV.shape[1]
    greedy_R = temperature_R == 0
    scaled_RV = logits_RV.float() / temperature_R.float().masked_fill(greedy_R, 1.0)[:, None]
    size_R = torch.where(top_k_R > 0, top_k_R, vocabulary).clamp(max=vocabulary)
    for rows in _some(((size_R < vocabulary) | (top_p_R < 1)) & ~greedy_R):
        scaled_RV[rows] = _most_probable(scaled_RV[rows], size_R[rows], top_p_R[rows].double())
    if (min_p_R > 0).any():
        least_R1 = scaled_RV.amax(-1, keepdim=True) + min_p_R.double().log()[:, None]
        scaled_RV = scaled_RV.masked_fill(scaled_RV < least_R1, -math.inf)
    for rows in _some(greedy_R):
        first_R1 = scaled_RV[rows].argmax(-1, keepdim=True)
        scaled_RV[rows] = torch.full_like(scaled_RV[rows], -math.inf).scatter(1, first_R1, 0.0)
    return scaled_RV


def inverse_cdf(logits_RV: Float[Tensor, "R V"], uniforms_R: Float[Tensor, " R"]) -> Int[Tensor, " R"]:
    """Draw a token for each row: the lowest id at which the cumulative distribution, in float64, exceeds the
    row's uniform number.

    A token with a logit of -inf is never drawn. A uniform number of 1, which may come from rounding, draws
    the last token whose logit is not -inf.

    Args:
        logits_RV: at least one finite logit in each row.
        uniforms_R: in [0, 1].
    Returns:
        (R,) int64 ids.

    Raises:
        ShapeError: the logits are not a matrix, or `uniforms_R` does not have the shape (R,).
    """
    if logits_RV.ndim != 2 or uniforms_R.shape != logits_RV.shape[:1]:
        raise ShapeError(
            f"uniforms_R has shape {tuple(uniforms_R.shape)} and logits_RV {tuple(logits_RV.shape)}; give "
            "one number a row of logits"
        )
    cumulative_RV = (logits_RV.double() - logits_RV.amax(-1, keepdim=True)).exp_().cumsum_(-1)
    bounds_R1 = uniforms_R.double()[:, None] * cumulative_RV[:, -1:]
    ids_R1 = torch.searchsorted(cumulative_RV, bounds_R1, right=True).clamp_(max=logits_RV.shape[1] - 1)
    if (logits_RV.gather(1, ids_R1) > -math.inf).all():
        return ids_R1.squeeze(1)
    drawable_RV = logits_RV > -math.inf
    exceeds_RV = drawable_RV & (cumulative_RV > bounds_R1)
    last_R = logits_RV.shape[1] - 1 - drawable_RV.flip(-1).to(torch.uint8).argmax(-1)
    return torch.where(exceeds_RV.any(-1), exceeds_RV.to(torch.uint8).argmax(-1), last_R)


def kept_ids(logits_RV: Float[Tensor, "R V"]) -> tuple[Int[Tensor, " S"], Int[Tensor, " R"]]:
    """Return the kept set of each row: the ids whose logit is finite.

    Returns:
        (S,) kept ids, row after row, ascending within a row; and (R,) the number of kept ids of each row.
    """
    rows_S, ids_S = logits_RV.isfinite().nonzero(as_tuple=True)
    return ids_S, torch.bincount(rows_S, minlength=len(logits_RV))


def _some(which_R: Tensor) -> list[Tensor]:
    """Return a list with one tensor, the indices of the rows that are True. If no row is True, return an
    empty list, so a loop over the list does nothing."""
    rows = which_R.nonzero().squeeze(1)
    return [rows] if len(rows) else []


def _most_probable(logits_RV: Tensor, size_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Return the logits after top-k and top-p; the logits of tokens that are not kept are -inf.

    Args:
        size_R: number of tokens that top-k keeps in each row; V if it keeps all.
        top_p_R: float64.
    """
    vocabulary = logits_RV.shape[1]
    is_whole_R = size_R == vocabulary
    first_width = int(size_R.masked_fill(is_whole_R, _NUCLEUS_WIDTH).max())
    for width in (min(first_width, vocabulary), vocabulary):
        values_RW, ids_RW = _ranked(logits_RV, width)
        left_RW = torch.arange(width, device=logits_RV.device) < size_R[:, None]
        exact_RW = values_RW.double().masked_fill(~left_RW, -math.inf)
        normaliser_R1 = exact_RW.logsumexp(-1, keepdim=True)
        if width < vocabulary and is_whole_R.any():
            normaliser_R1[is_whole_R] = logits_RV[is_whole_R].double().logsumexp(-1, keepdim=True)
        mass_RW = (exact_RW - normaliser_R1).exp_()
        reached_RW = mass_RW.cumsum(-1)
        if ((reached_RW[:, -1] >= top_p_R) | ~is_whole_R).all():
            break
    kept_RW = left_RW & ((reached_RW - mass_RW < top_p_R[:, None]) | (top_p_R[:, None] >= 1))
    return torch.full_like(logits_RV, -math.inf).scatter(
        1, ids_RW, values_RW.masked_fill(~kept_RW, -math.inf)
    )


def _ranked(logits_RV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the logits and the ids of each row's `width` most probable tokens, the most probable first. Of
    two tokens with equal logits, the one with the lower id comes first."""
    if width == logits_RV.shape[1]:
        return logits_RV.sort(dim=-1, descending=True, stable=True)
    values_RW, ids_RW = logits_RV.topk(width)
    least_R1 = values_RW[:, -1:]
    if ((logits_RV >= least_R1).sum(-1) > width).any():
        above_RV, equal_RV = logits_RV > least_R1, logits_RV == least_R1
        room_R1 = width - above_RV.sum(-1, keepdim=True)
        ids_RW = (
            (above_RV | (equal_RV & (equal_RV.cumsum(-1) <= room_R1))).to(torch.uint8).topk(width).indices
        )
    ids_RW = ids_RW.sort(dim=-1).values
    values_RW, order_RW = logits_RV.gather(1, ids_RW).sort(dim=-1, descending=True, stable=True)
    return values_RW, ids_RW.gather(1, order_RW)
