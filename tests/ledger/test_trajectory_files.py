"""The files of trajectories: written before their row, removed after it, and verified when they are read."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fixtures import forked, kill_at, make_group, make_questions, named
from ledger_rounds import add, files, name_of, take, tree

from oat.errors import LedgerError
from oat.ledger.audit import contradictions
from oat.ledger.reader import Reader
from oat.ledger.store import Store
from oat.ledger.trajectory_files import TrajectoryFiles


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with closing(Store(path)) as store:
        yield store


def file_of(store: Reader, step: int) -> Path:
    return store.files.path(name_of(store, step))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "is missing, and has the trajectories of a round; put it back from a copy"),
    "cut": (cut, "is not what was written there, it was cut or changed; put it back from a copy"),
    "changed": (flip, "is not what was written there, it was cut or changed; put it back from a copy"),
    "a folder": (make_folder, "cannot be read (Is a directory), and has the trajectories of a round; put"),
    "a dangling link": (
        lambda file: (file.unlink(), file.symlink_to("nowhere")),
        "is missing, and has the trajectories of a round",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_not_read(store: Store, damage: str) -> None:
    add(store, 0)
    do, words = DAMAGE[damage]
    do(file := file_of(store, 0))
    with pytest.raises(LedgerError) as failed:
        store.groups("train", 0, 0)
    assert str(failed.value).startswith(f"{file}: {words}")
    assert str(failed.value).endswith("or begin anew in another run_dir")
    (found,) = contradictions(store)
    assert found.startswith(f"the trajectories of a round are missing or damaged: train 0 0: {file}: ")


@pytest.mark.parametrize(
    "name", ["../ledger.sqlite", "", "A" * 64, "0" * 63, "/etc/passwd", "7", b"\0", None]
)
def test_what_is_no_name_becomes_no_path(store: Store, name: object, tmp_path: Path) -> None:
    """A damaged row names something else than a hash. No file is read, written or removed for it."""
    add(store, 0)
    store.db.execute("CREATE TABLE changed AS SELECT * FROM rounds")
    store.db.execute("DROP TABLE rounds")  # whose column does not accept NULL
    store.db.execute("ALTER TABLE changed RENAME TO rounds")
    store.db.execute("UPDATE rounds SET groups = ?", (name,))
    before = tree(tmp_path)
    with pytest.raises(LedgerError, match="which is no name of a file there"):
        store.groups("train", 0, 0)
    assert "which is no name of a file there" in contradictions(store)[0]
    assert store.lost(0) == [name]
    take(store, 0)
    with store:
        assert store.drop_groups(1) == 1
    TrajectoryFiles(tmp_path / "other").take_over(store.files, store.kept_names())
    assert {file: data for file, data in tree(tmp_path).items() if "sqlite" not in file} == {
        file: data for file, data in before.items() if "sqlite" not in file
    }


def test_equal_rounds_share_a_file_until_the_last_is_dropped(store: Store) -> None:
    for step in (0, 1):
        add(store, step, "a", "b")
        take(store, step)
    (file,) = files(store)
    written = file.stat().st_mtime_ns
    with store:
        store.drop_groups(1)
    assert files(store) == [file]
    assert len(store.groups("train", 0, 0)) == 1
    with store:
        assert store.drop_groups(2) == 1
        assert files(store) == [file], "until the transaction has ended"
    assert files(store) == []
    add(store, 2, "a", "b")
    assert files(store) == [file]
    assert file.stat().st_mtime_ns > written


def test_a_transaction_that_drops_and_asks_again_keeps_the_file(store: Store) -> None:
    add(store, 0, "a")
    take(store, 0)
    groups = [make_group(0, "a")]
    with store:
        store.drop_groups(1)
        store.add_round("train", 1, 0, groups, make_questions(groups, "score", 1, oracle="o"), [0])
    assert len(files(store)) == 1
    assert len(store.groups("train", 1, 0)) == 1


def test_a_transaction_that_fails_removes_nothing(store: Store) -> None:
    add(store, 0)
    take(store, 0)

    def fails() -> None:
        with store:
            store.drop_groups(1)
            store.db.execute("DELETE FROM nowhere")

    with pytest.raises(LedgerError, match="no such table"):
        fails()
    assert len(store.groups("train", 0, 0)) == 1
    with store:
        pass
    assert len(files(store)) == 1


def test_what_a_kill_left_is_swept_and_nothing_else(path: Path, store: Store, tmp_path: Path) -> None:
    """Files that no row names, and files that are not complete, are removed when the ledger is opened for
    writing. A reader removes nothing, and a file that the ledger did not write stays."""
    add(store, 0)
    kept = file_of(store, 0)
    names = (kept.with_name("0" * 64), kept.with_name(f".new-{'1' * 64}"))
    mine = (kept.with_name("notes"), store.files.directory / "notes", store.files.directory / ("2" * 64))
    for file in (*names, *mine):
        file.write_text("left")
    store.close()
    with closing(Reader(path)) as reader:
        left = reader.leftovers()
        assert (set(left.paths), left.bytes) == ({*names}, 8)
        assert contradictions(reader) == []
    assert all(file.exists() for file in names)
    with closing(Store(path)) as store:
        assert not any(file.exists() for file in names)
        assert all(file.exists() for file in (kept, *mine))
        assert store.leftovers().paths == []


@pytest.mark.parametrize("is_there", [True, False], ids=["the same", "another"])
def test_a_file_that_is_already_there(store: Store, is_there: bool) -> None:
    """A file with the right name and content is kept; one with other content is replaced."""
    add(store, 0, "a")
    file, content = file_of(store, 0), file_of(store, 0).read_bytes()
    inode = file.stat().st_ino
    if not is_there:
        flip(file)
    add(store, 1, "a")
    assert file.read_bytes() == content
    assert (file.stat().st_ino == inode) == is_there


def test_the_file_is_on_disk_before_its_row(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, then its name in the folder, and only then the row: each is forced to disk in this order."""
    order: list[str] = []
    synced, replaced = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        order.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name[:5]}")
        synced(descriptor)

    def replace(old: Any, new: Any) -> None:
        order.append("rename")
        replaced(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "rename", replace)
    store.db.set_trace_callback(lambda sql: order.append("commit") if sql == "COMMIT" else None)
    add(store, 0)
    folder = name_of(store, 0)[0]
    assert order == [
        f"sync {store.files.directory.name[:5]}",
        "sync .new-",
        "rename",
        f"sync {folder}",
        "commit",
    ]


