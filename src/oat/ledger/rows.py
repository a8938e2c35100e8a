"""Converts questions and answers to rows of the ledger's tables (`ledger/schema.py`), and back.

The functions that read rows raise ValueError, TypeError or LookupError if a row is damaged.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from oat import wire
from oat.ledger import schema
from oat.ledger.intents import AWAITED, Intent, cached_text, cached_values
from oat.types import Answer, Key, Message, Question

NEW_QUESTION_COLUMNS = (
    "id, purpose, step, round, occurrence, number, position, member, kind, oracle, prompt, candidates, "
    "picks, known, features, cached"
)
"""The columns that `new_question_row` fills."""

QUESTION_COLUMNS = (
    f"q.id, {schema.KEY}, q.kind, q.oracle, q.prompt, q.candidates, q.picks, q.known, q.features, "
    "q.member, q.ticket, q.sent, q.cached"
)
"""The columns of the table `questions`, alias `q`, that `question_of` reads."""

ANSWER_COLUMNS = "vals, marks, label, queries, cost, answered_by, seconds, tokens, scores"
"""The columns of the table `answers`, without the question's id. `answer_row` fills them in this order."""

_SCALARS = {str, int, float, bool, type(None)}
"""Types whose values come back unchanged from JSON."""


def new_question_row(
    intent: Intent, position: int, prompt: str, candidates: Sequence[str]
) -> tuple[Any, ...]:
    """Return the row of a question, with the columns `NEW_QUESTION_COLUMNS`.

    Args:
        position: the question's place in its round.
        prompt: the name (`text_name`) of its prompt's text.
        candidates: the names of its candidates' texts.
    """
    question, key = intent.question, intent.question.key
    place = (intent.id, key.purpose, key.step, key.round, key.occurrence, key.index, position, intent.member)
    features = None if question.features is None else wire.encode(question.features)
    texts = (prompt, list_text(candidates), common_text(question.picks), list_text(question.known))
    return (*place, question.kind, question.oracle, *texts, features, cached_text(intent.cached))


def as_read(question: Question, prompt: str) -> Question:
    """Return a question as the tables would give it back. They store its columns as JSON, which turns a tuple
    into a list.

    Args:
        prompt: the question's `prompt_text`.
    """
    if all(type(value) in _SCALARS for value in question.columns.values()):
        return question
    return replace(question, columns=json.loads(prompt)["columns"])


def text_names(row: Sequence[Any]) -> tuple[str, ...]:
    """The names of the texts of a row of `QUESTION_COLUMNS`: its prompt, then its candidates."""
    return (row[8], *json.loads(row[9]))


def question_of(row: Sequence[Any], texts: Mapping[str, str]) -> Intent:
    """Return the intent of a row of `QUESTION_COLUMNS`.

    Args:
        texts: the texts by name, at least those of `text_names`.
    """
    id, *address = row[:6]
    kind, oracle, _, _, picks, known, features, member, ticket, sent, cached = row[6:]
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
    )
    return Intent(id, question, member, ticket, sent, cached_values(cached, question.key.purpose))


def answer_row(answer: Answer, label: int | None) -> tuple[Any, ...]:
    """A row of `ANSWER_COLUMNS`."""
    took = (answer.queries, answer.cost, answer.by, answer.seconds, answer.tokens)
    return (list_text(answer.values), common_text(answer.marks), label, *took, list_text(answer.scores))


def answer_of(key: Key, row: Sequence[Any]) -> tuple[Answer, int | None]:
    """The answer and the label of a row of `ANSWER_COLUMNS`."""
    values, marks, label, queries, cost, by, seconds, tokens, scores = row
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
    )
    return answer, label


def answered_state(answer: Answer) -> int:
    """The value of the column `answered` of the table `waiting`, for a question with this answer."""
    return -1 if AWAITED in answer.marks else 2 if "unpaid" in answer.marks else 1


def list_text(values: Sequence[Any]) -> str:
    """A list as JSON."""
    return json.dumps(values) if values else "[]"


def list_values(text: str) -> tuple[Any, ...]:
    """The values of a list as JSON."""
    return tuple(json.loads(text)) if text != "[]" else ()


@functools.lru_cache(4096)
def common_text(values: tuple[int | str, ...]) -> str:
    """Return what `list_text` returns, from a cache. It is for picks and marks, which have few different
    values."""
    return list_text(values)


@functools.lru_cache(4096)
def common_values(text: str) -> tuple[Any, ...]:
    """Return what `list_values` returns, from a cache."""
    return list_values(text)
