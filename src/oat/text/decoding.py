"""The decoding of ids to a text, in the context of the ids before them.

Some tokenizers mark the beginning of a word, and put such a mark before every text (Llama 2, Mistral). When
they decode, they drop the first mark. So the ids of a response, decoded alone, lose the blank with which the
response begins. Here they are decoded behind a short text, which is then removed.

Many of these tokenizers put a mark behind each control token, too. Then the text behind a control token is
decoded as the beginning of a text. So decoding gives back what was encoded.

How many characters of a response's text are complete after each of its tokens.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, islice, takewhile
from typing import TYPE_CHECKING

import numpy as np

from oat.errors import TemplateError
from oat.text.encoding import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


Ids = Sequence[int] | np.ndarray

_ANCHORS = "a0.|\nZé字" + "".join(map(chr, range(33, 127)))
"""Texts that may stand before ids while these are decoded or encoded. Several kinds of characters come first:
a tokenizer may join one kind with the text behind it."""
_MOST_ANCHORS = 8
_MOST_WORDS = 64
"""Number of tokens whose texts are tried, if no text of one character can be used."""
_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token for one byte of a character. A trainer may have added it as a special token."""
_STRANGE = ("\ue000", "\U0010fffd", "\U000120ff", "\u0bf5", "\u2603", "\U0001f355")
"""Characters of which a vocabulary without bytes has at most a few."""


