"""Converts questions and answers to rows of the ledger's tables (`ledger/schema.py`), and rows to questions
and answers.

The functions that read rows raise ValueError, TypeError or LookupError if a row is damaged.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from oat import wire
from oat.ledger import schema
from oat.ledger.intents import AWAITED, Intent, Known, cached_text, cached_values
from oat.types import Answer, Key, Mark, Message, Question, Steps, StepUnit

NEW_QUESTION_COLUMNS = (
    "id, purpose, step, round, occurrence, number, position, member, kind, oracle, prompt, candidates, "
    "picks, known, features, cached, notes"
)
"""The columns that `new_question_row` fills."""

QUESTION_COLUMNS = (
    f"q.id, {schema.KEY}, q.kind, q.oracle, q.prompt, q.candidates, q.picks, q.known, q.features, "
    "q.member, q.ticket, q.sent, q.cached, q.notes"
)
"""The columns that `question_of` reads, of the table `questions` under the alias `q`."""

ANSWER_COLUMNS = "vals, marks, label, queries, cost, answered_by, seconds, tokens, scores, steps, sources"
"""The columns of the table `answers`, without the question's id, in the order in which `answer_row` fills
them."""

_SCALARS = {str, int, float, bool, type(None)}
"""The types whose values JSON gives back unchanged."""


def new_question_row(
    intent: Intent, position: int, prompt: str, candidates: Sequence[str]
) -> tuple[Any, ...]:
    """Return the row of a question, with the columns `NEW_QUESTION_COLUMNS`.

    Args:
        position: the question's place in its round.
        prompt: the name of the prompt's text (`text_name`).
        candidates: the names of the candidates' texts.
    """
    question, key = intent.question, intent.question.key
    place = (intent.id, key.purpose, key.step, key.round, key.occurrence, key.index, position, intent.member)
    features = None if question.features is None else wire.encode(question.features)
    texts = (prompt, list_text(candidates), common_text(question.picks), list_text(question.known))
    notes = dict_text(question.notes)
    return (*place, question.kind, question.oracle, *texts, features, cached_text(intent.cached), notes)


def as_read(question: Question, prompt: str) -> Question:
    """Return a question as the tables would give it back. The tables store the prompt's columns as JSON,
    which turns a tuple into a list.

    Args:
        prompt: the question's `prompt_text`.
    """
    if all(type(value) in _SCALARS for value in question.columns.values()):
        return question
    return replace(question, columns=json.loads(prompt)["columns"])


def text_names(row: Sequence[Any]) -> tuple[str, ...]:
    """Return the names (`text_name`) of a question's texts: first the prompt's, then the candidates'.

    Args:
        row: the question's values of `QUESTION_COLUMNS`.
    """
    return (row[8], *json.loads(row[9]))


def question_of(row: Sequence[Any], texts: Mapping[str, str]) -> Intent:
    """Return the intent in a row of `QUESTION_COLUMNS`.

    Args:
        texts: the texts by name; those named by `text_names` must be present.
    """
    id, *address = row[:6]
    kind, oracle, _, _, picks, known, features, member, ticket, sent, cached, notes = row[6:]
    prompt, *candidates = [texts[name] for name in text_names(row)]
    content = json.loads(prompt)
    question = Question(
        Key(*address),
        kind,
        tuple(Message(*message) for message in content["messages"]),
        tuple(candidates),
        common_values(picks),
        content["reference"],
        content["columns"],
        oracle,
        list_values(known),
        None if features is None else wire.decode(features),
        content.get("is_chat", False),
        notes=json.loads(notes) if notes != "{}" else {},
    )
    return Intent(id, question, member, ticket, sent, cached_values(cached, question.key.purpose))


def answer_row(answer: Answer, label: int | None) -> tuple[Any, ...]:
    """Return the row of an answer, with the columns `ANSWER_COLUMNS`."""
    took = (answer.queries, answer.cost, answer.by, answer.seconds, answer.tokens)
    parts = (list_text(answer.scores), steps_text(answer.steps, answer.step_unit), dict_text(answer.sources))
    return (list_text(answer.values), common_text(answer.marks), label, *took, *parts)


def answer_of(key: Key, row: Sequence[Any]) -> tuple[Answer, int | None]:
    """Return the answer and the label in a row of `ANSWER_COLUMNS`."""
    values, marks, label, queries, cost, by, seconds, tokens, scores, steps, sources = row
    answer = Answer(
        key,
        list_values(values),
        common_values(marks),
        queries,
        cost,
        by,
        seconds,
        tokens,
        list_values(scores),
        *steps_of(steps),
        sources_of(sources),
    )
    return answer, label


def cached_known(value: float, mark: Mark, scores: str, steps: str, sources: str) -> Known:
    """Return the value in a row of the table `cache`."""
    own, unit = steps_of(steps)
    return Known(
        value, mark, list_values(scores), own[0] if own else (), unit, (*sources_of(sources).items(),)
    )


def answered_state(answer: Answer) -> int:
    """Return the value of the column `answered` of the table `waiting` for a question with this answer."""
    return -1 if AWAITED in answer.marks else 2 if "unpaid" in answer.marks else 1


def steps_text(steps: Sequence[Steps], unit: StepUnit) -> str:
    """Return the step rewards of some candidates as JSON text: a list of the unit, and for each candidate the
    list of its pairs of an end and a reward. Without steps, the list is empty."""
    return json.dumps([unit, *steps]) if any(steps) else "[]"


def steps_of(text: str) -> tuple[tuple[Steps, ...], StepUnit]:
    """Return the step rewards and their unit in a text that `steps_text` wrote."""
    if text == "[]":
        return (), "characters"
    unit, *candidates = json.loads(text)
    return tuple(tuple((end, reward) for end, reward in steps) for steps in candidates), unit


def dict_text(values: Mapping[str, Any]) -> str:
    """Return a dict of lists or numbers as JSON text."""
    return json.dumps(values, ensure_ascii=False) if values else "{}"


def sources_of(text: str) -> dict[str, tuple[float | None, ...]]:
    """Return `Answer.sources` from a text that `dict_text` wrote."""
    return {name: tuple(scores) for name, scores in json.loads(text).items()} if text != "{}" else {}


def list_text(values: Sequence[Any]) -> str:
    """Return a list as JSON text."""
    return json.dumps(values) if values else "[]"


def list_values(text: str) -> tuple[Any, ...]:
    """Return the values in a text that `list_text` wrote."""
    return tuple(json.loads(text)) if text != "[]" else ()


@functools.lru_cache(4096)
def common_text(values: tuple[int | str, ...]) -> str:
    """Return values as JSON text, as `list_text` does. The texts are cached, because the picks and the marks
    of most questions are equal."""
    return list_text(values)


@functools.lru_cache(4096)
def common_values(text: str) -> tuple[Any, ...]:
    """Return the values in a text that `common_text` or `list_text` wrote. They are cached."""
    return list_values(text)
