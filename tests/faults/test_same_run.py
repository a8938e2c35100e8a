"""R2: the same configuration and seed give bitwise the same run in any process. With `engine.deterministic`,
this also holds for any size of the engine's batches."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, oat

from oat.commands.digest import digest_run


def processes_agree(
    world: World, folder: Path, algorithm: str, changes: dict[str, Any], hashes: Sequence[int] = (1, 2)
) -> int:
    """Train in one process per hash seed. Return how many of them, after the first, made the same run as the
    first."""
    config = world.config(algorithm, folder, changes)
    running = {}
    for number in hashes:
        command = [sys.executable, "-m", "oat", "train", str(config), "--run_dir", str(folder / str(number))]
        environment = {**os.environ, "PYTHONHASHSEED": str(number), "OMP_NUM_THREADS": "1"}
        running[number] = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    assert {process.wait() for process in running.values()} == {0}
    first, *others = (digest_run(folder / str(number)) for number in running)
    return sum(other == first for other in others)


SINGLE = {"engine": {"name": "torch", "threads": 1}}


@pytest.mark.slow(
    instead="tests/faults/test_kill.py::test_from_a_cold_shell, whose two processes have other hashes",
    seconds=11.1,
)
@pytest.mark.fault("R2")
def test_other_hashes_give_the_same_run(world: World, tmp_path: Path, figure: Callable[[str], None]) -> None:
    equal = processes_agree(world, tmp_path, "dpo", SINGLE)
    figure(f"{equal} of 1 runs with another PYTHONHASHSEED equal the first run bitwise")
    assert equal == 1


@pytest.mark.large
@pytest.mark.fault("R2")
@pytest.mark.parametrize("algorithm", ["dpo", "grpo", "sft"])
@pytest.mark.parametrize("serialise", [False, True])
def test_other_hashes_give_the_same_longer_run(
    world: World, tmp_path: Path, algorithm: str, serialise: bool, figure: Callable[[str], None]
) -> None:
    changes = {
        **SINGLE,
        "stop.max_steps": 60,
        "evaluation.every": 20,
        "compute.serialise": serialise,
        "learner.sync_every": 2,
    }
    threshold = {"algorithm.threshold": 0.0} if algorithm == "sft" else {}
    equal = processes_agree(world, tmp_path, algorithm, {**changes, **threshold}, (0, 1, 2**32 - 1))
    figure(f"{equal} of 2 runs with another PYTHONHASHSEED equal the first run bitwise")
    assert equal == 2


@pytest.mark.sample("grpo", seconds=1.5)
@pytest.mark.fault("R2")
@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_a_run_does_not_depend_on_who_is_decoded_together(
    world: World, tmp_path: Path, algorithm: str, figure: Callable[[str], None]
) -> None:
    """The engine decodes at most 1, 3 or 256 rows together, and the three runs are equal."""
    digests = []
    for rows in (256, 3, 1):
        engine = {"engine": {"name": "torch", "threads": 1, "deterministic": True, "max_rows": rows}}
        assert oat("train", world.config(algorithm, tmp_path, engine), "--run_dir", tmp_path / str(rows)) == 0
        digests.append(digest_run(tmp_path / str(rows)))
    figure(
        f"{sum(digest == digests[0] for digest in digests[1:])} of 2 runs with another number of queues "
        "equal the first run bitwise"
    )
    assert digests[0] == digests[1] == digests[2]
