"""The sequences that a forward pass of the learner computes for rows.

The simplest choice is the rows themselves. A pass with many tokens to spare computes less:

1. A prompt that several rows begin with is computed once.
2. Rows that are equal, up to the last token whose hidden state is read, are one sequence. Samples of a
   prompt are often equal if responses are short.
3. Tokens of a row after the last one whose hidden state is read are left out. To score a response, nobody
   reads the hidden state of its last token.

Attention is causal, so the hidden states that are read are those of the whole rows. Only the rounding of the
weights' gradients differs, since equal rows are added up earlier.
"""

from collections.abc import Sequence

import numpy as np

from oat.types import Trajectory

SHARE_FROM = 1.2
"""A pass computes fewer tokens if it would otherwise have more than this many times as many."""
SHORTEN_FROM = 256
"""A pass with fewer tokens than this number shares prompts, but neither joins nor shortens rows. It takes
little time anyway, and the stored numbers of small runs stay as they are."""


def sequences_of(
    rows: Sequence[np.ndarray], prompts: Sequence[np.ndarray], ends: Sequence[int]
) -> tuple[list[np.ndarray], list[int] | None, list[int]]:
    """Choose the sequences that a pass computes.

    Args:
        rows: the ids of each row.
        prompts: the ids of each row's prompt; empty if it has none.
        ends: for each row, the number of its tokens up to the last one whose hidden state is read, at least
            1.

    Returns:
        The ids of each sequence; for each sequence the length of its prompt, or None if no prompts are
        shared; and for each row the number of its sequence, which is the row or its beginning.
    """
    total, prefixes = _shared(rows, prompts)
    each = list(range(len(rows)))
    if total >= SHORTEN_FROM:
        read = [ids[:end] for ids, end in zip(rows, ends, strict=True)]
        number_of: dict[bytes, int] = {}
        sequence_of_N = [number_of.setdefault(ids.tobytes(), len(number_of)) for ids in read]
        firsts = np.unique(sequence_of_N, return_index=True)[1].tolist()
        sequences = [read[row] for row in firsts]
        fewer, its_prefixes = _shared(sequences, [prompts[row][: ends[row]] for row in firsts])
        if total > SHARE_FROM * fewer:
            return sequences, its_prefixes, sequence_of_N
    return list(rows), prefixes, each


def prompt_of(row: Trajectory) -> np.ndarray:
    """Return the ids of a row's prompt; none if the row has no context before the model's tokens."""
    first = row.segments[0]
    return first.ids if first.author == "context" and len(row.segments) > 1 else first.ids[:0]


def shared_prompts(sequences: Sequence[np.ndarray], prompts: Sequence[np.ndarray]) -> list[int] | None:
    """Return the lengths of the prompts, if a pass over the sequences should compute each different prompt
    once; otherwise None."""
    return _shared(sequences, prompts)[1]


def _shared(sequences: Sequence[np.ndarray], prompts: Sequence[np.ndarray]) -> tuple[int, list[int] | None]:
    """Return the number of tokens that a pass over the sequences computes; and the lengths of their prompts
    if prompts are shared, otherwise None."""
    total = sum(map(len, sequences))
    different = {ids.tobytes(): len(ids) for ids in prompts}
    fewer = total - sum(map(len, prompts)) + sum(different.values())
    return (fewer, [len(ids) for ids in prompts]) if total > SHARE_FROM * fewer else (total, None)
