"""Clients: processes that ask a run's oracles. The run's own process sends them its questions and gets the
answers through a `ClientOracle` for each oracle.

A question goes to the client that has the fewest questions to answer. Each client has a thread here, which
sends it new questions and fetches its answers. So slow answers of one client hold no other.

If a client is lost, the process that takes its place is asked the questions that the lost one had not
answered. A durable oracle has kept them: its answers are fetched by the tickets that it gave. It is asked by
the first client alone, since two processes may not be able to share what it keeps. Questions whose scores
depend on each other (`Oracle.is_relative`) go to one client together.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any

from oat import wire
from oat.errors import LostError, OatError
from oat.oracles.base import Mean, Oracle, Wrapper
from oat.runtime.calls import call_of
from oat.runtime.worker_group import WorkerGroup, WorkerProcess
from oat.types import Answer, Question

_WAIT_S = 0.2
"""Longest time in seconds that a client waits for an answer, before it can be sent new questions."""
_PAUSE_S = 0.01
"""Time in seconds between two looks at oracles that do not wait although they have no answer."""
_CLOSE_S = 5.0
"""Longest time in seconds that clients have to close their oracles."""

Sums = Mapping[str, tuple[float, float | None]]
"""Metrics of an oracle in one process, by name: the total and the count of a mean, or a number and None."""


@dataclass(eq=False)
class _Batch:
    """Questions that one client gets together.

    Attributes:
        role: the setting that names their oracle.
        purpose: that of all of them; "" if they are from before a restart.
        questions: those that are not answered, encoded, by the ticket that the ledger has.
        given: the tickets that the oracle gave when the questions were sent last.
        tickets: the tickets of `questions`, by that of the oracle; None: the oracle was not asked yet.
        error: why the oracle is not asked for them at present; None: it is.
        is_raised: True if the run's thread got the error. It may then ask again.
    """

    role: str
    purpose: str
    is_durable: bool
    questions: dict[str, bytes]
    given: Sequence[str] = ()
    tickets: dict[str, str] | None = None
    error: OatError | None = None
    is_raised: bool = False

    def take_tickets(self, given: Sequence[str], sent: Sequence[str]) -> list[str]:
        """Take the tickets of the oracle. Those of a durable oracle are the ledger's too. Return those of
        questions that were dropped meanwhile.

        Args:
            sent: the tickets that the questions had when they were sent.
        """
        self.given = given
        if self.is_durable:
            self.questions = {own: self.questions[old] for own, old in zip(given, sent, strict=True)}
            sent = given
        tickets = dict(zip(given, sent, strict=True))
        self.tickets = {own: ticket for own, ticket in tickets.items() if ticket in self.questions}
        return [own for own in given if own not in self.tickets]

    def drop(self, tickets: Collection[str]) -> list[str]:
        """Forget the questions with these tickets, and return the oracle's tickets of them."""
        self.questions = {each: text for each, text in self.questions.items() if each not in tickets}
        dropped = [own for own, ticket in (self.tickets or {}).items() if ticket in tickets]
        for own in dropped:
            del self.tickets[own]  # type: ignore[union-attr]
        return dropped


@dataclass(eq=False)
class _Client:
    """A client, or the one that took its place.

    Attributes:
        batches: those with questions that are not answered.
        dropped: the tickets of oracles that nobody waits for, with the role of each. The client does not know
            it yet.
    """

    member: WorkerProcess
    batches: list[_Batch] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def load(self) -> int:
        return sum(len(batch.questions) for batch in self.batches if batch.error is None)

    @property
    def due(self) -> list[_Batch]:
        """The batches that the oracles are to be asked about now."""
        return [batch for batch in self.batches if batch.error is None]

    def ask(self, what: str, *arguments: Any) -> Any:
        """Call a method of the client's box, and return its result."""
        return self.member.ask(what, call_of(what, *arguments))()


