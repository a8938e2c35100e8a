"""Where a fork begins: what `fork.json`, the first file of its directory, says of the run that it was made
from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oat.files import parse_json

FORK_FILE = "fork.json"


@dataclass(frozen=True)
class Origin:
    """The checkpoint with which a fork begins: that of step `step` of the run in the directory `run`."""

    run: Path
    step: int


def origin_of(directory: Path) -> Origin:
    """Return the origin that `opening.fork.begin_fork` has recorded."""
    origin = read_origin(directory)
    assert origin is not None, "begin_fork comes first"
    return origin


def begins_after(directory: Path) -> int:
    """Return the number of steps that were done when a run began: for a fork the step of the checkpoint that
    it began with, for any other run 0."""
    origin = read_origin(directory)
    return 0 if origin is None else origin.step


def first_seed(directory: Path, seed: int) -> int:
    """Return the seed of a run's initial weights (`Seeds`): for a fork that of the run that it was made from,
    for any other run its own.

    Args:
        seed: the run's own seed. It also counts for a fork that an earlier version of oat made.
    """
    found = told_of_fork(directory).get("seed")
    return found if isinstance(found, int) else seed


def read_origin(directory: Path) -> Origin | None:
    """Return where the run in a directory begins; None if it is no fork."""
    try:
        found = told_of_fork(directory)
        return Origin(Path(found["run"]), found["step"])
    except (KeyError, TypeError):
        return None


def told_of_fork(directory: Path) -> dict[str, Any]:
    """Return what `fork.json` says; empty if the directory has no such file, or it is damaged."""
    try:
        found = parse_json((directory / FORK_FILE).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}
