"""Exports to a directory that already holds an export. At every moment, after a kill, and on a full disk, the
directory holds either the complete old model or the complete new one."""

import ctypes
import fcntl
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import Any

import pytest
from fixtures import Finished, World, forked, oat
from transformers import AutoModelForCausalLM, AutoTokenizer

from oat.commands.export import export_run
from oat.commands.export_mark import MARK
from oat.commands.swap import _SIGN_TEXT
from oat.errors import ExportError

Figure = Callable[[str], None]
Content = dict[str, bytes]

FOREIGN = {"notes.txt": b"mine", "eval.bin": b"\0" * 9}
STALE = {
    "model-00001-of-00002.safetensors": b"old",
    "model.safetensors.index.json": b"{}",
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"old",
    "tokenizer.model": b"old",
    "generation_config.json": b"{}",
}
NO_MOUNTS = "this user may not mount a file system of its own"
_NEW_MOUNTS = 0x20000
_PRIVATE = 0x44000
_REMOUNT = 32
_SKIPPED = 77


@pytest.fixture(scope="module")
def run_dir(finished: Finished) -> Path:
    """Return a finished run with checkpoints of steps 2 and 4. Tests must not change it."""
    return finished.only_read("dpo", {"evaluation": None})


@pytest.fixture(scope="module")
def exports(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Content]:
    """Return a folder, and what the next export must make of it. The folder holds an older export, further
    files of a model, and foreign files."""
    folder = tmp_path_factory.mktemp("exports")
    export_run(run_dir, folder / "old" / "out", 2)
    export_run(run_dir, folder / "new" / "out")
    for name, text in {**STALE, **FOREIGN}.items():
        (folder / "old" / "out" / name).write_bytes(text)
    mark = folder / "old" / "out" / MARK
    said = json.loads(mark.read_text())
    said["files"] |= {name: [hashlib.sha256(text).hexdigest()] for name, text in STALE.items()}
    mark.write_text(json.dumps(said))
    return folder / "old" / "out", {**content(folder / "new" / "out"), **FOREIGN}


@pytest.fixture
def out(exports: tuple[Path, Content], tmp_path: Path) -> Path:
    """Return a copy of the older export."""
    shutil.copytree(exports[0], tmp_path / "place" / "out")
    return tmp_path / "place" / "out"


def content(folder: Path) -> Content:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and ".oat-" not in str(file)
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def hear(below: Path, act: Callable[[], None]) -> None:
    """Call `act` before each operation of this process on a path below a folder, and before each look-up of a
    C function. For a forked child only, since an audit hook cannot be removed."""
    is_within = False

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal is_within
        if is_within or not (
            event == "ctypes.dlsym" or any(str(below) in str(argument) for argument in arguments)
        ):
            return
        is_within = True
        act()
        is_within = False

    sys.addaudithook(heard)


def seen_by_a_reader(run_dir: Path, out: Path) -> list[Content]:
    """Return the contents of `out` before each operation of an export that `hear` reports, without
    repeats."""
    seen = [content(out)]

    def look() -> None:
        if (now := content(out)) != seen[-1]:
            seen.append(now)

    hear(out.parent, look)
    assert oat("export", run_dir, out) == 0
    look()
    return seen


def killed_at(run_dir: Path, out: Path, call: int) -> int:
    """Export, with SIGKILL at operation `call` (from 1) of those that `hear` reports. Return the exit code if
    the export has fewer operations."""
    left = call

    def strike() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    hear(out.parent, strike)
    return oat("export", run_dir, out)


@pytest.mark.fault("R7")
def test_a_reader_finds_the_old_export_or_the_new_one(
    run_dir: Path, out: Path, exports: tuple[Path, Content], tmp_path: Path, figure: Figure
) -> None:
    old, moments = content(out), tmp_path / "moments"

    def child() -> int:
        seen = seen_by_a_reader(run_dir, out)
        assert seen == [old, exports[1]]
        return 0

    assert forked(child, moments) == 0, moments.read_text()
    assert names(out.parent) == ["out"]
    AutoModelForCausalLM.from_pretrained(out)
    AutoTokenizer.from_pretrained(out)
    figure("a reader gets the old model or the new one while an export replaces it")


