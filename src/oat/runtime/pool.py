"""A pool of actors in processes of their own, behind the protocols of an actor and of a receiver of weights.

A prompt goes to the actor that has the fewest responses to sample. Random numbers are addressed, so it does
not matter which actor gets a prompt (with `engine.deterministic`, not even for the last bits).

If an actor is lost, another one takes its place. It gets the weights that the lost one had, and is asked for
what the lost one did not return. So no response is missing, and none comes twice.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np

from oat.errors import LostError, OatError, WeightsError, warn
from oat.runtime.calls import call_of, parts_of
from oat.runtime.transfer import loaded_with
from oat.runtime.worker_group import WorkerGroup, WorkerProcess
from oat.types import Branching, Bucket, Group, Prompt, Receipt, Sampling, Shipment, Work

_MOST_FLYING = 2
"""Most buckets that are on their way to an actor at the same time."""
_MOST_THREADS = 1024
"""Most actors that a pool waits for at the same time. Each wait takes a thread."""


@dataclass
class _Sent:
    """What was sent to fill a slot.

    Attributes:
        calls: the calls, each with its name, in their order.
        receipt: what each actor has answered to the last of them; None: not all have answered yet.
    """

    calls: list[tuple[str, Any]] = field(default_factory=list)
    receipt: Receipt | None = None


class ActorPool:
    """Actors that work as one.

    Args:
        crew: the processes.
        shared: sets of slots that share their storage (`transfer.loaded_with`).
        wanted: function that returns how many actors there shall be.

    Attributes:
        versions: the version of the weights that each slot was last given; who transfers weights notes it
            here (`Weights`). Responses of other versions are refused on arrival.
    """

    def __init__(
        self,
        crew: WorkerGroup,
        shared: Sequence[Collection[str]] = (),
        wanted: Callable[[], int] | None = None,
    ):
        self.crew, self.shared = crew, shared
        self.versions: dict[str, int] = {}
        self._wanted = wanted
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "actors")
        self._coming: dict[WorkerProcess, Future[None]] = {}
        self._refused: int | None = None
        self._load: Counter[WorkerProcess] = Counter()
        self._lock = Lock()
        self._worked: dict[WorkerProcess, Work] = {}
        self._past = Work()
        self._sent: dict[str, _Sent] = {}
        self._flying: dict[WorkerProcess, deque[Callable[[], Any]]] = defaultdict(deque)
        self._replies: dict[WorkerProcess, Any] = {}

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
            ActorError: an actor was lost, and no further one may be replaced.
        """
        self._follow_wanted()
        others = dict(samples), list(address), sampling
        return self._groups("sample", prompts, others, sum(samples.values()))

    def branch(
        self, groups: Sequence[Group], branching: Branching, address: Sequence[str | int]
    ) -> list[Group]:
        """Return groups with branches; see `protocols.Actor`."""
        return self._groups("branch", groups, (branching, list(address)), 1)

    def score(self, groups: Sequence[Group], needs: Sequence[str]) -> dict[str, list[np.ndarray]]:
        """Return scores of the samples, by name; see `protocols.Actor`."""
        if not needs:
            return {}
        found: list[dict[str, np.ndarray]] = self._shared_out("score", groups, (list(needs),), 1, _unjoined)
        return {name: [scores[name] for scores in found] for name in (found[0] if found else ())}

    def work(self) -> Work:
        """Return the work of all actors together, those included that were lost."""
        found = self._ask_all("work")
        self._worked = dict(zip(self.crew.members, found, strict=True))
        return sum(found, self._past)

    def inbox(self, slot: str) -> "PoolInbox":
        """Return the place where the weights of a slot arrive, for all actors."""
        return PoolInbox(self, slot)

    def close(self) -> None:
        self.crew.close()
        # threads that wait for a process end when all are closed
        self._threads.shutdown(wait=False, cancel_futures=True)

    def transfer(self, slot: str, what: str, *arguments: Any) -> None:
        """Send a call of a transfer of weights to all actors. It stays at hand for actors that come later."""
        if what == "begin":
            for other in loaded_with(slot, self.shared):
                self._sent.pop(other, None)
            self._sent[slot] = _Sent()
        call = what, self.crew.launcher.shared(parts_of(what, slot, *arguments))
        self._sent[slot].calls.append(call)
        for member in list(self.crew.members):
            self._flying[member].append(member.ask(*call))
            self._arrive(member, _MOST_FLYING)

    def receipt(self, slot: str) -> Receipt:
        """Wait until all actors have switched to what was sent, and return their receipt.

        Raises:
            WeightsError: two actors have different weights.
        """
        for member in list(self.crew.members):
            self._arrive(member, 0)
        first: Receipt = self._replies[self.crew.members[0]]
        for member in self.crew.members:
            _refuse_other_weights(slot, member, self._replies[member], first)
        self._sent[slot].receipt = first
        return first

    def _ask_all(self, what: str) -> list[Any]:
        """Call a method of all actors at the same time, and return their results."""
        data = call_of(what)
        asked = [(member, member.ask(what, data)) for member in self.crew.members]
        return [self._asked(member, what, data, reply) for member, reply in asked]

    def _arrive(self, member: WorkerProcess, most: int) -> None:
        """Wait until at most so many calls are on their way to an actor."""
        flying = self._flying[member]
        try:
            while len(flying) > most:
                self._replies[member] = flying.popleft()()
        except LostError as lost:
            self._replaced(member, lost)

    def _asked(
        self, member: WorkerProcess, what: str, data: bytes, reply: Callable[[], Any] | None = None
    ) -> Any:
        """Return the value of a call. If the actor is lost, ask the one that takes its place."""
        while True:
            try:
                return (reply or member.ask(what, data))()
            except LostError as lost:
                member, reply = self._replaced(member, lost), None

    def _replaced(self, member: WorkerProcess, lost: LostError) -> WorkerProcess:
        """Replace a lost actor, give the new one all weights, and return it."""
        while True:
            self._forget(member)
            member = self.crew.replace(member, lost)
            try:
                self._give(member)
                return member
            except LostError as error:
                lost = error

    def _forget(self, member: WorkerProcess) -> None:
        with self._lock:
            self._flying.pop(member, None)
            self._replies.pop(member, None)
            self._past += self._worked.pop(member, Work())

    def _give(self, member: WorkerProcess) -> None:
        """Send an actor all weights that actors have, and what has been sent of those that they get.

        Raises:
            WeightsError: the actor then has other weights than the others.
            LostError: the actor has ended.
        """
        flying: deque[Callable[[], Any]] = deque()
        for slot, sent in list(self._sent.items()):
            for call in sent.calls:
                flying.append(member.ask(*call))
                if len(flying) > _MOST_FLYING:
                    flying.popleft()()
            while flying:
                self._replies[member] = flying.popleft()()
            if sent.receipt is not None:
                _refuse_other_weights(slot, member, self._replies[member], sent.receipt)

    def _follow_wanted(self) -> None:
        """Begin to use the actors that were added and are ready, and end those that are not wanted. Further
        ones are started if there is room, and are used when they are ready."""
        wanted = self._wanted() if self._wanted is not None else len(self.crew.members)
        self._refused = wanted if wanted == self._refused else None
        for coming in [each for each, ready in self._coming.items() if ready.done()]:
            self._welcome(coming, self._coming.pop(coming), wanted)
        while len(self.crew.members) + len(self._coming) > wanted:
            self._dismiss()
        missing = wanted - len(self.crew.members) - len(self._coming)
        if missing > 0 and self._refused is None:
            room = self.crew.launcher.room
            for _ in range(min(missing, room)):
                hired = self.crew.start_worker()
                self._coming[hired] = self._threads.submit(hired.ready)
            if missing > room:
                self._refuse(wanted, "there is no room for more actors")

    def _welcome(self, coming: WorkerProcess, ready: Future[None], wanted: int) -> None:
        """Begin to use an actor that has done what it was ordered, or failed to."""
        error = ready.exception()
        try:
            if error is None:
                self._give(coming)
                self.crew.members.append(coming)
                return
        except LostError as lost:
            error = lost
        if not isinstance(error, OatError):
            raise error
        coming.remote.close()
        self._refuse(wanted, str(error))

    def _dismiss(self) -> None:
        """End an actor: one that is not ready yet, if there is one."""
        if self._coming:
            coming, _ = self._coming.popitem()
            coming.remote.close()
        else:
            self._forget(self.crew.members[-1])
            self.crew.remove(self.crew.members[-1])

    def _refuse(self, wanted: int, why: str) -> None:
        """Start no further actors until another number is wanted."""
        warn(f"{why}; the run goes on with {len(self.crew.members) + len(self._coming)} of {wanted} actors")
        self._refused = wanted

    def _shares(self, count: int, weight: int) -> list[tuple[WorkerProcess, list[int]]]:
        """Share out items: each goes to the actor with the smallest load.

        Args:
            weight: the load of an item.

        Returns:
            The actors that get items, each with their indices.
        """
        shares: dict[WorkerProcess, list[int]] = {}
        with self._lock:
            for index in range(count):
                member = min(self.crew.members, key=lambda each: self._load[each])
                self._load[member] += weight
                shares.setdefault(member, []).append(index)
        return list(shares.items())

    def _shared_out(
        self,
        name: str,
        items: Sequence[Any],
        others: tuple[Any, ...],
        weight: int,
        unjoined: Callable[[Any], list[Any]] = list,
    ) -> list[Any]:
        """Call a method of each actor with its share of the items, and return one result per item.

        Args:
            others: further arguments.
            weight: the load of an item.
            unjoined: function that takes the results of a share apart.
        """
        shares = self._shares(len(items), weight)

        def ask(member: WorkerProcess, indices: Sequence[int]) -> list[Any]:
            try:
                data = call_of(name, [items[index] for index in indices], *others)
                return unjoined(self._asked(member, name, data))
            finally:
                with self._lock:
                    self._load[member] -= weight * len(indices)

        asked = [self._threads.submit(ask, *share) for share in shares]
        wait(asked)
        found: list[Any] = [None] * len(items)
        for (_, indices), future in zip(shares, asked, strict=True):
            for index, result in zip(indices, future.result(), strict=True):
                found[index] = result
        return found

    def _groups(self, name: str, items: Sequence[Any], others: tuple[Any, ...], weight: int) -> list[Group]:
        groups = self._shared_out(name, items, others, weight)
        for group in groups:
            self._refuse_other_versions(group)
        return groups

    def _refuse_other_versions(self, group: Group) -> None:
        for trajectory in group.trajectories:
            asked = self.versions.get(trajectory.slot, 0)
            for segment in trajectory.segments:
                found = segment.versions
                if segment.author == "model" and (found is None or (found != asked).any()):
                    said = "no version" if found is None else f"version {found[found != asked].min()}"
                    raise WeightsError(
                        f"slot {trajectory.slot}: an actor answered with {said} of the weights, and version "
                        f"{asked} was asked; nothing is learned from it"
                    )


