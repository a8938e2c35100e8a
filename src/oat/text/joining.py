"""The encoding of a text that follows another one.

The ids of two texts, one after another, may not be the ids of the whole text. A tokenizer may put a blank
before every text that it gets (Llama 2, Mistral, T5), or join the end of one text with the beginning of the
next. So a text is encoded together with the end of what stands before it, and the ids of the latter are taken
away.

Ids that a model has read or written stay as they are. If the tokenizer joins characters on both sides of the
boundary, no ids behind the boundary are those of the whole text. Then ids are searched that give the text of
the whole, and they are checked by decoding.
"""

import re
import unicodedata
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np

from oat.errors import TemplateError
from oat.text.control_tokens import any_of, pieces_of
from oat.text.decoding import Decoder
from oat.text.encoding import Encoder

_ENOUGH = 256
"""A context of at most this number of characters is encoded as a whole. From a longer one, the last half of
this number or more is taken, from the beginning of a word. Tokens do not depend on words so far away."""
_MOST = 2048
"""Largest number of characters of a context in which no word begins."""
_WORD = re.compile(r"(?<=\w) (?=\w)")
_MOST_CONTEXTS = 64


class Joiner:
    """An encoder of texts that follow other texts.

    A *context* is the end of what stands before a text, as `context` returns it. The context "" is the
    beginning of a text.
    """

    def __init__(self, encoder: Encoder, decoder: Decoder):
        self._encoder = encoder
        self._decoder = decoder
        self._contexts: dict[str, list[int]] = {}

    def plain(self, text: str) -> np.ndarray:
        """Return the ids, (T,) int32, of a plain text that others may follow. They begin with what the
        tokenizer puts before every text, once, also if the text itself begins with it, such as `<s>`. They do
        not end with what it puts behind every text."""
        ids, _ = self._encoder.ids(text, adds=True)
        prefix = self._decoder.prefix
        if prefix and ids[len(prefix) : 2 * len(prefix)] == prefix:
            ids = ids[len(prefix) :]
        end = len(ids) - len(self._decoder.suffix)
        return np.array(ids[:end] if ids[end:] == self._decoder.suffix else ids, dtype=np.int32)

    def marked(
        self, text: str, context: str = "", *, is_strict: bool = True, keeps_blanks: bool = False
    ) -> np.ndarray:
        """Return the ids, (T,) int32, of a text behind a context. Control tokens that `control_tokens.marked`
        has marked are read as ordinary text.

        Args:
            is_strict: as for `following`.
            keeps_blanks: as for `following`.

        Raises:
            TemplateError: as for `following`.
        """
        ids, before = list[int](), context
        for piece, is_control in pieces_of(text):
            if is_control:
                # `splits` affects special tokens only, so a marked token is also divided in two
                ids += self._split(piece[:1], self.context(before)) + self._alone(piece[1:], splits=True)
                before = piece[1:] or self._ordinary
            else:
                ids += self.following(
                    piece, self.context(before), is_strict=is_strict, keeps_blanks=keeps_blanks
                )
                before += piece
        return np.array(ids, dtype=np.int32)

    def following(
        self, text: str, context: str, *, is_strict: bool = True, keeps_blanks: bool = False
    ) -> list[int]:
        """Return the ids of a text behind a context.

        If the ids of both together begin with those of the context, they are the rest. Otherwise they are ids
        that, behind the ids of the context, decode to what the ids of both together decode to.

        Args:
            is_strict: False accepts other ids for the text if there are no such ids.
            keeps_blanks: True keeps the white space that an added token takes away in a whole text
                (`Encoder.takers`). A sampled response has such white space.

        Raises:
            TemplateError: the tokenizer cannot encode the text, or there are no such ids.
        """
        if keeps_blanks and (kept := self._with_blanks(text, context, is_strict=is_strict)) is not None:
            return kept
        if not context or not text:
            return self._ids(text)
        before, whole = self._context_ids(context), self._ids(context + text)
        if whole[: len(before)] == before:
            return whole[len(before) :]
        found = self._apart(text, context, before, whole)
        if found is None and is_strict:
            raise TemplateError(
                f"the tokenizer has no tokens for {text[:40]!r} behind {context[-40:]!r} that keep both "
                "texts; end the text before at the end of a word, or change one of them"
            )
        return self._alone(text) if found is None else found

    def context(self, text: str) -> str:
        """Return the end of a text, which may have marked control tokens, as the context of what follows."""
        if not text:
            return ""
        *earlier, (tail, _) = pieces_of(text)
        if not tail:
            return (earlier[-1][0][1:] if earlier else "") or self._ordinary
        tail, start = self._shortened(tail), 0
        for found in self._added.finditer(tail):
            start = found.start()
        return tail[start:]

    def of_ids(self, ids: np.ndarray) -> str:
        """Return the end of the text of ids as the context of what follows."""
        if not len(ids):
            return ""
        last = int(ids[-1])
        if last in self._decoder.unknown:
            return self._ordinary
        if last in self._decoder.added:
            return self._decoder.added[last]
        return self.context(self._decoder(ids[-_ENOUGH // 8 :])) or self._ordinary

    def takes_blanks(self, context: str, text: str = "") -> bool:
        """Return True if white space between a context and a text has no ids in the whole text, because an
        added token beside it takes it away."""
        none = False, False
        behind, before = self._added.match(context), self._added.match(text)
        is_last = behind is not None and not context[behind.end() :].strip()
        return bool(
            (is_last and behind and self._takers.get(behind[0], none)[1])
            or (before and self._takers.get(before[0], none)[0])
        )

    def _with_blanks(self, text: str, context: str, *, is_strict: bool) -> list[int] | None:
        """Return the ids of a text behind a context, with the white space that added tokens take away in a
        whole text. Return None if they take none away, or if no ids keep it."""
        if not self._takers or not text:
            return None
        cuts = [0] if text[0].isspace() and self.takes_blanks(context) else []
        for found in self._added.finditer(text):
            before, behind = self._takers.get(found[0], (False, False))
            cuts += [found.start()] if before and text[: found.start()][-1:].isspace() else []
            cuts += [found.end()] if behind and text[found.end() :][:1].isspace() else []
        if not cuts:
            return None
        ids = self.following(text[: cuts[0]], context, is_strict=is_strict)
        for start, end in pairwise([*dict.fromkeys(cuts), len(text)]):
            after = ids or self._context_ids(context)
            piece = text[start:end]
            found_ids = next(
                (each for each in self._candidates(piece) if self._decoder(each, after=after) == piece), None
            )
            if found_ids is None:
                return None
            ids = ids + found_ids
        return ids

    @cached_property
    def _takers(self) -> dict[str, tuple[bool, bool]]:
        return self._encoder.takers()

    def _split(self, text: str, context: str) -> list[int]:
        """Return the ids of a text behind a context, with special tokens in the text read as ordinary
        text."""
        found = self._added.match(context)
        ordinary = context[found.end() :] if found else context
        if not ordinary and (not found or self._decoder.begins([self._decoder.ids[found[0]]])):
            return self._ids(text, splits=True)
        before, whole = (self._ids(part, splits=True) for part in (ordinary, ordinary + text))
        if ordinary and whole[: len(before)] == before:
            return whole[len(before) :]
        return self._alone(text, splits=True)

    @cached_property
    def _added(self) -> re.Pattern[str]:
        return any_of(self._decoder.added.values())

    @property
    def _ordinary(self) -> str:
        """The context of a text behind ordinary text that is not known."""
        return self._decoder.anchors[0][0] if self._decoder.anchors else ""

    def _shortened(self, text: str) -> str:
        if len(text) <= _ENOUGH:
            return text
        for size in (_ENOUGH, _MOST):
            places = _WORD.finditer(text, max(0, len(text) - size), len(text) - _ENOUGH // 2)
            if starts := [place.start() for place in places]:
                return text[starts[-1] + self._decoder.knows_place :]
        return text[-_MOST:]

    def _ids(self, text: str, *, splits: bool | None = None) -> list[int]:
        return self._encoder.ids(text, adds=False, splits=splits)[0]

    def _context_ids(self, context: str) -> list[int]:
        if context not in self._contexts:
            if len(self._contexts) >= _MOST_CONTEXTS:
                self._contexts.clear()
            self._contexts[context] = self._ids(context)
        return self._contexts[context]

    def _apart(self, text: str, context: str, before: list[int], whole: list[int]) -> list[int] | None:
        """Return ids behind `before` that decode to the text of `whole`, or keep the text itself; None if
        none are found.

        A normaliser may compose characters on both sides of the boundary to one. So texts that are equal
        under the normal form NFKC count as equal if no others are found.
        """
        target = self._decoder(whole)
        wanted = {target, context + text}
        head = self._decoder(before)
        tails = dict.fromkeys([text, target.removeprefix(head)] if target.startswith(head) else [text])
        found = [ids for tail in tails if tail for ids in self._candidates(tail)]
        decoded = [self._decoder([*before, *ids]) for ids in found]
        for ids, own in zip(found, decoded, strict=True):
            if own in wanted:
                return ids
        normal = {_normal(each) for each in wanted}
        return next((ids for ids, own in zip(found, decoded, strict=True) if _normal(own) in normal), None)

    def _alone(self, text: str, *, splits: bool | None = None) -> list[int]:
        """Return the ids of a text behind any ordinary text. Return other ids of the text if the tokenizer
        does not keep it."""
        if not text:
            return []
        found = list(self._candidates(text, splits=splits))
        for ids in found:
            if self._decoder(ids, after=self._within) == text:
                return ids
        return found[min(1, len(found) - 1)]

    @property
    def _within(self) -> list[int]:
        return self._decoder.anchors[0][1] if self._decoder.anchors else []

    def _candidates(self, text: str, *, splits: bool | None = None) -> Iterator[list[int]]:
        """Yield ids of a text: those at the beginning of a text, and those behind several characters with
        which the tokenizer does not join it."""
        yield self._ids(text, splits=splits)
        for anchor, before in self._decoder.anchors:
            ids = self._ids(anchor + text, splits=splits)
            if ids[: len(before)] == before:
                yield ids[len(before) :]


def _normal(text: str) -> str:
    return unicodedata.normalize("NFKC", text)