class Clients:
    """The clients of a run.

    Args:
        crew: the processes, whose boxes answer four calls:

            * `submit(role, questions)` returns the oracle's tickets;
            * `collect(role, purpose, tickets, seconds)` returns pairs of a ticket and an answer, and the
              oracle's metrics (`sums_of`). All tickets are of one purpose;
            * `drop(role, tickets)` tells the oracle what nobody waits for;
            * `close()` closes the oracles.
    """

    def __init__(self, crew: WorkerGroup):
        self.crew = crew
        self._clients: list[_Client] = []
        self._threads: list[Thread] = []
        self._changed = Condition()
        self._numbers = itertools.count()
        self._ready: dict[str, dict[str, Answer]] = defaultdict(dict)
        self._metrics: dict[tuple[str, WorkerProcess], Sums] = {}
        self._failure: BaseException | None = None
        self._is_closed = False

    def begin(self) -> None:
        """Wait until all clients have made their oracles.

        Raises:
            OatError: a client cannot make them.
        """
        self.crew.ready()
        self._clients = [_Client(member) for member in self.crew.members]
        self._threads = [Thread(target=self._serve, args=(each,), daemon=True) for each in self._clients]
        for thread in self._threads:
            thread.start()

    def submit(
        self, role: str, questions: Sequence[Question], *, is_durable: bool, is_together: bool
    ) -> list[str]:
        """Send questions to clients, and return their tickets. Only for a durable oracle, wait until it has
        given them.

        Args:
            is_together: True: one client gets all the questions.

        Raises:
            OatError: a durable oracle refuses them, or no client may be replaced any more.
        """
        encoded = [wire.encode(question) for question in questions]
        with self._changed:
            self._refuse_failed()
            given = [str(next(self._numbers)) for _ in questions]
            made = []
            for client, places in self._shares(len(questions), is_durable, is_together):
                own = {given[place]: encoded[place] for place in places}
                batch = _Batch(role, questions[0].key.purpose, is_durable, own)
                client.batches.append(batch)
                made.append(batch)
            self._changed.notify_all()
            if not is_durable or not made:
                return given
            (batch,) = made
            # the client's thread ends this wait: each of its calls has a deadline
            self._changed.wait_for(lambda: self._failure or batch.error or batch.given)
            self._refuse_failed()
            if batch.error is not None:
                self._clients[0].batches.remove(batch)
                raise batch.error
            return list(batch.given)

    def collect(
        self, role: str, tickets: Sequence[str], seconds: float, *, is_durable: bool
    ) -> list[tuple[str, Answer]]:
        """Return answers; see `Oracle.collect`.

        Raises:
            OatError: the oracle raised it in a client, or no client may be replaced any more.
        """
        ready = self._ready[role]
        with self._changed:
            mine = self._asked_again(role, dict.fromkeys(tickets), is_durable)
            self._changed.wait_for(
                lambda: self._failure or ready.keys() & {*tickets} or any(each.error for each in mine),
                seconds,
            )
            if there := [ticket for ticket in dict.fromkeys(tickets) if ticket in ready]:
                return [(ticket, ready.pop(ticket)) for ticket in there]
            self._refuse_failed()
            for batch in mine:
                if batch.error is not None:
                    batch.is_raised = True
                    raise batch.error
        return []

    def drop(self, role: str, tickets: Collection[str]) -> None:
        """Ask no client any more about these tickets, and tell the oracles; see `Oracle.drop`."""
        with self._changed:
            for ticket in tickets:
                self._ready[role].pop(ticket, None)
            for client in self._clients:
                for batch in client.batches:
                    if batch.role == role:
                        client.dropped += [(role, own) for own in batch.drop(tickets)]
                client.batches = [batch for batch in client.batches if batch.questions]
            self._changed.notify_all()

    def metrics(self, role: str) -> dict[str, float]:
        """Return the metrics of an oracle, over all clients, those included that were lost."""
        with self._changed:
            return together(sums for (own, _), sums in self._metrics.items() if own == role)

    def close(self) -> None:
        """Let the clients close their oracles, and end them."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        until = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self.crew.close()

    def _shares(self, count: int, is_durable: bool, is_together: bool) -> list[tuple[_Client, list[int]]]:
        """Share out questions. Return each client that gets some, with their indices."""
        loads = {client: client.load for client in self._clients[: 1 if is_durable else None]}
        shares: dict[_Client, list[int]] = {}
        least = min(loads, key=loads.__getitem__)
        for place in range(count):
            client = least if is_together else min(loads, key=loads.__getitem__)
            loads[client] += 1
            shares.setdefault(client, []).append(place)
        return list(shares.items())

    def _asked_again(self, role: str, tickets: Mapping[str, None], is_durable: bool) -> list[_Batch]:
        """Return the batches that have one of these tickets. If the run's thread has got their error, their
        oracle is asked again. Tickets of a durable oracle that no batch has are from before a restart."""
        batches = [batch for client in self._clients for batch in client.batches if batch.role == role]
        mine = [batch for batch in batches if batch.questions.keys() & tickets.keys()]
        for batch in mine:
            if batch.is_raised:
                batch.error, batch.is_raised = None, False
        known = {*self._ready[role]}.union(*(batch.questions for batch in mine))
        if old := [ticket for ticket in tickets if is_durable and ticket not in known]:
            tickets_of_old = {ticket: ticket for ticket in old}
            batch = _Batch(role, "", is_durable, dict.fromkeys(old, b""), tickets=tickets_of_old)
            self._clients[0].batches.append(batch)
            mine.append(batch)
        self._changed.notify_all()
        return mine

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _serve(self, client: _Client) -> None:
        """Let a client work until the run ends, or cannot go on."""
        try:
            while self._has_work(client):
                try:
                    self._drop(client)
                    self._submit(client)
                    self._collect(client)
                except LostError as lost:
                    self._replace(client, lost)
            with suppress(OatError):
                client.ask("close")
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _has_work(self, client: _Client) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or client.due or client.dropped)
            return not self._is_closed

    def _drop(self, client: _Client) -> None:
        """Tell the client what nobody waits for."""
        with self._changed:
            dropped, client.dropped = client.dropped, []
        for role in {role for role, _ in dropped}:
            client.ask("drop", role, [own for its, own in dropped if its == role])

    def _submit(self, client: _Client) -> None:
        """Send the client the questions that it has not got."""
        with self._changed:
            new = [(batch, dict(batch.questions)) for batch in client.due if batch.tickets is None]
        for batch, sent in new:
            try:
                given = client.ask("submit", batch.role, list(sent.values()))
            except LostError:
                raise
            except OatError as error:
                self._hold([batch], error)
            else:
                with self._changed:
                    late = batch.take_tickets(given, list(sent))
                    client.dropped += [(batch.role, own) for own in late]
                    self._changed.notify_all()

    def _collect(self, client: _Client) -> None:
        """Fetch the answers that the client has, from each of its oracles. As in the run's own process, an
        oracle is asked for one purpose at a time: so what fails for an evaluation fails for it alone."""
        asked = defaultdict[tuple[str, str], list[tuple[_Batch, list[str]]]](list)
        with self._changed:
            for batch in client.due:
                if batch.tickets is not None:
                    asked[batch.role, batch.purpose].append((batch, list(batch.tickets)))
        has_come = False
        for (role, purpose), batches in asked.items():
            tickets = [ticket for _, own in batches for ticket in own]
            try:
                answers, sums = client.ask("collect", role, purpose, tickets, _WAIT_S / len(asked))
            except LostError:
                raise
            except OatError as error:
                self._hold([batch for batch, _ in batches], error)
            else:
                has_come |= bool(answers)
                self._arrive(client, role, answers, sums)
        if not has_come:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _PAUSE_S)

    def _arrive(self, client: _Client, role: str, answers: Sequence[tuple[str, Answer]], sums: Sums) -> None:
        with self._changed:
            self._metrics[role, client.member] = sums
            batches = [batch for batch in client.batches if batch.role == role and batch.tickets]
            for own, answer in answers:
                batch = next((each for each in batches if each.tickets and own in each.tickets), None)
                if batch is not None and batch.tickets is not None:
                    ticket = batch.tickets.pop(own)
                    del batch.questions[ticket]
                    self._ready[role][ticket] = answer
            client.batches = [batch for batch in client.batches if batch.questions]
            self._changed.notify_all()

    def _hold(self, batches: Iterable[_Batch], error: OatError) -> None:
        """Ask no oracle about these questions until the run's thread has got the error and asks again."""
        with self._changed:
            for batch in batches:
                batch.error = error
            self._changed.notify_all()

    def _replace(self, client: _Client, lost: LostError) -> None:
        client.member = self.crew.replace(client.member, lost)
        with self._changed:
            client.dropped = []
            for batch in client.batches:
                if not batch.is_durable:
                    batch.tickets = None


