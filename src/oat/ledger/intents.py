"""Intents: questions as the ledger records them.

When a question is recorded, each value of its answer is in one of three states:

* `Known`: earlier answers gave the value.
* `Awaited`: equal questions that are being asked will bring the value.
* None: an oracle is asked for the value.

This module says which part of a question is sent. It also puts the complete answer together from values of
all three states.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, cast

from oat.types import Answer, Key, Mark, Price, Question, Steps, StepUnit

AWAITED: Final = "awaited"
"""The mark of a value that will come from the answer to an equal question. An answer with this mark is
recorded as soon as its other values have come."""


_MISSING: Final[tuple[Any, ...]] = ((), (), "characters", ())
"""What a `Known` has after its value and its mark where a text of an older ledger, or one without steps and
sources, has nothing."""


class Known(NamedTuple):
    """A value that an oracle gave.

    Attributes:
        scores: as in `Answer`.
        steps: the step rewards of the candidate; empty if it has none.
        step_unit: as in `Answer`.
        sources: pairs of a source and its scores, which are two for a comparison and one for a candidate
            that was scored.
    """

    value: float
    mark: Mark
    scores: tuple[float | None, ...] = ()
    steps: Steps = ()
    step_unit: StepUnit = "characters"
    sources: tuple[tuple[str, tuple[float | None, ...]], ...] = ()

    def turned(self, is_turned: bool = True) -> "Known":
        """Return the value that a comparison has if its two texts change places. If `is_turned` is False,
        return the value unchanged."""
        if not is_turned:
            return self
        sources = tuple((source, scores[::-1]) for source, scores in self.sources)
        return self._replace(value=1.0 - self.value, scores=self.scores[::-1], sources=sources)


class ValueAddress(NamedTuple):
    """The address of one value in the answer to another question of the same purpose.

    Attributes:
        key: the other question's key.
        place: the index of the value in the other question's answer.
        is_turned: True if the other question compares the same two texts in reverse order.
    """

    key: Key
    place: int
    is_turned: bool


@dataclass(frozen=True)
class Awaited:
    """A value that is not asked for, because an oracle is already being asked about an equal response (or
    pair). `_brought` makes the value from the values that the attributes name.

    Attributes:
        brought_by: the addresses of values that have not come yet.
        known: values of equal responses (or pairs) that are stored already; empty unless `oracle.repeats` is
            above 1.
    """

    brought_by: tuple[ValueAddress, ...]
    known: tuple[Known, ...] = ()


Value = Known | Awaited | None
"""The state of a value when its question is recorded. None: the value is unknown, so an oracle is asked for
it."""


@dataclass(frozen=True)
class Quote:
    """The terms on which a question is recorded.

    Attributes:
        cached: for each value of the answer, whether it is known, awaited from another question, or unknown;
            empty if all are unknown.
        price: the highest price of the values that the oracle is asked for.
    """

    cached: tuple[Value, ...] = ()
    price: Price = field(default_factory=Price)


@dataclass(frozen=True, eq=False)
class Intent:
    """A recorded question.

    Attributes:
        id: the number of its row in the ledger.
        member: the index of its group among the round's groups.
        ticket: the ticket of a durable oracle, which keeps questions across restarts. None if the ledger had
            no ticket when it read this intent.
        sent: the time at which that ticket was given, in seconds since 1970; None if the ledger does not have
            it.
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
        """True if an oracle is asked for at least one of the question's values."""
        return not self.cached or None in self.cached

    @property
    def rest(self) -> Question:
        """The part of the question that is sent; see the function `rest`."""
        return rest(self.question, self.cached)

    @property
    def others(self) -> set[Key]:
        """The keys of the other questions that bring some of this question's values."""
        keys = {
            address.key for value in self.cached if isinstance(value, Awaited) for address in value.brought_by
        }
        return keys - {self.question.key}


