"""Packing: sequences of any lengths follow each other in one row of tokens. They are padded only if a width
is given. `attention.py` computes the attention of such a row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """A sequence in a packed row: tokens `start` to `stop` - 1, which attend to each other causally.

    Attributes:
        prefix: index of an earlier span; this span's tokens also attend to all tokens of that span. None:
            there is no prefix.
    """

    start: int
    stop: int
    prefix: int | None = None


def pack(
    sequences: Sequence[np.ndarray], device: torch.device, *, width: int | None = None, rows: int = 0
) -> tuple[Tensor, Tensor, list[Span]]:
    """Put sequences one after another into one row of tokens.

    Args:
        sequences: the ids of each sequence; at least one sequence.
        width: number of tokens to which each sequence is padded on the right; None: no padding.
        rows: if `width` is given, the result is padded at its end to at least `rows` * `width` tokens.

    Returns:
        Ids (1, T); positions (1, T); and the span of each sequence, without its padding.
    """
    widths = [width if width is not None else len(ids) for ids in sequences]
    starts = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
    spans = [Span(int(start), int(start) + len(ids)) for start, ids in zip(starts, sequences, strict=False)]
    return *_lay(sequences, spans, max(int(starts[-1]), rows * (width or 0)), device), spans


def pack_groups(
    sequences: Sequence[np.ndarray], prefixes: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, list[Span], list[np.ndarray]]:
    """Put sequences one after another into one row of tokens. Several sequences may share a prefix, which is
    in the row once.

    Args:
        sequences: the ids of each sequence.
        prefixes: for each sequence, the length of its prefix, which may be the whole sequence; 0 for no
            prefix. Equal prefixes are shared.

    Returns:
        Ids (1, T); positions (1, T); the spans (a prefix is a span of its own); and for each sequence the
        indices of its tokens in the row.
    """
    spans: list[Span] = []
    pieces: list[np.ndarray] = []
    places: list[np.ndarray] = []
    number_of: dict[bytes, int] = {}

    def add(ids: np.ndarray, prefix: int | None = None) -> None:
        start = spans[-1].stop if spans else 0
        spans.append(Span(start, start + len(ids), prefix))
        pieces.append(ids)

    for ids, length in zip(sequences, prefixes, strict=True):
        common = ids[:length].tobytes()
        if length and common not in number_of:
            number_of[common] = len(spans)
            add(ids[:length])
        own = []
        prefix = number_of[common] if length else None
        if prefix is not None:
            own.append(np.arange(spans[prefix].start, spans[prefix].stop))
        if prefix is None or len(ids) > length:
            add(ids[length:], prefix)
            own.append(np.arange(spans[-1].start, spans[-1].stop))
        places.append(np.concatenate(own))
    return *_lay(pieces, spans, spans[-1].stop, device), spans, places


def _lay(
    pieces: Sequence[np.ndarray], spans: Sequence[Span], total: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    tokens, positions = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    for span, ids in zip(spans, pieces, strict=True):
        before = 0 if span.prefix is None else spans[span.prefix].stop - spans[span.prefix].start
        tokens[span.start : span.stop], positions[span.start : span.stop] = (
            ids,
            np.arange(before, before + len(ids)),
        )
    return torch.from_numpy(tokens)[None].to(device), torch.from_numpy(positions)[None].to(device)