def test_a_full_disk_and_a_folder_that_is_not_one(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    add(store, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            LedgerError,
            match=r"No space left on device \([\d,]+ bytes are free there\).*is whole.*same command",
        ):
            add(store, 1)
    assert not store.has_round("train", 1, 0)
    assert [file.name for file in files(store)] == [name_of(store, 0)]
    add(store, 1)
    store.close()
    shutil.rmtree(store.files.directory)
    store.files.directory.write_text("a file")
    with pytest.raises(
        LedgerError, match=r"ledger.trajectories: trajectories cannot be written \(File exists"
    ):
        Store(path)


def test_a_folder_that_is_moved_under_an_open_ledger(store: Store, tmp_path: Path) -> None:
    add(store, 0)
    store.files.directory.rename(tmp_path / "elsewhere")
    with pytest.raises(LedgerError, match=r"ledger.trajectories: was moved, removed or replaced while a run"):
        add(store, 1)
    assert not store.files.directory.exists()
    (tmp_path / "elsewhere").rename(store.files.directory)
    add(store, 1)


def test_a_folder_that_is_a_link_is_read_and_not_written(path: Path, tmp_path: Path) -> None:
    """Copies of a run would share the folder behind the link, and remove each other's files."""
    with closing(Store(path)) as store:
        add(store, 0)
        folder = store.files.directory
    folder.rename(tmp_path / "large disk")
    folder.symlink_to("large disk")
    before = tree(tmp_path / "large disk")
    with closing(Reader(path)) as reader:
        assert len(reader.groups("train", 0, 0)) == 1
    with pytest.raises(LedgerError, match=r"ledger\.trajectories: is a symbolic link\. A copy of the run"):
        Store(path)
    assert tree(tmp_path / "large disk") == before


@pytest.mark.parametrize("end", ["", "-wal"])
@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_database_that_is_a_link_is_read_and_not_written(
    path: Path, tmp_path: Path, end: str, link: Callable[[Path, Path], None]
) -> None:
    """A backup that is made of hard links, or a run beside another whose database it is linked to, would
    change with the run."""
    with closing(Store(path)) as store:
        add(store, 0)
        own = path.with_name(path.name + end)
        log = own.read_bytes()
    (tmp_path / "backup").write_bytes(log if end else own.read_bytes())
    own.unlink(missing_ok=True)
    link(own, tmp_path / "backup")
    before = tree(tmp_path)
    with pytest.raises(LedgerError, match=rf"{path.name}{end}: is a (symbolic|hard) link"):
        Store(path)
    assert tree(tmp_path) == before
    if not end:
        with closing(Reader(path)) as reader:
            assert len(reader.groups("train", 0, 0)) == 1


def test_a_linked_folder_of_a_digit_is_not_swept(path: Path, store: Store, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ("0" * 64)).write_text("of another run")
    (store.files.directory / "0").symlink_to(tmp_path / "other")
    store.close()
    Store(path).close()
    assert (tmp_path / "other" / ("0" * 64)).exists()


def ask_and_drop(path: Path) -> int:
    """Ask and take three steps, and drop the first two."""
    with closing(Store(path)) as store:
        for step in range(store.asked("train", 99, 0), 3):
            add(store, step)
            take(store, step)
        with store:
            store.drop_groups(2)
    return 0


ROUND_KILLS = {
    "the folder made": ("a folder of trajectories is made", 3, True),
    "written, not renamed": ("oat.files:sync_to_disk", 5, True),
    "the file on disk, the round not": ("oat.ledger.trajectory_files:TrajectoryFiles.write", 2, True),
    "inside the transaction": ("oat.ledger.store:Store.add_round", 2, True),
    "dropped, not committed": ("oat.ledger.store:Store.drop_groups", 1, True),
    "dropped and committed, the files there": (
        "oat.ledger.trajectory_files:TrajectoryFiles.remove",
        1,
        False,
    ),
    "the files removed": ("oat.ledger.trajectory_files:TrajectoryFiles.remove", 1, True),
}


@pytest.mark.parametrize("moment", ROUND_KILLS)
def test_a_kill_leaves_no_round_without_its_file(path: Path, tmp_path: Path, moment: str) -> None:
    place, call, after = ROUND_KILLS[moment]

    def dies() -> int:
        kill_at(*named(place), call, after=after)
        return ask_and_drop(path)

    assert forked(dies, tmp_path / "log") == -9, (tmp_path / "log").read_text()
    with closing(Reader(path)) as reader:
        assert contradictions(reader) == []
    assert ask_and_drop(path) == 0
    with closing(Store(path)) as store:
        assert contradictions(store) == []
        assert [file.name for file in files(store)] == [name_of(store, 2)]


def test_a_round_that_the_writer_drops_while_a_reader_looks(path: Path, store: Store) -> None:
    add(store, 0)
    with closing(Reader(path)) as reader:
        read = reader.trajectories

        def late(name: str) -> bytes:
            take(store, 0)
            with store:
                store.drop_groups(1)
            return read(name)

        reader.trajectories = late  # type: ignore[method-assign]
        with pytest.raises(LedgerError, match="the trajectories of step 0 were dropped once every kept"):
            reader.groups("train", 0, 0)
        assert contradictions(reader) == []


@pytest.mark.parametrize("can_link", [True, False])
def test_a_fork_and_its_parent_do_not_need_each_other(
    path: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_link: bool
) -> None:
    def no_link(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    if not can_link:
        monkeypatch.setattr(os, "link", no_link)
    add(store, 0)
    add(store, 1)
    (tmp_path / "fork").mkdir()
    copy = TrajectoryFiles.beside(tmp_path / "fork" / "ledger.sqlite")
    copy.take_over(store.files, [*store.kept_names(), "0" * 64])
    assert {file.name for file in copy.directory.glob("*/*")} == store.kept_names()
    assert (file_of(store, 0).stat().st_nlink == 2) == can_link
    content = copy.read(name_of(store, 0))
    take(store, 1)
    with store:
        assert store.drop_groups(2) == 2
    assert files(store) == []
    assert copy.read(hashlib.sha256(content).hexdigest()) == content