def rest(question: Question, cached: Sequence[Value]) -> Question:
    """Return the part of a question that is sent. A comparison is sent complete. A question for scores is
    sent with only those candidates whose values are unknown.

    Args:
        cached: the state of each value; empty if all are unknown.
    """
    if question.kind == "compare" or not any(cached):
        return question
    places = [place for place, value in enumerate(cached) if value is None]

    def of(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[place] for place in places) if values else values

    q = question
    return replace(q, candidates=of(q.candidates), picks=of(q.picks), known=of(q.known), ids=of(q.ids))


def whole(
    intent: Intent,
    answer: Answer,
    brought: Mapping[Key, Sequence[Known]] | None = None,
    *,
    missing: Mark | Literal["awaited"] = AWAITED,
) -> Answer:
    """Put the answer to a complete question together from its parts.

    Args:
        answer: the answer to the part that was sent, or the result of an earlier call that still awaits
            values.
        brought: values from the answers to other questions, by the key of the question.
        missing: the mark for a value that has not come yet.
    """
    if not any(intent.cached):
        return answer
    given = values_of(answer)
    if len(given) == len(intent.cached):
        given = [value for value, cached in zip(given, intent.cached, strict=True) if cached is None]
    fresh = iter(given)
    own = [next(fresh) if cached is None else None for cached in intent.cached]
    found: dict[Key, Sequence[Known | None]] = {**(brought or {}), intent.question.key: own}
    values = []
    for place, cached in enumerate(intent.cached):
        value = _brought(cached, found) if isinstance(cached, Awaited) else cached or own[place]
        values.append(value or Known(0.5, cast(Mark, missing)))
    units = [value.step_unit for value in values if value.steps]
    unit: StepUnit = units[0] if units else "characters"
    steps = tuple(value.steps if value.step_unit == unit else () for value in values) if units else ()
    return replace(
        answer,
        values=tuple(value.value for value in values),
        marks=tuple(value.mark for value in values),
        scores=values[0].scores if intent.question.kind == "compare" else (),
        steps=steps,
        step_unit=unit,
        sources=_joined([value.sources for value in values]),
    )


def values_of(answer: Answer) -> list[Known]:
    """Return the values of an answer in their order. Each is a `Known` with its own mark, with all of the
    answer's scores, and with its own steps and sources."""
    steps = answer.steps or ((),) * len(answer.values)
    given = [*answer.sources.items()]
    found = []
    for place, (value, mark) in enumerate(zip(answer.values, answer.marks, strict=True)):
        is_whole = len(answer.values) == 1
        sources = tuple((name, scores if is_whole else (scores[place],)) for name, scores in given)
        found.append(Known(value, mark, answer.scores, steps[place], answer.step_unit, sources))
    return found


def mean(answers: Sequence[Known]) -> Known:
    """Return the mean of several values of one query. Its mark is `tie` if all these values are ties, else
    `ok`.

    If all of them have step rewards of one unit, the mean has steps too: one at each end that any of them
    has, whose reward is the sum of the rewards at this end, divided by the number of values. The mean is then
    the sum of these rewards. A source's score is the mean of the scores that it gave.
    """
    mark: Mark = "tie" if all(answer.mark == "tie" for answer in answers) else "ok"
    made_of = [tuple(score for score in answer.scores if score is not None) for answer in answers]
    scores = tuple(_mean(each) for each in zip(*made_of, strict=True)) if all(made_of) else ()
    steps, unit = _mean_steps(answers), answers[0].step_unit
    value = math.fsum(reward for _, reward in steps) if steps else _mean([each.value for each in answers])
    return Known(value, mark, scores, steps, unit if steps else "characters", _mean_sources(answers))


def cached_text(cached: Sequence[Value]) -> str:
    """Return the values of a question, each a `Value`, as JSON text for the ledger's tables."""
    return json.dumps([_plain(value) for value in cached]) if cached else "[]"