def all_killed(run_dir: Path, out: Path, new: Content, tmp_path: Path, calls: Iterator[int]) -> int:
    """Kill an export over an older export once at each of `calls`. Return the number of kills."""
    old, done = content(out), 0
    for call in calls:
        place = tmp_path / str(call) / "out"
        shutil.copytree(out, place)
        if (
            code := forked(lambda place=place, call=call: killed_at(run_dir, place, call), tmp_path / "log")
        ) == 0:  # type: ignore[misc]
            return done
        assert code == -signal.SIGKILL, (tmp_path / "log").read_text()
        assert content(place) in (old, new), call
        assert oat("export", run_dir, place) == 0
        assert content(place) == new
        assert names(place.parent) == ["out"], "what the killed one left is gone"
        done += 1
    return done


@pytest.mark.fault("R7")
def test_an_export_that_is_killed(
    run_dir: Path, out: Path, exports: tuple[Path, Content], tmp_path: Path, figure: Figure
) -> None:
    done = all_killed(run_dir, out, exports[1], tmp_path, iter(range(3, 400, 24)))
    figure(f"{done} of {done} killed exports left either the old model or the new one")
    assert done >= 4


@pytest.mark.large
@pytest.mark.fault("R7")
def test_an_export_that_is_killed_at_any_moment(
    run_dir: Path, out: Path, exports: tuple[Path, Content], tmp_path: Path, figure: Figure
) -> None:
    done = all_killed(run_dir, out, exports[1], tmp_path, iter(range(1, 1000)))
    figure(f"{done} of {done} killed exports left either the old model or the new one")
    assert done > 40


def prepared(case: str, out: Path) -> tuple[Path, Path]:
    """Prepare a directory that cannot be exchanged for another. Return the OUT argument of the command, and
    the directory itself."""
    if case == "a folder":
        (out / ".git").mkdir()
        (out / ".git" / "HEAD").write_text("ref")
    elif case == "the working directory":
        os.chdir(out)
        return Path(), out
    elif case == "no exchange":
        sys.modules["oat.commands.swap"]._RENAME_EXCHANGE = 1 << 20  # type: ignore[attr-defined] # the kernel refuses what it does not know
    elif case == "a mount":
        mounted(out, "size=10m", keep=True)
    return out, out


