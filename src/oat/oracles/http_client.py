"""An HTTP client for a service that may be slow, overloaded or away.

A call makes one or more tries, one after the other, to send the same request. It ends with the first answer,
or with an error. All calls share an event loop, which runs in a thread of its own. A try without an answer is
a fault. There are two kinds of faults:

1. The service cannot be reached now: there is no connection, or the reply's status is 429, 502, 503 or 504.
   The call goes on trying until its deadline, or until an outage has lasted longer than `max_outage_s`.
2. The try failed: it timed out, the reply's status is 408, 409, 425 or another 5xx, or the reply is cut, too
   large or malformed. The request may be the reason, so the call ends after `max_tries` failed tries. If a
   caller sets `counts_gateways`, a try with 502 or 504 also counts as failed.

Every other status is an answer: a reply 2xx is read, and any other reply is a refusal. So are 500 and 501 if
they name log-probabilities, and 429 if its code says that the credit is used up (`refusals.py`). If every
other request would be refused too, the error is a `ClosedError`. An error within a reply 200 counts with its
own status. Redirects are not followed. A reply that is compressed unasked is decompressed (http_bodies.py).

An outage is a time in which no URL gives an answer. It begins with the first fault of either kind. It ends
with the next answer, or when no call is under way.

The waits between tries are exponential with full jitter
(https://aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter).

Each URL has a circuit breaker, which opens after `rest_after` faults in a row. The URL then rests: for a
while no call uses it. After the rest, one call at a time tries the URL, until it answers. `counts["outages"]`
is the number of times that breakers have opened, not the number of outages.

Two kinds of replies are special:

* 429 shows that the service is there. It sets the URL's faults in a row back to 0. It can begin an outage,
  but it does not end one.
* If 429, 502, 503 or 504 comes with `Retry-After`, the URL rests for this time, at most until the call's
  deadline.

Not handled: HTTP/2, streamed replies, credentials other than a bearer token.
"""

import asyncio
import contextlib
import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2

from oat.config.secrets import Hider
from oat.errors import ClosedError, ConfigError, NoReplyError, OutageError, RefusalError
from oat.oracles.base import Mean
from oat.oracles.http_bodies import decoded
from oat.oracles.refusals import ErrorInReply, concerns_all, concerns_one, names_logprobs, retry_after_s

T = TypeVar("T")

_AWAY = (429, 502, 503, 504)
_GATEWAY = (502, 504)
_AGAIN = (408, 409, 425)
_EXCERPT = 200
ASKED_AGAIN = ", and run the same command again: what is unanswered is asked again"
_TICK_S = 0.05


class _Fault(Exception):
    """A fault of a try: the try may be repeated.

    Attributes:
        is_away: True for a fault of the first kind (head of this file): the service cannot be reached now.
        status: the status of the reply; 0 if there is no reply, or if its status does not matter.
    """

    def __init__(self, what: str, *, is_away: bool = False, status: int = 0):
        super().__init__(what)
        self.is_away, self.status = is_away, status


@dataclass(frozen=True, eq=False)
class _HttpRequest:
    """The request of a call. The attributes are arguments of `post`."""

    path: str
    body: bytes
    headers: Mapping[str, str]
    max_tries: int
    has_failed: Callable[[], None]
    counts_gateways: bool


@dataclass(eq=False)
class _Url:
    """One address of the service.

    Attributes:
        outstanding: number of tries that are under way.
        failures: number of faults in a row, of both kinds (see the head of this file). A reply that is no
            fault sets this number to 0, and so does a reply 429.
        rests_until: the time, in monotonic seconds, before which the URL is not tried.
    """

    address: str
    outstanding: int = 0
    failures: int = 0
    rests_until: float = 0.0


