"""Processes that work for a run. A process that ends, or hangs, is replaced."""

import time
from collections.abc import Callable, Mapping, Sequence
from threading import RLock
from typing import Any

from oat.errors import ActorError, ConfigError, LostError, OatError
from oat.processes.launcher import Launcher, Remote
from oat.processes.restarts import Restarts
from oat.runtime.calls import call_of, value_of
from oat.runtime.worker import surroundings, versions

_ROOM_S = 10.0
"""Longest time in seconds until what a lost process had counts as free."""
_PAUSE_S = 0.2
"""Time in seconds between two looks whether there is room."""


class UserFiles:
    """The user's own files that the processes of a run have imported. All of them must have imported the same
    content, also those that start late."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def take(self, who: str, found: Mapping[str, str]) -> None:
        """Note the files of a process (`loading.own_files`).

        Raises:
            ConfigError: another process has imported other content of one of them.
        """
        changed = [name for name, digest in found.items() if self._known.setdefault(name, digest) != digest]
        if changed:
            raise ConfigError(
                f"{who} has imported code that was edited while the run works, or that differs between "
                f"machines: {', '.join(changed[:3])}; put back what this run began with"
            )


class RestartState:
    """What one process keeps of a run, also if it opens the run again.

    Args:
        most: how many processes may be replaced.
    """

    def __init__(self, most: int):
        self.restarts, self.files = Restarts(most), UserFiles()


class WorkerProcess:
    """A process of a crew."""

    def __init__(self, remote: Remote):
        self.remote = remote
        self.name = remote.name
        self.lock = RLock()
        self.successor: WorkerProcess | None = None
        self._ordered: list[Callable[[], Any]] = []

    def ask(self, what: str, data: Any) -> Callable[[], Any]:
        """Send a call, and return a function that waits for the reply and returns its value."""
        pending = self.remote.call(what, data)
        return lambda: value_of(pending(), self.name)

    def order(self, what: str, data: bytes, take: Callable[[str, Any], None]) -> None:
        """Send a call whose reply only `ready` waits for.

        Args:
            take: function that gets the name of the process and the reply.
        """
        reply = self.ask(what, data)
        self._ordered.append(lambda: take(self.name, reply()))

    def ready(self) -> None:
        """Wait until the process has done what it was ordered.

        Raises:
            OatError: the process cannot do it.
            LostError: the process has ended.
        """
        while self._ordered:
            self._ordered[0]()
            del self._ordered[0]


class WorkerGroup:
    """Processes that do the same work. Each has a number, which no other process of the crew has or had.

    Args:
        kind: what a process is called in messages, such as "actor"; its number follows.
        size: number of processes.
        standby: number of further processes that wait until one is lost.
        parts: names of the user's parts that each of them needs (`worker.prepared`).
        files: the files of all processes of the run; None: those of this crew are compared with each other.

    Attributes:
        members: the processes that work.
    """

    def __init__(
        self,
        launcher: Launcher,
        restarts: Restarts,
        kind: str,
        size: int,
        standby: int = 0,
        parts: Sequence[str] = (),
        files: UserFiles | None = None,
    ):
        self.launcher, self.restarts, self._kind = launcher, restarts, kind
        self._files = files or UserFiles()
        prepare = call_of("prepare", versions(), list(parts), *surroundings())
        self._orders: list[tuple[str, bytes, Callable[[str, Any], None]]] = [("prepare", prepare, _ignore)]
        self._lock = RLock()
        self._is_closed = False
        self._hired = 0
        self.members = [self.start_worker() for _ in range(size)]
        self._standbys = [self.start_worker() for _ in range(standby)]

    def start_worker(self) -> WorkerProcess:
        """Start a further process, give it the orders that all have, and return it at once."""
        with self._lock:
            member = WorkerProcess(self.launcher.start(f"{self._kind} {self._hired}"))
            self._hired += 1
            for order in self._orders:
                member.order(*order)
            return member

    def make(self, symbol: str, plan: bytes) -> None:
        """Order every process to make its box.

        Args:
            symbol: the class of the box (`worker.Box`), as `package.module:Name`.
            plan: its argument.
        """
        self._orders.append(("make", call_of("make", symbol, plan), self._files.take))
        for member in [*self.members, *self._standbys]:
            member.order(*self._orders[-1])

    def ready(self) -> None:
        """Wait until all processes have done what they were ordered.

        Raises:
            OatError: a process cannot do it.
        """
        for member in [*self.members, *self._standbys]:
            try:
                member.ready()
            except LostError as lost:
                self.replace(member, lost)

    def replace(self, member: WorkerProcess, lost: LostError) -> WorkerProcess:
        """End a process that was lost, and return the one that takes its place.

        Raises:
            ActorError: no further process may be replaced, there is no room for one, a new one cannot do what
                it is ordered, or the crew is closed.
        """
        with member.lock:
            if member.successor is None:
                member.remote.close()
                self._refuse_closed(member)
                self._await_room(lost)
                self.restarts.use(lost)
                member.successor = self._succeeded(member)
            successor = member.successor
        try:
            successor.ready()
        except LostError as error:
            return self.replace(successor, error)
        except OatError as error:
            raise ActorError(f"{error}. The run continues with the same command") from None
        return successor

    def remove(self, member: WorkerProcess) -> None:
        """End a process that is no longer needed."""
        with self._lock:
            self.members.remove(member)
        member.remote.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for member in [*self.members, *self._standbys]:
                member.remote.close()

    def _succeeded(self, member: WorkerProcess) -> WorkerProcess:
        """Put another process in the place of a member, and return it."""
        with self._lock:
            self._refuse_closed(member)
            place = self.members if member in self.members else self._standbys
            has_standby = place is self.members and bool(self._standbys)
            new = self._standbys.pop(0) if has_standby else self.start_worker()
            place[place.index(member)] = new
            if has_standby:
                self._standbys.append(self.start_worker())
            return new

    def _refuse_closed(self, member: WorkerProcess) -> None:
        if self._is_closed:
            raise ActorError(f"{member.name} has ended, and so has the run")

    def _await_room(self, lost: LostError) -> None:
        """Wait until a further process can start, unless one is on standby.

        Raises:
            ActorError: no room has come up in `_ROOM_S` seconds.
        """
        until = time.monotonic() + _ROOM_S
        while not (self._standbys or self._is_closed or self.launcher.room):
            if time.monotonic() > until:
                raise ActorError(
                    f"{lost}; there is no room for another process in its place. The run continues "
                    "with the same command, when there is room"
                )
            time.sleep(_PAUSE_S)


def _ignore(who: str, reply: Any) -> None:
    """Do nothing with a reply."""
