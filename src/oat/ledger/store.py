"""The ledger's tables: SQLite, one writer, one transaction for whatever must happen together.

Trajectories are a blob a round, by hash; texts that people and exports read are stored once each, by hash,
and outlive the blobs.
"""

import functools
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from oat import wire
from oat.errors import LedgerError
from oat.ledger import blobs, schema
from oat.ledger.asked import AWAITED, Asked, Known, Quote, cached_text, cached_values, prompt_text, text_name
from oat.ledger.connection import Connection
from oat.types import Answer, Group, Key, Message, Price, Question

_TAKEABLE = "w.purpose = ? AND w.answered > 0 AND w.step BETWEEN ? AND ?"

_SCALARS = {str, int, float, bool, type(None)}
"""Come back from JSON as they were."""


class Store(Connection):
    """The tables of one run."""

    def is_empty(self) -> bool:
        """Whether nothing was ever asked."""
        return self._one("SELECT COUNT(*) FROM rounds", ()) == 0

    def has_round(self, purpose: str, step: int, round: int) -> bool:
        return (
            self._one(
                "SELECT COUNT(*) FROM rounds WHERE (purpose, step, round) = (?, ?, ?)", (purpose, step, round)
            )
            > 0
        )

    def asked(self, purpose: str, step: int, round: int) -> int:
        """Questions in recorded rounds before (step, round)."""
        sql = "SELECT COALESCE(SUM(questions), 0) FROM rounds WHERE purpose = ? AND (step, round) < (?, ?)"
        return self._one(sql, (purpose, step, round))

    def add_round(
        self,
        purpose: str,
        step: int,
        round: int,
        groups: Sequence[Group],
        questions: Sequence[Question],
        members: Sequence[int],
        quotes: Sequence[Quote] | None = None,
    ) -> list[Asked]:
        """Intents of a round with its trajectories; returns them as they now stand here. The caller holds the
        transaction."""
        data = blobs.pack(groups)
        blob = hashlib.sha256(data).hexdigest()
        self.db.execute("INSERT OR IGNORE INTO blobs VALUES (?, ?)", (blob, data))
        self.db.execute(
            "INSERT INTO rounds VALUES (?, ?, ?, ?, ?, 1)", (purpose, step, round, len(questions), blob)
        )
        self.db.execute("INSERT OR IGNORE INTO purses (purpose) VALUES (?)", (purpose,))
        rows = []
        waiting = []
        asked = []
        texts = dict[str, str]()
        first = self._one("SELECT COALESCE(MAX(id), 0) FROM questions", ()) + 1
        for position, (question, member, quote) in enumerate(
            zip(questions, members, quotes or [Quote()] * len(questions), strict=True)
        ):
            written = [prompt_text(question), *question.candidates]
            texts.update({text: text_name(text) for text in written if text not in texts})
            prompt, *candidates = [texts[text] for text in written]
            key, picks = question.key, _written(question.picks)
            place = (
                first + position,
                key.purpose,
                key.step,
                key.round,
                key.occurrence,
                key.index,
                position,
                member,
            )
            features = None if question.features is None else wire.encode(question.features)
            content = (
                prompt,
                _plain(candidates),
                picks,
                _plain(question.known),
                features,
                cached_text(quote.cached),
            )
            rows.append((*place, question.kind, question.oracle, *content))
            if not all(type(value) in _SCALARS for value in question.columns.values()):
                question = replace(question, columns=json.loads(written[0])["columns"])
            asked.append(Asked(first + position, question, member, None, None, quote.cached))
            waiting.append(
                (
                    first + position,
                    purpose,
                    step,
                    round,
                    position,
                    quote.price.queries,
                    quote.price.tokens,
                    quote.price.cost,
                )
            )
        self.db.executemany(
            "INSERT OR IGNORE INTO texts VALUES (?, ?)", [(name, text) for text, name in texts.items()]
        )
        columns = (
            "id, purpose, step, round, occurrence, number, position, member, kind, oracle, prompt, "
            "candidates, picks, known, features, cached"
        )
        self.db.executemany(f"INSERT INTO questions ({columns}) VALUES ({', '.join('?' * 16)})", rows)
        self.db.executemany("INSERT INTO waiting VALUES (?, ?, ?, ?, ?, 0, ?, ?, ?)", waiting)
        return asked

    def groups(self, purpose: str, step: int, round: int) -> list[Group]:
        """The trajectories of a recorded round.

        Raises:
            LedgerError: they were dropped, since every kept checkpoint was past them; or they are damaged.
        """
        sql = (
            "SELECT data, hash FROM rounds JOIN blobs ON blobs.hash = rounds.groups WHERE (purpose, step, "
            "round) = (?, ?, ?)"
        )
        row = self.db.execute(sql, (purpose, step, round)).fetchone()
        if row is None:
            raise LedgerError(
                f"{self.path}: the trajectories of step {step} were dropped once every kept checkpoint "
                "was past them, and are needed now; put a "
                "checkpoint back, or begin anew in another run_dir (tracking.keep_trajectories keeps them)"
            )
        if hashlib.sha256(row[0]).hexdigest() != row[1]:
            raise self._damaged(f"blob {row[1][:12]}")
        return blobs.unpack(row[0])

    def drop_groups(self, step: int) -> int:
        """Drop the trajectories of rounds of which everything was taken before this step; returns how many
        blobs went. Texts stay."""
        done = """SELECT r.purpose, r.step, r.round FROM rounds r WHERE r.kept = 1 AND r.step < ? AND NOT EXISTS (
            SELECT 1 FROM waiting w WHERE (w.purpose, w.step, w.round) = (r.purpose, r.step, r.round)) AND NOT EXISTS (
            SELECT 1 FROM questions q JOIN taken t ON t.question = q.id
            WHERE (q.purpose, q.step, q.round) = (r.purpose, r.step, r.round) AND t.step >= ?)"""
        rounds = self.db.execute(done, (step, step)).fetchall()
        blobs = {
            self.db.execute(
                "SELECT groups FROM rounds WHERE (purpose, step, round) = (?, ?, ?)", place
            ).fetchone()
            for place in rounds
        }
        self.db.executemany("UPDATE rounds SET kept = 0 WHERE (purpose, step, round) = (?, ?, ?)", rounds)
        unused = (
            "DELETE FROM blobs WHERE hash = ? AND NOT EXISTS (SELECT 1 FROM rounds WHERE kept = 1 AND "
            "groups = blobs.hash)"
        )
        return self.db.executemany(unused, blobs).rowcount if blobs else 0

    def unanswered(self) -> list[Asked]:
        """Every intent without an answer, of every purpose, oldest first."""
        return self.waiting(0)

    def waiting(self, *answered: int) -> list[Asked]:
        """Questions of every purpose that no step has taken, by what there is of their answers
        (`schema.TABLES`), oldest first."""
        return self._questions(
            "JOIN waiting w ON w.question = q.id",
            f"w.answered IN ({', '.join('?' * len(answered))})",
            answered,
        )

    def fail_awaited(self, purpose: str) -> None:
        """What is awaited for a purpose will not come; the caller holds the transaction."""
        awaiting = "SELECT question FROM waiting WHERE answered = -1 AND purpose = ?"
        sql = f"""UPDATE answers SET marks = REPLACE(marks, '"{AWAITED}"', '"failed"') WHERE question IN ({awaiting})"""
        self.db.execute(sql, (purpose,))
        self.db.execute("UPDATE waiting SET answered = 1 WHERE answered = -1 AND purpose = ?", (purpose,))

    def num_takeable(self, purpose: str, step: int, oldest: int = 0) -> int:
        """Of those of `takeable_ids` that were paid."""
        return self._one(
            f"SELECT COUNT(*) FROM waiting w WHERE {_TAKEABLE} AND w.answered = 1", (purpose, oldest, step)
        )

    def lacks(self, purpose: str, step: int, count: int, oldest: int = 0) -> bool:
        """Whether an answer is missing to one of the next `count` questions that no step has taken, in the
        order they were asked, of rounds from `oldest` up to `step`; or to one of an older round."""
        old = "SELECT 1 FROM waiting w WHERE w.purpose = ? AND w.step < ? AND w.answered < 1"
        rounds = "w.purpose = ? AND w.step BETWEEN ? AND ?"
        new = f"SELECT w.answered FROM waiting w WHERE {rounds} ORDER BY w.step, w.round, w.position LIMIT ?"
        sql = f"SELECT EXISTS ({old}) OR EXISTS (SELECT 1 FROM ({new}) WHERE answered < 1)"
        return bool(self._one(sql, (purpose, oldest, purpose, oldest, step, count)))

    def num_open(self, purpose: str) -> int:
        """Questions that are paid for and that no step has taken."""
        return self._one("SELECT COUNT(*) FROM waiting WHERE purpose = ? AND answered < 2", (purpose,))

    def unpaid_ids(self, purpose: str) -> list[int]:
        """Questions that were not paid, and that no step has taken."""
        return [
            id
            for (id,) in self.db.execute(
                "SELECT question FROM waiting WHERE purpose = ? AND answered = 2", (purpose,)
            )
        ]

    def takeable_ids(self, purpose: str, step: int, limit: int, oldest: int = 0) -> list[int]:
        """Answered questions of rounds from `oldest` up to `step` that no step has taken, in the order they
        were asked; limit -1: all."""
        sql = (
            f"SELECT w.question FROM waiting w WHERE {_TAKEABLE} ORDER BY w.step, w.round, w.position LIMIT ?"
        )
        return [id for (id,) in self.db.execute(sql, (purpose, oldest, step, limit))]

    def by_id(self, id: int) -> Asked:
        (row,) = self._questions("", "q.id = ?", (id,))
        return row

    def taken(self, purpose: str, step: int) -> list[Asked]:
        """The questions that a step trains on, in recorded order."""
        return self._questions(
            "JOIN taken t ON t.question = q.id",
            "t.purpose = ? AND t.step = ? AND t.position >= 0",
            (purpose, step),
            order="t.position",
        )

    def num_taken(self, purpose: str, step: int) -> int:
        return self._one(
            "SELECT COUNT(*) FROM taken WHERE purpose = ? AND step = ? AND position >= 0", (purpose, step)
        )

    def num_expired(self, purpose: str, step: int) -> int:
        """Answered questions that a step found too old to learn from."""
        return self._one(
            "SELECT COUNT(*) FROM taken WHERE purpose = ? AND step = ? AND position < 0", (purpose, step)
        )

    def set_tickets(self, tickets: Iterable[tuple[str, float, int]]) -> None:
        """(ticket, when it was given in seconds since 1970, question id) each."""
        self.db.executemany("UPDATE questions SET ticket = ?, sent = ? WHERE id = ?", tickets)

    def add_answers(self, answers: Iterable[tuple[int, Answer, int | None]]) -> None:
        """(question id, answer, label) each; the first answer of a question wins."""
        given = list(answers)
        new = {
            id
            for (id,) in self._each(
                "SELECT question FROM waiting WHERE answered = 0 AND question IN ({})",
                [id for id, _, _ in given],
            )
        }
        fresh = list({id: (id, a, label) for id, a, label in reversed(given) if id in new}.values())
        self.db.executemany(
            "UPDATE waiting SET answered = ? WHERE question = ?", [(_state(a), id) for id, a, _ in fresh]
        )
        texts = [(json.dumps(a.values), _written(a.marks), _plain(a.scores)) for _, a, _ in fresh]
        rows = [
            (id, *text[:2], label, a.queries, a.cost, a.by, a.seconds, a.tokens, text[2])
            for text, (id, a, label) in zip(texts, fresh, strict=True)
        ]
        self.db.executemany("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        for purpose in {a.key.purpose for _, a, _ in fresh}:
            spent = sum(
                (Price(a.queries, a.tokens, a.cost) for _, a, _ in fresh if a.key.purpose == purpose), Price()
            )
            sql = (
                "UPDATE purses SET queries = queries + ?, tokens = tokens + ?, cost = cost + ? WHERE "
                "purpose = ?"
            )
            self.db.execute(sql, (spent.queries, spent.tokens, spent.cost, purpose))

    def complete(self, id: int, answer: Answer) -> None:
        """Values that were awaited are there; what the answer took stays."""
        self.db.execute(
            "UPDATE answers SET vals = ?, marks = ? WHERE question = ?",
            (json.dumps(answer.values), _written(answer.marks), id),
        )
        self.db.execute("UPDATE waiting SET answered = ? WHERE question = ?", (_state(answer), id))

    def values(self, key: Key) -> list[Known] | None:
        """What the answer to a question says, if there is one."""
        sql = f"""SELECT a.vals, a.marks, a.scores FROM answers a JOIN questions q ON q.id = a.question WHERE ({schema.KEY}) = (?, ?, ?, ?, ?)"""
        row = self.db.execute(sql, (key.purpose, key.step, key.round, key.occurrence, key.index)).fetchone()
        return row and [
            Known(value, mark, _values(row[2]))
            for value, mark in zip(_values(row[0]), _read(row[1]), strict=True)
        ]

    def answer(self, asked: Asked) -> tuple[Answer, int | None]:
        ((_, answer, label),) = self.answers([asked])
        return answer, label

    def answers(self, rows: Sequence[Asked]) -> list[tuple[Asked, Answer, int | None]]:
        """Answered questions with their answers and labels."""
        sql = (
            "SELECT question, vals, marks, label, queries, cost, answered_by, seconds, tokens, scores "
            "FROM answers WHERE question IN ({})"
        )
        found = {id: answer for id, *answer in self._each(sql, [row.id for row in rows])}
        answers = []
        with self._reading():
            for row in rows:
                values, marks, label, queries, cost, by, seconds, tokens, scores = found[row.id]
                answer = Answer(
                    row.question.key,
                    _values(values),
                    _read(marks),
                    queries,
                    cost,
                    by,
                    seconds,
                    tokens,
                    _values(scores),
                )
                answers.append((row, answer, label))
        return answers

    def cached(self, purpose: str, oracle: str, item: str) -> list[Known]:
        """The answers that are kept of an item, in the order they were taken."""
        sql = (
            "SELECT value, mark, scores FROM cache WHERE purpose = ? AND oracle = ? AND item = ? ORDER BY "
            "number"
        )
        return [
            Known(value, mark, _values(scores))
            for value, mark, scores in self.db.execute(sql, (purpose, oracle, item))
        ]

    def add_cached(self, purpose: str, oracle: str, item: str, number: int, known: Known, step: int) -> None:
        row = (purpose, oracle, item, number, known.value, known.mark, step, _plain(known.scores))
        self.db.execute("INSERT INTO cache VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    def count_again(self, ids: Iterable[int]) -> None:
        """These questions are asked once more, after a kill."""
        for id in ids:
            self.db.execute("UPDATE questions SET again = again + 1 WHERE id = ?", (id,))
            self.db.execute(
                (
                    "UPDATE purses SET again = again + 1 WHERE purpose = (SELECT purpose FROM questions "
                    "WHERE "
                    "id = ?)"
                ),
                (id,),
            )

    def asked_again(self) -> int:
        """How often a question was asked once more, of every purpose."""
        return self._one("SELECT COALESCE(SUM(again), 0) FROM purses", ())

    def answered(self) -> list[Asked]:
        """Every answered question, in the order they were asked."""
        return self._questions(
            "JOIN answers a ON a.question = q.id", "TRUE", (), order="q.purpose, q.step, q.round, q.position"
        )

    def spent(self, purpose: str) -> Price:
        """What all answers cost that are there."""
        return self._sums("queries, tokens, cost", purpose)

    def committed(self, purpose: str) -> Price:
        """What was taken so far, and the most that everything waiting may cost: a sum at the cursor, whenever
        answers come."""
        rows = self.db.execute(
            "SELECT queries, tokens, cost FROM waiting WHERE purpose = ?", (purpose,)
        ).fetchall()
        queries, tokens, costs = zip(*rows, strict=True) if rows else ((), (), ())
        return self.taken_so_far(purpose) + Price(sum(queries), sum(tokens), math.fsum(costs))

    def taken_so_far(self, purpose: str) -> Price:
        """What the answers cost that steps have taken."""
        return self._sums("taken_queries, taken_tokens, taken_cost", purpose)

    def has_take(self, purpose: str, step: int) -> bool:
        return self._one("SELECT COUNT(*) FROM takes WHERE (purpose, step) = (?, ?)", (purpose, step)) > 0

    def take_price(self, purpose: str, step: int) -> Price:
        """What the answers cost that this step and those before it took. Ledgers of before have what all
        answers did that were there."""
        return Price(
            *self.db.execute(
                "SELECT queries, tokens, cost FROM takes WHERE (purpose, step) = (?, ?)", (purpose, step)
            ).fetchone()
        )

    def take_refused(self, purpose: str, step: int) -> Price | None:
        """The price of the cheapest question of a step's take that was not paid."""
        (refused,) = self.db.execute(
            "SELECT refused FROM takes WHERE (purpose, step) = (?, ?)", (purpose, step)
        ).fetchone()
        return None if refused is None else Price(*json.loads(refused))

    def last_refused(self, purpose: str, step: int) -> Price | None:
        """The same of the newest take up to a step, if there is one."""
        sql = "SELECT refused FROM takes WHERE purpose = ? AND step <= ? ORDER BY step DESC LIMIT 1"
        (refused,) = self.db.execute(sql, (purpose, step)).fetchone() or (None,)
        return None if refused is None else Price(*json.loads(refused))

    def add_take(
        self,
        purpose: str,
        step: int,
        ids: Sequence[int],
        expired: Sequence[int] = (),
        refused: Price | None = None,
    ) -> None:
        """Record what a step trains on, in this order, what it found too old, and the cheapest price it could
        not pay; the caller holds the transaction."""
        positions = [*enumerate(ids), *((-1 - place, id) for place, id in enumerate(expired))]
        self.db.executemany(
            "INSERT INTO taken VALUES (?, ?, ?, ?)",
            [(purpose, step, position, id) for position, id in positions],
        )
        self.db.executemany("DELETE FROM waiting WHERE question = ?", [(id,) for _, id in positions])
        sql = """SELECT COALESCE(SUM(a.queries), 0), COALESCE(SUM(a.tokens), 0), COALESCE(SUM(a.cost), 0.0)
            FROM taken t JOIN answers a USING (question) WHERE (t.purpose, t.step) = (?, ?)"""
        taken = self.db.execute(sql, (purpose, step)).fetchone()
        sql = (
            "UPDATE purses SET taken_queries = taken_queries + ?, taken_tokens = taken_tokens + ?, "
            "taken_cost = taken_cost + ? WHERE purpose = ?"
        )
        self.db.execute(sql, (*taken, purpose))
        so_far, price = (
            self.taken_so_far(purpose),
            None if refused is None else json.dumps([refused.queries, refused.tokens, refused.cost]),
        )
        self.db.execute(
            "INSERT INTO takes VALUES (?, ?, ?, ?, ?, ?)",
            (purpose, step, so_far.queries, so_far.tokens, so_far.cost, price),
        )

    def cut(self, step: int, *, evaluated: bool) -> None:
        """Take the ledger back to the state before a step of training; the caller holds the transaction.

        Args:
            evaluated: the evaluation after so many steps was over by then, and stays.
        """
        later = (
            f"(step > {step} OR (step = {step} AND {'purpose = ' + repr('train') if evaluated else 'TRUE'}))"
        )
        gone = f"SELECT id FROM questions WHERE {later}"
        for table in ("takes", "taken", "cache"):
            self.db.execute(f"DELETE FROM {table} WHERE {later}")
        for table in ("answers", "waiting"):
            self.db.execute(f"DELETE FROM {table} WHERE question IN ({gone})")
        for table in ("questions", "rounds"):
            self.db.execute(f"DELETE FROM {table} WHERE {later}")
        left = "(SELECT COALESCE(MAX(id), 0) FROM questions WHERE questions.purpose = waves.purpose)"
        self.db.execute(f"DELETE FROM waves WHERE first > {left}")
        self.db.execute(f"UPDATE waves SET last = {left} WHERE last > {left}")
        self.db.execute("DELETE FROM blobs WHERE hash NOT IN (SELECT groups FROM rounds WHERE kept = 1)")
        self.db.execute("DELETE FROM purses")
        for statement in schema.RECOUNTS:
            self.db.execute(statement)

    def forget_judgements(self) -> None:
        """Nothing that evaluations were told is known any more, nor what they could not pay; the caller holds
        the transaction."""
        self.db.execute("DELETE FROM cache WHERE purpose != 'train'")
        self.db.execute("UPDATE takes SET refused = NULL WHERE purpose != 'train'")

    def digest(self) -> str:
        """SHA-256 of the ledger in canonical form (`schema.CANONICAL`)."""
        digest = hashlib.sha256()
        for sql in schema.CANONICAL:
            for row in self.db.execute(sql):
                digest.update(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        return digest.hexdigest()

    def _sums(self, columns: str, purpose: str) -> Price:
        return Price(
            *(
                self.db.execute(f"SELECT {columns} FROM purses WHERE purpose = ?", (purpose,)).fetchone()
                or (0, 0, 0.0)
            )
        )

    def _questions(
        self, join: str, condition: str, values: Sequence[Any], order: str = "q.step, q.round, q.position"
    ) -> list[Asked]:
        columns = (
            f"q.id, {schema.KEY}, q.kind, q.oracle, q.prompt, q.candidates, q.picks, q.known, q.features, "
            "q.member, q.ticket, q.sent, q.cached"
        )
        sql = f"SELECT {columns} FROM questions q {join} WHERE {condition} ORDER BY {order}"
        with self._reading():
            found = [
                (*row[:9], json.loads(row[9]), *row[10:]) for row in self.db.execute(sql, values).fetchall()
            ]
            texts = self._texts({name for row in found for name in (row[8], *row[9])})
            return [self._asked(texts, *row) for row in found]

    def _texts(self, names: Collection[str]) -> dict[str, str]:
        found = dict(self._each("SELECT hash, text FROM texts WHERE hash IN ({})", list(names)))
        for name in names:
            if name not in found or text_name(found[name]) != name:
                raise self._damaged(f"text {name[:12]}")
        return found

    def _asked(self, texts: Mapping[str, str], id: int, *row: Any) -> Asked:
        *address, kind, oracle, prompt, candidates, picks, known, features, member, ticket, sent, cached = row
        content = json.loads(texts[prompt])
        messages = tuple(Message(*message) for message in content["messages"])
        question = Question(
            Key(*address),
            kind,
            messages,
            tuple(texts[name] for name in candidates),
            _read(picks),
            content["reference"],
            content["columns"],
            oracle,
            _values(known),
            None if features is None else wire.decode(features),
            content.get("is_chat", False),
        )
        return Asked(id, question, member, ticket, sent, cached_values(cached, question.key.purpose))


@functools.lru_cache(4096)
def _written(values: tuple[int | str, ...]) -> str:
    """As text; of picks and marks, of which there are few."""
    return json.dumps(values)


@functools.lru_cache(4096)
def _read(text: str) -> tuple[Any, ...]:
    return tuple(json.loads(text))


def _state(answer: Answer) -> int:
    """Of a waiting question that has this answer."""
    return -1 if AWAITED in answer.marks else 2 if "unpaid" in answer.marks else 1


def _plain(values: Sequence[Any]) -> str:
    return json.dumps(values) if values else "[]"


def _values(text: str) -> tuple[Any, ...]:
    return tuple(json.loads(text)) if text != "[]" else ()
