"""Answers that are used again: what an oracle said once about a text, or a pair of texts, it need not be paid
to say twice.

An item is one priced thing under its canonical name: the purpose, the oracle and its version, the prompt with
everything the oracle sees of it, and a candidate, or two in either order. What is kept is the value, a score
or the probability that the first of the two wins (of the other order one minus it), and never a label: labels
are drawn anew for each question. An item may be asked several times before its answers are used again
(`repeats`); what is known of it then is their mean.

An item becomes known when a step takes its answer, not when the answer comes; until then its equals await
that answer, and are not asked either. So what is known or awaited at a round depends on recorded rounds and
steps only, and a run that is continued decides as the unbroken one; besides, the decision is stored with the
question. Purposes share nothing: an evaluation costs what it costs, and training never finds its answers. An
oracle whose answers are no function of the question says `cacheable = False`.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping

from oat.ledger.intents import Awaited, Intent, Source, Value, mean, prompt_text, text_name, values_of
from oat.ledger.store import Store
from oat.types import Answer, Key, Question

Asking = dict[tuple[str, str, str], tuple[Source, ...]]
"""By item (purpose, oracle and canonical name) who asks for it, in the order they were asked."""


class Cache:
    """The known items of one ledger, and those that are being asked.

    Args:
        repeats: answers of an item before they are used again; 0 asks every time, and nothing is known.
        versions: of the oracles, by address; what one said in another version is not known.
        oracles: the addresses of those whose answers may be used again.

    Attributes:
        asking: for the items of questions that no step has taken.
    """

    def __init__(self, store: Store, repeats: int, versions: Mapping[str, str], oracles: Collection[str]):
        self.store = store
        self.repeats = repeats
        self.versions = versions
        self.oracles = oracles if repeats else ()
        self.asking: Asking = {}

    def find(self, question: Question, asking: Asking) -> tuple[tuple[Value, ...], Asking]:
        """What is known of each value of the answer; and who asks for its items, if it is asked."""
        if question.oracle not in self.oracles:
            return (None,) * question.size, {}
        found: list[Value] = []
        own: Asking = {}
        for place, (item, is_turned) in enumerate(self._items(question)):
            known, sources = self.store.cached(*item), own.get(item, asking.get(item, ()))
            if len(known) >= self.repeats:
                found.append(mean(known).turned(is_turned))
            elif len(known) + len(sources) >= self.repeats:
                awaited = tuple(
                    source._replace(is_turned=source.is_turned != is_turned) for source in sources
                )
                found.append(Awaited(awaited, tuple(each.turned(is_turned) for each in known)))
            else:
                found.append(None)
                own[item] = (*sources, Source(question.key, place, is_turned))
        return tuple(found), own

    def resume(self, rows: Iterable[Intent]) -> None:
        """Take up who asks for what from questions that no step has taken, oldest first."""
        for row in rows:
            if row.question.oracle not in self.oracles:
                continue
            cached = row.cached or (None,) * row.question.size
            for place, (item, is_turned) in enumerate(self._items(row.question)):
                if cached[place] is None:
                    self.asking[item] = (
                        *self.asking.get(item, ()),
                        Source(row.question.key, place, is_turned),
                    )

    def forget(self, taken: Collection[Key]) -> None:
        """These questions ask no more."""
        left = {
            item: tuple(source for source in sources if source.key not in taken)
            for item, sources in self.asking.items()
        }
        self.asking = {item: sources for item, sources in left.items() if sources}

    def keep(self, asked: Intent, answer: Answer, step: int) -> None:
        """Remember the values that were asked for, as of the step that took them; the caller holds the
        transaction."""
        if asked.question.oracle not in self.oracles:
            return
        fresh = asked.cached or (None,) * asked.question.size
        for (item, is_turned), before, known in zip(
            self._items(asked.question), fresh, values_of(answer), strict=True
        ):
            number = len(self.store.cached(*item))
            if before is None and known.mark in ("ok", "tie") and number < self.repeats:
                self.store.add_cached(*item, number, known.turned(is_turned), step)

    def _items(self, question: Question) -> list[tuple[tuple[str, str, str], bool]]:
        """For each value its item, and whether the question has the item's two texts the other way round."""
        asked = [*filter(None, [self.versions.get(question.oracle)]), text_name(prompt_text(question))]
        names = [text_name(text) for text in question.candidates]
        place = question.key.purpose, question.oracle
        if question.kind == "score":
            return [((*place, _name(*asked, name)), False) for name in names]
        first, second = names
        return [((*place, _name(*asked, *sorted(names))), first > second)]


def _name(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
