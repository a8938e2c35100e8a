"""Messages between two processes, on a socket.

A message has a head, and may have data, which is sent from where it lies, and received into new memory. File
descriptors may go with it, to the process that was started.
"""

import mmap
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

_SIZES = struct.Struct("<QQ")
"""The first bytes of a message: the size of its head, and that of its data plus one; 0: it has no data."""
_MOST_DESCRIPTORS = 8
_LARGE = 2**20
"""From this number of bytes on, new memory is not filled with zeros first, and goes back when it is free."""


class Message(NamedTuple):
    """A message that has arrived.

    Attributes:
        data: None: it has no data.
        descriptors: the receiver closes them.
    """

    head: memoryview
    data: memoryview | None
    descriptors: list[int]


class Pipe:
    """One end of a connection.

    Args:
        end: its socket, of which this object becomes the owner.
        most: largest number of bytes in a message that arrives; None: no limit.
        takes_descriptors: False: descriptors that the other end sends are closed.
    """

    def __init__(self, end: socket.socket, most: int | None = None, *, takes_descriptors: bool = False):
        self._socket, self._most, self._takes_descriptors = end, most, takes_descriptors

    def send(
        self,
        head: bytes,
        data: Sequence[bytes | memoryview] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send a message.

        Args:
            data: parts, which arrive as one; None: the message has no data.
            descriptors: the receiver gets copies of them.

        Raises:
            OSError: the other end is closed.
        """
        size = 0 if data is None else 1 + sum(memoryview(part).nbytes for part in data)
        sizes = _SIZES.pack(len(head), size)
        if descriptors:
            # one byte: a stream socket may take a part of more
            socket.send_fds(self._socket, [sizes[:1]], descriptors)
            sizes = sizes[1:]
        self._socket.sendall(sizes + head)
        for part in data or ():
            self._socket.sendall(part)

    def receive(self) -> Message:
        """Wait for a message, and return it.

        Raises:
            EOFError, OSError: an end is closed.
            ValueError: the message is larger than allowed.
        """
        descriptors: list[int] = []
        if self._takes_descriptors:
            first, descriptors, _, _ = socket.recv_fds(self._socket, 1, _MOST_DESCRIPTORS)
        else:
            first = self._socket.recv(1)
        if not first:
            raise EOFError
        head, data = _SIZES.unpack(first + self._received(_SIZES.size - 1))
        if self._most is not None and head + data > self._most:
            raise ValueError(f"a message of {head + data:,} bytes, and {self._most:,} are allowed")
        return Message(self._received(head), self._received(data - 1) if data else None, descriptors)

    def fileno(self) -> int:
        return self._socket.fileno()

    def shut(self) -> None:
        """End the connection. A thread that waits in `receive` gets an EOFError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _received(self, size: int) -> memoryview:
        found, there = _memory(size), 0
        while there < size:
            number = self._socket.recv_into(found[there:], size - there, socket.MSG_WAITALL)
            if not number:
                raise EOFError
            there += number
        return found


def _memory(size: int) -> memoryview:
    return memoryview(bytearray(size) if size < _LARGE else mmap.mmap(-1, size))
