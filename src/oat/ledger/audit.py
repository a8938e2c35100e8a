"""Checks that a ledger does not contradict itself: its rows, its hashes, and the values in its cache."""

import json
import math
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any, get_args

from oat.errors import LedgerError
from oat.ledger.intents import text_name
from oat.ledger.reader import Reader
from oat.ledger.schema import sources_of, steps_of
from oat.types import Mark, StepUnit

UNREADABLE = (sqlite3.DatabaseError, ValueError, TypeError, AttributeError, LookupError)
"""The errors that code raises when it reads damaged rows."""

_SIZE = "CASE q.kind WHEN 'compare' THEN 1 ELSE json_array_length(q.candidates) END"
"""The number of values in the answer to a question `q`."""
_MARKS = ", ".join(repr(mark) for mark in get_args(Mark))


def _each(column: str) -> str:
    """Return an SQL expression that lists the entries of a JSON column. A text that is not JSON has no
    entries here; another check reports it."""
    return f"json_each(CASE WHEN json_valid({column}) THEN {column} ELSE '[]' END)"


_CONTRADICTIONS = {
    "an answer does not have one value and one mark for each item of its question": f"""
        SELECT a.question FROM answers a JOIN questions q ON q.id = a.question
        WHERE CASE WHEN json_valid(a.vals) AND json_valid(a.marks)
            THEN json_array_length(a.vals) != {_SIZE} OR json_array_length(a.marks) != {_SIZE}
            ELSE TRUE END""",
    "a value of an answer is no number, or no probability where two were compared": f"""
        SELECT DISTINCT a.question FROM answers a JOIN questions q ON q.id = a.question, {_each("a.vals")} v
        WHERE v.type NOT IN ('real', 'integer') OR (q.kind = 'compare' AND v.value NOT BETWEEN 0 AND 1)""",
    f"a mark of an answer is none of {', '.join(get_args(Mark))}": f"""
        SELECT DISTINCT a.question FROM answers a LEFT JOIN waiting w ON w.question = a.question,
            {_each("a.marks")} m
        WHERE m.type != 'text'
            OR (m.value NOT IN ({_MARKS}) AND (m.value != 'awaited' OR w.answered IS NOT -1))""",
    "a label stands where no two were compared, or is neither of the two": """
        SELECT a.question FROM answers a JOIN questions q ON q.id = a.question
        WHERE a.label IS NOT NULL
            AND (q.kind != 'compare' OR a.label NOT IN (0, 1) OR a.marks != '["ok"]')""",
    "what a step learned from does not stand at the places from the first to the last": """
        SELECT purpose, step FROM (
            SELECT purpose, step, position < 0 AS late,
                CASE WHEN position < 0 THEN -1 - position ELSE position END AS place
            FROM taken)
        GROUP BY purpose, step, late HAVING MIN(place) != 0 OR MAX(place) != COUNT(*) - 1""",
    "a round has more or fewer questions than were asked": """
        SELECT r.purpose, r.step, r.round FROM rounds r LEFT JOIN questions q
            ON (q.purpose, q.step, q.round) = (r.purpose, r.step, r.round)
        GROUP BY r.purpose, r.step, r.round HAVING COUNT(q.id) != r.questions""",
    "a step learned from a question without an answer": """
        SELECT t.purpose, t.step, t.position FROM taken t LEFT JOIN answers a ON a.question = t.question
        WHERE a.question IS NULL""",
    "the prompt of a question is missing": """
        SELECT q.id FROM questions q LEFT JOIN texts x ON x.hash = q.prompt WHERE x.hash IS NULL""",
    "a candidate of a question is missing": """
        SELECT q.id FROM questions q, json_each(q.candidates) c LEFT JOIN texts x ON x.hash = c.value
        WHERE x.hash IS NULL""",
    "a step learned from questions and has no record": """
        SELECT t.purpose, t.step FROM taken t LEFT JOIN takes k ON (k.purpose, k.step) = (t.purpose, t.step)
        WHERE k.step IS NULL""",
    "a question is neither waiting nor taken, or both": """
        SELECT q.id FROM questions q
        LEFT JOIN taken t ON t.question = q.id LEFT JOIN waiting w ON w.question = q.id
        WHERE (t.question IS NULL) = (w.question IS NULL)""",
    "a waiting question is marked answered and is not, or the other way round": """
        SELECT w.question FROM waiting w LEFT JOIN answers a ON a.question = w.question
        WHERE (a.question IS NOT NULL) != (w.answered != 0)""",
    "a budget does not have the sum of its answers": """
        SELECT p.purpose FROM purses p LEFT JOIN questions q ON q.purpose = p.purpose
        LEFT JOIN answers a ON a.question = q.id LEFT JOIN taken t ON t.question = q.id
        GROUP BY p.purpose HAVING TOTAL(a.queries) != p.queries OR TOTAL(a.tokens) != p.tokens
            OR TOTAL(CASE WHEN t.question IS NOT NULL THEN a.queries END) != p.taken_queries
            OR TOTAL(CASE WHEN t.question IS NOT NULL THEN a.tokens END) != p.taken_tokens
            OR ABS(TOTAL(a.cost) - p.cost) > 1e-6 * (1 + p.cost)
            OR ABS(TOTAL(CASE WHEN t.question IS NOT NULL THEN a.cost END) - p.taken_cost)
                > 1e-6 * (1 + p.cost)""",
    "a purpose has questions and no budget": """
        SELECT DISTINCT purpose FROM questions WHERE purpose NOT IN (SELECT purpose FROM purses)""",
    "a wave does not follow the one before, or has another sum than its answers": """
        SELECT n.purpose, n.number FROM waves n JOIN waves w
            ON (w.purpose, w.number) = (n.purpose, n.number - 1)
        WHERE n.first <= w.last OR ABS(n.cost - w.cost - (
            SELECT TOTAL(a.cost) FROM questions q JOIN answers a ON a.question = q.id
            WHERE q.purpose = n.purpose AND q.id >= w.first AND q.id < n.first)) > 1e-6 * (1 + n.cost)""",
}
"""The SQL queries of the checks, by message. In a sound ledger, each of them finds nothing."""


