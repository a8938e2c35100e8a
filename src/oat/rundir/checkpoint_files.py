"""The files of checkpoints: names, pointer, manifest and state.

This module does not load torch, so a command that needs only the state of the newest checkpoint starts
quickly. `rundir/checkpoints.py` writes and loads complete checkpoints.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from oat.files import parse_json, sync_to_disk

FILES = ("tensors.safetensors", "state.json")
"""The files in a checkpoint's folder, besides its manifest."""

_OWN = (*FILES, "manifest.json")
_NAME = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_MOST_NAMES = 5


def place_of(name: str) -> tuple[int, int]:
    """Return two numbers from a checkpoint's name: its step, and its index (from 0) among the saves of this
    step."""
    match = _NAME.fullmatch(name)
    assert match is not None, f"{name} is no checkpoint's name"
    return int(match[1]), int(match[2] or 0)


def names_in(directory: Path) -> list[str]:
    """Return the names of the checkpoints in a directory, sorted by step and then by save."""
    found = (folder.name for folder in directory.glob("step_*") if folder.is_dir())
    return sorted((name for name in found if _NAME.fullmatch(name)), key=place_of)


def halves_in(directory: Path) -> list[str]:
    """Return the names of the folders that killed saves have left in a directory."""
    return [folder.name for folder in directory.glob(".new-step_*") if _NAME.fullmatch(folder.name[5:])]


def bytes_of(folder: Path) -> int:
    """Return the size of a checkpoint's own files."""
    return sum((folder / name).stat().st_size for name in _OWN if (folder / name).is_file())


def in_the_way(folder: Path) -> str | None:
    """Return what keeps a checkpoint's folder from being removed: the files in it that the checkpoint did not
    write. Return None if there are none."""
    if folder.is_symlink():
        return "is a link"
    with os.scandir(folder) as found:
        names = [
            each.name for each in found if each.name not in _OWN or not each.is_file(follow_symlinks=False)
        ]
    if not names:
        return None
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"has {', '.join(sorted(names)[:_MOST_NAMES])}{more}, which the checkpoint did not write"


def pointed(directory: Path) -> tuple[list[str], str | None]:
    """Return the name that the pointer (`latest`) holds, and the names of all earlier checkpoints.

    Returns:
        The names, and a warning or None. If the pointer cannot be used, the names are those of all
        checkpoints, and the warning says why. If the pointer does not name the newest checkpoint, the warning
        says this.
    """
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


def saved(run_dir: Path) -> str:
    """Say which step of a run is saved: the step of the checkpoint from which the run would go on. If the
    directory has no configuration, no run was begun there."""
    if not (run_dir / "config.yaml").exists():
        return "nothing was begun; the same command begins the run"
    names, _ = pointed(run_dir / "checkpoints")
    if not names:
        return "no step is saved yet; the same command goes on from the start, with the answers on disk"
    return f"saved after step {place_of(names[-1])[0]}; the same command goes on there"


def write_manifest(folder: Path) -> None:
    """Write the manifest of a checkpoint: the size and the SHA-256 of each file. Sync its folder to disk."""
    for name in FILES:
        sync_to_disk(folder / name)
    manifest = {
        name: {"sha256": _sha256(folder / name), "bytes": (folder / name).stat().st_size} for name in FILES
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    sync_to_disk(folder / "manifest.json")
    sync_to_disk(folder)


def verify(folder: Path) -> str | None:
    """Compare a checkpoint's files with its manifest. Return what is wrong, or None if nothing is wrong."""
    try:
        manifest = parse_json((folder / "manifest.json").read_text(encoding="utf-8"))
        for name in FILES:
            file, expected = folder / name, manifest[name]
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, its manifest says {expected['bytes']}"
            if _sha256(file) != expected["sha256"]:
                return f"{name} does not match the checksum in its manifest"
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = "" if isinstance(error, OSError) else "manifest.json: "
        return f"{what}{type(error).__name__}: {error}"
    return None


def row_of(folder: Path) -> dict[str, float]:
    """Return the metrics of the last row before a checkpoint. They are empty if that row was not complete
    when the checkpoint was saved, or if they cannot be read."""
    try:
        return dict(parse_json((folder / "state.json").read_text(encoding="utf-8"))["metrics"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def newest_state(directory: Path, step: int | None = None) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the state of the newest checkpoint whose state matches its manifest; None if there
    is no such checkpoint. The tensors are not verified.

    Args:
        step: only checkpoints of this step count. None: the checkpoint that `checkpoints/latest` names and
            those before it count; if this file names no checkpoint that is there, all count.
    """
    if step is None:
        found, _ = pointed(directory)
    else:
        found = [name for name in names_in(directory) if place_of(name)[0] == step]
    for name in reversed(found):
        try:
            text = (directory / name / "state.json").read_bytes()
            manifest = parse_json((directory / name / "manifest.json").read_bytes())
            if hashlib.sha256(text).hexdigest() == manifest["state.json"]["sha256"]:
                return name, parse_json(text)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged, or removed meanwhile
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
