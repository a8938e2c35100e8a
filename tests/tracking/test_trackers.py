"""Weights & Biases and MLflow with their own libraries, in an environment that `make test-slow` makes: the
files that they wrote are read back."""

import importlib.util
import json
import math
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fixtures import NO_MLFLOW, NO_WANDB, World, forked, kill_at, named, oat, told

from oat.commands.digest import digest_run
from oat.metrics import repeatable
from oat.processes.marks import VARIABLE

KEY = "0123456789abcdef0123456789abcdef01234567"
"""A made-up key in the form of wandb's keys."""
needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason=NO_WANDB)
needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason=NO_MLFLOW)
pytestmark = pytest.mark.slow


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Yield the bytes that reach a proxy. All libraries are told to use this proxy, and it never answers."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, address)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)

        def listen() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=lambda c=connection: heard.append(c.recv(4096)), daemon=True).start()

        threading.Thread(target=listen, daemon=True).start()
        yield heard
        server.shutdown(socket.SHUT_RDWR)


def killed_continued_and_forked(world: World, folder: Path, sinks: list[Any]) -> tuple[Path, Path]:
    """Return two run directories: a run that was killed after its first checkpoint, continued and made
    longer, and a fork of it."""
    config = world.config("grpo", folder, {"tracking.sinks": sinks})
    run_dir = folder / "grpo"
    log = folder / "log"
    assert (
        forked(lambda: kill_at(*named("oat.learner.learner:Learner.update"), 4) or told("train", config), log)
        == -signal.SIGKILL
    )
    for flags in (
        (),
        ("--stop.max_steps", 6),
        ("--stop.max_steps", 6, "--run_dir", folder / "fork", "--from", f"{run_dir}@4", "--seed", 3),
    ):
        assert forked(lambda flags=flags: told("train", config, *flags), log) == 0, log.read_text()
    assert "warning: the sink" not in log.read_text()
    nothing_is_left()
    return run_dir, folder / "fork"


def nothing_is_left() -> None:
    """Check that no process of a sink remains within ten seconds. The library's own process notices by itself
    that training was killed."""
    deadline = time.monotonic() + 10
    while (left := processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def processes() -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"{VARIABLE}=".encode() in (place / "environ").read_bytes() and place.name != str(os.getpid()):
                found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def has_nowhere(run_dir: Path, *secrets: str) -> bool:
    return not [
        file
        for file in run_dir.rglob("*")
        if file.is_file()
        for secret in secrets
        if secret.encode() in file.read_bytes()
    ]


def log_records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a file of wandb. It is a LevelDB log in blocks of 32 KiB, after a head of 7 bytes.
    A record that was cut off is left out."""
    block = 2**15
    place = 7
    parts = list[bytes]()
    while place + 7 <= len(log):
        if block - place % block < 7:
            place += block - place % block
            continue
        size, kind = struct.unpack_from("<HB", log, place + 4)
        parts.append(log[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4) and len(parts[-1]) == size:  # whole, or its last part
            yield b"".join(parts)
            parts.clear()


def wandb_records(run_dir: Path) -> tuple[set[str], dict[str, Any], dict[int, list[dict[str, Any]]]]:
    """Return the ids, the configuration, and the logged values by step, from all offline files of a run."""
    from wandb.proto.wandb_internal_pb2 import Record

    ids = set[str]()
    config = dict[str, Any]()
    rows = dict[int, list[dict[str, Any]]]()
    for file in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")):
        for data in log_records(file.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                config |= {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.run.config.update
                }
            if record.WhichOneof("record_type") == "history":
                values = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                rows.setdefault(int(values.pop("_step", record.history.step.num)), []).append(values)
    return ids, config, rows


@needs_wandb
def test_wandb_offline(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: list[bytes]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "online")  # which the configuration does not say
    run_dir, fork = killed_continued_and_forked(
        world, tmp_path, [{"name": "wandb", "project": "mine", "tags": ["a"], "wait_s": 120}]
    )
    ids, config, rows = wandb_records(run_dir)
    assert ids == {json.loads((run_dir / "sinks" / "wandb.json").read_text())["id"]}
    assert list(rows) == [row["step"] for row in rows_of(run_dir)]
    for row in rows_of(run_dir):
        (values,) = rows[row["step"]]
        logged = repeatable({name: value for name, value in values.items() if not name.startswith("_")})
        assert logged == {name: value for name, value in repeatable(row).items() if name != "step"}
    assert config["stop"]["max_steps"] == 6
    assert config["tracking"]["sinks"][0]["project"] == "mine"
    others, _, forks = wandb_records(fork)
    assert not ids & others
    assert list(forks) == list(range(7))
    assert has_nowhere(tmp_path, KEY)
    assert not list(run_dir.rglob("*.table.json")), "texts only where they are asked for"
    assert listener == []


@needs_wandb
def test_wandb_has_texts_where_they_are_asked_for(world: World, tmp_path: Path) -> None:
    sinks = [{"name": "wandb", "samples": True, "wait_s": 120}]
    config = world.config(
        "grpo",
        tmp_path,
        {"tracking.sinks": sinks, "stop.max_steps": 2, "evaluation": None, "tracking.samples": 2},
    )
    assert forked(lambda: told("train", config), tmp_path / "log") == 0
    tables = [json.loads(file.read_text()) for file in (tmp_path / "grpo").rglob("*.table.json")]
    assert len(tables) == 2
    assert all("responses" in table["columns"] and len(table["data"]) == 2 for table in tables)
    nothing_is_left()


@needs_wandb
def test_wandb_online_that_nobody_answers_holds_up_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: list[bytes]
) -> None:
    """Wandb is online, and its server never answers. The run ends normally. The listener hears wandb's
    requests, so it could also hear them in the test of offline files."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.invalid")
    config, log = world.config("grpo", tmp_path), tmp_path / "log"
    assert forked(lambda: oat("train", config), log) == 0
    sinks, run_dir = [{"name": "wandb", "mode": "online", "wait_s": 12}], tmp_path / "with"
    begin = time.monotonic()
    assert (
        forked(
            lambda: told("train", config, "--run_dir", run_dir, "--tracking.sinks", json.dumps(sinks)), log
        )
        == 0
    )
    assert time.monotonic() - begin < 60
    assert log.read_text().count("warning: the sink wandb") == 1, log.read_text()
    assert KEY not in log.read_text()
    assert digest_run(run_dir) == digest_run(tmp_path / "grpo")
    assert listener
    nothing_is_left()


