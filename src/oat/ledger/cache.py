"""The cache of answers. It stores what oracles said, so an equal query need not be paid again.

A **cache key** names one query: the purpose, the oracle and its version, everything that the oracle sees of
the prompt, and the candidate. For a comparison the key has two candidates, in either order. The cache stores
the query's value under this key: a score, or the probability that one of the two candidates wins. Only values
marked `ok` or `tie` are stored. A purpose uses only its own answers, so training never uses an answer of an
evaluation.

The setting `oracle.repeats`, if positive, is the number of answers that are bought for a query. Once they are
stored, their mean is the value of every later equal query. An answer is never used again if `repeats` is 0,
or if its oracle has `cacheable = False` because its answers are not a function of the question.

An answer is stored when a step or an evaluation takes it, which may be long after the answer comes. If enough
answers to a query are stored or are being asked for, an equal query is not sent, but gets its value from
those answers. So recorded rounds and takes alone decide which queries are sent, and a continued run sends the
same queries as the unbroken one.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping

from oat.ledger.intents import Awaited, Intent, Value, ValueAddress, mean, prompt_text, text_name, values_of
from oat.ledger.open_questions import CacheKey
from oat.ledger.store import Store
from oat.types import Answer, Question

Asking = Callable[[CacheKey], tuple[ValueAddress, ...]]
"""Returns where answers will have values of a query, as `OpenQuestions.asking` does."""
Asks = list[tuple[CacheKey, ValueAddress]]
"""The queries that a question asks, each with the address at which its value will arrive."""


class Cache:
    """The known answers of one ledger.

    Args:
        repeats: number of answers that are bought for a query before they are used again; 0: no answer is
            used again.
        versions: the oracles' versions, by address. Answers of another version are not used.
        oracles: the addresses of the oracles whose answers may be used again.
    """

    def __init__(self, store: Store, repeats: int, versions: Mapping[str, str], oracles: Collection[str]):
        self.store = store
        self.repeats = repeats
        self.versions = versions
        self.oracles = oracles if repeats else ()

    def find(self, question: Question, asking: Asking) -> tuple[tuple[Value, ...], Asks]:
        """Find which values of a question are known, awaited, or to be asked for.

        Args:
            asking: the queries that other questions ask.

        Returns:
            The state of each value, and the queries that this question has to ask. If the oracle's answers
            may not be used again, all values are to be asked for, and no query is returned.
        """
        if question.oracle not in self.oracles:
            return (None,) * question.size, []
        found: list[Value] = []
        own: Asks = []
        for place, (key, is_turned) in enumerate(self._keys(question)):
            known = self.store.cached(*key)
            askers = (*asking(key), *(address for other, address in own if other == key))
            if len(known) >= self.repeats:
                found.append(mean(known).turned(is_turned))
            elif len(known) + len(askers) >= self.repeats:
                brought_by = tuple(asker._replace(is_turned=asker.is_turned != is_turned) for asker in askers)
                found.append(Awaited(brought_by, tuple(each.turned(is_turned) for each in known)))
            else:
                found.append(None)
                own.append((key, ValueAddress(question.key, place, is_turned)))
        return tuple(found), own

    def asks(self, intent: Intent) -> Asks:
        """Return the queries that a recorded question asks; as `find` returned them."""
        question = intent.question
        if question.oracle not in self.oracles:
            return []
        cached = intent.cached or (None,) * question.size
        return [
            (key, ValueAddress(question.key, place, is_turned))
            for place, (key, is_turned) in enumerate(self._keys(question))
            if cached[place] is None
        ]

    def keep(self, intent: Intent, answer: Answer, step: int) -> None:
        """Store the values of an answer that a step takes. The caller holds the transaction.

        A value is left out in three cases: its mark is neither `ok` nor `tie`; the oracle was not asked for
        it, because it was known or awaited; or `repeats` values of its query are stored already. If answers
        of the oracle may not be used again, nothing is stored.
        """
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
        """Return, for each value, its cache key, and True if the question compares two texts and the key has
        them in reverse order."""
        about = [*filter(None, [self.versions.get(question.oracle)]), text_name(prompt_text(question))]
        names = [text_name(text) for text in question.candidates]
        place = question.key.purpose, question.oracle
        if question.kind == "score":
            return [((*place, _name(*about, name)), False) for name in names]
        first, second = names
        return [((*place, _name(*about, *sorted(names))), first > second)]


def _name(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
