"""Answers that are used again: what an oracle said once about a text, or a pair of texts, it need not be paid to say twice.

An item is one priced thing under its canonical name: the purpose, the oracle and its version, the prompt with everything the oracle sees of it, and
a candidate, or two in either order. What is kept is the value, a score or the probability that the first of the two wins (of the other order one
minus it), and never a label: labels are drawn anew for each question. An item may be asked several times before its answers are used again
(`repeats`); what is known of it then is their mean.

An item becomes known when a step takes its answer, not when the answer comes. So what is known at a round depends on recorded steps only, and a run
that is continued decides as the unbroken one; besides, the decision is stored with the question. Purposes share nothing: an evaluation costs what it
costs, and training never finds its answers. An oracle whose answers are no function of the question says `cacheable = False`.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence

from oat.store import Asked, Known, Store, prompt_text, text_name
from oat.types import Answer, Mark, Question


class Cache:
    """The known items of one ledger.

    Args:
        repeats: answers of an item before they are used again.
        versions: of the oracles, by address; what one said in another version is not known.
    """

    def __init__(self, store: Store, repeats: int, versions: Mapping[str, str]):
        self.store, self.repeats, self.versions = store, repeats, versions

    def find(self, question: Question) -> tuple[Known, ...]:
        """What is known of each value of the answer."""
        found: list[Known] = []
        for item, is_turned in self._items(question):
            answers = self.store.cached(question.key.purpose, question.oracle, item)
            found.append(_turned(_mean(answers), is_turned) if len(answers) >= self.repeats else None)
        return tuple(found)

    def keep(self, asked: Asked, answer: Answer, step: int) -> None:
        """Remember the values that were asked for, as of the step that took them; the caller holds the transaction."""
        question, fresh = asked.question, asked.cached or (None,) * asked.question.size
        for (item, is_turned), known, value, mark in zip(self._items(question), fresh, answer.values, answer.marks, strict=True):
            number = len(self.store.cached(question.key.purpose, question.oracle, item))
            if known is None and mark in ("ok", "tie") and number < self.repeats:
                self.store.add_cached(question.key.purpose, question.oracle, item, number, *_turned((value, mark), is_turned), step)

    def _items(self, question: Question) -> list[tuple[str, bool]]:
        """For each value its item, and whether the question has the item's two texts the other way round."""
        asked = [*filter(None, [self.versions.get(question.oracle)]), text_name(prompt_text(question))]
        names = [text_name(text) for text in question.candidates]
        if question.kind == "score":
            return [(_name(*asked, name), False) for name in names]
        first, second = names
        return [(_name(*asked, *sorted(names)), first > second)]


def _name(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _turned(known: tuple[float, Mark], is_turned: bool) -> tuple[float, Mark]:
    return (1.0 - known[0] if is_turned else known[0]), known[1]


def _mean(answers: Sequence[tuple[float, Mark]]) -> tuple[float, Mark]:
    """The mean of an item's answers; a tie only where all are."""
    mark: Mark = "tie" if all(mark == "tie" for _, mark in answers) else "ok"
    return math.fsum(value for value, _ in answers) / len(answers), mark
