"""Scoring: the log-probabilities of the tokens of given sequences, by passes over packed sequences."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from oat.engines.shapes import PASS_TOKENS, fixed_width, passes, power_below
from oat.functional.logprobs import chunked_head, token_logps
from oat.models.attention import Packed, pack
from oat.models.causal_lm import CausalLM

_HEAD_LOGITS = 2**24
"""Largest number of logits that are in memory at once."""


def score(
    lm: CausalLM, sequences: Sequence[np.ndarray], *, fixed_rows: int | None = None
) -> list[np.ndarray]:
    """Return, for each sequence, the raw log-probabilities of all its tokens except the first: (T - 1,)
    float32, nats. The model must be in evaluation mode.

    Args:
        sequences: the ids of each sequence, at least one id in each.
        fixed_rows: the largest number of rows in a pass of fixed size. On a CPU the result for a sequence is
            then bitwise equal beside any other sequences. None: sequences are packed without padding.
    """
    scored: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(sequences)
    widths = np.array(
        [len(ids) if fixed_rows is None else fixed_width(len(ids)) for ids in sequences], dtype=np.int64
    )
    for some in passes(widths) if fixed_rows is None else _fixed_passes(widths, fixed_rows):
        width = None if fixed_rows is None else int(widths[some[0]])
        found = _score_packed(
            lm,
            [sequences[number] for number in some],
            width,
            0 if width is None or fixed_rows is None else _rows(width, fixed_rows),
        )
        for number, logps_T in zip(some, found, strict=True):
            scored[number] = logps_T
    return scored


@torch.inference_mode()
def _score_packed(
    lm: CausalLM, sequences: Sequence[np.ndarray], width: int | None, rows: int
) -> list[np.ndarray]:
    """Score sequences in one pass. With a `width`, the pass has the fixed size of `rows` rows."""
    ids_1T, positions_1T, spans = pack(sequences, lm.device, width=width, rows=rows)
    next_T = ids_1T[0].roll(-1)
    raw = {"raw": lambda logits_CV, span: token_logps(logits_CV, next_T[span])}
    hidden_TD = lm.hidden(ids_1T, positions=positions_1T, layout=Packed(spans, width=width))[0]
    logps_T = (
        chunked_head(hidden_TD, lm.head, raw, power_below(_HEAD_LOGITS // lm.vocab_rows))["raw"].cpu().numpy()
    )
    return [logps_T[span.start : span.stop - 1].copy() for span in spans]


def _fixed_passes(widths: np.ndarray, max_rows: int) -> Iterator[list[int]]:
    """Yield the indices of the sequences of each pass of fixed size: at most `_rows` sequences of the same
    padded width."""
    for width in np.unique(widths):
        numbers, rows = np.flatnonzero(widths == width).tolist(), _rows(int(width), max_rows)
        for start in range(0, len(numbers), rows):
            yield numbers[start : start + rows]


def _rows(width: int, max_rows: int) -> int:
    """Return the number of rows, a power of two, in a pass of fixed size with rows of `width` tokens."""
    return min(max_rows, power_below(PASS_TOKENS // width))