def mounted(place: Path, options: str, *, keep: bool = False) -> None:
    """Mount a file system in memory that only this process sees. This needs root; without it the test is
    skipped. For a forked child only.

    Args:
        keep: copy the files of `place` into the new file system.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = content(place) if keep else {}
    if libc.unshare(_NEW_MOUNTS) != 0 or libc.mount(b"none", b"/", None, _PRIVATE, None) != 0:
        os._exit(_SKIPPED)
    if libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, options.encode()) != 0:
        os._exit(_SKIPPED)
    for name, text in before.items():
        (place / name).write_bytes(text)


def remount(place: Path, options: str) -> None:
    """Change the size of a file system in memory."""
    if (
        ctypes.CDLL(None, use_errno=True).mount(
            b"tmpfs", os.fsencode(place), b"tmpfs", _REMOUNT, options.encode()
        )
        != 0
    ):
        raise OSError(ctypes.get_errno(), options)


@pytest.mark.fault("R7")
@pytest.mark.sample("no exchange", "a mount", seconds=2.0)
@pytest.mark.parametrize("case", ["a folder", "the working directory", "no exchange", "a mount"])
def test_where_directories_cannot_be_exchanged(
    case: str, run_dir: Path, out: Path, exports: tuple[Path, Content], tmp_path: Path, figure: Figure
) -> None:
    """A reader sees the old model, then no model, then the new model. The directory keeps its inode and its
    `.git` files."""

    def child() -> int:
        given, place = prepared(case, out)
        inode, old = place.stat().st_ino, content(place)
        new = {**exports[1], **{name: text for name, text in old.items() if name.startswith(".git")}}
        seen = seen_by_a_reader(run_dir, given.absolute())
        assert seen[0] == old
        assert seen[-1] == new
        models = [
            {name: text for name, text in one.items() if name != MARK} for one in seen if "config.json" in one
        ]
        assert [one for one, before in zip(models, [{}, *models], strict=False) if one != before] == [
            {name: text for name, text in one.items() if name != MARK} for one in (old, new)
        ]
        assert place.stat().st_ino == inode
        assert not [
            name for folder in (place, place.parent) for name in names(folder) if name.startswith(".oat-")
        ]
        assert oat("export", run_dir, given) == 0
        return 0

    if (code := forked(child, tmp_path / "log")) == _SKIPPED:
        pytest.skip(NO_MOUNTS)
    assert code == 0, (tmp_path / "log").read_text()
    figure("an export where directories cannot be exchanged leaves the old model, none, or the new one")


@contextmanager
def limited(most: int, below: Path) -> Iterator[None]:
    """From the first operation on a path that begins with `below` on, no file may grow past `most` bytes;
    this includes the standard output. For a forked child only."""
    is_armed, none = True, resource.RLIM_INFINITY
    hear(below, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, none)) if is_armed else None)
    try:
        yield
    finally:
        is_armed = False
        resource.setrlimit(resource.RLIMIT_FSIZE, (none, none))


def fails_whole(run_dir: Path, out: Path, said: str, full: AbstractContextManager[None]) -> None:
    """Check that an export fails with one message and changes no file."""
    before, place = content(out), names(out.parent)
    with full, pytest.raises(ExportError) as error:
        export_run(run_dir, out)
    text = str(error.value)
    assert text.startswith(f"{out}: the model of step 4 could not be written ({said} (")
    assert " bytes are free there)" in text
    assert int(text.partition("it needs ")[2].partition(" bytes")[0].replace(",", "")) > 1000
    assert text.endswith("make room, or give another directory, and run the same command again")
    assert content(out) == before
    assert names(out.parent) == place


@pytest.mark.fault("R9")
def test_files_of_an_export_that_may_not_grow(
    run_dir: Path, out: Path, tmp_path: Path, figure: Figure
) -> None:
    """A size limit of the kernel is reached by the weights, the tokenizer or the card. The export fails with
    one message and changes nothing."""
    sizes = {name: len(text) for name, text in content(out).items()}
    limits = [
        0,
        sizes["config.json"] - 1,
        sizes["README.md"] - 1,
        sizes["tokenizer.json"] - 1,
        sizes["model.safetensors"] - 1,
    ]

    def child(limit: int) -> int:
        fails_whole(run_dir, out, "File too large", limited(limit, out.parent / ".oat-export-"))
        return 0

    for limit in limits:
        assert forked(lambda limit=limit: child(limit), tmp_path / "log") == 0, (
            limit,
            (tmp_path / "log").read_text(),
        )  # type: ignore[misc]
    figure(
        f"{len(limits)} of {len(limits)} limits on the size of an export's files: the old model is complete"
    )


def full_until_it_fits(run_dir: Path, out: Path, option: str, least: int, unit: int) -> int:
    """Export to disks of growing size until the export fits. Return the number of disks that were too
    small."""
    before, done = content(out), 0
    while True:
        remount(out.parent, option.format(least + done * unit))
        with suppress(ExportError):
            export_run(run_dir, out)
        if content(out) != before:
            return done
        fails_whole(run_dir, out, "No space left on device", nullcontext())
        done += 1


@pytest.mark.slow(instead="test_files_of_an_export_that_may_not_grow", seconds=2.5)
@pytest.mark.fault("R9")
def test_a_full_disk_under_an_export(
    run_dir: Path, out: Path, exports: tuple[Path, Content], tmp_path: Path, figure: Figure
) -> None:
    """An export is tried on a file system in memory that gets more room until the export fits. Every failure
    leaves the old export unchanged."""
    before = content(out)

    def child(option: str, unit: int) -> int:
        mounted(out.parent, "nr_inodes=1000,size=10m")
        out.mkdir()
        for name, text in before.items():
            (out / name).write_bytes(text)
        least = (
            len(before) + 3
            if "nr_inodes={}" in option
            else sum(-(-len(text) // 4096) for text in before.values()) * 4
        )
        done = full_until_it_fits(run_dir, out, option, least, unit)
        assert content(out) == exports[1]
        assert names(out.parent) == ["out"]
        assert done >= 5
        return 0

    for option, unit in {"nr_inodes={},size=10m": 1, "nr_inodes=1000,size={}k": 4}.items():
        if (
            code := forked(lambda option=option, unit=unit: child(option, unit), tmp_path / "log")
        ) == _SKIPPED:  # type: ignore[misc]
            pytest.skip(NO_MOUNTS)
        assert code == 0, (tmp_path / "log").read_text()
    figure("a disk with too little room for an export: the old model is complete")


@pytest.mark.fault("R9")
def test_a_first_export_on_a_full_disk_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    """A first export fails on a full disk. All its files are removed, and so are the folders that it made for
    OUT."""

    def child() -> int:
        with limited(100, tmp_path / "a"), redirect_stderr(io.StringIO()) as said:
            assert oat("export", run_dir, tmp_path / "a" / "b" / "out") == 1
        assert said.getvalue().count("\n") == 1
        assert said.getvalue().endswith(" and run the same command again\n")
        return 0

    assert forked(child, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert names(tmp_path) == ["log"]


@pytest.mark.fault("R9")
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_full_disk_under_the_export_of_a_ledger(suffix: str, run_dir: Path, tmp_path: Path) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not here")
    file = tmp_path / "place" / f"answers.{suffix}"
    assert oat("ledger", run_dir, "--export", file) == 0
    before = file.read_bytes()

    def child() -> int:
        with limited(len(before) // 2, file.parent), redirect_stderr(io.StringIO()) as said:
            assert oat("ledger", run_dir, "--export", file.with_stem("more")) == 1
        assert " bytes are free there" in said.getvalue()
        return 0

    assert forked(child, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert (file.read_bytes(), names(file.parent)) == (before, [file.name])


@pytest.mark.fault("R9")
def test_a_model_that_is_given_from_python_on_a_full_disk(world: World, tmp_path: Path) -> None:
    """A model object from Python cannot be written to a full disk. The files that the run wrote of it are
    removed, and the error names the free bytes."""

    def child() -> int:
        import oat as library

        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(world.folder / "model"),
            AutoTokenizer.from_pretrained(world.folder / "model"),
        )
        tree = world.tree("dpo", tmp_path / "run", {"evaluation": None})
        tree["model"] = {"path": model}
        trainer = library.Trainer(**tree, tokenizer=tokenizer)
        with (
            limited(1000, tmp_path / "run"),
            pytest.raises(OSError, match=r"File too large \(.* bytes are free there\)"),
        ):
            trainer.train()
        assert not list((tmp_path / "run").rglob(".new-*"))
        return 0

    assert forked(child, tmp_path / "log") == 0, (tmp_path / "log").read_text()


def test_what_killed_exports_left_is_removed_and_what_others_write_is_not(run_dir: Path, out: Path) -> None:
    """An export removes the working folder of a killed export. The working folder of an export that still
    runs is locked, and stays."""
    dead, alive = (out.parent / f".oat-export-{digits}" for digits in ("00000000", "11111111"))
    dead.mkdir()
    alive.mkdir()
    (dead / "made-by-oat").write_bytes(_SIGN_TEXT)
    (dead / "new").mkdir()
    (dead / "new" / "model.safetensors").write_text("part")
    (out.parent / ".oat-export-22222222").mkdir()
    (out.parent / ".oat-export-22222222" / "model.safetensors").write_text("a user's")
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (out.parent / ".oat-export-of-mine").mkdir()
    export_run(run_dir, out)
    os.close(lock)
    users = [".oat-export-22222222", ".oat-export-of-mine"]
    assert names(out.parent) == [alive.name, *users, "out"]
    export_run(run_dir, out)
    assert names(out.parent) == [*users, "out"]
    assert (out.parent / users[0] / "model.safetensors").read_text() == "a user's"


def test_ctrl_c_within_an_export(run_dir: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    before = content(out)
    monkeypatch.setattr("oat.commands.swap._sync", interrupted)
    assert oat("export", run_dir, out) == 130
    assert (content(out), names(out.parent)) == (before, ["out"])


def test_links_lead_where_they_led(run_dir: Path, out: Path, exports: tuple[Path, Content]) -> None:
    """A symbolic link as OUT stays a link, whether its target exists or not. Links within the directory and
    access rights are kept."""
    (out.parent / "link").symlink_to("out")
    (out.parent / "early").symlink_to("later")
    (out / "latest.txt").symlink_to("notes.txt")
    (out / "nowhere").symlink_to("missing")
    out.chmod(0o750)
    export_run(run_dir, out.parent / "link")
    assert names(out.parent) == ["early", "link", "out"]
    assert content(out) == {**exports[1], "latest.txt": FOREIGN["notes.txt"]}
    assert (out / "nowhere").is_symlink()
    assert os.readlink(out.parent / "link") == "out"
    assert out.stat().st_mode & 0o777 == 0o750
    before = os.umask(0o022)
    export_run(run_dir, out.parent / "early")
    os.umask(before)
    assert (out.parent / "later" / "config.json").exists()
    assert (out.parent / "later").stat().st_mode & 0o777 == 0o755


def test_places_where_nothing_can_be_made(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    for out, words in {"file/out": "give a directory where you may write", "pipe": "is a file"}.items():
        assert oat("export", run_dir, tmp_path / out) == 2
        assert words in capsys.readouterr().err
    assert names(tmp_path) == ["file", "pipe"]
