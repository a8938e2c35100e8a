"""What stands in a run's folder of checkpoints, by name: for who writes and loads them
(`rundir/checkpoints.py`), and for who only wants to know what the newest one says, without torch."""

import hashlib
import re
from pathlib import Path
from typing import Any

from oat.files import parse_json

_NAME = re.compile(r"step_(\d{8,})(?:\.(\d+))?")


def place_of(name: str) -> tuple[int, int]:
    """Step, and which save of it."""
    match = _NAME.fullmatch(name)
    assert match is not None, f"{name} is no checkpoint's name"
    return int(match[1]), int(match[2] or 0)


def names_in(directory: Path) -> list[str]:
    """In the order in which they were written."""
    return sorted(
        (
            folder.name
            for folder in directory.glob("step_*")
            if _NAME.fullmatch(folder.name) and folder.is_dir()
        ),
        key=place_of,
    )


def pointed(directory: Path) -> tuple[list[str], str | None]:
    """The names up to the one in the pointer, all of them if it is of no use; and what people should know of
    it."""
    found = names_in(directory)
    if not found:
        return [], None
    try:
        named = (directory / "latest").read_text(encoding="utf-8").removesuffix("\n")
        problem = None if named in found else f"it names {named[:40]!r}, which is not there"
    except (OSError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        return found, f"{directory / 'latest'}: {problem}; trying the newest checkpoint"
    if named != found[-1]:
        problem = (
            f"{directory / 'latest'}: names {named}, and {found[-1]} is there too; going on from the "
            "named one, as after a turn back"
        )
    return found[: found.index(named) + 1], problem


def newest_state(directory: Path, step: int | None = None) -> tuple[str, dict[str, Any]] | None:
    """The name and the state of the newest checkpoint whose state is what was written; whether its tensors
    are is not looked at.

    Args:
        step: among those of one step; None: up to the one that the pointer names.
    """
    found = (
        pointed(directory)[0]
        if step is None
        else [name for name in names_in(directory) if place_of(name)[0] == step]
    )
    for name in reversed(found):
        try:
            text, manifest = (
                (directory / name / "state.json").read_bytes(),
                parse_json((directory / name / "manifest.json").read_bytes()),
            )
            if hashlib.sha256(text).hexdigest() == manifest["state.json"]["sha256"]:
                return name, parse_json(text)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged, or removed meanwhile
    return None
