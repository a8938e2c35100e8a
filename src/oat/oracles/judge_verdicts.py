"""Reads the verdict or the score in a judge's reply.

A reply can be read in two ways: its text says a verdict (judge_texts.py), and the log-probabilities of its
tokens say how probable each verdict was. **The two agree, or there is no verdict.** The text says which
verdict, and at which place. There, each alternative of the token is read as the verdict that the text would
have if it had this alternative. The verdict of the text must be the most probable one, and all verdicts
together must have the probability `LEAST_SHARE`. If the tokens are not those of the text, or have no
alternatives, the text alone counts where this is allowed, unless the tokens say another verdict.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from oat.oracles.judge_replies import ChatCompletion, Token, answer_in
from oat.oracles.judge_texts import Found, Reader

LEAST_SHARE = 0.5
"""Least probability that all verdicts together have at the place where a verdict is read. Below one half, the
judge would more probably have gone on with something else, and a few per cent would decide."""

_LEAST_REST = 0.001
"""Least probability of tokens that a reply does not name for which their absence is told."""
MISSING = "there are none"
_OTHERS = "they are not those of the text"
_ALONE = "they have no usable alternatives"

_MOST_SHOWN = 40
_BESIDE = (
    "what comes below the verdict may turn it round; let the judge give reasons before a last line such as "
    "`Verdict: 0` or `Score: 7`, or none"
)
V = TypeVar("V", str, float)
Reads = Literal["auto", "logprobs", "text"]


@dataclass(frozen=True)
class Reading(Generic[V]):
    """How a reply is read.

    Attributes:
        shares: the probability of each verdict or score, given that it is one of them; None: there is none.
        lacks: why there is none, in words; "" if the text says none.
        unused: why the text alone counts although log-probabilities may be read, in words; "" if they were
            read, or would tell nothing else. They are not read for a number of several tokens.
    """

    shares: dict[V, float] | None
    lacks: str = ""
    unused: str = ""


def read_reply(reply: ChatCompletion, reader: Reader[V], reads: Reads) -> Reading[V]:
    """Read a reply.

    Args:
        reads: "text": the text alone. "logprobs": the log-probabilities too, or there is no verdict. "auto":
            the log-probabilities too, if the reply has usable ones.
    """
    if reply.end == "broken":
        word = reply.finish if len(reply.finish) <= _MOST_SHOWN else "..."
        return Reading(None, f"it has ended before its end (finish_reason: {word!r})")
    said = reader.says(reply.answer, reply.end == "cut")
    if said is None:
        is_first = reader.says(reply.answer.partition("\n")[0]) is not None
        lacks = "it was cut (max_tokens)" if reply.end == "cut" else _BESIDE if is_first else ""
        return Reading(None, lacks)
    if reads == "text" or (reply.tokens is None and reads == "auto"):
        return Reading({said.value: 1.0}, unused=MISSING if reads == "auto" else "")
    place = _place(reply, said)
    is_there = place is not None and place.value(place.token.piece, reader) == said.value
    if place is not None and is_there and place.is_whole and len(place.token.logps) > 1:
        return _at_place(place, said.value, reader)
    if reads == "logprobs":
        return Reading(None, "its log-probabilities have no place of the verdict with alternatives")
    if place is None:
        other = reader.says(answer_in(_joined(reply.tokens or ()).decode("utf-8", "replace")))
        if other is not None and other.value != said.value:
            return Reading(None, "its tokens say something else than its text")
        return Reading({said.value: 1.0}, unused=_OTHERS)
    is_certain = is_there and math.fsum(map(math.exp, place.token.logps.values())) >= 1 - _LEAST_REST
    return Reading({said.value: 1.0}, unused=_ALONE if place.is_whole and not is_certain else "")


@dataclass(frozen=True)
class _Place:
    """Where the tokens of a reply have its verdict.

    Attributes:
        token: the token that has the first character of the verdict.
        before: the bytes between a label, such as `Answer:`, and the token.
        shared: the bytes of the token that come before the marks around the verdict.
        is_whole: the token has the end of the verdict too. The `1` of a `1.0` has not: its alternative `0`
            may be the beginning of `0.9`.
    """

    token: Token
    before: bytes
    shared: bytes
    is_whole: bool

    def value(self, piece: bytes, reader: Reader[V]) -> V | None:
        """Return the verdict that the text would have if it had `piece` instead of the token."""
        if self.shared.strip():
            if not piece.startswith(self.shared):
                return None
            piece = piece[len(self.shared) :]
        return reader.alone((self.before + piece).decode("utf-8", "replace"))


def _at_place(place: _Place, said: V, reader: Reader[V]) -> Reading[V]:
    """Read a token and its alternatives. Where the token is `7`, the alternative `8.` is no score: it may be
    the beginning of `8.5`."""
    found: dict[V, float] = {}
    has_point = place.token.piece.endswith(b".")
    for piece, logp in place.token.logps.items():
        value = place.value(piece, reader)
        goes_on = isinstance(value, float) and piece.endswith(b".") and not has_point
        if value is not None and not goes_on:
            found[value] = found.get(value, 0.0) + math.exp(logp)
    total = math.fsum(found.values())
    if total < LEAST_SHARE:
        return Reading(None, "something else than a verdict was as probable (log-probabilities)")
    if found.get(said, 0.0) < max(found.values()):
        return Reading(None, "another verdict was more probable (log-probabilities)")
    return Reading({value: share / total for value, share in found.items()})


def _place(reply: ChatCompletion, said: Found[V]) -> _Place | None:
    """Return the place of the verdict in the tokens; None if the tokens do not have the answer."""
    if reply.start is None:
        return None
    answer = reply.answer.encode("utf-8", "surrogatepass")
    opening, first, last = (
        len(reply.answer[:place].encode("utf-8", "surrogatepass"))
        for place in (said.opening, said.start, said.end)
    )
    end = -reply.start
    for token in reply.tokens or ():
        begin, end = end, end + len(token.piece)
        if end > first:
            before, shared = answer[opening : max(begin, opening)], token.piece[: max(0, opening - begin)]
            return _Place(token, before, shared, end >= last)
    return None


def _joined(tokens: Sequence[Token]) -> bytes:
    return b"".join(token.piece for token in tokens)
