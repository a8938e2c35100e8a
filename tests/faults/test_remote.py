"""R12, R28 and R29: no fault of a reward server costs a question, hostile requests do not harm the server,
and a token is never shown."""

import contextlib
import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from faulty_server import Asked, FaultyServer, Reply, serving, until
from fixtures import World, oat
from reward_server import save_tiny_reward_model, served

from oat.commands.digest import digest_run
from oat.ledger.reader import Reader
from oat.ledger.store import Store
from oat.oracles.remote.format import decode_request, encode_reply
from oat.reports.accounts import accounts
from oat.types import UNASKED

Figure = Callable[[str], None]

FAULTS = {
    "500": Reply(status=500),
    "503": Reply(status=503, headers={"retry-after": "0"}),
    "429 with Retry-After": Reply(status=429, headers={"retry-after": "1"}),
    "hang": Reply(fault="hang"),
    "half a response": Reply(b"\x82" + b"x" * 64, fault="half"),
    "closed": Reply(fault="close"),
    "wrong length": Reply(msgspec.msgpack.encode({"batch_first_win_prob": [], "batch_score": [1.0] * 17})),
    "NaN": Reply(msgspec.msgpack.encode({"batch_first_win_prob": [], "batch_score": [float("nan")] * 3})),
    "slow drip": Reply(b"x" * 100, fault="drip"),
}
PATIENT = {"oracle.timeout_s": 0.3, "oracle.max_tries": 50}


def feedback(asked: Asked) -> Reply:
    """Return the reply of a server without faults."""
    request = decode_request(asked.body)
    return Reply(
        encode_reply(request, [text.count("a") + 0.1 * text.count("b") for _, text in request.items])
    )


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with serving(feedback) as server:
        yield server


