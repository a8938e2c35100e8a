"""Records answers with their labels, and completes answers that await values.

The first answer of a question wins. A question may have been recorded as awaiting values from an equal
question (`ledger/cache.py`). When the equal question is answered, the same transaction also completes the
answer that awaits its values.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from oat.ledger.intents import Intent, whole
from oat.ledger.store import Store
from oat.oracles.contract import nothing
from oat.seeds import Seeds
from oat.types import Answer, Key, Question


class Settling:
    """Records answers, and completes the answers that await values from them.

    Args:
        labels: how the probability of a comparison becomes a label. "threshold": the more probable candidate
            wins. "bernoulli": the first candidate wins with that probability, drawn from a generator of the
            question's own. In both cases a probability of exactly one half gives no label.

    Attributes:
        awaiting: for the key of an unanswered question, the intents that await values from its answer, by
            intent id.
    """

    def __init__(self, store: Store, seeds: Seeds, labels: Literal["threshold", "bernoulli"]):
        self.store = store
        self.seeds = seeds
        self.labels = labels
        self.awaiting: dict[Key, dict[int, Intent]] = {}

    def record(self, answers: Sequence[tuple[Intent, Answer]]) -> None:
        """Record answers of oracles. Some questions await values from these answers. In the same transaction,
        complete the answer to each such question that awaits no further value."""
        with self.store.lock, self.store:
            self.add(answers)
            intents: dict[int, Intent] = {}
            for _, answer in answers:
                intents |= self.awaiting.pop(answer.key, {})
            self.complete(intents.values())

    def add(self, answers: Iterable[tuple[Intent, Answer]]) -> None:
        """Record answers with their labels. The caller holds the transaction."""
        self.store.add_answers(
            [(intent.id, answer, self._label(intent.question, answer)) for intent, answer in answers]
        )

    def complete(self, intents: Iterable[Intent]) -> None:
        """Complete the answer to each question whose awaited values are all recorded. Add the remaining
        questions to `awaiting`. The caller holds the transaction."""
        for intent in intents:
            keys = intent.others | ({intent.question.key} if intent.is_sent else set())
            found = {key: self.store.values(key) for key in keys}
            brought = {key: values for key, values in found.items() if values is not None}
            for key in found.keys() - brought.keys():
                self.awaiting.setdefault(key, {})[intent.id] = intent
            if len(brought) < len(found):
                continue
            if intent.is_sent:
                self.store.complete(intent.id, whole(intent, self.store.answer(intent)[0], brought))
            else:
                empty = Answer(intent.question.key, (), (), queries=0, by=intent.question.oracle)
                self.add([(intent, whole(intent, empty, brought))])

    def forget(self, purpose: str) -> None:
        """Remove the intents of a purpose from `awaiting`."""
        self.awaiting = {key: intents for key, intents in self.awaiting.items() if key.purpose != purpose}

    def _label(self, question: Question, answer: Answer) -> int | None:
        """Return the index of the candidate that won a comparison. Return None if no candidate won, or if the
        question is for scores."""
        if question.kind != "compare" or answer.marks[0] != "ok":
            return None
        probability = answer.values[0]
        if probability == 0.5:
            return None
        if self.labels == "bernoulli":
            return 0 if self.seeds.at("label", str(question.key)).random() < probability else 1
        return int(probability < 0.5)


def unanswered(intent: Intent, mark: Literal["failed", "unpaid"]) -> Answer:
    """Return the answer to record for a question that no oracle answers. It has the question's known values;
    every other value gets the mark `mark`."""
    return whole(intent, nothing(intent.rest, mark, intent.question.oracle), missing=mark)


def close_unanswered(store: Store, *purposes: str) -> None:
    """Record the unanswered questions of these purposes as failed. In the recorded answers of these
    purposes, mark the values that are still awaited as failed. The caller holds the transaction."""
    store.add_answers(
        (intent.id, unanswered(intent, "failed"), None)
        for intent in store.unanswered()
        if intent.question.key.purpose in purposes
    )
    for purpose in purposes:
        store.fail_awaited(purpose)
