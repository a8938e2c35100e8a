"""The mark of a run directory: the file `.oat-run`, which only a run has.

Without the mark, a folder with a `config.yaml` could be a user's own folder, and a run there would empty the
user's `samples.jsonl`. So a run begins only in a folder that is missing, empty, or marked. The mark is the
first file that a run writes, apart from the empty file `lock`. What else stands in a marked folder under the
names of `OWN` was written by the run, also if a kill ended its first process early.

Runs that were begun before there was a mark are known by their ledger. It was written before any file that a
run replaces.
"""

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from oat.errors import ConfigError, printable
from oat.files import remove, saying_what_is_free, sync_to_disk

MARK = ".oat-run"
_TEXT = "A run of oat is in this folder: oat writes, replaces and removes the files of the run here.\n"
_NEW = re.compile(re.escape(f".new-{MARK}-") + "[0-9a-f]{16}")
"""Names of marks that are not complete. Each has a name of its own, so that no file is replaced."""
LEDGER = ("ledger.sqlite", *(f"ledger.sqlite{end}" for end in ("-journal", "-wal", "-shm")))
EARLY = ("lock", "actors", "config.yaml", "given", "indexes", "logs", "ledger.trajectories", *LEDGER)
"""Names of files and folders that a run may write before its first question, apart from the mark."""
OWN = (
    *EARLY,
    "advantages.jsonl",
    "checkpoints",
    "environment.json",
    "evaluations",
    "fork.json",
    "metrics.jsonl",
    "mlflow",
    "nonfinite",
    "profile",
    "samples.jsonl",
    "sinks",
    "tensorboard",
    "wandb",
)
"""Names of all files and folders that a run writes into its directory, apart from the mark. Before a name
there may be `.new-`: such a file is not complete."""
_LEDGER_HEAD = b"SQLite format 3\0"
_LEDGER_TABLES = (b"CREATE TABLE rounds", b"CREATE TABLE takes")
_HEAD_BYTES = 2**20
_MOST_NAMES = 5


def is_own(name: str, names: Collection[str] = OWN) -> bool:
    """Return True if this is the name of the mark, or one of the names that a run writes.

    Args:
        names: these names, without that of the mark.
    """
    return name == MARK or name.removeprefix(".new-") in names or _NEW.fullmatch(name) is not None


def is_run(directory: Path) -> bool:
    """Return True if a directory has a run, or the beginning of one."""
    return _is_marked(directory) or _is_ledger(directory / LEDGER[0])


def is_begun(directory: Path) -> bool:
    """Return True if a directory has a run with a configuration, as one has before its first step."""
    return (directory / "config.yaml").exists() and is_run(directory)


def foreign(directory: Path) -> list[str]:
    """Return the names of what stands in a directory that has no run; empty if the directory is missing. What
    does not hinder a run is left out: an empty file `lock`, and a mark that a kill cut off."""
    if not directory.is_dir() or is_run(directory):
        return []
    return sorted(entry.name for entry in os.scandir(directory) if not _is_harmless(Path(entry.path)))


def refuse_foreign(directory: Path) -> None:
    """Refuse a directory that has files and no run, before anything is written there.

    Raises:
        ConfigError: the directory has such files, or cannot be read.
    """
    try:
        names = foreign(directory)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be read ({error.strerror}: {error.filename}); give another --run_dir"
        ) from error
    if names:
        raise in_the_way(directory, names)


def in_the_way(directory: Path, names: list[str]) -> ConfigError:
    """Return the error that says which files keep a run from beginning in a directory."""
    listed = ", ".join(map(printable, names[:_MOST_NAMES]))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ConfigError(
        f"{directory} is not empty and holds no run; it has {listed}{more}, and a run needs a folder of its "
        f"own. Give another --run_dir, such as {directory / 'run'}"
    )


def mark(directory: Path) -> bool:
    """Mark a directory as that of a run, if it is not marked. The caller has refused foreign files.

    Returns:
        True if the directory had a run without a mark: an earlier version of oat began it.
    """
    for left in directory.glob(f".new-{MARK}-*"):
        if _NEW.fullmatch(left.name) and _is_cut_off(left):
            with suppress(OSError):
                left.unlink()
    if _is_marked(directory):
        return False
    is_earlier = is_run(directory)
    new = directory / f".new-{MARK}-{os.urandom(8).hex()}"
    with saying_what_is_free(directory / MARK):
        with new.open("x", encoding="utf-8") as file:
            file.write(_TEXT)
        sync_to_disk(new)
        new.rename(directory / MARK)
        sync_to_disk(directory)
    return is_earlier


def remove_own(directory: Path, keep: Collection[str] = ()) -> None:
    """Remove the files and folders that a run has written into its directory. Others stay.

    Args:
        keep: names that stay too.
    """
    for entry in list(os.scandir(directory)):
        if is_own(entry.name) and entry.name not in keep:
            remove(Path(entry.path))


def _is_marked(directory: Path) -> bool:
    return _read(directory / MARK, len(_TEXT) + 1) == _TEXT.encode()


def _is_ledger(path: Path) -> bool:
    """Return True if a file is the ledger of a run. SQLite is not asked: it may write beside a foreign
    database. The tables may still be in the file with the ending `-wal` alone."""
    heads = [_read(path.with_name(path.name + end), _HEAD_BYTES) for end in ("", "-wal")]
    return heads[0].startswith(_LEDGER_HEAD) and any(
        all(table in head for table in _LEDGER_TABLES) for head in heads
    )


def _is_harmless(path: Path) -> bool:
    if path.name == "lock":
        return _is_plain(path) and path.stat().st_size == 0
    return _NEW.fullmatch(path.name) is not None and _TEXT.encode().startswith(_read(path, len(_TEXT) + 1))


def _is_cut_off(path: Path) -> bool:
    """Return True if a file has the beginning of a mark. An empty file may be anybody's."""
    found = _read(path, len(_TEXT) + 1)
    return bool(found) and _TEXT.encode().startswith(found)


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _read(path: Path, most: int) -> bytes:
    """Return the first bytes of a file; nothing if it is missing, is a link or no file, or cannot be read."""
    if not _is_plain(path):
        return b""
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError:
        return b""
