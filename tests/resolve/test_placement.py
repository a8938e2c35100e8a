"""`compute.gpus`: who uses which GPU, and the settings that contradict it."""

from pathlib import Path
from typing import Any

import pytest
from fixtures import World, oat
from pretended import pretended_gpu

from oat.config.compute_settings import ComputeConfig
from oat.config.load import load_config
from oat.processes.gpus import shares_of
from oat.resolve.placement import Placement, placement, placement_notes
from oat.resolve.resolve import resolve

APART = {
    1: ([0], 0, []),
    2: ([0], 1, []),
    3: ([0, 1], 2, []),
    4: ([0, 1], 2, [3]),
    5: ([0, 1, 2], 3, [4]),
    6: ([0, 1, 2], 3, [4, 5]),
    7: ([0, 1, 2, 3], 4, [5, 6]),
    8: ([0, 1, 2, 3], 4, [5, 6, 7]),
}
"""The GPUs of the actors, that of the learner, and the idle ones, by the number of GPUs."""
GPUS = {"compute.runtime": "ray", "compute.profile": "gpu", "compute.gpus": 4}


@pytest.mark.inventory(90)
@pytest.mark.parametrize("gpus", APART)
def test_who_uses_which_gpu(gpus: int) -> None:
    actors, learner, idle = APART[gpus]
    placed = placement(gpus, collocate=False)
    assert placed == Placement(tuple(actors), learner, tuple(idle))
    assert shares_of(placed.actors, placed.learner) == ([0.5] if gpus == 1 else [1.0] * len(actors))
    assert placed.is_shared == (gpus == 1)


@pytest.mark.inventory(90)
@pytest.mark.parametrize("gpus", APART)
def test_who_uses_which_gpu_together(gpus: int) -> None:
    placed = placement(gpus, collocate=True)
    assert placed == Placement(tuple(range(gpus)), 0, ())
    assert shares_of(placed.actors, placed.learner) == [0.5] + [1.0] * (gpus - 1)
    assert placed.is_shared


def numbers(cell: str) -> tuple[int, ...]:
    """Return the numbers of a cell of the table, such as "0 to 2" or "4, 5"."""
    first, *last = cell.split(" to ")
    if last:
        return tuple(range(int(first), int(last[0]) + 1))
    return tuple(int(number) for number in cell.split(", ") if number)


def test_the_table_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
    section = page[page.index("## On several GPUs") :]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "|" in line]
    table = [row for row in rows if row[0].isdecimal()][:8]
    assert [int(row[0]) for row in table] == [*APART]
    for gpus, actors, learner, idle, together in table:
        placed = placement(int(gpus), collocate=False)
        assert (numbers(actors), int(learner.split(",")[0])) == (placed.actors, placed.learner)
        assert ("shared" in learner, numbers(idle)) == (placed.is_shared, placed.idle)
        placed = placement(int(gpus), collocate=True)
        of_actors, _, of_learner = together.partition(", and ")
        assert (numbers(of_actors), int(of_learner)) == (placed.actors, placed.learner)


@pytest.mark.parametrize(
    ("gpus", "collocate", "words"),
    [
        (None, False, []),
        (3, False, []),
        (1, False, ["the learner and actor 0 share a GPU, and the memory of both must fit"]),
        (4, False, ["of which 1 GPU stays idle"]),
        (8, False, ["of which 3 GPUs stay idle and are left to others"]),
        (8, True, []),
    ],
)
def test_what_is_said_of_gpus(gpus: int | None, collocate: bool, words: list[str]) -> None:
    notes = list(placement_notes(ComputeConfig(gpus=gpus, collocate=collocate)))
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compute.runtime": "local"}, "compute.gpus is 4: a run in one process takes the first visible GPU"),
        (
            {"compute.profile": "cpu"},
            "compute.gpus is 4: nothing computes on a GPU with compute.profile: cpu",
        ),
        ({"compute.gpus": None}, "compute.gpus is not set: set it to the number of GPUs that the run uses"),
        ({"compute.gpus": 0}, "compute.gpus"),
        ({"compute.actors": 3}, "compute.actors is 3: compute.gpus 4 has 2 for actors, one each"),
        ({"compute.standby": 1}, "compute.standby is 1: every GPU has its actor"),
    ],
)
def test_contradictions_are_refused(
    changes: dict[str, Any], words: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pretended_gpu():
        for command in ("check", "train"):
            assert oat(command, world.config("grpo", tmp_path, {**GPUS, **changes})) == 2
            assert words in capsys.readouterr().err


def test_nothing_to_share(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oat("check", world.config("grpo", tmp_path, {"compute.collocate": True})) == 2
    assert "compute.collocate is True: there are no GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "actors"), [({}, 2), ({"compute.collocate": True}, 4)])
def test_the_number_of_actors_follows(
    given: dict[str, Any], actors: int, world: World, tmp_path: Path
) -> None:
    resolved = resolve(*load_config(world.config("grpo", tmp_path, {**GPUS, **given})))
    assert resolved.config.compute.actors == actors
