"""A question as the ledger has it: what of its answer is known before anyone is asked, what is sent, and how
its answer is put together.

A value of an answer is `Known` from an earlier one, or `Awaited` from an equal question that is being asked,
or asked for.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from oat.types import Answer, Key, Mark, Price, Question

AWAITED = "awaited"
"""The mark of a value that is still to be brought, in the answer to a question of which the rest is there."""


class Known(NamedTuple):
    """A value that an oracle gave.

    Attributes:
        scores: as in `Answer`.
    """

    value: float
    mark: Mark
    scores: tuple[float | None, ...] = ()

    def turned(self, is_turned: bool = True) -> "Known":
        """The same of the two texts the other way round."""
        return Known(1.0 - self.value, self.mark, self.scores[::-1]) if is_turned else self


class Source(NamedTuple):
    """A value that a question of the same purpose asks for.

    Attributes:
        place: in that question's answer.
        is_turned: that question has the two texts the other way round.
    """

    key: Key
    place: int
    is_turned: bool


@dataclass(frozen=True)
class Awaited:
    """A value that equal questions bring which are being asked.

    Attributes:
        known: of earlier answers, where several make one (`oracle.repeats`).
    """

    sources: tuple[Source, ...]
    known: tuple[Known, ...] = ()


Value = Known | Awaited | None
"""What is known of a value before anyone is asked; None: nothing."""


@dataclass(frozen=True)
class Quote:
    """On which terms a question is recorded.

    Attributes:
        cached: for each value of its answer, what is known of it; empty: nothing.
        price: the most that the rest may cost.
    """

    cached: tuple[Value, ...] = ()
    price: Price = field(default_factory=Price)


@dataclass(frozen=True, eq=False)
class Intent:
    """A question as it stands in the ledger.

    Attributes:
        member: place of its group in the round's groups.
        ticket: the oracle's ticket, kept for durable oracles.
        sent: when it was given, seconds since 1970.
        cached: as in `Quote`.
    """

    id: int
    question: Question
    member: int
    ticket: str | None
    sent: float | None
    cached: tuple[Value, ...]

    @property
    def is_sent(self) -> bool:
        """Whether the oracle is asked for any of it."""
        return not self.cached or None in self.cached

    @property
    def others(self) -> set[Key]:
        """Other questions that bring some of its values."""
        keys = {source.key for value in self.cached if isinstance(value, Awaited) for source in value.sources}
        return keys - {self.question.key}


def rest(question: Question, cached: Sequence[Value]) -> Question:
    """What is still to be asked: of scores only those candidates of which nothing is known."""
    if question.kind == "compare" or not any(cached):
        return question
    places = [place for place, value in enumerate(cached) if value is None]

    def of(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[place] for place in places) if values else values

    q = question
    return replace(q, candidates=of(q.candidates), picks=of(q.picks), known=of(q.known), ids=of(q.ids))


def whole(
    asked: Intent,
    answer: Answer,
    brought: Mapping[Key, Sequence[Known]] | None = None,
    *,
    missing: str = AWAITED,
) -> Answer:
    """The answer to all of a question.

    Args:
        answer: to the rest, or one that this made before other questions brought their values.
        brought: the values that other questions have.
        missing: the mark of a value that is not there yet.
    """
    if not any(asked.cached):
        return answer
    given = values_of(answer)
    if len(given) == len(asked.cached):
        given = [value for value, cached in zip(given, asked.cached, strict=True) if cached is None]
    fresh = iter(given)
    own = [next(fresh) if cached is None else None for cached in asked.cached]
    found: dict[Key, Sequence[Known | None]] = {**(brought or {}), asked.question.key: own}
    values = []
    for place, cached in enumerate(asked.cached):
        value = _brought(cached, found) if isinstance(cached, Awaited) else cached or own[place]
        values.append(value or Known(0.5, cast(Mark, missing)))
    scores = values[0].scores if asked.question.kind == "compare" else ()
    return replace(
        answer,
        values=tuple(value.value for value in values),
        marks=tuple(value.mark for value in values),
        scores=scores,
    )


def values_of(answer: Answer) -> list[Known]:
    return [
        Known(value, mark, answer.scores) for value, mark in zip(answer.values, answer.marks, strict=True)
    ]


def mean(answers: Sequence[Known]) -> Known:
    """The mean of several answers about the same; a tie only where all are."""
    mark: Mark = "tie" if all(answer.mark == "tie" for answer in answers) else "ok"
    made_of = [tuple(score for score in answer.scores if score is not None) for answer in answers]
    scores = tuple(_mean(each) for each in zip(*made_of, strict=True)) if all(made_of) else ()
    return Known(_mean([answer.value for answer in answers]), mark, scores)


def cached_text(cached: Sequence[Value]) -> str:
    """What is known of the values of a question, as text."""
    return json.dumps([_plain(value) for value in cached]) if cached else "[]"


def cached_values(text: str, purpose: str) -> tuple[Value, ...]:
    """What `cached_text` wrote of a question of this purpose."""
    return tuple(_lifted(value, purpose) for value in json.loads(text)) if text != "[]" else ()


def prompt_text(question: Question) -> str:
    """What is asked about, but for the candidates, in canonical form."""
    messages = [message.parts for message in question.messages]
    content: dict[str, Any] = {
        "messages": messages,
        "reference": question.reference,
        "columns": question.columns,
    }
    content |= {"is_chat": True} if question.is_chat else {}
    return json.dumps(content, ensure_ascii=False, sort_keys=True)


def text_name(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _brought(awaited: Awaited, found: Mapping[Key, Sequence[Known | None]]) -> Known | None:
    """The mean of what was known and of what has been answered since; where none of it is a value, the mark
    of the first. None: some are missing."""
    values = list(awaited.known)
    for key, place, is_turned in awaited.sources:
        value = found[key][place] if key in found else None
        if value is None:
            return None
        values.append(value.turned(is_turned))
    usable = [value for value in values if value.mark in ("ok", "tie")]
    return mean(usable) if usable else values[0]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _plain(value: Value) -> Any:
    if isinstance(value, Awaited):
        sources = [
            (s.key.step, s.key.round, s.key.occurrence, s.key.index, s.place, s.is_turned)
            for s in value.sources
        ]
        return {"of": sources, "known": [_plain(known) for known in value.known]}
    return value and (value if value.scores else value[:2])


def _lifted(value: Any, purpose: str) -> Value:
    if isinstance(value, dict):
        sources = tuple(
            Source(Key(purpose, *address), place, is_turned) for *address, place, is_turned in value["of"]
        )
        return Awaited(sources, tuple(_known(known) for known in value["known"]))
    return value and _known(value)


def _known(value: Sequence[Any]) -> Known:
    return Known(value[0], value[1], tuple(value[2]) if len(value) > 2 else ())
