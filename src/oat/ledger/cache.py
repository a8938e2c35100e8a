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
from collections.abc import Collection, Iterable, Mapping

from oat.ledger.intents import Awaited, Intent, Value, ValueAddress, mean, prompt_text, text_name, values_of
from oat.ledger.store import Store
from oat.types import Answer, Key, Question

CacheKey = tuple[str, str, str]
"""Purpose, oracle, and a hash of the remaining parts of the key: the columns `purpose`, `oracle` and `item`
of the table `cache`."""
Asking = dict[CacheKey, tuple[ValueAddress, ...]]
"""Maps the cache key of a query to addresses, one for each time that the query is asked, from the oldest
question to the newest. Each address says where an answer will have a value of the query."""


class Cache:
    """The known answers of one ledger, and the queries that are being asked.

    Args:
        repeats: number of answers that are bought for a query before they are used again; 0: no answer is
            used again.
        versions: the oracles' versions, by address. Answers of another version are not used.
        oracles: the addresses of the oracles whose answers may be used again.

    Attributes:
        asking: the queries that were sent for questions which no step has taken yet.
    """

    def __init__(self, store: Store, repeats: int, versions: Mapping[str, str], oracles: Collection[str]):
        self.store = store
        self.repeats = repeats
        self.versions = versions
        self.oracles = oracles if repeats else ()
        self.asking: Asking = {}

    def find(self, question: Question, asking: Asking) -> tuple[tuple[Value, ...], Asking]:
        """Find which values of a question are known, awaited, or to be asked for.

        Args:
            asking: the queries that other questions ask.

        Returns:
            The state of each value, and the queries that this question has to ask. Each query comes with
            the addresses at which its value will arrive: those in `asking`, then the one in the answer to
            this question. If the oracle's answers may not be used again, all values are to be asked for, and
            no query is returned.
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
            intents: questions that no step has taken, oldest first.
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
        """Remove the queries of some questions from `asking`.

        Args:
            taken: the keys of these questions.
        """
        left = {
            key: tuple(asker for asker in askers if asker.key not in taken)
            for key, askers in self.asking.items()
        }
        self.asking = {key: askers for key, askers in left.items() if askers}

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