class HttpClient:
    """A client that posts bodies to a service with one or several URLs.

    A try goes to the URL with the fewest tries under way; if several have the fewest, to the one with the
    fewest faults in a row. A URL whose circuit breaker is open comes first when its rest is over, but serves
    one try at a time. TLS, proxies and their environment variables work as in httpx.

    Args:
        urls: the beginnings of addresses, without credentials, query or fragment; `post` appends its path.
        token: sent in the header `Authorization: Bearer`. No message contains it, even if the service sends
            it back.
        token_from: the names of the environment variables for the token, for messages.
        timeout_s: seconds of one try, from connecting to the last byte of its reply.
        max_tries: number of failed tries (faults of kind 2 at the head of this file) after which a call ends
            with NoReplyError.
        max_outage_s: largest number of seconds of an outage. If it lasts longer, each call that has had a
            fault raises OutageError.
        concurrency: largest number of calls under way together; others wait.
        max_reply_bytes: largest number of bytes in a reply.
        rest_after: number of faults in a row after which a URL rests.
        rest_s: seconds of the first rest, doubled for each further fault.
        backoff_s: upper bound of a call's first wait between tries, in seconds, doubled for each further
            wait.
        max_backoff_s: upper bound of the doubled `backoff_s` and of the doubled `rest_s`, in seconds.
        jitter: the random generator of the waits.

    Raises:
        ConfigError: there is no URL, a URL cannot be used, or no header can contain the token.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        token_from: str = "",
        timeout_s: float = 60.0,
        max_tries: int = 8,
        max_outage_s: float = 300.0,
        concurrency: int = 16,
        max_reply_bytes: int = 1 << 24,
        rest_after: int = 5,
        rest_s: float = 1.0,
        backoff_s: float = 0.25,
        max_backoff_s: float = 3.0,
        jitter: random.Random | None = None,
    ):
        self._urls = [_Url(_base(url)) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self._urls:
            raise ConfigError("an HTTP client needs at least one URL; give one, or a list")
        if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
            named = f" in {token_from}" if token_from else ""
            raise ConfigError(
                f"the token{named} is empty, or has blanks or characters that no header can hold; give "
                "the token alone"
            )
        self._token, self._token_from = token, token_from
        self._timeout_s = timeout_s
        self._max_tries = max_tries
        self._max_outage_s = max_outage_s
        self._concurrency = concurrency
        self._max_reply_bytes = max_reply_bytes
        self._rest_after = rest_after
        self._rest_s = rest_s
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._jitter = jitter or random.Random()
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open, self._down_since = 0, math.inf
        self._calls = 0
        self._retries = 0
        self._outages = 0
        self._seconds = 0.0

    @property
    def counts(self) -> dict[str, float]:
        """Counts since the client was made:

        * `calls`: number of calls with a usable reply;
        * `retries`: number of tries, without the first try of each call;
        * `outages`: number of times that a circuit breaker opened;
        * `latency_s`: mean seconds of the calls with a usable reply, from the first try on.
        """
        return {
            "calls": self._calls,
            "retries": self._retries,
            "outages": self._outages,
            "latency_s": Mean(self._seconds, self._calls),
        }

    def post(
        self,
        path: str,
        body: bytes,
        read: Callable[[bytes], T],
        *,
        deadline_s: float,
        content_type: str = "application/json",
        max_tries: int | None = None,
        has_failed: Callable[[], None] = lambda: None,
        counts_gateways: bool = False,
    ) -> "Future[T]":
        """Begin a call, and return at once.

        Args:
            read: makes the result from a reply's body, on the client's thread. If it raises ValueError, the
                try has failed.
            deadline_s: seconds for the call. While `concurrency` other calls are under way, the call waits,
                and this wait does not count.
            max_tries: replaces the client's `max_tries` for this call.
            has_failed: called on the client's thread after each failed try. The service may charge for this
                try.
            counts_gateways: True counts a try with 502 or 504 as failed, because a gateway may send these
                after the model has worked. False counts it as a fault of the first kind (head of this file).

        Returns:
            A future of the result. Cancelling the future ends the call.

        Raises (the future):
            RefusalError: the service refused the request, with a status after which it is not tried again.
            ClosedError: the service refuses every request.
            NoReplyError: the deadline has passed, or `max_tries` tries have failed.
            OutageError: no URL has answered for longer than `max_outage_s`.
        """
        sent = {"content-type": content_type}
        loop = self._started()
        request = _HttpRequest(path, body, sent, max_tries or self._max_tries, has_failed, counts_gateways)
        return asyncio.run_coroutine_threadsafe(self._call(request, read, deadline_s), loop)

    def close(self) -> None:
        """End the calls that are under way. Their futures are cancelled."""
        with self._starting:
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
                self._stop()
                self._thread.join()
                self._loop = None

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self._concurrency)
                fixed = {
                    "accept-encoding": "identity",
                    **({} if self._token is None else {"authorization": f"Bearer {self._token}"}),
                }
                try:
                    self._client = httpx2.AsyncClient(headers=fixed, timeout=None, limits=limits)
                except OSError as error:
                    raise ConfigError(
                        "the certificates that encrypted calls are checked with cannot be read "
                        f"({error}); correct SSL_CERT_FILE or SSL_CERT_DIR"
                    ) from error
                self._places = asyncio.Semaphore(self._concurrency)
                self._loop = asyncio.new_event_loop()
                self._stop = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="oat-http", daemon=True)
                self._thread.start()
            return self._loop

    async def _end(self) -> None:
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._client.aclose()

    async def _call(self, request: _HttpRequest, read: Callable[[bytes], T], deadline_s: float) -> T:
        async with self._places:
            self._open += 1
            try:
                return await self._tries(request, read, time.monotonic() + deadline_s)
            finally:
                self._open -= 1
                if self._open == 0:
                    self._down_since = math.inf

    async def _tries(self, request: _HttpRequest, read: Callable[[bytes], T], until: float) -> T:
        began = time.monotonic()
        tries = 0
        counted = 0
        last = ""
        while True:
            url = await self._turn(until, last)
            tries += 1
            self._retries += tries > 1
            try:
                result = await self._try(url, request, read, until)
            except _Fault as fault:
                last = f"{url.address}{request.path}: {fault}"
                if not fault.is_away or (request.counts_gateways and fault.status in _GATEWAY):
                    counted += 1
                    request.has_failed()
                if counted >= request.max_tries:
                    raise NoReplyError(
                        f"{last}, after {tries} {'tries' if tries > 1 else 'try'}; look at the service's "
                        "own log"
                    ) from None
                await asyncio.sleep(
                    self._jitter.uniform(
                        0.0, min(self._max_backoff_s, self._backoff_s * 2.0 ** min(tries - 1, 32))
                    )
                )
            else:
                self._calls += 1
                self._seconds += time.monotonic() - began
                return result

    async def _turn(self, until: float, last: str) -> _Url:
        """Wait until a URL can serve the next try, and return it. A URL that rests (head of this file)
        cannot. A URL with at least `rest_after` faults in a row serves one try at a time.

        Args:
            until: the call's deadline, in monotonic seconds.
            last: the fault of the call's last try; "" before the first try. The first try is made even in an
                outage.
        """
        while True:
            now = time.monotonic()
            if last and now - self._down_since > self._max_outage_s:
                raise OutageError(
                    f"no answer for {now - self._down_since:.0f} s ({last}); bring the service back, and "
                    "run the same command again: what is "
                    "unanswered is asked again"
                )
            if now >= until:
                raise NoReplyError(
                    f"no answer within the deadline ({last or 'every URL rests'}); look at the service, "
                    "or allow more time"
                )
            ready = [
                url
                for url in self._urls
                if now >= url.rests_until and not (url.failures >= self._rest_after and url.outstanding)
            ]
            if ready:
                return min(
                    ready, key=lambda url: (url.failures < self._rest_after, url.outstanding, url.failures)
                )
            await asyncio.sleep(_TICK_S)

    async def _try(self, url: _Url, request: _HttpRequest, read: Callable[[bytes], T], until: float) -> T:
        rest_s = 0.0
        url.outstanding += 1
        try:
            async with asyncio.timeout(min(self._timeout_s, until - time.monotonic())):
                status, reply, rest_s = await self._exchange(
                    url.address + request.path, request.body, request.headers
                )
            result = self._result(url, request.path, status, reply, read, has_rest=rest_s > 0)
        except RefusalError:
            self._is_back(url)
            raise
        except (_Fault, TimeoutError) as error:
            fault = (
                error if isinstance(error, _Fault) else _Fault(f"no whole reply within {self._timeout_s:g} s")
            )
            if fault.status == 429:
                url.failures, self._down_since = 0, min(self._down_since, time.monotonic())
            else:
                self._has_failed(url)
            if fault.status in _AWAY and rest_s:
                url.rests_until = max(url.rests_until, min(time.monotonic() + rest_s, until))
            raise fault from None
        finally:
            url.outstanding -= 1
        self._is_back(url)
        return result

    async def _exchange(
        self, address: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes, float]:
        """Send one request. Return the reply's status, its body, and the seconds of its `Retry-After` (0
        without one)."""
        parts, size = [], 0
        try:
            async with self._client.stream("POST", address, content=body, headers=dict(headers)) as response:
                async for part in response.aiter_raw():
                    parts.append(part)
                    size += len(part)
                    if size > self._max_reply_bytes:
                        raise _Fault(f"a reply of more than {self._max_reply_bytes} bytes")
                rest_s = retry_after_s(response.headers.get("retry-after", ""))
                status, coding = response.status_code, response.headers.get("content-encoding", "")
                return status, decoded(b"".join(parts), coding, self._max_reply_bytes, status), rest_s
        except ValueError as error:
            raise _Fault(str(error)) from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError) as error:
            raise _Fault(f"no connection ({error})", is_away=True) from None
        except httpx2.TransportError as error:
            raise _Fault(f"the reply was cut ({type(error).__name__})") from None

    def _result(
        self, url: _Url, path: str, status: int, reply: bytes, read: Callable[[bytes], T], *, has_rest: bool
    ) -> T:
        if 200 <= status < 300:
            try:
                return read(reply)
            except ErrorInReply as error:
                status = error.status
            except ValueError as error:
                raise _Fault(
                    f"a reply that cannot be used{self._excerpt(str(error).encode('utf-8', 'replace'))}"
                ) from None
        raise self._error(url, path, status, reply, has_rest)

    def _error(self, url: _Url, path: str, status: int, reply: bytes, has_rest: bool) -> Exception:
        """Return the fault, or the refusal, of a reply with an error. `has_rest`: it has `Retry-After`."""
        is_of_all = concerns_all(status, reply, has_rest=has_rest)
        of_logprobs = status <= 501 and names_logprobs(reply)
        is_fault = status in _AWAY or status in _AGAIN or (status >= 500 and not of_logprobs)
        said = self._excerpt(reply)
        if is_fault and not is_of_all:
            return _Fault(f"status {status}{said}", is_away=status in _AWAY, status=status)
        if status in (401, 403):
            said = Hider({}).text(said) + self._of_token()
        again = ASKED_AGAIN if is_of_all else ""
        return (ClosedError if is_of_all else RefusalError)(
            f"{url.address}{path} refused with status {status}{said}; mend the request, or look at the "
            f"service{again}",
            status,
            said,
            of_logprobs,
            concerns_one(status, reply),
        )

    def _of_token(self) -> str:
        """A hint about the bearer token, for the message about a refusal with status 401 or 403."""
        if self._token is None:
            return (
                f"; no token was sent, since the environment has no {self._token_from}"
                if self._token_from
                else "; no token was sent"
            )
        return f"; is the token{f' in {self._token_from}' if self._token_from else ''} right?"

    def _excerpt(self, reply: bytes) -> str:
        """The beginning of a reply, for messages: one line of printable characters, without the token."""
        text = reply.decode("utf-8", "replace")
        text = (text.replace(self._token, "[token]") if self._token else text)[:_EXCERPT]
        text = "".join(c if c.isprintable() else " " for c in text).strip()
        return f": {text}" if text else ""

    def _is_back(self, url: _Url) -> None:
        url.failures, self._down_since = 0, math.inf

    def _has_failed(self, url: _Url) -> None:
        now = time.monotonic()
        url.failures += 1
        self._down_since = min(self._down_since, now)
        if url.failures >= self._rest_after:
            self._outages += url.failures == self._rest_after
            rest_s = min(
                max(self._max_backoff_s, self._rest_s),
                self._rest_s * 2.0 ** min(url.failures - self._rest_after, 32),
            )
            url.rests_until = max(url.rests_until, now + rest_s)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _base(url: Any) -> str:
    """Return the URL without slashes at its end.

    Raises:
        ConfigError: this is no URL of a service, or the URL has credentials, a query or a fragment. The
            message does not contain the credentials.
    """
    with contextlib.suppress(TypeError, httpx2.InvalidURL):
        found = httpx2.URL(url)
        if found.userinfo or found.query or found.fragment:
            raise ConfigError(
                f"the URL of {found.host} has credentials, a query or a fragment; give scheme, host, port "
                "and path alone"
            )
        if (
            found.scheme in ("http", "https")
            and found.host
            and (found.port is None or 0 < found.port < 1 << 16)
        ):
            return str(url).rstrip("/")
    raise ConfigError(f"{str(url)[:80]!r} is no URL of a service; give one such as http://127.0.0.1:8000")
