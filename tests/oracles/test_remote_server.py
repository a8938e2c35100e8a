"""`oat serve reward` as a user starts it, with good and bad clients."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from faulty_server import until
from reward_server import TOKEN, feedback, save_tiny_reward_model, scores, served

from oat.cli import main
from oat.oracles.remote import server as predecessor
from oat.oracles.remote.front import Front, Limits, MosecClient
from oat.oracles.remote.server import ServerConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_reward_model(tmp_path_factory.mktemp("reward_model"))


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


def test_the_predecessors_command_is_read(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[ServerConfig] = []
    monkeypatch.setattr(predecessor, "run_server", lambda config, say: given.append(config))
    (tmp_path / "token").write_text(TOKEN)
    words = ["--remote_rm_model", model, "--max-wait-time", "1", "--cuda-devices", "0,3", "--port", "0"]
    assert predecessor.main([*words, "--token-file", str(tmp_path / "token")]) == 0
    assert predecessor.main([*words, "--multi_gpu", "--timeout", "500"]) == 0
    one, whole = given
    assert (one.model, one.devices, one.visible, one.token) == (model, ("cuda:0", "cuda:1"), "0,3", TOKEN)
    assert (one.max_wait_ms, one.port, one.host) == (1, 0, "127.0.0.1")
    assert (whole.devices, whole.limits.answer_s, whole.token) == (("auto",), 0.5, None)


@pytest.mark.slow(
    instead="test_the_predecessors_command_is_read, and the server of `oat serve reward`", seconds=10.3
)
@pytest.mark.inventory(81)
def test_the_predecessors_command_works_and_one_process_spans_all_devices(model: str) -> None:
    words = ["--remote_rm_model", model, "--max-wait-time", "1", "--cuda-devices", "all", "--multi_gpu"]
    with served(*words, command=["oat.oracles.remote.server"]) as one:
        assert len(one.workers) == 1
        assert feedback(one, ["who", "why"], [], ["me", "so"])[1]["batch_score"] == pytest.approx(
            scores(model, ("who", "me"), ("why", "so")), abs=1e-4
        )


@pytest.mark.slow(
    instead="tests/faults/test_workers.py and tests/faults/test_leaves_nothing.py, for other processes",
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
@pytest.mark.inventory(81)
@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_a_worker_that_dies_is_replaced(devices: str, model: str, tmp_path: Path) -> None:
    """A worker is killed, and another one replaces it, even if it was the only one. Requests meanwhile get
    503 or 504, and clients repeat them."""
    with served("--model", model, "--devices", devices, "--timeout-s", "2", log=tmp_path / "log") as server:
        assert len(server.workers) == devices.count("cpu")
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
    """The weights are damaged, which the workers find when they read them. The server ends with an error."""
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
    """The front closes the connection of a slow or silent sender. The test starts only the front, with short
    limits and without workers."""
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
