"""The HTTP client of oracles against a real server with faults."""

import math
import pickle
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from email.utils import formatdate
from typing import Any

import pytest
from cpu_time import seconds
from faulty_server import Asked, Reply, in_turn, serving, until
from posts import Clock

from oat.errors import ConfigError, NoReplyError, OutageError, RefusalError
from oat.oracles.http_client import HttpClient

FAST: dict[str, Any] = {"timeout_s": 10.0, "backoff_s": 0.01, "max_backoff_s": 0.02, "rest_s": 0.1}


@pytest.fixture
def client() -> Iterator[Any]:
    """Yield a function that makes clients, and close them at the end."""
    made: list[HttpClient] = []

    def make(*urls: str, **settings: Any) -> HttpClient:
        made.append(HttpClient(urls, **{**FAST, **settings}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def text(reply: bytes) -> str:
    if reply == b"nan":
        raise ValueError("nan is no number")
    return reply.decode()


def ask(client: HttpClient, body: bytes = b"question", deadline_s: float = 10.0) -> str:
    return client.post("/ask", body, text, deadline_s=deadline_s).result(30.0)


GOOD = Reply(b"good")


@pytest.mark.sample(slow=("drip",), instead="the slow drip of tests/oracles/test_judge.py", seconds=1.8)
@pytest.mark.parametrize(
    "fault",
    [
        Reply(b"oops", status=500),
        Reply(b"late", status=408),
        Reply(b"", status=503),
        Reply(b"", status=429, headers={"retry-after": "0"}),
        Reply(b"12345678", fault="half"),
        Reply(fault="close"),
        Reply(b"nan"),
        Reply(b"x" * 2000),
        Reply(b"x" * 100, fault="drip"),
        Reply(fault="hang"),
    ],
    ids=["500", "408", "503", "429", "half", "closed", "unusable", "too large", "drip", "hang"],
)
def test_a_transient_fault_is_tried_again(client: Any, fault: Reply) -> None:
    with serving(in_turn(fault, fault, GOOD)) as server:
        # a reply that comes may take its time on a busy machine
        timeout_s = 1.0 if fault.fault in ("drip", "hang") else 10.0
        one = client(server.url, max_reply_bytes=1000, timeout_s=timeout_s)
        assert ask(one) == "good"
        assert [asked.body for asked in server.asked] == [b"question"] * 3
        assert one.counts["retries"] == 2
        assert one.counts["calls"] == 1
        assert one.counts["latency_s"] > 0


TOKEN = "sesame-4711-sesame"


@pytest.mark.parametrize("status", [301, 400, 401, 404, 413, 422])
def test_a_refusal_is_not(client: Any, status: int) -> None:
    with serving(
        in_turn(Reply(b"no\x1b[31m way", status=status, headers={"location": "http://127.0.0.1:9/"}))
    ) as server:
        with pytest.raises(RefusalError, match=f"/ask refused with status {status}") as raised:
            ask(client(server.url))
        assert raised.value.status == status
        assert "\x1b" not in str(raised.value)
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
        assert len(server.asked) == 1


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(
    ("token", "asks"),
    [(None, "; no token was sent"), (TOKEN, "; is the token right?")],
    ids=["without a token", "with one"],
)
def test_why_nobody_is_let_in_is_said_beside_the_token(
    client: Any, status: int, token: str | None, asks: str
) -> None:
    """The error shows the server's words. It hides the token that was sent, and any other text in the form of
    a key."""
    body = b"Country, region, or territory not supported (" + TOKEN.encode() + b", sk-proj-0123456789abcdef)"
    reply = Reply(body if token else body.replace(TOKEN.encode(), b"[token]"), status=status)
    with serving(lambda asked: reply) as server, pytest.raises(RefusalError) as raised:
        ask(client(server.url, token=token))
    assert (
        f"status {status}: Country, region, or territory not supported ([token], ***){asks}; mend the request"
    ) in str(raised.value)


LONG = 15_000_000
"""Bytes of a long reply, below the limit of a reply."""


@pytest.mark.sample("*-sesame", seconds=1.7)
@pytest.mark.parametrize("token", [None, "sesame"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Reply(b"sesame " * (LONG // 7), status=400), "refused with status 400: "),
        (Reply(b"sesame " * (LONG // 7), status=500), "status 500: "),
        (Reply(b"sesame " * (LONG // 7), headers={"unusable": "yes"}), "a reply that cannot be used: "),
        (Reply(b"x" * 20_000_000, status=400), "a reply of more than 16777216 bytes"),
        (Reply(b"x" * 20_000_000), "a reply of more than 16777216 bytes"),
    ],
    ids=["a refusal", "an error", "an unusable reply", "a refusal of 20 MB", "a reply of 20 MB"],
)
def test_of_a_long_reply_the_beginning_is_said(
    client: Any, fault: Reply, said: str, token: str | None
) -> None:
    """The error shows only the beginning of a long reply. The event loop that all calls share is not
    blocked."""

    def read(reply: bytes) -> None:
        raise ValueError(reply.decode().replace("sesame", "[token]"))

    with serving(lambda asked: fault) as server:
        one = client(server.url, token=token, max_tries=1, timeout_s=20.0)
        with pytest.raises((RefusalError, NoReplyError)) as raised:
            one.post("/ask", b"question", read, deadline_s=20.0).result(30.0)
        text = str(raised.value)
        assert said in text
        assert len(text) < 500
        assert sum(len(str(argument)) for argument in raised.value.args) < 1000, "nor is the rest kept"
        assert token is None or token not in text
        assert seconds(lambda: one._excerpt(fault.body)) < 0.5


def test_a_question_that_is_the_reason_is_given_up_after_max_tries(client: Any) -> None:
    with serving(lambda asked: Reply(status=500) if asked.body == b"poison" else GOOD) as server:
        one = client(server.url, max_tries=3, rest_after=100)
        with pytest.raises(NoReplyError, match=r"status 500, after 3 tries; look at"):
            ask(one, b"poison")
        assert ask(one) == "good"


@pytest.mark.sample("True", seconds=2.3)
@pytest.mark.parametrize("is_date", [False, True])
def test_retry_after_in_seconds_and_as_a_date_holds_for_every_call(client: Any, is_date: bool) -> None:
    begin = time.time()
    rests_until = math.ceil(begin + 0.5) if is_date else begin + 1.0
    times: list[float] = []

    def answer(asked: Asked) -> Reply:
        times.append(time.time())
        value = formatdate(rests_until, usegmt=True) if is_date else "1.0"
        return Reply(status=429, headers={"retry-after": value}) if len(times) == 1 else GOOD

    with serving(answer) as server:
        one = client(server.url)
        first = one.post("/ask", b"", text, deadline_s=20.0)
        assert until(lambda: one._urls[0].rests_until > 0.0)
        assert ask(one, deadline_s=20.0) == first.result(20.0) == "good"
        assert len(times) == 3
        assert min(times[1:]) >= rests_until - 0.05


@pytest.mark.sample("99999999999999999999", "soon", seconds=1.3)
@pytest.mark.parametrize(
    "value", ["99999999999999999999", "soon", "-5", "9999.5", "Wed, 21 Oct 9999 07:28:00 GMT", "Mon, 99 Foo"]
)
def test_retry_after_is_bounded_by_the_deadline(client: Any, value: str) -> None:
    with serving(in_turn(Reply(status=503, headers={"retry-after": value}))) as server:
        begin = time.monotonic()
        with pytest.raises(NoReplyError, match="within the deadline"):
            ask(client(server.url), deadline_s=0.2)
        assert time.monotonic() - begin < 10.0


def test_one_slow_byte_at_a_time_does_not_hold_a_call(client: Any) -> None:
    with serving(in_turn(Reply(b"x" * 1000, fault="drip"))) as server:
        begin = time.monotonic()
        with pytest.raises(NoReplyError):
            ask(client(server.url, timeout_s=5.0), deadline_s=0.25)
        assert time.monotonic() - begin < 20.0


def test_post_does_not_wait_and_no_more_than_concurrency_are_asked_together(client: Any) -> None:
    def answer(asked: Asked) -> Reply:
        assert until(lambda: server.most >= 4), "fewer are asked together"
        return Reply(asked.body, delay_s=0.05)

    with serving(answer) as server:
        one = client(server.url, concurrency=4)
        futures = [one.post("/ask", str(number).encode(), text, deadline_s=20.0) for number in range(20)]
        assert not futures[-1].done()
        assert [future.result(20.0) for future in futures] == [str(number) for number in range(20)]
        assert server.most == 4


def test_several_urls_share_calls_and_stand_in_for_each_other(client: Any) -> None:
    def all_at_once() -> bool:
        return until(lambda: a.most + b.most >= 8)

    with (
        serving(lambda asked: Reply(b"a" if all_at_once() else b"too few")) as a,
        serving(lambda asked: Reply(b"b" if all_at_once() else b"too few")) as b,
    ):
        one = client(a.url, b.url, concurrency=8)
        said = [
            future.result(20.0)
            for future in [one.post("/ask", b"", text, deadline_s=20.0) for _ in range(40)]
        ]
        assert set(said) == {"a", "b"}
        assert (a.most, b.most) == (4, 4), "the one with fewer calls under way gets the next"
        a.stop()
        said = [
            future.result(20.0)
            for future in [one.post("/ask", b"", text, deadline_s=20.0) for _ in range(40)]
        ]
        assert said == ["b"] * 40
        before, tries = one.counts["retries"], len(b.asked)
        assert [ask(one) for _ in range(5)] == ["b"] * 5
        assert len(b.asked) == tries + 5
        assert one.counts["outages"] == 1
        assert one.counts["retries"] <= before + 5
        a.start()
        assert until(lambda: [ask(one), ask(one), len(a.asked)][-1] > 20)


def test_an_url_that_failed_often_rests_and_one_probe_opens_it_again(client: Any) -> None:
    is_well = threading.Event()
    with serving(lambda asked: GOOD if is_well.is_set() else Reply(status=500)) as server:
        one = client(server.url, rest_after=3, rest_s=0.15, max_tries=1000, concurrency=16)
        futures = [one.post("/ask", b"", text, deadline_s=30.0) for _ in range(16)]
        assert until(lambda: one.counts["outages"] == 1)
        time.sleep(0.1)  # those that were under way
        before, begin = len(server.asked), time.monotonic()
        time.sleep(0.5)
        assert until(lambda: len(server.asked) > before)
        assert len(server.asked) - before <= 1 + (time.monotonic() - begin) / 0.15
        is_well.set()
        assert {future.result(20.0) for future in futures} == {"good"}


def test_an_outage_has_an_end(client: Any) -> None:
    with serving(in_turn(GOOD)) as server:
        one = client(server.url, max_outage_s=0.3)
        assert ask(one) == "good"
        server.stop()
        with pytest.raises(
            OutageError, match=r"no answer for \d+ s .*no connection.*run the same command again"
        ):
            ask(one, deadline_s=30.0)
        server.start()
        assert ask(one) == "good"


@pytest.mark.parametrize("retry_after", [{}, {"retry-after": "60"}])
def test_a_quota_that_is_exhausted_is_an_outage(client: Any, retry_after: dict[str, str]) -> None:
    with serving(in_turn(GOOD, Reply(b"over quota", status=429, headers=retry_after))) as server:
        one = client(server.url, max_outage_s=0.2)
        assert ask(one) == "good"
        with pytest.raises(OutageError, match=r"no answer for \d+ s .*status 429: over quota"):
            ask(one, deadline_s=5.0)
        assert one.counts["outages"] == 0, "a server that says 429 has not failed"


def test_answers_between_429_are_no_outage(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's clock goes on with each request."""
    clock = Clock()
    monkeypatch.setattr("oat.oracles.http_client.time", clock)

    def answer(asked: Asked) -> Reply:
        clock.now += 0.01
        return Reply(status=429) if asked.number % 2 else GOOD

    with serving(answer) as server:
        one = client(server.url, max_outage_s=0.2)
        end = clock.now + 0.6
        while clock.now < end:
            said = [
                future.result(20.0)
                for future in [one.post("/ask", b"", text, deadline_s=20.0) for _ in range(8)]
            ]
            assert said == ["good"] * 8


def test_what_failed_before_a_pause_is_no_outage(client: Any) -> None:
    with serving(in_turn(Reply(status=500), Reply(status=500), GOOD)) as server:
        one = client(server.url, max_outage_s=0.1, max_tries=1)
        for _ in range(2):
            with pytest.raises(NoReplyError):
                ask(one)
            time.sleep(0.15)
        assert ask(one) == "good"


@pytest.mark.fault("R29")
def test_a_token_is_in_the_header_and_in_no_message(client: Any) -> None:
    replies = [Reply(TOKEN.encode() * 60, status=status) for status in (400, 401, 500, 503)]
    with serving(lambda asked: replies[int(asked.body)]) as server:
        one = client(server.url, token=TOKEN, max_tries=2)
        for number in range(len(replies)):
            with pytest.raises((RefusalError, NoReplyError)) as raised:
                ask(one, str(number).encode(), deadline_s=0.2 if replies[number].status == 503 else 10.0)
            assert "sesame" not in repr(raised.value) + str(raised.value.args)
            assert raised.value.__cause__ is None
        assert {asked.headers["authorization"] for asked in server.asked} == {f"Bearer {TOKEN}"}
        assert "sesame" not in repr(one) + str(one.counts)


@pytest.mark.parametrize("token", ["", "two words", "line\n", "ünicode"])
def test_a_token_that_no_header_can_hold_is_refused_without_saying_it(token: str) -> None:
    with pytest.raises(ConfigError) as raised:
        HttpClient("http://127.0.0.1:1", token=token)
    assert not token or token.strip() not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://me:sesame@host",
        "http://host?key=sesame",
        "http://h:99999",
    ],
)
def test_an_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        HttpClient(url)
    assert "sesame" not in str(raised.value)
    with pytest.raises(ConfigError, match="at least one URL"):
        HttpClient([])


def test_waits_are_drawn_from_the_generator_that_is_given(client: Any) -> None:
    class Drawn(random.Random):
        def __init__(self) -> None:
            super().__init__(0)
            self.bounds: list[float] = []

        def uniform(self, a: float, b: float) -> float:
            self.bounds.append(b)
            return 0.0

    jitter = Drawn()
    with serving(in_turn(Reply(status=500))) as server, pytest.raises(NoReplyError):
        ask(client(server.url, jitter=jitter, max_tries=6, backoff_s=0.25, max_backoff_s=2.0, rest_after=100))
    assert jitter.bounds == [0.25, 0.5, 1.0, 2.0, 2.0]


def test_a_client_that_is_closed_leaves_no_thread(client: Any) -> None:
    with serving(in_turn(Reply(fault="hang"))) as server:
        one = client(server.url, timeout_s=30.0)
        before = {thread for thread in threading.enumerate() if thread.name == "oat-http"}
        future = one.post("/ask", b"", text, deadline_s=30.0)
        assert until(lambda: len(server.asked) == 1)
        one.close()
        with pytest.raises(CancelledError):
            future.result(1.0)
        assert {thread for thread in threading.enumerate() if thread.name == "oat-http"} == before


def test_certificates_that_cannot_be_read_are_a_mistake_and_the_client_ends(client, monkeypatch, tmp_path):
    """A missing certificate file is a ConfigError. `close` then returns, although the client's thread was
    never started."""
    one = client("https://127.0.0.1:1")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match="SSL_CERT_FILE"):
        ask(one)
    ended = threading.Thread(target=one.close, daemon=True)
    ended.start()
    ended.join(60.0)
    assert not ended.is_alive()
