"""A learner whose models are sharded over two ranks learns what one process learns. Each rank has all rows,
so the gradients of the ranks are equal, and their mean is that of one process."""

import os
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import ranks
import torch

from oat import wire
from oat.processes.pipe import Message
from oat.processes.spawn import Child, on_one_thread

RANKS = 2
MOST = 5e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    ranks.save_models(made)
    return made


@pytest.fixture(scope="module")
def sharded(folder: Path) -> Iterator[dict[str, list[Any]]]:
    """What each rank has found, by case."""
    said = [SimpleQueue[Message | None]() for _ in range(RANKS)]
    children = [
        Child(
            "ranks:work",
            {"folder": str(folder), "meeting": str(folder / "meeting"), "rank": rank, "ranks": RANKS},
            said[rank].put,
            environment=on_one_thread(os.environ),
        )
        for rank in range(RANKS)
    ]
    found: dict[str, list[Any]] = {}
    for case in [*ranks.CASES, "measured"]:
        messages = [queue.get(timeout=300) for queue in said]
        assert all(message is not None for message in messages), case
        found[case] = [wire.decode(message.head) for message in messages if message is not None]
    yield found
    for child in children:
        child.end(30.0)


@pytest.mark.parametrize("case", ranks.CASES)
def test_two_ranks_learn_what_one_process_learns(
    case: str, folder: Path, sharded: dict[str, list[Any]]
) -> None:
    kind, objective = ranks.CASES[case]
    alone = ranks.updates(ranks.models_of(folder, kind), objective)
    for rank in sharded[case]:
        for one, other in zip(rank["metrics"], alone["metrics"], strict=True):
            assert one == pytest.approx(other, rel=MOST, abs=MOST)
        assert rank["weights"].keys() == alone["weights"].keys()
        for name, tensor in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], tensor, rtol=0, atol=MOST)
        assert rank["share"] <= 0.52
        assert rank["moments"] == rank["trained"] == alone["trained"]
    assert wire.encode(sharded[case][0]["weights"]) == wire.encode(sharded[case][1]["weights"])


def test_the_ranks_agree_on_what_is_measured(sharded: dict[str, list[Any]]) -> None:
    one, other = sharded["measured"]
    assert one == other
    assert one["threads"] in (1, 2)
    assert one["tokens"] < 128, "that is all rows of a step"
