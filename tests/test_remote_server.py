"""`oat serve reward` as people start it, and whoever speaks to it."""

import http.client
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from faulty_server import until
from reward_server import Served, save_tiny_reward_model, served

from oat.cli import main
from oat.models.scoring import Scorer
from oat.oracles.remote.client import RemoteOracle
from oat.oracles.remote.front import Front, Limits, MosecClient
from oat.testing import check_oracle, make_question
from oat.types import Message

TOKEN = "sesame-4711-sesame"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_reward_model(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With two processes, a token, and limits that tests can reach."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "token").write_text(f"{TOKEN}\n")
    limits = ["--max-body-bytes", "20000", "--max-responses", "8"]
    with served(
        "--model",
        model,
        "--devices",
        "cpu,cpu",
        "--token-file",
        str(folder / "token"),
        *limits,
        log=folder / "log",
    ) as server:
        yield server


def ask(
    server: Served, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, bytes, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60.0)
    connection.request(method, path, body or None, {"authorization": f"Bearer {TOKEN}", **headers})
    response = connection.getresponse()
    found = response.status, response.read(), response
    connection.close()
    return found


def feedback(
    server: Served, prompts: list[Any], candidates: list[list[str]], responses: list[str]
) -> tuple[int, Any]:
    body = msgspec.msgpack.encode(
        {"batch_prompt": prompts, "batch_candidates": candidates, "batch_response": responses}
    )
    status, reply, _ = ask(server, "POST", "/get_feedback", body)
    return status, msgspec.msgpack.decode(reply) if status == 200 else reply.decode()


def scores(model: str, *pairs: tuple[str, str]) -> list[float]:
    """By the model, without a server."""
    scorer = Scorer(model)
    found = scorer.score([scorer.encode((Message("user", prompt),), response) for prompt, response in pairs])
    return [value for value in found if value is not None]


PROMPTS = ["who", "why not", "when?"]
FIRST = ["me", "because it is so", "now"]
SECOND = ["you", "no", "later, or never"]


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


@pytest.mark.inventory(81)
def test_there_is_a_process_a_device(server: Served) -> None:
    assert len(server.workers) == 2


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
    """Mosec's own port, which other users of this machine can reach."""
    command = next(command for command in server.session.values() if "oat.oracles.remote.worker" in command)
    port = re.search(r"--port=(\d+)", command)
    assert port is not None
    assert TOKEN not in command
    behind = Served(f"http://127.0.0.1:{port[1]}", server.process, [])
    body = msgspec.msgpack.encode({"batch_prompt": ["p"], "batch_candidates": [], "batch_response": ["r"]})
    for sent in (body, b"0123456789abcdef" + body, b"x"):
        assert ask(behind, "POST", "/get_feedback", sent)[1] == b"-ask the server, not its workers"
    assert feedback(server, ["p"], [], ["a"])[0] == 200


@pytest.mark.fault("R27")
@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.1", "example.org", "::"])
def test_another_address_needs_a_token(host: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "reward", "--model", model, "--host", host]) == 2
    assert (
        f"{host} can be reached by others, and the server has no token; give --token-file"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "nowhere/"], "nowhere"),
        (["--devices", "cuda:77"], "there is no device 'cuda:77' here"),
        (["--devices", "auto,cpu"], "give it alone"),
        (["--max-batch-size", "0"], "--max-batch-size is 0; give at least 1"),
        (["--token-file", "missing"], "the token cannot be read from missing"),
        (["--port", "99999"], "cannot listen on 127.0.0.1:99999"),
        (["--label", "3"], "has no label 3"),
    ],
)
def test_a_mistake_is_one_message(
    flags: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = flags if "--model" in flags else ["--model", model, *flags]
    assert main(["serve", "reward", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_token_file_holds_one_token(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("", "two words", "sesame\nsesame"):
        (tmp_path / "token").write_text(text)
        assert main(["serve", "reward", "--model", model, "--token-file", str(tmp_path / "token")]) == 2
        assert "sesame" not in (said := capsys.readouterr().err)
        assert "holds no token" in said


@pytest.mark.slow(
    instead="test_the_predecessors_command_is_read, and the server of `oat serve reward`", seconds=10.3
)
@pytest.mark.inventory(81)
def test_the_predecessors_command_works_and_one_process_spans_all_devices(model: str) -> None:
    words = ["--remote_rm_model", model, "--max-wait-time", "1", "--cuda-devices", "all", "--multi_gpu"]
    with served(*words, command=["oat.oracles.remote.server"]) as server:
        assert len(server.workers) == 1
        assert feedback(server, PROMPTS, [], FIRST)[1]["batch_score"] == pytest.approx(
            scores(model, *zip(PROMPTS, FIRST, strict=True)), abs=1e-4
        )


@pytest.mark.slow(
    instead="tests/faults/test_workers.py and tests/faults/test_leaves_nothing.py, of other processes",
    seconds=3.9,
)
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_it_leaves_nothing_however_it_ends(number: signal.Signals, model: str, tmp_path: Path) -> None:
    with served("--model", model, "--devices", "cpu", log=tmp_path / "log") as server:
        others = server.session
        assert len(others) >= 3
        server.process.send_signal(number)
        assert server.process.wait(30.0) == (-signal.SIGKILL if number == signal.SIGKILL else 0)
        assert until(lambda: not any(_is_there(pid) for pid in others), 30.0)
        host, port = server.url.removeprefix("http://").split(":")
        with pytest.raises(OSError):
            socket.create_connection((host, int(port)), timeout=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_a_worker_that_dies_is_replaced(devices: str, model: str, tmp_path: Path) -> None:
    """Also the only one, with which Mosec ends. Requests meanwhile are 503 or 504, which clients try again,
    and soon all are answered."""
    with served("--model", model, "--devices", devices, "--timeout-s", "2", log=tmp_path / "log") as server:
        (victim, *_), statuses = server.workers, list[int]()
        os.kill(victim, signal.SIGKILL)

        def is_well() -> bool:
            statuses.append(feedback(server, ["p"], [], ["a"])[0])
            return statuses[-3:] == [200] * 3 and len(server.workers) == devices.count("cpu")

        assert until(is_well, 120.0), statuses
        assert set(statuses) <= {200, 503, 504}
        assert victim not in server.workers
        assert server.process.poll() is None
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow(instead="test_a_mistake_is_one_message", seconds=9.4)
def test_workers_that_cannot_load_end_the_server(model: str, tmp_path: Path) -> None:
    """The weights are damaged, which shows when they are read."""
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:1000])
    words = [
        sys.executable,
        "-m",
        "oat",
        "serve",
        "reward",
        "--model",
        str(damaged),
        "--devices",
        "cpu",
        "--port",
        "0",
    ]
    ended = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=120.0,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode in (1, 2), ended
    assert "before they were ready; what they said stands above" in ended.stderr.strip().splitlines()[-1]


def test_a_slow_sender_and_a_silent_one_are_left(model: str) -> None:
    """By the front alone, with short limits: its workers are away."""
    import asyncio

    async def talk(sent: bytes) -> bytes:
        front = Front(MosecClient(9, b"", 1.0), None, Limits(read_s=0.3, idle_s=0.3))
        server = await asyncio.start_server(front.connected, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 20.0)
        writer.close()
        server.close()
        return answer

    assert asyncio.run(talk(b"")) == b""
    assert asyncio.run(talk(b"GET / HT")).startswith(b"HTTP/1.1 408")
    assert asyncio.run(
        talk(b"POST /get_feedback HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\n1")
    ).startswith(b"HTTP/1.1 408")
    assert asyncio.run(talk(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")).startswith(b"HTTP/1.1 503")


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