def contradictions(store: Reader) -> list[str]:
    """Check a ledger.

    Returns:
        A sentence for each fault; empty if the ledger has none.
    """
    checks: dict[str, Callable[[Reader], Iterator[str]]]
    checks = {
        "the file": _damage,
        "trajectories": _other_trajectories,
        "texts": _other_texts,
        "what is known from earlier answers": _made_up,
        "rewards of steps": _other_steps,
        "scores of sources": _other_sources,
    }
    checks |= {what: partial(_rows, sql, what) for what, sql in _CONTRADICTIONS.items()}
    found: list[str] = []
    for what, check in checks.items():
        try:
            found.extend(check(store))
        except UNREADABLE as error:
            found.append(f"{what}: cannot be checked ({type(error).__name__}: {error})")
    return found


def _damage(store: Reader) -> Iterator[str]:
    for (line,) in store.db.execute("PRAGMA integrity_check"):
        if line != "ok":
            yield f"SQLite says: {line}"
    for table, row, to, _ in store.db.execute("PRAGMA foreign_key_check"):
        yield f"table {table}, row {row}: points to a row of {to} that is not there"


def _other_trajectories(store: Reader) -> Iterator[str]:
    """Yield a sentence for each round whose trajectories are missing or damaged. A run that still goes on may
    have dropped some meanwhile."""
    of_rounds = "SELECT purpose, step, round, groups FROM rounds WHERE kept = 1 GROUP BY groups"
    for *place, name in store.rows(of_rounds):
        try:
            store.trajectories(name)
        except LedgerError as error:
            if store.keeps(*place):
                what = "the trajectories of a round are missing or damaged"
                yield f"{what}: {' '.join(map(str, place))}: {error}"


