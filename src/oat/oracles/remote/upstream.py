"""The HTTP client with which a reward server's front asks Mosec, over loopback connections that stay open.

It uses no client library. The connection pool of a client library checks every connection for each request;
with 64 connections this takes more CPU time than all other work of the front. There is one address, without
TLS, redirects or proxies. The package h11 handles the protocol.
"""

import asyncio

import h11

_READ = 1 << 16


class Upstream:
    """A client of a server on this machine.

    Args:
        port: the server's port.
        answer_s: seconds for a request, including the time to connect.
    """

    def __init__(self, port: int, answer_s: float):
        self._port, self._answer_s = port, answer_s
        self._idle: list[_Line] = []

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Send a request, and return the status and the body of the reply. If Mosec has closed an idle
        connection, send the request again over another connection.

        Raises:
            TimeoutError: there was no reply in time.
            ConnectionError: nobody listens, the connection ended, or the reply is no HTTP.
        """
        async with asyncio.timeout(self._answer_s):
            while True:
                line = self._idle.pop() if self._idle else await _Line.to(self._port)
                try:
                    found = await line.ask(method, path, body)
                except (OSError, h11.RemoteProtocolError) as error:
                    line.close()
                    if not line.is_used:
                        raise ConnectionError(str(error)) from error
                    continue
                except BaseException:
                    line.close()
                    raise
                if line.renew():
                    self._idle.append(line)
                return found

    def close(self) -> None:
        for line in self._idle:
            line.close()


class _Line:
    """One connection.

    Attributes:
        is_used: True if a reply has come over this connection.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)
        self.is_used = False

    @classmethod
    async def to(cls, port: int) -> "_Line":
        """Connect to a port of the loopback.

        Raises:
            ConnectionError: nobody listens.
        """
        try:
            return cls(*await asyncio.open_connection("127.0.0.1", port))
        except OSError as error:
            raise ConnectionError(str(error)) from error

    async def ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        headers = [("host", "127.0.0.1"), ("content-length", str(len(body)))]
        events: list[h11.Event] = [
            h11.Request(method=method, target=path, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))
        status, parts = 0, list[bytes]()
        while not isinstance(event := self._http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(_READ))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionError("closed without a reply")
        return status, b"".join(parts)

    def renew(self) -> bool:
        """Make the connection ready for another request, and return True. If it takes no more requests, close
        it and return False."""
        self.is_used = True
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            return True
        self.close()
        return False

    def close(self) -> None:
        self._writer.close()