def cached_values(text: str, purpose: str) -> tuple[Value, ...]:
    """Return the values that `cached_text` wrote into a text. The text lacks the question's purpose."""
    return tuple(_lifted(value, purpose) for value in json.loads(text)) if text != "[]" else ()


def prompt_text(question: Question) -> str:
    """Return a question's prompt as JSON in canonical form: messages, reference, columns, and whether it is a
    chat."""
    messages = [message.parts for message in question.messages]
    content: dict[str, Any] = {
        "messages": messages,
        "reference": question.reference,
        "columns": question.columns,
    }
    content |= {"is_chat": True} if question.is_chat else {}
    return json.dumps(content, ensure_ascii=False, sort_keys=True)


def text_name(text: str) -> str:
    """Return the name under which a text is stored: the first half of its SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _brought(awaited: Awaited, found: Mapping[Key, Sequence[Known | None]]) -> Known | None:
    """Return the value for which `awaited` stands; None if one of the awaited values has not come.

    It is the mean of the known and the awaited values that are marked `ok` or `tie`. If there are none, it is
    the first awaited value.
    """
    values = list(awaited.known)
    for key, place, is_turned in awaited.brought_by:
        value = found[key][place] if key in found else None
        if value is None:
            return None
        values.append(value.turned(is_turned))
    usable = [value for value in values if value.mark in ("ok", "tie")]
    return mean(usable) if usable else values[0]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _mean_steps(answers: Sequence[Known]) -> Steps:
    if not all(answer.steps for answer in answers) or len({answer.step_unit for answer in answers}) > 1:
        return ()
    if len(answers) == 1:
        return answers[0].steps
    at: dict[int, list[float]] = {}
    for end, reward in (step for answer in answers for step in answer.steps):
        at.setdefault(end, []).append(reward)
    return tuple((end, math.fsum(at[end]) / len(answers)) for end in sorted(at))


def _mean_sources(answers: Sequence[Known]) -> tuple[tuple[str, tuple[float | None, ...]], ...]:
    names = dict.fromkeys(name for answer in answers for name, _ in answer.sources)
    found = []
    for name in names:
        given = [dict(answer.sources)[name] for answer in answers if name in dict(answer.sources)]
        columns = [[score for score in scores if score is not None] for scores in zip(*given, strict=True)]
        found.append((name, tuple(_mean(column) if column else None for column in columns)))
    return tuple(found)


def _joined(
    sources: Sequence[tuple[tuple[str, tuple[float | None, ...]], ...]],
) -> dict[str, tuple[float | None, ...]]:
    """Return `Answer.sources`, made of the sources of each value. A candidate about which a source was not
    asked has None."""
    names = dict.fromkeys(name for each in sources for name, _ in each)
    missing: tuple[float | None, ...] = (None,)
    given = [dict(each) for each in sources]
    return {name: tuple(score for each in given for score in each.get(name, missing)) for name in names}


def _plain(value: Value) -> Any:
    if isinstance(value, Awaited):
        addresses = [
            (a.key.step, a.key.round, a.key.occurrence, a.key.index, a.place, a.is_turned)
            for a in value.brought_by
        ]
        return {"of": addresses, "known": [_plain(known) for known in value.known]}
    return value and value[: 6 if value.steps or value.sources else 3 if value.scores else 2]


def _lifted(value: Any, purpose: str) -> Value:
    if isinstance(value, dict):
        addresses = tuple(
            ValueAddress(Key(purpose, *key), place, is_turned) for *key, place, is_turned in value["of"]
        )
        return Awaited(addresses, tuple(_known(known) for known in value["known"]))
    return value and _known(value)


def _known(value: Sequence[Any]) -> Known:
    number, mark, *others = value
    scores, steps, unit, sources = [*others, *_MISSING[len(others) :]]
    pairs = tuple((end, reward) for end, reward in steps)
    return Known(number, mark, tuple(scores), pairs, unit, tuple((name, tuple(own)) for name, own in sources))