def _other_texts(store: Reader) -> Iterator[str]:
    for name, text in store.db.execute("SELECT hash, text FROM texts"):
        if text_name(text) != name:
            yield f"text {name[:12]}: its content has another hash"


def _made_up(store: Reader) -> Iterator[str]:
    """Yield a sentence for each cached value that no answer gave.

    A cached value names the step that took it, the oracle, the mark and the rewards of its steps. If a value
    appears in the cache more often than in this step's answers of this oracle with this mark and these
    rewards, there is a sentence for each time too many. Responses are not compared, because a cache key is a
    hash that does not show the response.
    """
    given: Counter[tuple[Any, ...]] = Counter()
    sql = """SELECT t.purpose, t.step, q.oracle, q.kind, q.candidates, q.cached, a.vals, a.marks, a.steps
        FROM taken t JOIN questions q ON q.id = t.question JOIN answers a ON a.question = q.id"""
    for *place, kind, texts, cached, values, marks, steps in store.db.execute(sql):
        names = json.loads(texts)
        known = json.loads(cached)
        own_steps = steps_of(steps)[0] or ((),) * len(names)
        answer = list(zip(json.loads(values), json.loads(marks), own_steps, strict=False))
        is_turned = kind == "compare" and names[0] > names[1]
        fresh = [one for one, before in zip_longest(answer, known) if before is None]
        given.update((*place, 1.0 - value if is_turned else value, mark, own) for value, mark, own in fresh)
    for *place, value, mark, steps, item, number in store.db.execute(
        "SELECT purpose, step, oracle, value, mark, steps, item, number FROM cache"
    ):
        own = (steps_of(steps)[0] or ((),))[0]
        given[*place, value, mark, own] -= 1
        if given[*place, value, mark, own] < 0:
            yield f"what is known of {item[:12]} ({number}) is no answer that step {place[1]} took"


def _other_steps(store: Reader) -> Iterator[str]:
    """Yield a sentence for each answer whose step rewards do not fit its question or its values."""
    sql = """SELECT a.question, q.kind, q.candidates, a.vals, a.marks, a.steps
        FROM answers a JOIN questions q ON q.id = a.question WHERE a.steps != '[]'"""
    for id, kind, names, values, marks, text in store.db.execute(sql).fetchall():
        steps, unit = steps_of(text)
        texts, numbers = json.loads(names), json.loads(values)
        if kind != "score" or unit not in get_args(StepUnit) or len(steps) != len(texts) or not any(steps):
            yield f"the rewards of steps do not have one entry for each candidate: {id}"
            continue
        for name, value, mark, own in zip(texts, numbers, json.loads(marks), steps, strict=True):
            ends = [end for end, _ in own]
            if ends != sorted(set(ends)):
                yield f"the ends of steps do not ascend: {id}"
            if own and (ends[0] < 1 or (unit == "characters" and ends[-1] > _length(store, name))):
                yield f"a step ends outside its response: {id}"
            if own and (mark != "ok" or value != math.fsum(reward for _, reward in own)):
                yield f"a value is not the sum of the rewards of its steps: {id}"


def _length(store: Reader, name: str) -> int:
    row = store.db.execute("SELECT text FROM texts WHERE hash = ?", (name,)).fetchone()
    return len(row[0]) if row else sys.maxsize


def _other_sources(store: Reader) -> Iterator[str]:
    """Yield a sentence for each answer whose sources do not have a score or none for each candidate."""
    sql = """SELECT a.question, q.candidates, a.sources FROM answers a JOIN questions q ON q.id = a.question
        WHERE a.sources != '{}'"""
    for id, names, text in store.db.execute(sql).fetchall():
        size = len(json.loads(names))
        for scores in sources_of(text).values():
            is_sound = all(score is None or isinstance(score, int | float) for score in scores)
            if len(scores) != size or not is_sound:
                yield f"a source does not have one score or none for each candidate: {id}"


def _rows(sql: str, what: str, store: Reader) -> Iterator[str]:
    for row in store.db.execute(sql):
        yield f"{what}: {' '.join(map(str, row))}"