class ClientOracle(Wrapper):
    """An oracle that clients ask.

    Args:
        role: the setting that names the oracle, by which the clients know it.
        oracle: the same oracle in this process. It tells the run what an oracle is like, and is asked
            nothing.
    """

    def __init__(self, clients: Clients, role: str, oracle: Oracle):
        super().__init__(oracle)
        self._clients, self._role = clients, role

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._clients.metrics(self._role)

    def submit(self, questions: Sequence[Question]) -> list[str]:
        return self._clients.submit(
            self._role, questions, is_durable=self.durable, is_together=self.is_relative
        )

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        return self._clients.collect(self._role, tickets, seconds, is_durable=self.durable)

    def drop(self, tickets: Sequence[str]) -> None:
        self._clients.drop(self._role, {*tickets})


def sums_of(metrics: Mapping[str, float]) -> Sums:
    """Return metrics of an oracle in the form in which those of several processes can be put together."""
    return {
        name: (value.total, value.count) if isinstance(value, Mean) else (float(value), None)
        for name, value in metrics.items()
    }


def together(found: Iterable[Sums]) -> dict[str, float]:
    """Return the metrics of an oracle over several processes: means over all of them, and sums."""
    parts: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for sums in found:
        for name, part in sums.items():
            parts[name].append(part)
    return {name: _added(each) for name, each in parts.items()}


def _added(parts: Sequence[tuple[float, float | None]]) -> float:
    total = sum(number for number, _ in parts)
    counts = [count for _, count in parts if count is not None]
    return Mean(total, sum(counts)) if counts else total
