"""The near end of a connection to another process.

A thread sends what is sent: so nobody waits for a process that hangs, and an interrupt leaves no message half
sent. Another thread takes what arrives.
"""

import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread, current_thread
from weakref import WeakSet

from oat.processes.pipe import Message, Pipe

Take = Callable[[Message | None], None]
"""Gets each message that arrives, and None when the connection has ended. A thread of the link calls it."""


class Link:
    """The near end of a connection.

    Args:
        end: its socket, of which this object becomes the owner.
        take: gets what arrives.
        most: largest number of bytes in a message that arrives; a larger one ends the connection.

    Attributes:
        is_anothers: True in a forked child of the process that has the connection.
    """

    def __init__(self, end: socket.socket, take: Take, most: int | None = None):
        self._pipe, self._take = Pipe(end, most), take
        self._to_send = SimpleQueue[
            tuple[bytes, Sequence[bytes | memoryview] | None, Sequence[int], Future[None]] | None
        ]()
        self.is_anothers = self._is_closed = False
        self._last: Future[None] | None = None
        _open.add(self)
        self._threads = [Thread(target=work, daemon=True) for work in (self._send_all, self._take_all)]
        for thread in self._threads:
            thread.start()

    def send(
        self,
        head: bytes,
        data: Sequence[bytes | memoryview] | None = None,
        descriptors: Sequence[int] = (),
    ) -> "Future[None]":
        """Send a message after those before it, and return at once. The future is done when the message is
        sent, which says nothing about its arrival. It has an OSError if the connection has ended.

        Args:
            data, descriptors: see `Pipe.send`; they may change when the future is done.
        """
        self._last = future = Future[None]()
        self._to_send.put((head, data, descriptors, future))
        return future

    def close(self, patience_s: float = 0.0) -> None:
        """End the connection, and wait for the threads.

        Args:
            patience_s: longest time until all is sent.
        """
        if not self._is_closed:
            self._is_closed = True
            if self._last is not None:
                wait([self._last], patience_s)
            self._pipe.shut()
            self._to_send.put(None)
            for thread in self._threads:
                if thread is not current_thread():  # which may collect garbage, and a link with it
                    thread.join()
            self._pipe.close()
            _open.discard(self)

    def let_go(self) -> None:
        """Close this end in a forked child, which would otherwise keep the connection open."""
        self.is_anothers = self._is_closed = True
        self._pipe.close()

    def _send_all(self) -> None:
        while (found := self._to_send.get()) is not None:
            head, data, descriptors, future = found
            try:
                self._pipe.send(head, data, descriptors)
            except OSError as error:
                future.set_exception(error)
            else:
                future.set_result(None)
        while not self._to_send.empty():
            if (found := self._to_send.get()) is not None:
                found[-1].set_exception(BrokenPipeError())

    def _take_all(self) -> None:
        with suppress(EOFError, OSError, ValueError):
            while True:
                self._take(self._pipe.receive())
        self._pipe.shut()
        self._take(None)


_open = WeakSet[Link]()


def _let_go() -> None:
    for link in list(_open):
        link.let_go()
    _open.clear()


os.register_at_fork(after_in_child=_let_go)
