"""The end of a run closes what its oracles hold: threads of clients, and processes of workers. An oracle
object that was given from Python stays open for its owner."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_server import Asked, FaultyServer, Reply, serving
from fixtures import World, oat

from oat import Trainer
from oat.errors import OatWarning
from oat.oracles.remote.format import decode_request, encode_reply
from oat.oracles.users import UsersOracle
from oat.plugins.loading import load_symbol

OWN = """
from oat.testing import FakeOracle

class Mine(FakeOracle):
    closed = 0

    def __init__(self):
        super().__init__(lambda question: [float(len(text)) for text in question.candidates], answers="score")

    def close(self):
        Mine.closed += 1
"""


def feedback(asked: Asked) -> Reply:
    request = decode_request(asked.body)
    return Reply(encode_reply(request, [float(len(text)) for _, text in request.items]))


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with serving(feedback) as server:
        yield server


def held() -> list[str]:
    """Return the names of the clients' threads."""
    return [thread.name for thread in threading.enumerate() if thread.name == "oat-http"]


@pytest.mark.sample("grpo", seconds=1.2)
@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_a_run_leaves_no_client(algorithm: str, world: World, tmp_path: Path, server: FaultyServer) -> None:
    """After a run no HTTP client remains: of training, of evaluations, of the gold oracle, or of a mixture's
    sources. Training runs with and without preferences from scores."""
    remote: dict[str, Any] = {"name": "remote", "url": server.url}
    changes = {
        "oracle": {
            "name": "mixture",
            "sources": [remote, {"name": "length", "target": 3, "unit": "characters"}],
        }
    }
    changes |= {
        "evaluation.oracle": {**remote, "concurrency": 2},
        "evaluation.gold": {**remote, "concurrency": 3},
    }
    config = world.config(algorithm, tmp_path, changes)
    assert held() == []
    assert oat("train", config) == 0
    assert len(server.asked) > 0
    assert held() == []
    assert oat("eval", tmp_path / algorithm) == 0
    assert held() == []


def test_a_run_that_fails_leaves_none(world: World, tmp_path: Path, server: FaultyServer) -> None:
    server.answer = lambda asked: Reply(b"no", status=400)
    assert (
        oat(
            "train",
            world.config(
                "grpo", tmp_path, {"oracle": {"name": "remote", "url": server.url}, "evaluation": None}
            ),
        )
        == 1
    )
    assert held() == []


def test_an_object_that_was_given_stays_open(world: World, tmp_path: Path) -> None:
    source: dict[str, Any] = {}
    exec(OWN, source)
    mine, tree = source["Mine"](), world.tree("grpo", tmp_path / "run")
    for name in ("one", "two"):
        given = {
            "model": tree["model"],
            "prompts": tree["prompts"],
            "sampling": tree["sampling"],
            "compute": {"threads": 1},
        }
        own: dict[str, Any] = {
            "algorithm": {"name": "grpo", "prompts": 2, "samples": 2},
            "stop": {"max_steps": 1},
        }
        Trainer(**given, **own, oracle=mine, run_dir=tmp_path / name, quiet=True).train()
    assert source["Mine"].closed == 0
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    spec = f"{tmp_path / 'mine.py'}:Mine"
    assert oat("train", world.config("grpo", tmp_path, {"oracle.name": spec})) == 0
    assert load_symbol(spec).closed == 1, "which training and evaluations share"


def test_what_a_close_raises_is_said() -> None:
    class Broken:
        name = "mine"

        def close(self) -> None:
            raise OSError("gone")

    with pytest.warns(OatWarning, match="oracle mine could not be closed: OSError: gone"):
        UsersOracle(Broken()).close()
    UsersOracle(object()).close()
