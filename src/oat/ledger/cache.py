"""The cache of answers: an oracle that has judged a text, or a pair of texts, is not paid for the same query
again.

A **cache key** names one query: the purpose, the oracle and its version, the prompt with everything that the
oracle sees of it, and a candidate, or two in either order. The cache stores the query's value under this key:
a score, or the probability that one of the two candidates wins. Only answers marked `ok` or `tie` are stored.
Labels are not stored; the ledger makes one for each question.

The setting `oracle.repeats` is the number of answers that are bought for a query. Once they are there, their
mean is the value of every later equal query. If `repeats` is 0, no answer is used again. If the answers of an
oracle are not a function of the question, the oracle sets `cacheable = False`; its answers are not used again
either.

An answer is stored when a step takes it, not when it comes. If enough answers to a query are stored or
already asked for, an equal question is not sent, but awaits those answers. So the values that are known or
awaited when a round is recorded follow from recorded rounds and steps alone, and a continued run sends the
same questions as the unbroken one. Each intent also records which of its values were known or awaited.

Purposes share no answers: training never uses those of evaluations, nor the other way round.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping

from oat.ledger.intents import Awaited, Intent, Value, ValueAddress, mean, prompt_text, text_name, values_of
from oat.ledger.store import Store
from oat.types import Answer, Key, Question

CacheKey = tuple[str, str, str]
"""Purpose, oracle, and a hash of the rest; the columns `purpose`, `oracle` and `item` of the table
`cache`."""
Asking = dict[CacheKey, tuple[ValueAddress, ...]]
"""For each query, the addresses of the values that questions ask for, in the order they were asked."""


class Cache:
    """The known answers of one ledger, and the queries that are being asked.

    Args:
        repeats: number of answers to a query that are bought before they are used again; 0: no answer is used
            again.
        versions: the oracles' versions, by address. Answers of another version are not used.
        oracles: the addresses of the oracles whose answers may be used again.

    Attributes:
        asking: the queries of questions that no step has taken.
    """

    def __init__(self, store: Store, repeats: int, versions: Mapping[str, str], oracles: Collection[str]):
        self.store = store
        self.repeats = repeats
        self.versions = versions
        self.oracles = oracles if repeats else ()
        self.asking: Asking = {}

    def find(self, question: Question, asking: Asking) -> tuple[tuple[Value, ...], Asking]:
        """Return the states of the values of a question's answer.

        Args:
            asking: the queries that other questions ask.

        Returns:
            The states. And a dict with each query that the question asks itself: the addresses of all values
            for which this query is then asked.
        """
        if question.oracle not in self.oracles:
            return (None,) * question.size, {}
        found: list[Value] = []
        own: Asking = {}
        for place, (key, is_turned) in enumerate(self._keys(question)):
            known = self.store.cached(*key)
            askers = own.get(key, asking.get(key, ()))
            if len(known) >= self.repeats:
                found.append(mean(known).turned(is_turned))
            elif len(known) + len(askers) >= self.repeats:
                brought_by = tuple(asker._replace(is_turned=asker.is_turned != is_turned) for asker in askers)
                found.append(Awaited(brought_by, tuple(each.turned(is_turned) for each in known)))
            else:
                found.append(None)
                own[key] = (*askers, ValueAddress(question.key, place, is_turned))
        return tuple(found), own

    def resume(self, intents: Iterable[Intent]) -> None:
        """Add the queries of these questions to `asking` after a restart.

        Args:
            intents: questions that no step has taken, the oldest first.
        """
        for intent in intents:
            if intent.question.oracle not in self.oracles:
                continue
            cached = intent.cached or (None,) * intent.question.size
            for place, (key, is_turned) in enumerate(self._keys(intent.question)):
                if cached[place] is None:
                    address = ValueAddress(intent.question.key, place, is_turned)
                    self.asking[key] = (*self.asking.get(key, ()), address)

    def forget(self, taken: Collection[Key]) -> None:
        """Remove the queries of these questions from `asking`."""
        left = {
            key: tuple(asker for asker in askers if asker.key not in taken)
            for key, askers in self.asking.items()
        }
        self.asking = {key: askers for key, askers in left.items() if askers}

    def keep(self, intent: Intent, answer: Answer, step: int) -> None:
        """Store the values that a question asked for itself and that are marked `ok` or `tie`, with the step
        that took them. The caller holds the transaction."""
        if intent.question.oracle not in self.oracles:
            return
        fresh = intent.cached or (None,) * intent.question.size
        for (key, is_turned), before, known in zip(
            self._keys(intent.question), fresh, values_of(answer), strict=True
        ):
            number = len(self.store.cached(*key))
            if before is None and known.mark in ("ok", "tie") and number < self.repeats:
                self.store.add_cached(*key, number, known.turned(is_turned), step)

    def _keys(self, question: Question) -> list[tuple[CacheKey, bool]]:
        """Return, for each value, its cache key and True if the question has the key's two texts in the other
        order."""
        about = [*filter(None, [self.versions.get(question.oracle)]), text_name(prompt_text(question))]
        names = [text_name(text) for text in question.candidates]
        place = question.key.purpose, question.oracle
        if question.kind == "score":
            return [((*place, _name(*about, name)), False) for name in names]
        first, second = names
        return [((*place, _name(*about, *sorted(names))), first > second)]


def _name(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
