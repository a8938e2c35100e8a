"""R9: a disk that becomes full at any moment. The files on it stay complete, one message reports the error,
and the same command then ends like the unbroken run."""

import errno
import io
import os
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from fixtures import Finished, World, forked, oat
from known_checkpoints import NEW, OLD, content, loaded_step, save, two_good_ones
from safetensors import SafetensorError

from oat.commands.digest import digest_run
from oat.errors import CheckpointError
from oat.ledger.store import Store
from oat.rundir.checkpoint_files import verify
from oat.rundir.checkpoints import Checkpoints

Figure = Callable[[str], None]

NO_SPACE = os.strerror(errno.ENOSPC)


@pytest.fixture(scope="module")
def unbroken(finished: Finished) -> dict[str, str]:
    """Return the digest of a run whose disk has room."""
    return digest_run(finished.only_read("dpo"))


@pytest.fixture(scope="module")
def pages(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Return the number of pages that a run adds to an empty ledger. Paths are in the ledger, so it depends
    on the length of the temporary folder."""
    empty = tmp_path_factory.mktemp("empty") / "ledger.sqlite"
    Store(empty).close()

    def count(ledger: Path) -> int:
        with closing(sqlite3.connect(ledger)) as database:
            (found,) = database.execute("PRAGMA page_count").fetchone()
        return int(found)

    return count(finished.only_read("dpo") / "ledger.sqlite") - count(empty)


@pytest.fixture(scope="module")
def largest(finished: Finished) -> int:
    """Return the bytes of the largest file of a run."""
    return max(file.stat().st_size for file in finished.only_read("dpo").rglob("*") if file.is_file())


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return two_good_ones(tmp_path / "checkpoints")


class FullDisk:
    """Counts the calls that write below a folder. From call `at` (from 1) on, the disk is full, after half of
    the bytes of that call. With `at` 0 the disk is never full."""

    def __init__(self, folder: Path, at: int):
        self.folder = str(folder)
        self.at = at
        self.calls = 0

    def is_full(self, path: Any) -> bool:
        """Count a call, and return True if the disk is full for it."""
        if not str(path).startswith(self.folder):
            return False
        self.calls += 1
        return 0 < self.at <= self.calls

    def arm(self, patch: pytest.MonkeyPatch) -> "FullDisk":
        """Replace the functions that write files."""
        patch.setattr(io, "open", self._limited_open())
        patch.setattr(safetensors.torch, "save_file", self._limited_save())
        patch.setattr(os, "mkdir", self._limited(os.mkdir, lambda path: "" if os.path.isdir(path) else path))
        for name in ("rename", "replace"):
            patch.setattr(os, name, self._limited(getattr(os, name), lambda path: path))
        patch.setattr(
            os,
            "fsync",
            self._limited(os.fsync, lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}")),
        )
        return self

    def _limited(self, call: Callable[..., Any], path: Callable[[Any], Any]) -> Callable[..., Any]:
        def limited(*arguments: Any, **kwargs: Any) -> Any:
            if self.is_full(path(arguments[0])):
                raise OSError(errno.ENOSPC, NO_SPACE)
            return call(*arguments, **kwargs)

        return limited

    def _limited_save(self) -> Callable[..., None]:
        save_file = safetensors.torch.save_file

        def limited(tensors: Any, file: Path) -> None:
            save_file(tensors, file)
            if self.is_full(file):
                os.truncate(file, file.stat().st_size // 2)
                raise SafetensorError(f"Error while serializing: I/O error: {NO_SPACE} (os error 28)")

        return limited

    def _limited_open(self) -> Callable[..., Any]:
        disk, opened = self, io.open

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                if disk.is_full(self.name):
                    super().write(bytes(data)[: len(data) // 2])
                    raise OSError(errno.ENOSPC, NO_SPACE)
                return super().write(data)

        def limited(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: Any = None,
            errors: Any = None,
            newline: Any = None,
        ) -> Any:
            if "r" in mode or not str(file).startswith(self.folder):
                return opened(file, mode, buffering, encoding, errors, newline)
            raw = io.BufferedWriter(Raw(file, mode.replace("b", "").replace("t", "")))
            return raw if "b" in mode else io.TextIOWrapper(raw, encoding, errors, newline)

        return limited


def fails_whole(checkpoints: Checkpoints) -> None:
    """Check that a save of step 6 fails with the message, and that every stored checkpoint is undamaged."""
    with pytest.raises(CheckpointError) as failed:
        save(checkpoints, 6)
    text = str(failed.value)
    needed = sum(tensor.nbytes for tensor in content(6)[0].values())
    assert "the checkpoint of step 6 could not be written" in text
    assert int(text.partition("it needs ")[2].partition(" bytes")[0].replace(",", "")) > needed
    assert " bytes are free there." in text
    assert "the same command goes on" in text
    assert all(verify(folder) is None for folder in checkpoints.directory.glob("step_*"))
    assert not list(checkpoints.directory.glob(".new-step_*"))
    assert {OLD, NEW} <= set(checkpoints.steps)


@pytest.mark.fault("R9")
def test_a_disk_that_is_full_at_any_write_of_a_save(
    tmp_path: Path, figure: Figure, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, counted = two_good_ones(tmp_path / "counted"), FullDisk(tmp_path / "counted", 0)
    with monkeypatch.context() as patch:
        counted.arm(patch)
        save(checkpoints, 6)
    for at in range(1, counted.calls + 1):
        checkpoints, disk = two_good_ones(tmp_path / str(at)), FullDisk(tmp_path / str(at), at)
        with monkeypatch.context() as patch:
            disk.arm(patch)
            fails_whole(checkpoints)
        assert disk.calls >= at
        assert loaded_step(checkpoints) == int(
            (checkpoints.directory / "latest").read_text().removeprefix("step_")
        )
        save(checkpoints, 6)
        assert loaded_step(checkpoints) == 6
    figure(
        f"{counted.calls} of {counted.calls} saves, each with another write call that fails: the last good "
        "checkpoint is loaded"
    )
    assert counted.calls >= 12


@pytest.mark.fault("R9")
def test_a_file_that_may_not_grow(checkpoints: Checkpoints, tmp_path: Path, figure: Figure) -> None:
    """A size limit of the kernel lets the write of a checkpoint fail, at several sizes of the largest file.
    The older checkpoints stay usable."""
    size = (checkpoints.directory / f"step_{NEW:08d}" / "tensors.safetensors").stat().st_size
    limits = [0, 1, 8, size // 2, size - 1]

    def child(limit: int) -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        fails_whole(checkpoints)
        return 0

    for limit in limits:
        assert forked(lambda limit=limit: child(limit), tmp_path / "log") == 0, limit  # type: ignore[misc]
        assert loaded_step(checkpoints) == NEW
    figure(
        f"{len(limits)} of {len(limits)} limits on the size of a file (RLIMIT_FSIZE): the last good "
        f"checkpoint is loaded"
    )


def run_on(
    disk: Callable[[pytest.MonkeyPatch], Any], config: Path, run_dir: Path, log: Path
) -> tuple[int, str]:
    """Run `oat train` in a child after `disk` was called. Return its exit code and its output."""

    def child() -> int:
        with pytest.MonkeyPatch.context() as patch:
            disk(patch)
            return oat("train", config, "--run_dir", run_dir)

    log.unlink(missing_ok=True)
    return forked(child, log), log.read_text()


def check_message(code: int, printed: str, place: Path) -> None:
    """Check that the last line of the output names the place and the free bytes."""
    assert code == 1, printed
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].startswith("oat train: ")
    assert str(place) in printed.splitlines()[-1]
    assert " bytes are free there" in printed.splitlines()[-1]
    assert "same command" in printed.splitlines()[-1]


def writes_of_a_run(config: Path, folder: Path) -> int:
    def child() -> int:
        with pytest.MonkeyPatch.context() as patch:
            disk = FullDisk(folder / "counted", 0).arm(patch)
            code = oat("train", config, "--run_dir", folder / "counted")
        (folder / "writes").write_text(str(disk.calls))
        return code

    assert forked(child, folder / "log") == 0, (folder / "log").read_text()
    return int((folder / "writes").read_text())


def full_at(
    world: World, tmp_path: Path, unbroken: dict[str, str], places: Callable[[int], Iterator[int]]
) -> tuple[int, int]:
    """Run once for each place, with a disk that is full at that write, and then continue the run. Return the
    number of runs and the number of writes of one run. Each run must fail with the message and then end like
    the unbroken run."""
    config = world.config("dpo", tmp_path)
    log = tmp_path / "log"
    done = 0
    writes = writes_of_a_run(config, tmp_path)
    for at in places(writes):
        run_dir = tmp_path / f"full at {at}"
        code, printed = run_on(FullDisk(run_dir, at).arm, config, run_dir, log)
        check_message(code, printed, run_dir)
        assert forked(lambda run_dir=run_dir: oat("train", config, "--run_dir", run_dir), log) == 0, (
            log.read_text()
        )  # type: ignore[misc]
        assert digest_run(run_dir) == unbroken
        shutil.rmtree(run_dir)
        done += 1
    return done, writes


@pytest.mark.fault("R9")
def test_a_disk_that_is_full_at_some_writes_of_a_run(
    world: World, tmp_path: Path, unbroken: dict[str, str], figure: Figure
) -> None:
    """The disk is full at some of a run's writes, which are of the configuration, metrics, samples,
    evaluations and checkpoints. Continued, the run ends like the unbroken run."""
    done, writes = full_at(world, tmp_path, unbroken, lambda writes: iter(range(3, writes, writes // 3)))
    figure(f"{done} of {done} runs, each with a full disk at another of {writes} writes, end bitwise equal")
    assert done >= 3


@pytest.mark.large
@pytest.mark.fault("R9")
def test_a_disk_that_is_full_at_any_write_of_a_run(
    world: World, tmp_path: Path, unbroken: dict[str, str], figure: Figure
) -> None:
    """The disk is full at each write of a run after the first. The first write makes the run directory, and
    without it the run cannot begin."""
    done, writes = full_at(world, tmp_path, unbroken, lambda writes: iter(range(2, writes + 1)))
    figure(f"{done} of {writes - 1} runs, each with a full disk at another write, end bitwise equal")
    assert done == writes - 1 > 50


def limited_ledger(pages: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a function that lets the ledger have at most `pages` pages more than an empty ledger."""

    def arm(patch: pytest.MonkeyPatch) -> None:
        from oat.ledger.store import Store

        opened = Store._bring_up_to_date

        def limited(self: Store) -> None:
            opened(self)
            held = self.db.execute("PRAGMA page_count").fetchone()[0]
            self.db.execute(f"PRAGMA max_page_count = {held + pages}")

        patch.setattr(Store, "_bring_up_to_date", limited)

    return arm


@pytest.mark.sample("most", seconds=1.9)
@pytest.mark.fault("R9")
@pytest.mark.parametrize("room", ["none", "one page", "half", "most"])
def test_a_full_disk_under_the_ledger(
    world: World, tmp_path: Path, unbroken: dict[str, str], figure: Figure, pages: int, room: str
) -> None:
    """The ledger may have fewer pages than the unbroken run needs."""
    given = {"none": 0, "one page": 1, "half": pages // 2, "most": pages - 2}[room]
    config = world.config("dpo", tmp_path)
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    code, printed = run_on(limited_ledger(given), config, run_dir, log)
    check_message(code, printed, run_dir / "ledger.sqlite")
    assert "the ledger cannot be written (database or disk is full)" in printed
    assert forked(lambda: oat("train", config, "--run_dir", run_dir), log) == 0, log.read_text()
    assert digest_run(run_dir) == unbroken
    figure("a full ledger: one message, then the run ends bitwise equal")


@pytest.mark.sample("half", seconds=1.5)
@pytest.mark.fault("R9")
@pytest.mark.parametrize("room", ["a tenth", "half", "all but a byte"])
def test_files_of_a_run_that_may_not_grow(
    world: World, tmp_path: Path, unbroken: dict[str, str], figure: Figure, largest: int, room: str
) -> None:
    """A size limit of the kernel, below the size of the unbroken run's largest file, makes a run fail at the
    first file that grows so large. Without the limit, the same command ends like the unbroken run."""
    limit = {"a tenth": largest // 10, "half": largest // 2, "all but a byte": largest - 1}[room]
    config = world.config("dpo", tmp_path)
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    limits = (limit, resource.RLIM_INFINITY)
    code, printed = run_on(lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, limits), config, run_dir, log)
    check_message(code, printed, run_dir)
    assert forked(lambda: oat("train", config, "--run_dir", run_dir), log) == 0, log.read_text()
    assert digest_run(run_dir) == unbroken
    figure("a kernel's limit on file sizes: one message, then the run ends bitwise equal")
