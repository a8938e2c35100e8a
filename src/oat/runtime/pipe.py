"""Messages between a run and the broker of its cluster, on a socket.

A message has a head, and may have data, which is sent from where it lies, and received into new memory.
"""

import socket
import struct
from collections.abc import Sequence

import numpy as np

_SIZES = struct.Struct("<QQ")
"""The first bytes of a message: the size of its head, and that of its data plus one; 0: it has no data."""


class Pipe:
    """One end of a connection.

    Args:
        end: its socket, of which this object becomes the owner.
    """

    def __init__(self, end: socket.socket):
        self._socket = end

    def send(self, head: bytes, data: Sequence[bytes | memoryview] | None = None) -> None:
        """Send a message.

        Args:
            data: parts, which arrive as one; None: the message has no data.

        Raises:
            OSError: the other end is closed.
        """
        size = 0 if data is None else 1 + sum(memoryview(part).nbytes for part in data)
        self._socket.sendall(_SIZES.pack(len(head), size) + head)
        for part in data or ():
            self._socket.sendall(part)

    def receive(self) -> tuple[memoryview, memoryview | None]:
        """Wait for a message, and return its head and its data.

        Raises:
            EOFError, OSError: an end is closed.
        """
        head, data = _SIZES.unpack(self._received(_SIZES.size))
        return self._received(head), self._received(data - 1) if data else None

    def close(self) -> None:
        self._socket.close()

    def _received(self, size: int) -> memoryview:
        found, there = np.empty(size, np.uint8).data, 0
        while there < size:
            number = self._socket.recv_into(found[there:], size - there, socket.MSG_WAITALL)
            if not number:
                raise EOFError
            there += number
        return found
