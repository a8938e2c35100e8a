"""Putting answers on record: each with its label, and together with the answers of equal questions that
awaited it.

The first answer of a question wins. A question may have been recorded as awaiting values that an equal
question brings (`ledger/cache.py`); it is completed in the transaction that records the answer with those
values.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from oat.ledger.intents import Intent, rest, whole
from oat.ledger.store import Store
from oat.oracles.contract import nothing
from oat.seeds import Seeds
from oat.types import Answer, Key, Question


class Settling:
    """Records answers, and completes the questions that await them.

    Args:
        labels: how the probability of a comparison becomes a label: above one half, or drawn with it from the
        question's own generator.

    Attributes:
        awaiting: for the key of a question that has no answer yet, the questions that await its values, by
        id.
    """

    def __init__(self, store: Store, seeds: Seeds, labels: Literal["threshold", "bernoulli"]):
        self.store = store
        self.seeds = seeds
        self.labels = labels
        self.awaiting: dict[Key, dict[int, Intent]] = {}

    def record(self, answers: Sequence[tuple[Intent, Answer]]) -> None:
        """Record answers of oracles, in one transaction with all that they complete."""
        with self.store.lock, self.store:
            self.add(answers)
            rows: dict[int, Intent] = {}
            for _, answer in answers:
                rows |= self.awaiting.pop(answer.key, {})
            self.complete(rows.values())

    def add(self, answers: Iterable[tuple[Intent, Answer]]) -> None:
        """Record answers with their labels; the caller holds the transaction."""
        self.store.add_answers(
            [(row.id, answer, self._label(row.question, answer)) for row, answer in answers]
        )

    def complete(self, rows: Iterable[Intent]) -> None:
        """Complete the answers of which everything is there now; the other questions await what is missing.
        The caller holds the transaction."""
        for row in rows:
            keys = row.others | ({row.question.key} if row.is_sent else set())
            found = {key: self.store.values(key) for key in keys}
            brought = {key: values for key, values in found.items() if values is not None}
            for key in found.keys() - brought.keys():
                self.awaiting.setdefault(key, {})[row.id] = row
            if len(brought) < len(found):
                continue
            if row.is_sent:
                self.store.complete(row.id, whole(row, self.store.answer(row)[0], brought))
            else:
                empty = Answer(row.question.key, (), (), queries=0, by=row.question.oracle)
                self.add([(row, whole(row, empty, brought))])

    def forget(self, purpose: str) -> None:
        """Let no question of a purpose await anything any more."""
        self.awaiting = {key: rows for key, rows in self.awaiting.items() if key.purpose != purpose}

    def _label(self, question: Question, answer: Answer) -> int | None:
        if question.kind != "compare" or answer.marks[0] != "ok":
            return None
        probability = answer.values[0]
        if probability == 0.5:
            return None
        if self.labels == "bernoulli":
            return 0 if self.seeds.at("label", str(question.key)).random() < probability else 1
        return int(probability < 0.5)


def close_unanswered(store: Store, *purposes: str) -> None:
    """Record every unanswered question of these purposes as failed; the caller holds the transaction."""
    rows = [row for row in store.unanswered() if row.question.key.purpose in purposes]
    answers = [
        whole(row, nothing(rest(row.question, row.cached), "failed", row.question.oracle), missing="failed")
        for row in rows
    ]
    store.add_answers([(row.id, answer, None) for row, answer in zip(rows, answers, strict=True)])
    for purpose in purposes:
        store.fail_awaited(purpose)
