"""A reward server with one process, a token and limits, which all tests here share: its answers and its
access control. No malformed request ends it."""

import math
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reward_server import TOKEN, Served, ask, feedback, save_tiny_reward_model, scores, served

from oat.models.scoring import Scorer
from oat.oracles.remote.client import RemoteOracle
from oat.oracles.remote.front import Front, MosecClient
from oat.testing import check_oracle, make_question
from oat.types import Message

Figure = Callable[[str], None]


PROMPTS = ["who", "why not", "when?"]
FIRST = ["me", "because it is so", "now"]
SECOND = ["you", "no", "later, or never"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_reward_model(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server with one process, a token, and limits that tests can reach."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "token").write_text(f"{TOKEN}\n")
    limits = ["--max-body-bytes", "20000", "--max-responses", "8"]
    with served(
        "--model",
        model,
        "--devices",
        "cpu",
        "--token-file",
        str(folder / "token"),
        *limits,
        log=folder / "log",
        temporary=folder / ("a long name" * 20),
    ) as server:
        yield server


@pytest.mark.inventory(79)
def test_preferences_are_those_of_the_models_scores(server: Served, model: str) -> None:
    first, second = (scores(model, *zip(PROMPTS, texts, strict=True)) for texts in (FIRST, SECOND))
    expected = [1 / (1 + math.exp(b - a)) for a, b in zip(first, second, strict=True)]
    for count in (3, 1):
        status, reply = feedback(
            server, PROMPTS[:count], [list(pair) for pair in zip(FIRST, SECOND, strict=True)][:count], []
        )
        assert status == 200
        assert reply["batch_first_win_prob"] == pytest.approx(expected[:count], abs=1e-5)
        assert reply["batch_score"] == []


@pytest.mark.inventory(80)
def test_rewards_are_a_list_also_for_one(server: Served, model: str) -> None:
    expected = scores(model, *zip(PROMPTS, FIRST, strict=True))
    for count in (3, 1):
        status, reply = feedback(server, PROMPTS[:count], [], FIRST[:count])
        assert (status, reply["batch_first_win_prob"]) == (200, [])
        assert isinstance(reply["batch_score"], list)
        assert reply["batch_score"] == pytest.approx(expected[:count], abs=1e-4)


def test_the_oracle_remote_asks_it(server: Served, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OAT_REMOTE_TOKEN", TOKEN)
    for kind in ("score", "compare"):
        oracle = RemoteOracle(server.url, answers=kind)  # type: ignore[arg-type]
        check_oracle(oracle)
        oracle.close()
    oracle = RemoteOracle(server.url)
    chat = [
        Message("system", "s"),
        Message("user", "who"),
        Message("assistant", "me"),
        Message("user", "why"),
    ]
    (ticket,) = oracle.submit([make_question("who", "me", "x" * 2000)])
    ((_, answer),) = oracle.collect([ticket], 60.0)
    assert answer.marks == ("ok", "abstain"), "the model reads 512 tokens"
    assert answer.values[0] == pytest.approx(scores(model, ("who", "me"))[0], abs=1e-4)
    named = [Message("user", "who", {"name": "a long name"})]
    (ticket,) = oracle.submit([make_question(named, "me")])
    ((_, answer),) = oracle.collect([ticket], 60.0)
    scorer = Scorer(model)
    (expected,) = scorer.score([scorer.encode(named, "me")])
    assert answer.values[0] == pytest.approx(expected, abs=1e-6)
    assert answer.values[0] != pytest.approx(scores(model, ("who", "me"))[0], abs=1e-5)
    status, reply = feedback(server, [[message.plain for message in chat]], [], ["so"])
    assert status == 200
    assert math.isfinite(reply["batch_score"][0])
    oracle.close()


def test_what_cannot_be_scored_is_said_and_disturbs_nobody(server: Served) -> None:
    long = ["x" * 100] * 9
    bad: list[tuple[int, str, Any]] = [
        (422, "either batch_candidates or batch_response", feedback(server, ["p"], [], [])),
        (422, "either batch_candidates or batch_response", feedback(server, ["p"], [["a", "b"]], ["c"])),
        (422, "batch_prompt has 2 entries", feedback(server, ["p", "q"], [], ["c"])),
        (413, "9 responses in one request", feedback(server, long, [], long)),
        (413, "more than 20000 bytes", feedback(server, ["x" * 30_000], [], ["a"])),
    ]
    for status, message, (found, said) in bad:
        assert (found, message in said) == (status, True), said
    assert (
        ask(server, "GET", "/get_feedback")[0]
        == ask(server, "POST", "/health")[0]
        == ask(server, "HEAD", "/")[0]
        == 405
    )
    assert ask(server, "GET", "/openapi/metadata.json")[0] == 404
    assert ask(server, "GET", "/" + "a" * 100_000)[0] in (400, 404, 431)
    assert ask(server, "POST", "/get_feedback", b"x", **{"transfer-encoding": "gzip"})[0] == 400
    assert feedback(server, ["p"], [], ["a"])[0] == 200


def test_a_body_of_unknown_length_has_the_same_limit(server: Served) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30.0) as connection:
        head = (
            f"POST /get_feedback HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {TOKEN}\r\n"
            "transfer-encoding: chunked\r\n\r\n"
        )
        connection.sendall(head.encode())
        for _ in range(3):
            connection.sendall(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_health_and_metrics(server: Served) -> None:
    assert ask(server, "GET", "/health")[:2] == (200, b"ready\n")
    assert ask(server, "GET", "/")[0] == 200
    status, text, _ = ask(server, "GET", "/metrics")
    assert status == 200
    assert re.search(rb'^oat_requests_total\{status="200"\} [1-9]', text, flags=re.MULTILINE)
    assert re.search(rb"^oat_reward_\w+_count\{.*\} [1-9]", text, flags=re.MULTILINE)


@pytest.mark.fault("R27")
def test_every_route_asks_for_the_token(server: Served, figure: Any) -> None:
    routes = [
        *Front(MosecClient(1, b"", 1.0), TOKEN).routes,
        ("GET", "/nothing"),
        ("GET", "/openapi/"),
        ("GET", "/openapi/metadata.json"),
    ]
    routes += [("GET", "/openapi/swagger/"), ("DELETE", "/"), ("OPTIONS", "*"), ("POST", "/inference")]
    wrong = [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}x",
        f"Basic {TOKEN}",
        TOKEN,
        "Basic c2VzYW1l",
        "Bearer \xff",
    ]
    for method, path in routes:
        for value in wrong:
            status, body, response = ask(
                server, method, path, b"" if method == "GET" else b"x", authorization=value
            )
            assert (status, response.getheader("www-authenticate")) == (401, "Bearer"), (method, path, value)
            assert b"sesame" not in body
    figure(
        f"{len(routes) * len(wrong):,} of {len(routes) * len(wrong):,} requests without the token "
        f"answered 401, on {len(routes)} routes"
    )


@pytest.mark.parametrize("scheme", ["bearer", "BEARER"])
def test_the_scheme_of_the_token_is_the_same_in_any_case(server: Served, scheme: str) -> None:
    assert ask(server, "GET", "/health", authorization=f"{scheme} {TOKEN}")[0] == 200


@pytest.mark.fault("R27")
def test_who_passes_by_the_front_gets_no_score(server: Served) -> None:
    """Mosec's own port, which other users of the machine can reach, gives no score."""
    command = next(command for command in server.session.values() if "oat.oracles.remote.worker" in command)
    port = re.search(r"--port=(\d+)", command)
    assert port is not None
    assert TOKEN not in command
    behind = Served(f"http://127.0.0.1:{port[1]}", server.process, [])
    body = msgspec.msgpack.encode({"batch_prompt": ["p"], "batch_candidates": [], "batch_response": ["r"]})
    for sent in (body, b"0123456789abcdef" + body, b"x"):
        assert ask(behind, "POST", "/get_feedback", sent)[1] == b"-ask the server, not its workers"
    assert feedback(server, ["p"], [], ["a"])[0] == 200


def _fuzzed(draw: random.Random) -> bytes:
    """Return a request: random bytes, or a valid request, possibly with an error in it."""
    texts = ["", "a", "why?", "\x00", "\U0001f600" * 3, "x" * draw.randrange(3000)]
    value: Any = {
        "batch_prompt": [draw.choice(texts) for _ in range(draw.randrange(4))],
        "batch_candidates": [[draw.choice(texts), draw.choice(texts)] for _ in range(draw.randrange(3))],
        "batch_response": [draw.choice(texts) for _ in range(draw.randrange(4))],
    }
    if draw.random() < 0.4:
        value[draw.choice([*value, "extra"])] = draw.choice(
            [None, -1, 1e308, float("nan"), "text", [1], [[]], {"a": {}}, [["a"]], b"\xff", 2**63]
        )
    body = msgspec.msgpack.encode(value) if draw.random() < 0.8 else draw.randbytes(draw.randrange(200))
    if draw.random() < 0.3 and body:
        place = draw.randrange(len(body))
        body = body[:place] + draw.randbytes(1) + body[place + 1 :] if draw.random() < 0.5 else body[:place]
    method, path = (
        draw.choice(["POST"] * 8 + ["GET", "PUT", "G\x00T"]),
        draw.choice(["/get_feedback"] * 8 + ["/", "/health", "/x", "/../", "*"]),
    )
    length = str(len(body)) if draw.random() < 0.95 else draw.choice(["-1", "9" * 30, "x", "0", "60000"])
    token = f"authorization: Bearer {TOKEN}\r\n" if draw.random() < 0.95 else ""
    odd = draw.choice(
        [""] * 8
        + [
            "x: \x01\r\n",
            "transfer-encoding: chunked\r\n",
            "expect: 100-continue\r\n",
            "a" * 70_000 + ": b\r\n",
            "no colon\r\n",
        ]
    )
    return (
        f"{method} {path} HTTP/1.1\r\nhost: h\r\n{token}content-length: {length}\r\n{odd}connection: "
        "close\r\n\r\n"
    ).encode("latin-1") + body


def fuzz(count: int, server: Served, figure: Figure) -> None:
    """Send `count` random requests, each on its own connection, eight at a time."""
    host, port = server.url.removeprefix("http://").split(":")
    statuses: list[str] = []

    def send(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(count // 8):
            with socket.create_connection((host, int(port)), timeout=60.0) as connection:
                try:
                    connection.sendall(_fuzzed(draw))
                    connection.shutdown(socket.SHUT_WR)
                    reply = b""
                    while len(reply) < 40 and (data := connection.recv(4096)):
                        reply += data
                except OSError:
                    reply = b""
            lines = reply.replace(b"HTTP/1.1 100 \r\n\r\n", b"")
            statuses.append(lines[9:12].decode() if lines else "closed")

    threads = [threading.Thread(target=send, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bad = {status for status in statuses if status[:1] not in ("2", "4") and status != "closed"}
    assert bad == set()
    assert statuses.count("200") > count // 50
    assert statuses.count("closed") < count // 5, "those that were cut in the middle"
    assert server.process.poll() is None
    with socket.create_connection((host, int(port)), timeout=60.0) as connection:
        connection.sendall(
            f"GET /health HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {TOKEN}\r\n\r\n".encode()
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert b"sesame" not in server.log.read_bytes()
    assert b"Traceback" not in server.log.read_bytes()
    figure(
        f"{len(statuses):,} of {len(statuses):,} fuzzed requests got no status of 5xx "
        f"({statuses.count('200'):,} of them were valid); the server was alive at the end"
    )


@pytest.mark.fault("R28")
def test_malformed_requests_get_an_answer_and_the_server_goes_on(server: Served, figure: Figure) -> None:
    fuzz(800, server, figure)


@pytest.mark.large
@pytest.mark.fault("R28")
def test_a_hundred_thousand_malformed_requests(server: Served, figure: Figure) -> None:
    fuzz(100_000, server, figure)


@pytest.mark.fault("R29")
def test_a_token_is_nowhere_in_a_server(server: Served) -> None:
    seen = [
        *server.said,
        *server.session.values(),
        Path(f"/proc/{server.process.pid}/cmdline").read_bytes().decode(),
    ]
    seen += [Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace") for pid in server.session]
    assert not any("sesame" in text for text in seen)
    assert b"sesame" not in server.log.read_bytes()
