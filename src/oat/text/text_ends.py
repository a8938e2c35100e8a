"""How many characters of a response's text are complete after each of its tokens."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

_INCOMPLETE = "\ufffd"
"""What a decoder writes for the bytes of a character of which some tokens are missing."""

Decode = Callable[[Sequence[int]], str]
"""A function that decodes ids to text."""


def text_ends(ids: Sequence[int], text: str, decode: Decode, pieces: Sequence[str]) -> np.ndarray:
    """Return the number of characters of a text that are complete after each token.

    Entry t is the length of the common beginning of the text and of what the first t + 1 ids decode to. For
    most texts it is found without decoding every such beginning:

    1. If the texts of the single tokens, one after another, are the text, their lengths are added up. A text
       with bytes that are no characters is left to the other two.
    2. Otherwise a window of a few ids is decoded before and after each token, as servers do that stream text.
    3. If the texts of the windows are not the text either, every beginning of `ids` is decoded.

    Args:
        ids: T ids.
        text: what all ids decode to.
        pieces: what each of the ids decodes to alone.

    Returns:
        (T,) int32, never falling; the last entry is the length of the text.
    """
    ends = _by_pieces(text, pieces) or _by_windows(ids, text, decode)
    if ends is None:
        ends = [_common(decode(ids[: t + 1]), text) for t in range(len(ids))]
    return np.maximum.accumulate(np.array(ends, dtype=np.int32))


def moved_ends(ends: np.ndarray, text: str, other: str) -> np.ndarray | None:
    """Return the ends of `text` as ends of `other`, which differs from it in white space and in what stands
    before and behind it, as a recorded response may differ from what a template writes.

    Args:
        ends: (T,) int32, as `text_ends` returns them for `text`.

    Returns:
        (T,) int32; None if the characters of `other` that are no white space do not stand in `text`.
    """
    if text == other:
        return ends
    places = [place for place, character in enumerate(other) if not character.isspace()]
    solid = "".join(text.split())
    start = solid.find("".join(other.split()))
    if start < 0:
        return None
    solid_before = np.cumsum([0, *(not character.isspace() for character in text)])
    counts = np.clip(solid_before[ends] - start, 0, len(places))
    bounds = np.array([0, *(place + 1 for place in places)], dtype=np.int32)
    bounds[-1] = len(other)
    return bounds[counts]


def _by_pieces(text: str, pieces: Sequence[str]) -> list[int] | None:
    """Return the ends that the texts of single tokens give; None if they do not make up `text`."""
    if _INCOMPLETE in text or "".join(pieces) != text:
        return None
    return [*accumulate(map(len, pieces))]


def _by_windows(ids: Sequence[int], text: str, decode: Decode) -> list[int] | None:
    """Return the ends that windows of ids give; None if their texts do not make up `text`.

    A window begins with ids whose text is complete. It grows until it does not end within a character. Then
    the texts that it had before are compared with its text.
    """
    ends: list[int] = []
    begin, complete = 0, 0
    found, before = "", ""
    pending: list[str] = []
    for t in range(len(ids)):
        window = decode(ids[begin : t + 1])
        if not window.startswith(before):
            return None
        pending.append(window[len(before) :])
        new = pending[-1]
        if (new and not new.endswith(_INCOMPLETE)) or t == len(ids) - 1:
            ends += [len(found) + _common(each, new) for each in pending]
            found += new
            begin, complete = complete, t + 1
            before = decode(ids[begin:complete])
            pending = []
    return ends if found == text else None


def _common(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    if other.startswith(one):
        return len(one)
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
