"""Reads a ledger's tables: questions, answers, sums of prices, and trajectories."""

import hashlib
import json
import math
from collections.abc import Collection, Sequence
from typing import Any

from oat import blobs
from oat.errors import LedgerError
from oat.ledger import schema
from oat.ledger.intents import Intent, Known, text_name, values_of
from oat.ledger.schema import (
    ANSWER_COLUMNS,
    QUESTION_COLUMNS,
    Connection,
    answer_of,
    cached_known,
    question_of,
    sources_of,
    text_names,
)
from oat.ledger.trajectory_files import Leftovers
from oat.types import Answer, Group, Key, Price

_TAKEABLE = "w.purpose = ? AND w.answered > 0 AND w.step BETWEEN ? AND ?"


class Reader(Connection):
    """The tables of one run, read only. Its subclass `Store` also writes them."""

    def is_empty(self) -> bool:
        """Return True if no round is recorded."""
        return self._one("SELECT COUNT(*) FROM rounds", ()) == 0

    def has_round(self, purpose: str, step: int, round: int) -> bool:
        """Return True if this round is recorded."""
        sql = "SELECT COUNT(*) FROM rounds WHERE (purpose, step, round) = (?, ?, ?)"
        return self._one(sql, (purpose, step, round)) > 0

    def asked(self, purpose: str, step: int, round: int) -> int:
        """Return the number of questions in recorded rounds before (step, round)."""
        sql = "SELECT COALESCE(SUM(questions), 0) FROM rounds WHERE purpose = ? AND (step, round) < (?, ?)"
        return self._one(sql, (purpose, step, round))

    def groups(self, purpose: str, step: int, round: int) -> list[Group]:
        """Return the groups of a recorded round.

        Raises:
            LedgerError: the trajectories were dropped because every kept checkpoint was past them, or they
                are damaged.
        """
        sql = "SELECT groups FROM rounds WHERE (purpose, step, round) = (?, ?, ?)"
        with self.lock:
            row = self.row(sql, (purpose, step, round))
            try:
                data = b"" if row is None else self.trajectories(row[0])
            except LedgerError:
                if self.keeps(purpose, step, round):
                    raise
                row = None
        if row is None:
            raise LedgerError(
                f"{self.path}: the trajectories of step {step} were dropped once every kept checkpoint "
                "was past them, and are needed now; put a "
                "checkpoint back, or begin anew in another run_dir (tracking.keep_trajectories keeps them)"
            )
        return blobs.unpack(data)

    def keeps(self, purpose: str, step: int, round: int) -> bool:
        """Return True if this round is recorded and its trajectories were not dropped."""
        sql = "SELECT COUNT(*) FROM rounds WHERE (purpose, step, round) = (?, ?, ?) AND kept = 1"
        return self._one(sql, (purpose, step, round)) > 0

    def trajectories(self, name: str) -> bytes:
        """Return the trajectories that a round names, as `blobs.pack` made them.

        Raises:
            LedgerError: they are missing or damaged.
        """
        if not self._has_blobs:
            return self.files.read(name)
        row = self.row("SELECT CAST(data AS BLOB) FROM old.blobs WHERE hash = ?", (name,))
        if row is None or hashlib.sha256(row[0]).hexdigest() != name:
            raise self._damaged(f"blob {str(name)[:12]}")
        data: bytes = row[0]
        return data

    def lost(self, since: int, before: float = math.inf) -> list[str]:
        """Return the names of trajectories that have no file, and that a step from `since` on reads.

        Args:
            before: only rounds that were asked in a step before this one count.
        """
        taken = (
            "SELECT q.purpose, q.step, q.round FROM taken t JOIN questions q ON q.id = t.question "
            "WHERE t.purpose IN (SELECT purpose FROM purses) AND t.step >= ?"  # so that an index serves
        )
        waiting = "SELECT purpose, step, round FROM waiting"
        sql = (
            "SELECT DISTINCT groups FROM rounds WHERE kept = 1 AND step < ? "
            f"AND (step >= ? OR (purpose, step, round) IN ({waiting} UNION {taken}))"
        )
        names = (name for (name,) in self.rows(sql, (before, since, since)))
        return [] if self._has_blobs else self.files.missing(names)

    def leftovers(self) -> Leftovers:
        """Return the files of trajectories that no round names."""
        return self.files.leftovers(self.kept_names())

    def by_id(self, id: int) -> Intent:
        """Return a recorded question by its id."""
        (row,) = self._questions("", "q.id = ?", (id,))
        return row

    def answered(self) -> list[Intent]:
        """Return every answered question, sorted by purpose and then in the order in which they were
        asked."""
        return self._questions(
            "JOIN answers a ON a.question = q.id", "TRUE", (), order="q.purpose, q.step, q.round, q.position"
        )

    def unanswered(self) -> list[Intent]:
        """Return every question without an answer, of every purpose, oldest first."""
        return self.waiting(0)

    def waiting(self, *answered: int) -> list[Intent]:
        """Return questions of every purpose that no step has taken, oldest first.

        Args:
            answered: the wanted values of the column `answered` (`schema.TABLES`).
        """
        return self._questions(
            "JOIN waiting w ON w.question = q.id",
            f"w.answered IN ({', '.join('?' * len(answered))})",
            answered,
        )

    def states(self) -> dict[int, int]:
        """Return the column `answered` of each question that no step has taken, by id."""
        return dict(self.rows("SELECT question, answered FROM waiting"))

    def lacks(self, purpose: str, step: int, count: int, oldest: int = 0) -> bool:
        """Return True if a step has to wait for an answer.

        The step waits for two kinds of questions: the next `count` questions that were asked in the steps
        `oldest` to `step`, and all that were asked before step `oldest`. Questions that a step has taken do
        not count. Unpaid questions count as answered.
        """
        old = "SELECT 1 FROM waiting w WHERE w.purpose = ? AND w.step < ? AND w.answered < 1"
        rounds = "w.purpose = ? AND w.step BETWEEN ? AND ?"
        new = f"SELECT w.answered FROM waiting w WHERE {rounds} ORDER BY w.step, w.round, w.position LIMIT ?"
        sql = f"SELECT EXISTS ({old}) OR EXISTS (SELECT 1 FROM ({new}) WHERE answered < 1)"
        return bool(self._one(sql, (purpose, oldest, purpose, oldest, step, count)))

    def num_takeable(self, purpose: str, step: int, oldest: int = 0) -> int:
        """Return the number of paid questions among those that `takeable_ids` returns without a limit."""
        return self._one(
            f"SELECT COUNT(*) FROM waiting w WHERE {_TAKEABLE} AND w.answered = 1", (purpose, oldest, step)
        )

    def takeable_ids(self, purpose: str, step: int, limit: int, oldest: int = 0) -> list[int]:
        """Return ids of questions in the order in which the questions were asked. These are the questions of
        the steps `oldest` to `step` that are answered or unpaid and were not taken yet.

        Args:
            limit: the largest number of ids to return; -1: no limit.
        """
        sql = (
            f"SELECT w.question FROM waiting w WHERE {_TAKEABLE} ORDER BY w.step, w.round, w.position LIMIT ?"
        )
        return [id for (id,) in self.rows(sql, (purpose, oldest, step, limit))]

    def num_open(self, purpose: str) -> int:
        """Return the number of questions that no step has taken, without the unpaid ones."""
        return self._one("SELECT COUNT(*) FROM waiting WHERE purpose = ? AND answered < 2", (purpose,))

    def unpaid_ids(self, purpose: str) -> list[int]:
        """Return the ids of unpaid questions that no step has taken."""
        sql = "SELECT question FROM waiting WHERE purpose = ? AND answered = 2"
        return [id for (id,) in self.rows(sql, (purpose,))]

    def values(self, key: Key) -> list[Known] | None:
        """Return the values of the answer to a question; None if it has no answer."""
        sql = (
            f"SELECT {ANSWER_COLUMNS} FROM answers a JOIN questions q ON q.id = a.question "
            f"WHERE ({schema.KEY}) = (?, ?, ?, ?, ?)"
        )
        place = (key.purpose, key.step, key.round, key.occurrence, key.index)
        row = self.row(sql, place)
        return None if row is None else values_of(answer_of(key, row)[0])

    def answer(self, intent: Intent) -> tuple[Answer, int | None]:
        """Return the answer to an answered question, and its label (`Item.label`): the index of the candidate
        that won, or None."""
        ((_, answer, label),) = self.answers([intent])
        return answer, label

    def answers(self, intents: Sequence[Intent]) -> list[tuple[Intent, Answer, int | None]]:
        """Return each of these intents, in order, with its answer and its label (`Item.label`). All must be
        answered."""
        sql = f"SELECT question, {ANSWER_COLUMNS} FROM answers WHERE question IN ({{}})"
        found = {id: answer for id, *answer in self._each(sql, [intent.id for intent in intents])}
        with self._reading():
            return [(intent, *answer_of(intent.question.key, found[intent.id])) for intent in intents]

    def source_labels(self) -> list[str]:
        """Return the labels of the sources whose scores are in answers to questions of training and of
        evaluations, in the order of the questions."""
        sql = (
            "SELECT a.sources FROM answers a JOIN questions q ON q.id = a.question "
            "WHERE q.purpose IN ('train', 'eval') AND a.sources != '{}' ORDER BY q.id"
        )
        with self._reading():
            return [*dict.fromkeys(label for (text,) in self.rows(sql, ()) for label in sources_of(text))]

    def cached(self, purpose: str, oracle: str, item: str) -> list[Known]:
        """Return the answers that the cache has under a key, in the order in which they were taken.

        Args:
            purpose, oracle, item: the cache key.
        """
        sql = (
            "SELECT value, mark, scores, steps, sources FROM cache "
            "WHERE purpose = ? AND oracle = ? AND item = ? ORDER BY number"
        )
        return [cached_known(*row) for row in self.rows(sql, (purpose, oracle, item))]

    def has_take(self, purpose: str, step: int) -> bool:
        """Return True if the ledger has a record of what a step took."""
        return self._one("SELECT COUNT(*) FROM takes WHERE (purpose, step) = (?, ?)", (purpose, step)) > 0

    def take_price(self, purpose: str, step: int) -> Price:
        """Return the price of all answers that this step and earlier ones have taken. If schema version 1 or
        2 recorded the take, the queries also count answers that had come but were not taken, and the tokens
        are 0."""
        sql = "SELECT queries, tokens, cost FROM takes WHERE (purpose, step) = (?, ?)"
        return Price(*self._only(sql, purpose, step))

    def pairs_before(self, purpose: str, step: int) -> int:
        """Return the number of compared pairs for which the steps before `step` took paid answers."""
        sql = "SELECT pairs FROM takes WHERE purpose = ? AND step < ? ORDER BY step DESC LIMIT 1"
        (pairs,) = self.row(sql, (purpose, step)) or (0,)
        return pairs

    def take_refused(self, purpose: str, step: int) -> Price | None:
        """Return the price of the cheapest unpaid question that a step took; None if all were paid."""
        (refused,) = self._only("SELECT refused FROM takes WHERE (purpose, step) = (?, ?)", purpose, step)
        return None if refused is None else Price(*json.loads(refused))

    def last_refused(self, purpose: str, step: int) -> Price | None:
        """Return the price that the budget refused at the newest take of `step` or of an earlier step. Return
        None if there is no such take, or if the budget refused nothing at this take."""
        sql = "SELECT refused FROM takes WHERE purpose = ? AND step <= ? ORDER BY step DESC LIMIT 1"
        (refused,) = self.row(sql, (purpose, step)) or (None,)
        return None if refused is None else Price(*json.loads(refused))

    def taken(self, purpose: str, step: int) -> list[Intent]:
        """Return the questions that a step learns from, or that an evaluation measures with, in recorded
        order."""
        return self._questions(
            "JOIN taken t ON t.question = q.id",
            "t.purpose = ? AND t.step = ? AND t.position >= 0",
            (purpose, step),
            order="t.position",
        )

    def thrown_away(self, step: int) -> list[Intent]:
        """Return the questions that a step of training asked and took, but does not learn from, in the order
        in which they were asked."""
        return self._questions(
            "JOIN taken t ON t.question = q.id",
            "t.purpose = 'train' AND t.step = ? AND t.position < 0 AND q.step = t.step",
            (step,),
            order="t.position DESC",
        )

    def num_taken(self, purpose: str, step: int) -> int:
        """Return the number of questions that a step trains on."""
        sql = "SELECT COUNT(*) FROM taken WHERE purpose = ? AND step = ? AND position >= 0"
        return self._one(sql, (purpose, step))

    def num_expired(self, purpose: str, step: int) -> int:
        """Return the number of answered questions of earlier steps that a step took but does not train on."""
        sql = (
            "SELECT COUNT(*) FROM taken t JOIN questions q ON q.id = t.question "
            "WHERE t.purpose = ? AND t.step = ? AND t.position < 0 AND q.step < t.step"
        )
        return self._one(sql, (purpose, step))

    def asked_again(self) -> int:
        """Return the number of submissions that repeat an earlier one, over all purposes."""
        return self._one("SELECT COALESCE(SUM(again), 0) FROM purses", ())

    def spent(self, purpose: str) -> Price:
        """Return the sum of the prices of the answers that have come for a purpose."""
        return self._sums("queries, tokens, cost", purpose)

    def committed(self, purpose: str) -> Price:
        """Return the price of the answers that steps have taken, plus the highest price of every question
        that no step has taken. The sum does not depend on when answers come."""
        sql = "SELECT queries, tokens, cost FROM waiting WHERE purpose = ?"
        with self.lock:
            taken, rows = self.taken_so_far(purpose), self.rows(sql, (purpose,))
        queries, tokens, costs = zip(*rows, strict=True) if rows else ((), (), ())
        return taken + Price(sum(queries), sum(tokens), math.fsum(costs))

    def taken_so_far(self, purpose: str) -> Price:
        """Return the price of all answers of a purpose that steps or evaluations have taken."""
        return self._sums("taken_queries, taken_tokens, taken_cost", purpose)

    def digest(self) -> str:
        """Return the SHA-256 of the ledger in canonical form (`schema.CANONICAL`)."""
        digest = hashlib.sha256()
        with self.lock:
            for sql in schema.CANONICAL:
                for row in self.db.execute(sql):
                    digest.update(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        return digest.hexdigest()

    def _sums(self, columns: str, purpose: str) -> Price:
        sql = f"SELECT {columns} FROM purses WHERE purpose = ?"
        return Price(*(self.row(sql, (purpose,)) or (0, 0, 0.0)))

    def _only(self, sql: str, purpose: str, step: int) -> tuple[Any, ...]:
        """Return the row of a query about the take of a step, which is there."""
        row = self.row(sql, (purpose, step))
        assert row is not None, "the caller knows that the step has a take"
        return row

    def _questions(
        self, join: str, condition: str, values: Sequence[Any], order: str = "q.step, q.round, q.position"
    ) -> list[Intent]:
        sql = f"SELECT {QUESTION_COLUMNS} FROM questions q {join} WHERE {condition} ORDER BY {order}"
        with self._reading():
            rows = self.rows(sql, values)
            texts = self._texts({name for row in rows for name in text_names(row)})
            return [question_of(row, texts) for row in rows]

    def _texts(self, names: Collection[str]) -> dict[str, str]:
        found = dict(self._each("SELECT hash, text FROM texts WHERE hash IN ({})", list(names)))
        for name in names:
            if name not in found or text_name(found[name]) != name:
                raise self._damaged(f"text {name[:12]}")
        return found
