"""Trajectories in the tables of older ledgers: read where they are, and moved into files by a writer, also if
it is killed or has no room."""

import errno
import hashlib
import os
import sqlite3
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
from fixtures import forked, kill_at, named
from ledger_rounds import add, files, name_of, tree
from old_ledgers import OLDER, make_old

from oat import wire
from oat.errors import LedgerError
from oat.ledger.audit import contradictions
from oat.ledger.reader import Reader
from oat.ledger.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.mark.parametrize("version", OLDER)
def test_blobs_of_older_ledgers_are_read_and_moved(path: Path, version: int, tmp_path: Path) -> None:
    """A reader of an older ledger reads its trajectories where they are and writes nothing. A writer moves
    them into files, and gives the space of the database back."""
    with closing(Store(path)) as store:
        for step in range(3):
            add(store, step, "a" * 100_000, "b")
        expected = [wire.encode(store.groups("train", step, 0)) for step in range(3)]
        digest, names = store.digest(), store.kept_names()
        make_old(store.db, version)
        store.db.execute("PRAGMA journal_mode = DELETE")
    before = tree(tmp_path)
    with closing(Reader(path)) as reader:
        assert [wire.encode(reader.groups("train", step, 0)) for step in range(3)] == expected
        assert (reader.digest(), contradictions(reader), reader.lost(0)) == (digest, [], [])
    assert tree(tmp_path) == before
    assert not (tmp_path / "ledger.trajectories").exists()
    with closing(Store(path)) as store:
        assert [wire.encode(store.groups("train", step, 0)) for step in range(3)] == expected
        assert (store.digest(), contradictions(store)) == (digest, [])
        assert {file.name for file in files(store)} == names
        assert store.row("SELECT 1 FROM sqlite_master WHERE name = 'blobs'") is None
    assert path.stat().st_size < len(before[str(path)]) / 2


def test_a_damaged_blob_stays_damaged(path: Path) -> None:
    with closing(Store(path)) as store:
        add(store, 0)
        add(store, 1)
        make_old(store.db, 8)
        store.db.execute("UPDATE blobs SET data = x'00' WHERE hash = ?", (name_of(store, 0),))
        store.db.execute("INSERT INTO blobs VALUES ('../escaped', x'00')")
    with (
        closing(Reader(path)) as reader,
        pytest.raises(LedgerError, match=r"blob [0-9a-f]{12} is not what was"),
    ):
        reader.groups("train", 0, 0)
    with closing(Store(path)) as store:
        with pytest.raises(LedgerError, match="it was cut or changed"):
            store.groups("train", 0, 0)
        assert len(store.groups("train", 1, 0)) == 1
    assert not (path.parent / "escaped").exists()


def old_ledger(path: Path, rounds: int, size: int) -> None:
    """Make a ledger of schema version 8 whose blobs are random bytes under their names."""
    with closing(Store(path)) as store:
        make_old(store.db, 8)
        for step in range(rounds):
            data = os.urandom(size)
            name = hashlib.sha256(data).hexdigest()
            store.db.execute("INSERT INTO blobs VALUES (?, ?)", (name, data))
            store.db.execute("INSERT INTO rounds VALUES ('train', ?, 0, 0, ?, 1)", (step, name))


def test_a_migration_has_one_blob_in_memory(path: Path) -> None:
    size = 2**20
    old_ledger(path, 30, size)
    tracemalloc.start()
    with closing(Store(path)) as store:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(files(store)) == 30
        assert contradictions(store) == []
    assert most < 6 * size


KILLS = {
    "before the first file": ("oat.ledger.trajectory_files:TrajectoryFiles.write", 1, False),
    "between two files": ("oat.ledger.trajectory_files:TrajectoryFiles.write", 3, True),
    "a file written under its temporary name": ("oat.ledger.trajectory_files:replacing", 2, False),
    "a file written, not renamed": ("oat.files:sync_to_disk", 5, True),
    "all files written, nothing committed": ("blobs become files", 1, True),
    "committed, the space not given back": ("space of a ledger is given back", 1, False),
}


@pytest.mark.parametrize("moment", KILLS)
def test_a_migration_that_is_killed_goes_on(path: Path, tmp_path: Path, moment: str) -> None:
    old_ledger(path, 6, 50_000)
    with closing(Reader(path)) as reader:
        expected = {name: reader.trajectories(name) for name in reader.kept_names()}
    place, call, after = KILLS[moment]

    def dies() -> int:
        kill_at(*named(place), call, after=after)
        Store(path)
        return 0

    assert forked(dies, tmp_path / "log") == -9, (tmp_path / "log").read_text()
    with closing(Reader(path)) as reader:
        assert {name: reader.trajectories(name) for name in reader.kept_names()} == expected
    with closing(Store(path)) as store:
        assert {name: store.trajectories(name) for name in store.kept_names()} == expected
        assert {file.name for file in files(store)} == expected.keys()
        assert contradictions(store) == []
    assert path.stat().st_size < 6 * 50_000, "the space is given back, also after the kill"


def test_a_migration_without_room_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_ledger(path, 6, 10_000)
    calls = 0
    synced = os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(LedgerError, match=r"trajectories cannot be written .*No space left on device"):
            Store(path)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT COUNT(*) FROM blobs").fetchone() == (6,)
        assert database.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone() == ("8",)
    with closing(Store(path)) as store:
        assert contradictions(store) == []
