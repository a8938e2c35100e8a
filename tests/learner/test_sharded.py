"""A learner whose models are sharded over two ranks learns what one process learns. Each rank has all rows,
so the gradients of the ranks are equal, and their mean is that of one process."""

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

from oat import wire
from oat.processes.forks import ForkServer

RANKS = 2
MOST = 5e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    ranks.save_models(made)
    return made


@pytest.fixture(scope="module")
def sharded(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """What each rank has found, by case: of those cases whose tests are run."""
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params["case"] for item in items if hasattr(item, "callspec")]
    log = folder / "log"
    server = ForkServer(["ranks"], str(log))  # a process that has computed on threads cannot be forked
    try:
        order = {"models": str(folder), "ranks": RANKS, "cases": cases}
        forked = [
            server.fork("ranks:serve", {**order, "rank": rank}, lambda _: None) for rank in range(RANKS)
        ]
        assert [each.code(600) for each in forked] == [0] * RANKS, log.read_text()
    finally:
        server.close()
    found = [wire.decode((folder / f"rank{rank}").read_bytes()) for rank in range(RANKS)]
    return {case: [rank[case] for rank in found] for case in found[0]}


@pytest.mark.sample("dpo, tied embeddings", "grpo, LoRA", seconds=0.5)
@pytest.mark.parametrize("case", ranks.CASES)
def test_two_ranks_learn_what_one_process_learns(
    case: str, folder: Path, sharded: dict[str, list[Any]]
) -> None:
    kind, objective = ranks.CASES[case]
    alone = ranks.updates(ranks.models_of(folder, kind, objective), objective)
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