class PoolInbox:
    """Where the weights of a slot arrive, for all actors of a pool (`transfer.Inbox`)."""

    def __init__(self, pool: ActorPool, slot: str):
        self._pool, self._slot = pool, slot

    def begin(self, shipment: Shipment) -> None:
        self._pool.transfer(self._slot, "begin", shipment)

    def put(self, bucket: Bucket) -> None:
        self._pool.transfer(self._slot, "put", bucket)

    def commit(self) -> Receipt:
        """Switch all actors, and return their receipt.

        Raises:
            WeightsError: two actors have different weights.
        """
        self._pool.transfer(self._slot, "commit")
        return self._pool.receipt(self._slot)


def _refuse_other_weights(slot: str, member: WorkerProcess, held: Receipt, expected: Receipt) -> None:
    """Refuse an actor whose receipt differs from that of the other actors.

    Raises:
        WeightsError: it does.
    """
    if held != expected:
        raise WeightsError(
            f"slot {slot}: {member.name} has other weights than another actor after the same transfer; do "
            "not trust this run's newest samples, and check the machine's memory"
        )


def _unjoined(scores: Mapping[str, Sequence[np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Return the scores of each group, by name."""
    count = len(next(iter(scores.values()), ()))
    return [{name: found[index] for name, found in scores.items()} for index in range(count)]
