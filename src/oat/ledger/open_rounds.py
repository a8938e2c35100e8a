"""The rounds that a ledger still works with, in memory: their trajectories and their waiting questions."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from oat.ledger.intents import Intent
from oat.ledger.store import Store
from oat.types import Answer, Group, Item

Place = tuple[str, int, int]
"""The address of a round: purpose, step, round."""


class OpenRounds:
    """The questions that no step has taken, and the trajectories of their rounds, held in memory. What is not
    in memory is read from the store when it is needed. The store's lock guards both maps.

    Attributes:
        groups: the groups of each round that is in memory.
        intents: the questions that are in memory, by id.
    """

    def __init__(self, store: Store):
        self.store = store
        self.groups: dict[Place, list[Group]] = {}
        self.intents: dict[int, Intent] = {}

    def add(self, place: Place, groups: Sequence[Group], intents: Sequence[Intent]) -> None:
        """Add a round that was just recorded."""
        with self.store.lock:
            self.groups[place] = list(groups)
            self.intents.update({intent.id: intent for intent in intents})

    def intent(self, id: int) -> Intent:
        """Return the waiting question with this id, its token ids included."""
        with self.store.lock:
            if id not in self.intents:
                self.intents[id] = self.with_ids(self.store.by_id(id))
            return self.intents[id]

    def close(self, id: int) -> Intent:
        """Remove the question with this id from memory, and return it. A step takes the question."""
        with self.store.lock:
            return self.intents.pop(id) if id in self.intents else self.store.by_id(id)

    def with_ids(self, intent: Intent) -> Intent:
        """Return `intent` with the token ids of its candidates and the row of its prompt. In the store, only
        the groups of its round have these."""
        if intent.question.ids:
            return intent
        group = self.group(intent)
        ids = tuple(group.trajectories[pick].completion for pick in intent.question.picks)
        return replace(intent, question=replace(intent.question, ids=ids, row=group.prompt.row))

    def group(self, intent: Intent) -> Group:
        """Return the group that a question is about.

        Raises:
            LedgerError: the group's trajectories were dropped, or are damaged.
        """
        return self._of_round(place_of(intent))[intent.member]

    def num_groups(self, place: Place) -> int:
        """Return the number of groups of a round.

        Raises:
            LedgerError: the round's trajectories were dropped, or are damaged.
        """
        return len(self._of_round(place))

    def _of_round(self, place: Place) -> list[Group]:
        with self.store.lock:
            if place not in self.groups:
                self.groups[place] = self.store.groups(*place)
            return self.groups[place]

    def item(self, intent: Intent, answer: Answer, label: int | None) -> Item:
        """Return what a step learns from: an answered question with its group, answer and label."""
        return Item(self.group(intent), intent.question, answer, label)

    def forget(self, needed: Collection[Place]) -> None:
        """Drop the trajectories of all rounds except those in `needed`."""
        with self.store.lock:
            self.groups = {place: groups for place, groups in self.groups.items() if place in needed}


def place_of(intent: Intent) -> Place:
    key = intent.question.key
    return key.purpose, key.step, key.round
