"""Writes a ledger's tables. A ledger has one writer. Changes that belong together share a transaction.

The trajectories of a round are in one file, named by the hash of its content (`ledger/trajectory_files.py`).
Each text of a prompt or a candidate is stored once, under its hash. Dropping trajectories leaves the texts in
place.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from oat import blobs
from oat.ledger import schema
from oat.ledger.intents import AWAITED, Intent, Known, Quote, prompt_text, text_name
from oat.ledger.reader import Reader
from oat.ledger.schema import (
    ANSWER_COLUMNS,
    NEW_QUESTION_COLUMNS,
    answer_row,
    answered_state,
    as_read,
    common_text,
    dict_text,
    list_text,
    new_question_row,
    steps_text,
)
from oat.types import Answer, Group, Price, Question


class Store(Reader):
    """Reads and writes the tables of one run's ledger."""

    is_read_only = False

    def __init__(self, path: Path):
        # a transaction of the opening already reads it
        self._unused: set[str] = set()
        super().__init__(path)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        """End the transaction. After it is committed, remove the files that no round names any more.

        Raises:
            LedgerError: the database cannot be written.
        """
        with self.lock:
            unused, self._unused = self._unused, set()
            super().__exit__(kind, error, *rest)
            if unused and error is None:
                self.files.remove(unused)

    def add_round(
        self,
        purpose: str,
        step: int,
        round: int,
        groups: Sequence[Group],
        questions: Sequence[Question],
        members: Sequence[int],
        quotes: Sequence[Quote] | None = None,
    ) -> list[Intent]:
        """Record the questions of a round with its trajectories. The caller holds the transaction.

        Args:
            members: for each question, the index of its group in `groups`.
            quotes: for each question, which values are known or awaited, and the highest price of the others.
                None: no value is known, and every price is 0.

        Returns:
            The recorded questions, equal to those that a later read gives.
        """
        self._add_trajectories(purpose, step, round, groups, len(questions))
        self.db.execute("INSERT OR IGNORE INTO purses (purpose) VALUES (?)", (purpose,))
        intents = []
        rows = []
        waiting = []
        names: dict[str, str] = {}
        first = self._one("SELECT COALESCE(MAX(id), 0) FROM questions", ()) + 1
        for position, (question, member, quote) in enumerate(
            zip(questions, members, quotes or [Quote()] * len(questions), strict=True)
        ):
            prompt = prompt_text(question)
            texts = [prompt, *question.candidates]
            names.update({text: text_name(text) for text in texts if text not in names})
            id = first + position
            intent = Intent(id, as_read(question, prompt), member, None, None, quote.cached)
            intents.append(intent)
            name, *candidates = [names[text] for text in texts]
            rows.append(new_question_row(intent, position, name, candidates))
            most = quote.price
            waiting.append((id, purpose, step, round, position, most.queries, most.tokens, most.cost))
        self.db.executemany(
            "INSERT OR IGNORE INTO texts VALUES (?, ?)", [(name, text) for text, name in names.items()]
        )
        self.db.executemany(
            f"INSERT INTO questions ({NEW_QUESTION_COLUMNS}) VALUES ({', '.join('?' * 17)})", rows
        )
        self.db.executemany("INSERT INTO waiting VALUES (?, ?, ?, ?, ?, 0, ?, ?, ?)", waiting)
        return intents

    def _add_trajectories(
        self, purpose: str, step: int, round: int, groups: Sequence[Group], num_questions: int
    ) -> None:
        data = blobs.pack(groups)
        name = hashlib.sha256(data).hexdigest()
        self.files.write(name, data)
        self._unused.discard(name)
        self.db.execute(
            "INSERT INTO rounds VALUES (?, ?, ?, ?, ?, 1)", (purpose, step, round, num_questions, name)
        )

    def set_tickets(self, tickets: Iterable[tuple[str, float, int]]) -> None:
        """Record tickets that oracles gave.

        Args:
            tickets: tuples of ticket, time of submission in seconds since 1970, and question id.
        """
        self.db.executemany("UPDATE questions SET ticket = ?, sent = ? WHERE id = ?", tickets)

    def add_answers(self, answers: Iterable[tuple[int, Answer, int | None]]) -> None:
        """Record answers. The first answer of a question wins; a later one changes nothing. The caller holds
        the transaction.

        Args:
            answers: tuples of question id, answer, and label (the index of the candidate that won, or None).
        """
        given = list(answers)
        open_ids = {
            id
            for (id,) in self._each(
                "SELECT question FROM waiting WHERE answered = 0 AND question IN ({})",
                [id for id, _, _ in given],
            )
        }
        first = {id: (answer, label) for id, answer, label in reversed(given) if id in open_ids}
        self.db.executemany(
            "UPDATE waiting SET answered = ? WHERE question = ?",
            [(answered_state(answer), id) for id, (answer, _) in first.items()],
        )
        self.db.executemany(
            f"INSERT INTO answers (question, {ANSWER_COLUMNS}) VALUES ({', '.join('?' * 12)})",
            [(id, *answer_row(answer, label)) for id, (answer, label) in first.items()],
        )
        spent: dict[str, Price] = {}
        for answer, _ in first.values():
            purpose = answer.key.purpose
            took = Price(answer.queries, answer.tokens, answer.cost)
            spent[purpose] = spent.get(purpose, Price()) + took
        sql = (
            "UPDATE purses SET queries = queries + ?, tokens = tokens + ?, cost = cost + ? WHERE purpose = ?"
        )
        self.db.executemany(
            sql, [(price.queries, price.tokens, price.cost, purpose) for purpose, price in spent.items()]
        )

    def complete(self, id: int, answer: Answer) -> None:
        """Replace the values of an answer that awaited values, with their marks, steps and sources. Its price
        stays. The caller holds the transaction."""
        parts = (steps_text(answer.steps, answer.step_unit), dict_text(answer.sources))
        self.db.execute(
            "UPDATE answers SET vals = ?, marks = ?, steps = ?, sources = ? WHERE question = ?",
            (list_text(answer.values), common_text(answer.marks), *parts, id),
        )
        self.db.execute("UPDATE waiting SET answered = ? WHERE question = ?", (answered_state(answer), id))

    def fail_awaited(self, purpose: str) -> None:
        """Some recorded answers of a purpose await values that the answers to other questions were to bring.
        Mark these values as failed. The caller holds the transaction."""
        awaiting = "SELECT question FROM waiting WHERE answered = -1 AND purpose = ?"
        failed = f"""REPLACE(marks, '"{AWAITED}"', '"failed"')"""
        self.db.execute(f"UPDATE answers SET marks = {failed} WHERE question IN ({awaiting})", (purpose,))
        self.db.execute("UPDATE waiting SET answered = 1 WHERE answered = -1 AND purpose = ?", (purpose,))

    def count_again(self, ids: Iterable[int]) -> None:
        """Add 1 to each question's number of repeated submissions. The caller holds the transaction."""
        purse = (
            "UPDATE purses SET again = again + 1 WHERE purpose = (SELECT purpose FROM questions WHERE id = ?)"
        )
        for id in ids:
            self.db.execute("UPDATE questions SET again = again + 1 WHERE id = ?", (id,))
            self.db.execute(purse, (id,))

    def add_cached(self, purpose: str, oracle: str, item: str, number: int, known: Known, step: int) -> None:
        """Store a value of an answer in the cache.

        Args:
            purpose, oracle, item: the value's cache key.
            number: the value's index among those under this key.
            step: the step that took the answer.
        """
        parts = (steps_text([known.steps], known.step_unit), dict_text(dict(known.sources)))
        row = (purpose, oracle, item, number, known.value, known.mark, step, list_text(known.scores), *parts)
        self.db.execute(f"INSERT INTO cache VALUES ({', '.join('?' * 10)})", row)

    def add_take(
        self,
        purpose: str,
        step: int,
        ids: Sequence[int],
        expired: Sequence[int] = (),
        refused: Price | None = None,
    ) -> None:
        """Record the questions that a step takes, and remove them from `waiting`. The caller holds the
        transaction.

        Args:
            ids: the answered questions that the step trains on, in this order.
            expired: the answered questions that it does not train on: they are too old, the step failed, or
                dynamic sampling threw them away.
            refused: the price of the cheapest question that was not paid; None if all were paid.
        """
        positions = [*enumerate(ids), *((-1 - place, id) for place, id in enumerate(expired))]
        self.db.executemany(
            "INSERT INTO taken VALUES (?, ?, ?, ?)",
            [(purpose, step, position, id) for position, id in positions],
        )
        self.db.executemany("DELETE FROM waiting WHERE question = ?", [(id,) for _, id in positions])
        sums = (
            "SELECT COALESCE(SUM(a.queries), 0), COALESCE(SUM(a.tokens), 0), COALESCE(SUM(a.cost), 0.0) "
            "FROM taken t JOIN answers a USING (question) WHERE (t.purpose, t.step) = (?, ?)"
        )
        took = self._only(sums, purpose, step)
        purse = (
            "UPDATE purses SET taken_queries = taken_queries + ?, taken_tokens = taken_tokens + ?, "
            "taken_cost = taken_cost + ? WHERE purpose = ?"
        )
        self.db.execute(purse, (*took, purpose))
        so_far = self.taken_so_far(purpose)
        pairs = self.pairs_before(purpose, step) + self._one(
            f"SELECT COALESCE(SUM({schema.PAIRS}), 0) FROM taken t JOIN questions q ON q.id = t.question "
            "JOIN answers a USING (question) WHERE (t.purpose, t.step) = (?, ?)",
            (purpose, step),
        )
        unpaid = None if refused is None else json.dumps([refused.queries, refused.tokens, refused.cost])
        self.db.execute(
            "INSERT INTO takes VALUES (?, ?, ?, ?, ?, ?, ?)",
            (purpose, step, so_far.queries, so_far.tokens, so_far.cost, unpaid, pairs),
        )

    def drop_groups(self, step: int) -> int:
        """Drop the trajectories of completed rounds. A round is completed if it was asked in a step before
        `step`, and earlier steps than `step` have taken all of its questions. Texts stay. The caller holds
        the transaction. When it is committed, the files are removed.

        Returns:
            The number of files that are to be removed.
        """
        waits = "SELECT 1 FROM waiting w WHERE (w.purpose, w.step, w.round) = (r.purpose, r.step, r.round)"
        taken_later = (
            "SELECT 1 FROM questions q JOIN taken t ON t.question = q.id "
            "WHERE (q.purpose, q.step, q.round) = (r.purpose, r.step, r.round) AND t.step >= ?"
        )
        done = (
            "SELECT r.purpose, r.step, r.round FROM rounds r WHERE r.kept = 1 AND r.step < ? "
            f"AND NOT EXISTS ({waits}) AND NOT EXISTS ({taken_later})"
        )
        rounds = self.rows(done, (step, step))
        of_round = "SELECT groups FROM rounds WHERE (purpose, step, round) = (?, ?, ?)"
        names = {name for place in rounds for (name,) in self.rows(of_round, place)}
        self.db.executemany("UPDATE rounds SET kept = 0 WHERE (purpose, step, round) = (?, ?, ?)", rounds)
        needed = "SELECT COUNT(*) FROM rounds WHERE kept = 1 AND groups = ?"
        unused = {name for name in names if not self._one(needed, (name,))}
        self._unused |= unused
        return len(unused)

    def cut(self, step: int, *, evaluated: bool) -> None:
        """Delete what was recorded after the first `step` steps of training. The caller holds the
        transaction.

        Args:
            evaluated: True keeps the evaluation that follows these steps; False deletes it too.
        """
        later = (
            f"(step > {step} OR (step = {step} AND {'purpose = ' + repr('train') if evaluated else 'TRUE'}))"
        )
        gone = f"SELECT id FROM questions WHERE {later}"
        kept_before = self.kept_names()
        for table in ("takes", "taken", "cache"):
            self.db.execute(f"DELETE FROM {table} WHERE {later}")
        for table in ("answers", "waiting"):
            self.db.execute(f"DELETE FROM {table} WHERE question IN ({gone})")
        for table in ("questions", "rounds"):
            self.db.execute(f"DELETE FROM {table} WHERE {later}")
        left = "(SELECT COALESCE(MAX(id), 0) FROM questions WHERE questions.purpose = waves.purpose)"
        self.db.execute(f"DELETE FROM waves WHERE first > {left}")
        self.db.execute(f"UPDATE waves SET last = {left} WHERE last > {left}")
        self._unused |= kept_before - self.kept_names()
        self.db.execute("DELETE FROM purses")
        for statement in schema.RECOUNTS:
            self.db.execute(statement)

    def forget_judgements(self) -> None:
        """Delete the cached answers of evaluations. In the records of their takes, delete the prices that the
        budget refused. The caller holds the transaction."""
        self.db.execute("DELETE FROM cache WHERE purpose != 'train'")
        self.db.execute("UPDATE takes SET refused = NULL WHERE purpose != 'train'")
