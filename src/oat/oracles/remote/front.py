"""The front of a reward server: the only address that others may reach.

Mosec itself listens on the loopback only, for three reasons: it answers `/`, `/metrics` and `/openapi`
itself; it passes no header to its workers; and if one request of a batch fails, all requests of the batch get
its status. Every request passes the front first:

1. If the server has a token, a request without it gets 401, whatever its route.
2. A request that is malformed, late or too large gets 400, 404, 405, 408, 413, 422 or 431. If too many
   requests are open, a request gets 429. If a worker cannot encode a request, it gets 422.
3. If no worker can answer now, a request gets 503 or 504, and may be tried again.
4. If scoring fails, a request gets 500.

Not covered:

* TLS. If the network is not yours, put a proxy with a certificate before the front.
* Other users of this machine, who can reach Mosec's own port. They can read Mosec's counters, but a request
  for scores needs a secret of this process.
"""

import asyncio
import contextlib
import hmac
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import h11

from oat.errors import WireError
from oat.oracles.remote.format import ANSWERED, CONTENT_TYPE, REFUSED, ROUTE, decode_request, encode_request
from oat.oracles.remote.upstream import Upstream
from oat.types import Message

_TEXT = "text/plain; charset=utf-8"
_READ = 1 << 16
_LINGER_S = 1.0
_FRESH_S = 5.0


@dataclass(frozen=True)
class Limits:
    """The limits of requests and connections.

    Attributes:
        body: largest number of bytes in a body.
        responses: largest number of responses in one request.
        open: largest number of requests under way at one time; a further request gets 429.
        connections: largest number of connections; a further connection is closed at once.
        read_s: seconds in which a request has to arrive, from its first byte on.
        idle_s: seconds that a connection may stay silent.
        answer_s: seconds that the workers have for an answer.
    """

    body: int = 1 << 22
    responses: int = 256
    open: int = 512
    connections: int = 1024
    read_s: float = 10.0
    idle_s: float = 75.0
    answer_s: float = 60.0


@dataclass(frozen=True)
class Response:
    status: int
    body: bytes
    content_type: str = _TEXT
    headers: tuple[tuple[str, str], ...] = ()


class Refused(Exception):
    """The refusal of a request.

    Attributes:
        response: the response to the request.
    """

    def __init__(self, status: int, why: str, *headers: tuple[str, str]):
        super().__init__(status, why)
        self.response = Response(status, f"{why}\n".encode(), headers=headers)


class MosecClient:
    """A client of Mosec. Mosec hands requests to worker processes.

    Args:
        port: the port of Mosec's loopback address.
        secret: bytes that are put before the body of each request to the workers.
        answer_s: seconds for one request, including its time in the queue.
    """

    def __init__(self, port: int, secret: bytes, answer_s: float):
        self._mosec, self._secret = Upstream(port, answer_s), secret
        self._answered = 0.0

    async def feedback(self, body: bytes) -> Response:
        """Return the response to a request that has been checked.

        Raises:
            Refused: no worker answers the request, or a worker refuses it or fails.
        """
        try:
            status, reply = await self._mosec.ask("POST", ROUTE, self._secret + body)
        except TimeoutError:
            raise Refused(504, "no worker answered in time") from None
        except ConnectionError:
            raise Refused(
                503, "the workers are away, or are still loading the model", ("retry-after", "1")
            ) from None
        if status == 429:
            raise Refused(429, "the queue is full", ("retry-after", "1"))
        if status != 200:
            raise Refused(504 if status == 408 else 503, "no worker could answer", ("retry-after", "1"))
        self._answered = time.monotonic()
        if reply[:1] != ANSWERED:
            raise Refused(422 if reply[:1] == REFUSED else 500, reply[1:].decode("utf-8", "replace"))
        return Response(200, reply[1:], CONTENT_TYPE)

    async def are_well(self) -> bool:
        """Return True if a worker has answered within the last `_FRESH_S` seconds, or answers a test request
        now."""
        if time.monotonic() - self._answered > _FRESH_S:
            with contextlib.suppress(Refused, TimeoutError):
                async with asyncio.timeout(_FRESH_S):
                    await self.feedback(encode_request([((Message("user", "1"),), ("1",))], "score"))
        return time.monotonic() - self._answered <= _FRESH_S

    def have_gone(self) -> None:
        """Record that the workers have ended: `are_well` then needs a new answer."""
        self._answered = 0.0

    async def metrics(self) -> bytes:
        try:
            return (await self._mosec.ask("GET", "/metrics"))[1]
        except (TimeoutError, ConnectionError):
            return b""

    def close(self) -> None:
        self._mosec.close()