class Decoder:
    """A decoder of ids with one tokenizer.

    Attributes:
        added: the texts of the added tokens, such as control tokens, by id.
        ids: the ids of the added tokens, by their texts.
        anchors: some texts of one character, each with its ids, that may stand before other ids.
        unknown: the ids of added tokens that stand for characters that the vocabulary lacks.
        knows_place: True if the text of ids depends on whether other ids stand before them.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", encoder: Encoder):
        self.tokenizer = tokenizer
        self._encoder = encoder
        self.added = {int(id): str(token.content) for id, token in tokenizer.added_tokens_decoder.items()}
        self.ids = {content: id for id, content in self.added.items()}
        self.anchors = list(islice(self._usable_anchors(), _MOST_ANCHORS))
        self.unknown = frozenset(self._of_strange_characters())
        self.knows_place = any(self._depends_on_place(*anchor) for anchor in self.anchors[:1])
        self._opens: dict[int, bool] = {}
        self._pieces: dict[tuple[int, bool, bool], str] = {}

    def __call__(self, ids: Ids, after: Ids = (), *, keeps_special: bool = True) -> str:
        """Return the text of ids.

        Args:
            after: the ids before them; only the last one matters. Empty: the ids begin a text.
            keeps_special: False leaves special tokens out.
        """
        plain = [int(id) for id in ids]
        if not self.knows_place or not plain:
            return self._decode(plain, keeps_special)
        begins = self.begins(after)
        if not keeps_special:
            return self._placed(plain, begins, keeps_special)
        text, start = "", 0
        for place, id in enumerate(plain):
            if self._opens_text(id):
                text += self._placed(plain[start : place + 1], begins, keeps_special)
                start, begins = place + 1, True
        return text + self._placed(plain[start:], begins, keeps_special)

    def begins(self, after: Ids) -> bool:
        """Return True if ids behind `after` are decoded as the beginning of a text."""
        if not len(after) or self._opens_text(int(after[-1])):
            return True
        return len(after) == len(self.prefix) and [int(id) for id in after] == self.prefix

    def pieces(self, ids: Ids, after: Ids = (), *, keeps_special: bool = True) -> list[str]:
        """Return the text of each id alone, in its place behind the others.

        Args:
            after: as for a call.
            keeps_special: as for a call.
        """
        found = list[str]()
        for id in map(int, ids):
            known = id, self.begins(after), keeps_special
            if known not in self._pieces:
                self._pieces[known] = self([id], after, keeps_special=keeps_special)
            found.append(self._pieces[known])
            after = [id]
        return found

    @property
    def prefix(self) -> list[int]:
        """The ids that the tokenizer itself puts before every plain text."""
        return self._frame[0]

    @property
    def suffix(self) -> list[int]:
        """The ids that the tokenizer itself puts behind every plain text, such as an end-of-text or [SEP]."""
        return self._frame[1]

    @property
    def end(self) -> tuple[int | None, str, str]:
        """The id that ends a response without a template, its text, and this text again. The id is the first
        that the tokenizer puts behind every text; if it puts none there, the end-of-text."""
        eos = self.tokenizer.eos_token_id
        id = self.suffix[0] if self.suffix else None if eos is None else int(eos)
        text = "" if id is None else self([id])
        return id, text, text

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        text = self.anchors[0][0] if self.anchors else ""
        ids, added = self._encoder.ids(text, adds=True)
        if not self.anchors:  # nothing then tells a prefix from a suffix, except the end-of-text
            ends = ids[-1:] == [self.tokenizer.eos_token_id]
            return (ids[:-1], ids[-1:]) if ends else (ids, [])
        before, behind = (sum(takewhile(bool, marks)) for marks in (added, reversed(added)))
        return ids[:before], ids[len(ids) - behind :]

    def _placed(self, ids: list[int], begins: bool, keeps_special: bool) -> str:
        if begins or not ids:
            return self._decode(ids, keeps_special)
        before_ids = self.anchors[0][1]
        before = self._decode(before_ids, keeps_special)
        text = self._decode([*before_ids, *ids], keeps_special)
        return text.removeprefix(before) if text.startswith(before) else self._decode(ids, keeps_special)

    def _decode(self, ids: list[int], keeps_special: bool) -> str:
        return str(
            self.tokenizer.decode(
                ids, skip_special_tokens=not keeps_special, clean_up_tokenization_spaces=False
            )
        )

    def _opens_text(self, id: int) -> bool:
        """Return True for an added token behind which the tokenizer encodes a text as at a beginning."""
        if id not in self._opens:
            self._opens[id] = False
            is_control = id in self.added and id not in self.unknown and not _BYTE.fullmatch(self.added[id])
            if self.knows_place and is_control:
                text, ids = self.anchors[0]
                self._opens[id] = self._encoder.ids(self.added[id] + text, adds=False)[0] == [id, *ids]
        return self._opens[id]

    def _of_strange_characters(self) -> Iterator[int]:
        for character in _STRANGE:
            try:
                found = self._encoder.ids(character, adds=False)[0]
            except TemplateError:  # the tokenizer has no unknown token
                continue
            yield from (id for id in found if character not in self.added.get(id, character))

    def _usable_anchors(self) -> Iterator[tuple[str, list[int]]]:
        """Yield some short texts, each with its ids, that can stand before other ids: texts of one character
        or, if the tokenizer knows complete words alone, of one token."""
        anchors = filter(None, map(self._anchor, dict.fromkeys(_ANCHORS)))
        first = next(anchors, None)
        if first is not None:
            yield first
            yield from anchors
            return
        words = (id for id in range(len(self.tokenizer)) if id not in self.added)
        yield from filter(None, (self._anchor(self._decode([id], True)) for id in islice(words, _MOST_WORDS)))

    def _anchor(self, text: str) -> tuple[str, list[int]] | None:
        try:
            ids = self._encoder.ids(text, adds=False)[0]
        except TemplateError:  # some tokenizers refuse a character that they do not know
            return None
        names = self.tokenizer.convert_ids_to_tokens(ids)
        is_whole = not any(map(self.added.__contains__, ids)) and "<0x" not in "".join(names)
        return (text, ids) if ids and is_whole and self._decode(ids, True).strip() == text.strip() else None

    def _depends_on_place(self, text: str, ids: list[int]) -> bool:
        shown = self._decode(ids, True)
        for probe in (text, f" {text}", f"{text} {text}"):
            try:
                found = self._encoder.ids(probe, adds=False)[0]
            except TemplateError:  # a tokenizer without blanks writes none
                continue
            if self._decode([*ids, *found], True) != shown + self._decode(found, True):
                return True
        return False


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
