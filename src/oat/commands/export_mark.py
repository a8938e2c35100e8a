"""The mark of an exported model's directory: the file `oat_export.json`, which says which files are an
export's, each with its SHA-256.

An export replaces the files of an earlier export, and no other file. So it refuses a directory that has a
file under the name of a model's file that no export wrote, or that somebody has changed since: the export
would destroy it, or a program would load it together with the export.
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from oat.commands.swap import bridge_of, swapped_in
from oat.errors import ConfigError
from oat.files import parse_json

MARK = "oat_export.json"
_MOST_NAMES = 5

Sums = dict[str, list[str]]
"""For each file of an export, by its path in the directory, the SHA-256 that it may have."""


@dataclass(frozen=True)
class Kind:
    """What an export consists of. Exports of different kinds may stand in one directory.

    Attributes:
        patterns: patterns of the names of its files. No foreign file may have such a name.
        keys: names of the key files, without which no program loads the export.
        is_mine: function that returns True if a file of an export, by its name, is of this kind.
    """

    patterns: Sequence[str]
    keys: Sequence[str]
    is_mine: Callable[[str], bool]


@contextmanager
def exported(out: Path, kind: Kind) -> Iterator[Path]:
    """Give the body of the context a new folder to write into (`swapped_in`). If the body ends without an
    error, the files in this folder replace those of an earlier export of this kind, and the directory gets a
    mark.

    Args:
        out: an absolute path, not a symbolic link.

    Raises:
        ConfigError: a file is in the way (`refuse_foreign`), or no folder can be made.
        OSError: the files cannot be written.
    """

    def stale(written: Collection[str]) -> set[str]:
        refuse_foreign(out, kind, written)
        return {_top(name) for name in read_mark(out) if kind.is_mine(name)}

    refuse_foreign(out, kind)
    with swapped_in(out, stale, kind.keys, MARK) as new:
        yield new
        before = read_mark(out)
        stays = {name: sums for name, sums in before.items() if not kind.is_mine(name)}
        now = {**stays, **{name: [_sum(new / name)] for name in _files(new)}}
        both = {name: [*now.get(name, []), *before.get(name, [])] for name in {**before, **now}}
        _write(bridge_of(new), both)
        _write(new / MARK, now)


def refuse_foreign(out: Path, kind: Kind, written: Collection[str] = ()) -> None:
    """Refuse a directory in which a file under the name of an export's file was not written by an export, or
    was changed since.

    Args:
        written: further names that no foreign file may have.

    Raises:
        ConfigError: there is such a file.
    """
    if not out.is_dir():
        return
    sums = read_mark(out)
    tops = {*map(_top, sums), *written}
    foreign = sorted(
        entry.name
        for entry in out.iterdir()
        if entry.name != MARK
        and kind.is_mine(entry.name)
        and (entry.name in tops or any(fnmatch(entry.name, pattern) for pattern in kind.patterns))
        and not _is_ours(out, entry.name, sums)
    )
    if os.path.lexists(out / MARK) and not sums:
        foreign.append(MARK)
    if foreign:
        more = f" and {len(foreign) - _MOST_NAMES} more" if len(foreign) > _MOST_NAMES else ""
        names = f"{', '.join(foreign[:_MOST_NAMES])}{more}"
        raise ConfigError(
            f"{out}: has {names}. `oat export` did not write this, or somebody has changed it since ({MARK} "
            "would say what it wrote); move it away, or give another directory"
        )


def read_mark(out: Path) -> Sums:
    """Return what the mark of a directory says; empty if there is none, or it is damaged."""
    try:
        found = parse_json((out / MARK).read_text(encoding="utf-8"))["files"]
        sums = {str(name): list(map(str, sums)) for name, sums in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {} if any(Path(name).is_absolute() or ".." in Path(name).parts for name in sums) else sums


def _write(file: Path, sums: Mapping[str, Sequence[str]]) -> None:
    about = "the files that `oat export` wrote here, with their SHA-256; it replaces only these"
    file.write_text(json.dumps({"about": about, "files": sums}, indent=1, sort_keys=True) + "\n", "utf-8")


def _is_ours(out: Path, name: str, sums: Sums) -> bool:
    """Return True if an export wrote the file of this name, or each file in the folder of this name, and
    nobody has changed it since."""
    path = out / name
    files = _files(path, f"{name}/") if path.is_dir() and not path.is_symlink() else [name]
    return bool(files) and all(_is_known(out / each, sums.get(each, [])) for each in files)


def _is_known(file: Path, sums: Sequence[str]) -> bool:
    return bool(sums) and file.is_file() and _sum(file) in sums


def _files(folder: Path, before: str = "") -> list[str]:
    """Return the paths of all files and symbolic links in a folder, relative to it.

    Args:
        before: text that is put before each path.
    """
    return sorted(
        before + path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    )


def _sum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _top(name: str) -> str:
    """Return the name of a file, or of the topmost folder in which it is."""
    return name.partition("/")[0]