class Front:
    """Answers the requests that arrive on its connections. For scores it asks the workers.

    Args:
        token: the token that each request must have; None: requests need no token.

    Attributes:
        routes: handlers by method and path.
        statuses: number of requests so far, by the status of the response.
    """

    def __init__(self, workers: MosecClient, token: str | None = None, limits: Limits | None = None):
        self._workers = workers
        self._token = token
        self._limits = limits or Limits()
        self.routes: dict[tuple[str, str], Callable[[bytes], Awaitable[Response]]] = {
            ("POST", ROUTE): self._feedback,
            ("GET", "/"): self._health,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
        }
        self.statuses: Counter[int] = Counter()
        self._connections: set[asyncio.StreamWriter] = set()
        self._open = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection, one after the other."""
        if len(self._connections) >= self._limits.connections:
            writer.close()
            return
        self._connections.add(writer)
        try:
            await _Connection(self, reader, writer, self._limits).answer_all()
        except (OSError, h11.LocalProtocolError, asyncio.CancelledError):
            pass  # the client is gone, or the server ends
        finally:
            self._connections.discard(writer)
            writer.close()

    def cut(self) -> None:
        """Close every connection."""
        for writer in list(self._connections):
            writer.close()

    def check_token(self, request: h11.Request) -> None:
        """Check the token of a request. If the server has no token, do nothing.

        Raises:
            Refused: the request does not have the token.
        """
        if self._token is None:
            return
        scheme, _, given = dict(request.headers).get(b"authorization", b"").partition(b" ")
        if not hmac.compare_digest(given, self._token.encode()) or scheme.lower() != b"bearer":
            raise Refused(
                401,
                "this server asks for its token: Authorization: Bearer TOKEN",
                ("www-authenticate", "Bearer"),
            )

    def handler(self, method: str, path: str) -> Callable[[bytes], Awaitable[Response]]:
        """Return the handler of a method and a path.

        Raises:
            Refused: there is no such path, or it does not take this method.
        """
        if (method, path) in self.routes:
            return self.routes[method, path]
        methods = [known for known, at in self.routes if at == path]
        if methods:
            raise Refused(405, f"{path} takes {', '.join(methods)}", ("allow", ", ".join(methods)))
        raise Refused(404, f"no such route; there are {', '.join(sorted({at for _, at in self.routes}))}")

    async def answer(self, handler: Callable[[bytes], Awaitable[Response]], body: bytes) -> Response:
        if self._open >= self._limits.open:
            raise Refused(429, f"{self._open} requests are being answered", ("retry-after", "1"))
        self._open += 1
        try:
            return await handler(body)
        finally:
            self._open -= 1

    async def _feedback(self, body: bytes) -> Response:
        try:
            request = decode_request(body)
        except WireError as error:
            raise Refused(422, str(error)) from None
        if request.size > self._limits.responses:
            raise Refused(
                413, f"{request.size} responses in one request; send at most {self._limits.responses}"
            )
        return await self._workers.feedback(body)

    async def _health(self, _: bytes) -> Response:
        if not await self._workers.are_well():
            raise Refused(503, "the workers are away, or are still loading the model", ("retry-after", "1"))
        return Response(200, b"ready\n")

    async def _metrics(self, _: bytes) -> Response:
        own = [
            "# HELP oat_requests_total requests by the status of their response",
            "# TYPE oat_requests_total counter",
        ]
        own += [
            f'oat_requests_total{{status="{status}"}} {count}'
            for status, count in sorted(self.statuses.items())
        ]
        own += [
            "# HELP oat_requests_open requests that are being answered",
            "# TYPE oat_requests_open gauge",
            f"oat_requests_open {self._open}",
        ]
        return Response(200, "\n".join([*own, ""]).encode() + await self._workers.metrics())


class _Connection:
    """One connection over HTTP/1.1."""

    def __init__(
        self, front: Front, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits
    ):
        self._front = front
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_READ)
        self._method = b""

    async def answer_all(self) -> None:
        while True:
            try:
                response = await self._answer_one()
            except Refused as refused:
                response = refused.response
            except h11.RemoteProtocolError as error:
                response = Refused(
                    431 if error.error_status_hint == 431 else 400, "this is no request of HTTP/1.1"
                ).response
            if response is None:
                return
            self._front.statuses[response.status] += 1
            await self._say(response)
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                await self._linger()
                return
            self._http.start_next_cycle()

    async def _answer_one(self) -> Response | None:
        """Return the response to the next request; None if no request comes."""
        if not await self._first_byte():
            return None
        until = asyncio.get_running_loop().time() + self._limits.read_s
        event = await self._event(until)
        if not isinstance(event, h11.Request):
            return None
        self._method = event.method
        self._front.check_token(event)
        handler = self._front.handler(
            event.method.decode("latin-1"), event.target.decode("latin-1").partition("?")[0]
        )
        declared = dict(event.headers).get(b"content-length", b"0")
        if len(declared) > 18 or int(declared) > self._limits.body:
            raise self._too_large
        return await self._front.answer(handler, await self._body(until))

    async def _first_byte(self) -> bool:
        """Wait for the first byte of a request. Return False if none comes."""
        if self._http.trailing_data[0]:
            return True
        try:
            async with asyncio.timeout(self._limits.idle_s):
                data = await self._reader.read(_READ)
        except TimeoutError:
            return False
        if data:
            self._http.receive_data(data)
        return bool(data)

    async def _body(self, until: float) -> bytes:
        if self._http.they_are_waiting_for_100_continue:
            self._writer.write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        parts, size = [], 0
        while isinstance(event := await self._event(until), h11.Data):
            size += len(event.data)
            if size > self._limits.body:
                raise self._too_large
            parts.append(bytes(event.data))
        return b"".join(parts)

    async def _event(self, until: float) -> object:
        """Return the next event of the connection.

        Raises:
            Refused: the event has not arrived in time.
            ConnectionError: the client closed the connection in the middle of a request.
        """
        while (event := self._http.next_event()) is h11.NEED_DATA:
            try:
                async with asyncio.timeout_at(until):
                    data = await self._reader.read(_READ)
            except TimeoutError:
                raise Refused(408, f"the request did not arrive within {self._limits.read_s:g} s") from None
            if not data and self._http.their_state is h11.SEND_BODY:
                raise ConnectionError("gone in the middle of a request")
            self._http.receive_data(data)
        return event

    async def _say(self, response: Response) -> None:
        headers = [
            ("content-type", response.content_type),
            ("content-length", str(len(response.body))),
            *response.headers,
        ]
        if self._http.their_state is not h11.DONE:
            headers.append(("connection", "close"))
        head = self._http.send(h11.Response(status_code=response.status, headers=headers)) or b""
        body = b"" if self._method == b"HEAD" else self._http.send(h11.Data(data=response.body)) or b""
        self._writer.write(head + body + (self._http.send(h11.EndOfMessage()) or b""))
        async with asyncio.timeout(self._limits.read_s):
            await self._writer.drain()

    async def _linger(self) -> None:
        """For at most `_LINGER_S` seconds, read and drop what the client still sends. If the connection were
        closed at once, the client could lose the response."""
        with contextlib.suppress(TimeoutError, OSError):
            if self._writer.can_write_eof():
                self._writer.write_eof()
            async with asyncio.timeout(_LINGER_S):
                while await self._reader.read(_READ):
                    pass

    @property
    def _too_large(self) -> Refused:
        return Refused(413, f"the body has more than {self._limits.body} bytes")
