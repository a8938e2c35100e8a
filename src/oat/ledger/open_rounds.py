"""The rounds that a ledger still works with, held in memory: their trajectories, and their questions that
wait."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from oat.ledger.intents import Intent
from oat.ledger.store import Store
from oat.types import Answer, Group, Item

Place = tuple[str, int, int]
"""The address of a round: purpose, step, round."""


class OpenRounds:
    """Questions that wait and trajectories of their rounds; the store is read for those that are not in
    memory.

    Attributes:
        groups: trajectories of whole rounds.
        questions: questions that no step has taken, by id.
    """

    def __init__(self, store: Store):
        self.store = store
        self.groups: dict[Place, list[Group]] = {}
        self.questions: dict[int, Intent] = {}

    def add(self, place: Place, groups: Sequence[Group], rows: Sequence[Intent]) -> None:
        """Keep a round that was just recorded."""
        self.groups[place] = list(groups)
        self.questions.update({row.id: row for row in rows})

    def question(self, id: int) -> Intent:
        """A question that waits, with its token ids."""
        if id not in self.questions:
            self.questions[id] = self.with_ids(self.store.by_id(id))
        return self.questions[id]

    def close(self, id: int) -> Intent:
        """A question that waits no more."""
        return self.questions.pop(id) if id in self.questions else self.store.by_id(id)

    def with_ids(self, row: Intent) -> Intent:
        """The same question with its token ids, which a question that comes back from the store lacks."""
        if row.question.ids:
            return row
        samples = self.group(row).trajectories
        ids = tuple(samples[pick].completion for pick in row.question.picks)
        return replace(row, question=replace(row.question, ids=ids))

    def group(self, row: Intent) -> Group:
        """The trajectories that a question is about."""
        place = place_of(row)
        if place not in self.groups:
            self.groups[place] = self.store.groups(*place)
        return self.groups[place][row.member]

    def item(self, row: Intent, answer: Answer, label: int | None) -> Item:
        """What a step learns from one answered question."""
        return Item(self.group(row), row.question, answer, label)

    def forget(self, needed: Collection[Place]) -> None:
        """Drop the trajectories of all rounds but the needed ones."""
        self.groups = {place: groups for place, groups in self.groups.items() if place in needed}


def place_of(row: Intent) -> Place:
    key = row.question.key
    return key.purpose, key.step, key.round
