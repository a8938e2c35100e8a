"""A pool of actors in processes of their own, behind the protocols of an actor and of the holders of weights.

Prompts are shared out evenly. Random numbers are addressed, so it does not matter which actor gets a prompt
(with `engine.deterministic`, not even for the last bits). Every argument and result is bytes of `wire.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from oat import errors, wire
from oat.errors import WeightsError
from oat.types import Branching, Bucket, Group, Prompt, Receipt, Sampling, Shipment, Work

Pending = Callable[[], bytes]
"""Waits for the reply to a call, and returns it."""


class Remote(Protocol):
    """An actor in a process of its own.

    Attributes:
        name: for messages.
    """

    name: str

    def call(self, what: str, data: bytes) -> Pending:
        """Send a call, the encoded pair of a method's name and its arguments, and return at once.

        Args:
            what: the method's name, for messages.
        """

    def close(self) -> None:
        """End the process."""


class ActorPool:
    """Actors that work as one.

    Attributes:
        versions: the version of the weights that each slot was last given; who transfers weights notes it
            here (`Weights`). Responses of other versions are refused on arrival.
    """

    def __init__(self, remotes: Sequence[Remote]):
        self.remotes = list(remotes)
        self.versions: dict[str, int] = {}

    def sample(
        self,
        prompts: Sequence[Prompt],
        samples: Mapping[str, int],
        address: Sequence[str | int],
        sampling: Sampling | None = None,
    ) -> list[Group]:
        """Return one group per prompt; see `protocols.Actor`.

        Raises:
            WeightsError: an actor answered with other weights than it was given.
        """
        others = dict(samples), list(address), sampling
        return self._groups("sample", prompts, others)

    def branch(
        self, groups: Sequence[Group], branching: Branching, address: Sequence[str | int]
    ) -> list[Group]:
        """Return groups with branches; see `protocols.Actor`."""
        return self._groups("branch", groups, (branching, list(address)))

    def score(self, groups: Sequence[Group], needs: Sequence[str]) -> dict[str, list[np.ndarray]]:
        """Return scores of the samples, by name; see `protocols.Actor`."""
        found = self._shared_out("score", groups, (list(needs),))
        names = found[0] if found else ()
        return {name: [scores for each in found for scores in each[name]] for name in names}

    def work(self) -> Work:
        """Return the work of all actors together."""
        return sum(self.deliver("work"), Work())

    def inbox(self, slot: str) -> "PoolInbox":
        """Return the place where the weights of a slot arrive, for all actors."""
        return PoolInbox(self, slot)

    def close(self) -> None:
        for remote in self.remotes:
            remote.close()

    def deliver(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method of all actors at the same time, and return their results."""
        data = wire.encode((name, arguments))
        pending = [self._send(remote, name, data) for remote in self.remotes]
        return [each() for each in pending]

    def _send(self, remote: Remote, name: str, data: bytes) -> Callable[[], Any]:
        """Send a call, and return a function that waits for the reply and returns its value.

        Raises:
            OatError: in the wait: what the actor raised.
        """
        pending = remote.call(name, data)

        def wait() -> Any:
            reply = wire.decode(pending())
            if "error" not in reply:
                return reply["value"]
            error = getattr(errors, reply["error"])
            raise error.__new__(error, f"{remote.name}: {reply['text']}")

        return wait

    def _shares(self, items: Sequence[Any]) -> list[tuple[Remote, list[Any]]]:
        bounds = np.linspace(0, len(items), len(self.remotes) + 1).round().astype(int)
        return [
            (remote, list(items[begin:end]))
            for remote, begin, end in zip(self.remotes, bounds, bounds[1:], strict=False)
        ]

    def _shared_out(self, name: str, items: Sequence[Any], others: tuple[Any, ...]) -> list[Any]:
        """Call a method of each actor with its share of the items. Return the results of those that got
        some."""
        pending = [
            self._send(remote, name, wire.encode((name, (share, *others))))
            for remote, share in self._shares(items)
            if share
        ]
        return [each() for each in pending]

    def _groups(self, name: str, items: Sequence[Any], others: tuple[Any, ...]) -> list[Group]:
        groups = [group for share in self._shared_out(name, items, others) for group in share]
        for group in groups:
            self._refuse_other_versions(group)
        return groups

    def _refuse_other_versions(self, group: Group) -> None:
        for trajectory in group.trajectories:
            asked = self.versions.get(trajectory.slot, 0)
            for segment in trajectory.segments:
                if segment.versions is not None and (segment.versions != asked).any():
                    found = sorted({*segment.versions.tolist()})
                    raise WeightsError(
                        f"slot {trajectory.slot}: an actor answered with version {found[0]} of the weights, "
                        f"and version {asked} was asked; nothing is learned from it"
                    )


class PoolInbox:
    """Where the weights of a slot arrive, for all actors of a pool (`transfer.Inbox`)."""

    def __init__(self, pool: ActorPool, slot: str):
        self._pool, self._slot = pool, slot

    def begin(self, shipment: Shipment) -> None:
        self._pool.deliver("begin", self._slot, shipment)

    def put(self, bucket: Bucket) -> None:
        self._pool.deliver("put", self._slot, bucket)

    def commit(self) -> Receipt:
        """Switch all actors, and return their receipt.

        Raises:
            WeightsError: two actors have different weights.
        """
        receipts: list[Receipt] = self._pool.deliver("commit", self._slot)
        for number, receipt in enumerate(receipts):
            if receipt != receipts[0]:
                raise WeightsError(
                    f"slot {self._slot}: actor {number} has other weights than actor 0 after the same "
                    "transfer; do not trust this run's newest samples, and check the machine's memory"
                )
        return receipts[0]