def train(
    world: World, folder: Path, server: FaultyServer, algorithm: str = "grpo", **changes: Any
) -> tuple[int, Path]:
    """Train with the server as oracle. Return the exit code and the run directory."""
    folder.mkdir(exist_ok=True)
    own = {
        "oracle": {"name": "remote", "url": server.url},
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return oat("train", world.config(algorithm, folder, own)), folder / algorithm


def labels(run_dir: Path, last: int = 4) -> dict[str, int]:
    """Return three counts of training questions: asked, queries paid by the last step, and failed."""
    store = Store(run_dir / "ledger.sqlite")
    count = "SELECT COUNT(*) FROM questions WHERE purpose = 'train'"
    found = {
        "asked": store.db.execute(count).fetchone()[0],
        "queries": store.take_price("train", last - 1).queries,
    }
    store.close()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found["failed"] = round(sum(row.get("answers/failed_frac", 0.0) for row in rows))
    return found


@pytest.mark.usefixtures("brief_waits")
@pytest.mark.sample("500", seconds=8.8)
@pytest.mark.fault("R12")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_nothing_of_a_run(
    fault: str, world: World, tmp_path: Path, server: FaultyServer, figure: Figure
) -> None:
    """Every third request fails. A run of preferences and its answers equal those of a run with a server
    without faults."""
    options = PATIENT | ({"oracle.timeout_s": 5.0} if "Retry" in fault else {})
    assert train(world, tmp_path / "sound", server, "dpo", **options)[0] == 0
    sound, number = tmp_path / "sound" / "dpo", len(server.asked)
    server.answer = lambda asked: FAULTS[fault] if (asked.number - number) % 3 == 0 else feedback(asked)
    code, run_dir = train(world, tmp_path / "faulty", server, "dpo", **options)
    assert code == 0
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[-1]["oracle/retries"] >= 5
    assert labels(run_dir) == labels(sound)
    assert labels(run_dir)["failed"] == 0
    assert digest_run(run_dir) == digest_run(sound)
    asked = labels(run_dir)["asked"]
    figure(f"0 of {asked} questions lost or counted twice; fault of the server: {fault}")


def outage(seconds: float, world: World, tmp_path: Path, server: FaultyServer, figure: Figure) -> None:
    assert train(world, tmp_path / "sound", server)[0] == 0
    begun, back = len(server.asked), [0.0]
    first = threading.Event()

    def answer(asked: Asked) -> Reply:
        if asked.number == begun + 7:
            first.set()
        if back[0] and len(back) == 1:
            back.append(time.monotonic())
        return feedback(asked)

    def away() -> None:
        first.wait(120.0)
        server.stop()
        time.sleep(seconds)
        server.start()
        back[0] = time.monotonic()

    server.answer = answer
    outside = threading.Thread(target=away)
    outside.start()
    code, run_dir = train(world, tmp_path / "away", server)
    outside.join()
    assert code == 0
    assert digest_run(run_dir) == digest_run(tmp_path / "sound" / "grpo")
    assert labels(run_dir) == labels(tmp_path / "sound" / "grpo")
    took = back[1] - back[0]
    assert took < 15.0
    figure(
        f"0 of {labels(run_dir)['asked']} questions lost in an outage of {seconds:g} s, recovery in "
        f"{took:.1f} s"
    )


@pytest.mark.fault("R12")
def test_a_server_that_is_away_in_mid_run_costs_no_question(
    world: World, tmp_path: Path, server: FaultyServer, figure: Figure
) -> None:
    outage(1.0, world, tmp_path, server, figure)


@pytest.mark.large
@pytest.mark.fault("R12")
def test_a_server_that_is_away_for_half_a_minute(
    world: World, tmp_path: Path, server: FaultyServer, figure: Figure
) -> None:
    outage(30.0, world, tmp_path, server, figure)


@pytest.mark.large
@pytest.mark.fault("R12")
def test_a_real_server_is_killed_for_half_a_minute(world: World, tmp_path: Path, figure: Figure) -> None:
    """A process of `oat serve reward` gets SIGKILL during the run. Half a minute later the same command
    starts the server on the same port.

    Scores depend on the server's batches by rounding, and batches depend on time. So the two runs are
    compared by their counts. The recovery time begins with the server's line that it is ready.
    """
    model, steps = save_tiny_reward_model(tmp_path / "model"), {"stop.max_steps": 40, "evaluation": None}
    back = [0.0, 0.0]
    with served("--model", model, "--devices", "cpu") as first:
        own = {"oracle": {"name": "remote", "url": first.url, "timeout_s": 5.0}, **steps}
        (tmp_path / "sound").mkdir()
        assert oat("train", world.config("dpo", tmp_path / "sound", own)) == 0
        before = _answered(first.url)

        def away() -> None:
            assert until(lambda: _answered(first.url) >= before + 20, 120.0)
            first.process.kill()
            first.process.wait()
            time.sleep(30.0)
            with served(
                "--model", model, "--devices", "cpu", port=int(first.url.rsplit(":", 1)[1])
            ) as second:
                back[0] = time.monotonic()
                assert until(lambda: _answered(second.url) > 0, 60.0)
                back[1] = time.monotonic()
                training.wait(300.0)

        (tmp_path / "away").mkdir()
        training = threading.Event()
        outside = threading.Thread(target=away)
        outside.start()
        code = oat("train", world.config("dpo", tmp_path / "away", own))
        training.set()
        outside.join()
    assert code == 0
    found, sound = labels(tmp_path / "away" / "dpo", 40), labels(tmp_path / "sound" / "dpo", 40)
    assert found["asked"] == sound["asked"] == 4 * 40
    assert found["failed"] == sound["failed"] == 0
    assert oat("ledger", tmp_path / "away" / "dpo", "--check") == 0
    with contextlib.closing(Reader(tmp_path / "away" / "dpo" / "ledger.sqlite")) as store:
        (account,) = [each for each in accounts(store) if each.oracle != UNASKED]
    assert (account.pending, account.failed, account.again) == (0, 0, 0)
    assert account.answered == account.taken == account.asked
    took = back[1] - back[0]
    assert took < 15.0
    figure(
        f"0 of {found['asked']} questions lost or counted twice while a real server was killed for 30 s, "
        f"recovery in {took:.1f} s"
    )


def _answered(url: str) -> int:
    """Return the number of requests that a server has answered."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30.0)
    try:
        connection.request("GET", "/metrics")
        found = re.search(
            rb'^oat_requests_total\{status="200"\} (\d+)', connection.getresponse().read(), flags=re.MULTILINE
        )
    except OSError:
        return 0
    finally:
        connection.close()
    return int(found[1]) if found else 0


@pytest.mark.usefixtures("brief_waits")
@pytest.mark.fault("R12")
def test_a_server_that_stays_away_ends_the_run_on_disk(
    world: World, tmp_path: Path, server: FaultyServer, capsys: pytest.CaptureFixture[str], figure: Figure
) -> None:
    assert train(world, tmp_path / "sound", server)[0] == 0
    begun = len(server.asked)

    def answer(asked: Asked) -> Reply:
        if asked.number == begun + 20:
            threading.Thread(target=server.stop).start()
        return feedback(asked)

    server.answer = answer
    code, run_dir = train(
        world, tmp_path / "away", server, **{"oracle.max_outage_s": 0.5, "checkpoint.every": 100}
    )
    assert code == 4
    said = capsys.readouterr().err
    assert "no answer for " in said
    assert "run the same command again" in said
    assert (run_dir / "checkpoints" / "latest").exists()
    server.start()
    server.answer = feedback
    code, run_dir = train(
        world, tmp_path / "away", server, **{"oracle.max_outage_s": 0.5, "checkpoint.every": 100}
    )
    assert code == 0
    assert labels(run_dir) == labels(tmp_path / "sound" / "grpo")
    assert digest_run(run_dir)["weights"] == digest_run(tmp_path / "sound" / "grpo")["weights"]
    figure(
        "a server that is away for too long: the run is saved, exit code 4, then it ends with the same "
        "weights bitwise"
    )


TOKEN = "sesame-4711-sesame"


@pytest.mark.fault("R29")
def test_a_token_is_nowhere_in_a_run(
    world: World,
    tmp_path: Path,
    server: FaultyServer,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    figure: Figure,
) -> None:
    monkeypatch.setenv("OAT_REMOTE_TOKEN", TOKEN)
    is_open = threading.Event()

    def answer(asked: Asked) -> Reply:
        assert asked.headers["authorization"] == f"Bearer {TOKEN}"
        return feedback(asked) if is_open.is_set() else Reply(f"no entry with {TOKEN}".encode(), status=400)

    server.answer = answer
    assert train(world, tmp_path, server)[0] == 1
    is_open.set()
    assert train(world, tmp_path, server)[0] == 0
    assert oat("ledger", tmp_path / "grpo") == 0
    assert oat("train", tmp_path / "grpo.yaml", "--print-config") == 0
    told = "".join(capfd.readouterr())
    assert "refused with status 400" in told
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    found = [file.name for file in files if b"sesame" in file.read_bytes()]
    assert found == []
    assert "sesame" not in told
    figure(f"0 of {len(files)} files of a run contain the token, and no line of its output does")