@needs_wandb
def test_wandb_is_killed_with_training_and_goes_on(world: World, tmp_path: Path) -> None:
    """Training is killed together with wandb's own processes, as when a machine is lost. Continued, the run
    logs no row twice."""
    config = world.config("grpo", tmp_path, {"tracking.sinks": [{"name": "wandb", "wait_s": 120}]})
    run_dir = tmp_path / "grpo"
    log = tmp_path / "log"

    def killed() -> int:
        from oat.learner.learner import Learner

        update, calls = Learner.update, 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 4:
                deadline = time.monotonic() + 60
                while (
                    not (state := run_dir / "sinks" / "wandb.json").exists()
                    or json.loads(state.read_text())["next"] < 3
                ) and (time.monotonic() < deadline):
                    time.sleep(0.05)
                subprocess.run(
                    [
                        "sh",
                        "-c",
                        (
                            f"grep -l {VARIABLE}= /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 > "
                            f"{tmp_path}/pids"
                        ),
                    ],
                    check=False,
                )
                for number in (tmp_path / "pids").read_text().split():
                    if (
                        b"wandb" in (command := Path(f"/proc/{number}/cmdline").read_bytes())
                        or b"oat.processes.child" in command
                    ):
                        os.kill(int(number), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            return update(*args, **kwargs)

        Learner.update = counted  # type: ignore[method-assign]
        return told("train", config)

    assert forked(killed, log) == -signal.SIGKILL
    assert forked(lambda: told("train", config), log) == 0, log.read_text()
    _, _, rows = wandb_records(run_dir)
    assert {4} <= set(rows) <= set(range(5))
    assert all(len(values) == 1 for values in rows.values())
    nothing_is_left()


@needs_mlflow
def test_mlflow_in_the_run_directory(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: list[bytes]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "a-planted-token")
    # which the configuration does not name
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.invalid")
    sinks = [{"name": "mlflow", "experiment": "mine", "tags": {"who": "me"}, "samples": True, "wait_s": 120}]
    run_dir, fork = killed_continued_and_forked(world, tmp_path, sinks)
    found = read_mlflow(run_dir, monkeypatch)
    assert found["status"] == "FINISHED"
    assert found["name"] == "grpo"
    assert found["tags"]["who"] == "me"
    assert found["params"]["stop.max_steps"] == "4", "as in the first process"
    expected = {
        (name, row["step"]): value
        for row in rows_of(run_dir)
        for name, value in repeatable(row).items()
        if name != "step"
    }
    assert expected.keys() == {(name, step) for name, step in found["points"] if repeatable({name: 0.0})}
    assert all(len(values) == 1 for values in found["points"].values())
    assert all(
        math.isclose(found["points"][place][0], value, rel_tol=1e-9, abs_tol=1e-30)
        for place, value in expected.items()
    )
    assert [file.name for file in sorted(run_dir.glob("mlflow/**/samples/*.json"))] == [
        f"step_{step:08}.json" for step in range(1, 7)
    ]
    other = read_mlflow(fork, monkeypatch)
    assert other["id"] != found["id"]
    assert {step for _, step in other["points"]} == set(range(7))
    assert has_nowhere(tmp_path, "a-planted-token")
    assert listener == []
    shutil.move(run_dir, tmp_path / "moved")
    flags = ("--run_dir", tmp_path / "moved", "--stop.max_steps", 7)
    assert forked(lambda: told("train", tmp_path / "grpo.yaml", *flags), tmp_path / "log") == 0
    assert (
        "the sink mlflow could not take a row: RuntimeError: MLflow keeps samples where the run was begun"
        in (tmp_path / "log").read_text()
    )
    assert not run_dir.exists()
    nothing_is_left()


def read_mlflow(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """Return the only run in the folder of MLflow."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    uri = (run_dir / "mlflow").as_uri()
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    points: dict[tuple[str, int], list[float]] = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            points.setdefault((name, metric.step), []).append(metric.value)
    about = {"id": run.info.run_id, "name": run.info.run_name, "status": run.info.status}
    return {**about, "tags": run.data.tags, "params": run.data.params, "points": points}
