"""An HTTP server on 127.0.0.1 whose replies and faults a test chooses."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

import pytest


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        number: number of requests before it.
    """

    number: int
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """A reply of the server.

    Attributes:
        fault: "hang" sends nothing, "half" closes in the middle of the body, "drip" sends one byte per tenth
            of a second, "close" closes at once.
        delay_s: seconds before the reply begins.
    """

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    fault: Literal["", "hang", "half", "drip", "close"] = ""
    delay_s: float = 0.0


class FaultyServer:
    """A server that runs until `stop`; `start` starts it again on the same port.

    Attributes:
        asked: every request so far.
        most: the highest number of requests that were open together.
    """

    def __init__(self, answer: Callable[[Asked], Reply]):
        self.answer = answer
        self.asked: list[Asked] = []
        self.open, self.most = 0, 0
        self.port = 0
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._ended = threading.Event()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._ended.clear()
        self._server = _Server(("127.0.0.1", self.port), self._handler())
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the port and every connection, as a kill would."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._server.cut()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                with owner._lock:
                    asked = Asked(
                        next(owner._numbers), self.path, {k.lower(): v for k, v in self.headers.items()}, body
                    )
                    owner.asked.append(asked)
                    owner.open += 1
                    owner.most = max(owner.most, owner.open)
                try:
                    reply = owner.answer(asked)
                    owner._ended.wait(reply.delay_s)
                finally:
                    with owner._lock:
                        owner.open -= 1
                self._say(reply)

            def _say(self, reply: Reply) -> None:
                if reply.fault in ("hang", "close"):
                    owner._ended.wait(60.0 if reply.fault == "hang" else 0.0)
                    self.close_connection = True
                    return
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(reply.body)))
                self.end_headers()
                if reply.fault == "drip":
                    for byte in reply.body:
                        self.wfile.write(bytes([byte]))
                        if owner._ended.wait(0.1):
                            break
                else:
                    self.wfile.write(
                        reply.body[: len(reply.body) // 2] if reply.fault == "half" else reply.body
                    )
                self.close_connection = self.close_connection or reply.fault == "half"

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: object):
        self._connections: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: socket.socket, client_address: object) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that closed its connection."""

    def cut(self) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(answer: Callable[[Asked], Reply]) -> Iterator[FaultyServer]:
    """Yield a server, and stop it at the end."""
    server = FaultyServer(answer)
    try:
        yield server
    finally:
        if not server._ended.is_set():
            server.stop()


def in_turn(*replies: Reply) -> Callable[[Asked], Reply]:
    """Return a function that gives one reply per request, and the last reply to all further requests."""
    return lambda asked: replies[min(asked.number, len(replies) - 1)]


def until(is_so: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait until a condition holds, and return True if it does within `seconds`."""
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    return is_so()


@pytest.fixture
def brief_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the default waiting times of this process's HTTP clients by ten. Times that a test gives
    stay."""
    from oat.oracles.http_client import HttpClient

    defaults = HttpClient.__init__.__kwdefaults__
    for name in ("backoff_s", "max_backoff_s", "rest_s"):
        monkeypatch.setitem(defaults, name, 0.1 * defaults[name])
