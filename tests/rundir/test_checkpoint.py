"""Checkpoints: exactness, writing in the background, retention. Order of operations, damage and full disks
are in tests/faults."""

import hashlib
import json
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_files import loaded_step, on_disk, save
from fixtures import World, forked, logged, oat

from oat.commands.digest import digest_run
from oat.errors import Again, CheckpointError, DirectoryError
from oat.files import write_atomically
from oat.rundir import checkpoints as checkpoints_module
from oat.rundir.checkpoint_files import verify
from oat.rundir.checkpoints import Checkpoints


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_bitwise(checkpoints: Checkpoints, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in {
        "matrix": (3, 4),
        "scalar": (),
        "empty": (0, 5),
        "one": (1,),
        "deep": (1, 2, 1, 3),
    }.items():
        tensors[name] = (torch.randn(shape, generator=generator) * 100).to(dtype)
    tensors["transposed"], tensors["shared"] = tensors["matrix"].T, tensors["matrix"]
    tensors["slice/of a thing"] = tensors["matrix"][:, 1::2]
    checkpoints.save(3, tensors, {})
    found = checkpoints.load()
    assert found is not None
    assert found[1].keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[1][name].dtype, found[1][name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[1][name]) == bits(tensor)


def test_odd_floats_come_back_bitwise(checkpoints: Checkpoints) -> None:
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45, 3.4e38]).view(torch.int32)
    odd[0] |= 7
    number = 0.1 + 0.2
    checkpoints.save(
        1,
        {"odd": odd.view(torch.float32)},
        {"part": {"x": number, "count": 2**62, "none": None, "words": ["ü", "\u2028"]}},
    )
    found = checkpoints.load()
    assert found is not None
    assert torch.equal(found[1]["odd"].view(torch.int32), odd)
    assert found[2] == {"part": {"x": number, "count": 2**62, "none": None, "words": ["ü", "\u2028"]}}


class Held:
    """A writer that waits before its first file until the test sets `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.began, self.go = threading.Event(), threading.Event()
        write = safetensors.torch.save_file

        def held(*arguments: Any) -> None:
            self.began.set()
            assert self.go.wait(60)
            write(*arguments)

        monkeypatch.setattr(safetensors.torch, "save_file", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def test_what_was_saved_does_not_change_with_the_weights(checkpoints: Checkpoints, held: Held) -> None:
    """A save returns before anything is written. Weights and lists that change afterwards do not change the
    checkpoint."""
    weight, words = torch.nn.Parameter(torch.zeros(2)), ["a"]
    checkpoints.save(1, {"w": weight, "half": weight[:1]}, {"part": {"words": words}})
    assert held.began.wait(60)
    assert (checkpoints.saved, checkpoints.steps, checkpoints.oldest) == (1, [], None)
    weight.data += 1
    words.append("b")
    held.go.set()
    found = checkpoints.load()
    assert found is not None
    assert (found[1]["w"].tolist(), found[1]["half"].tolist()) == ([0.0, 0.0], [0.0])
    assert found[2] == {"part": {"words": ["a"]}}


def test_one_write_at_a_time_and_no_thread_left(checkpoints: Checkpoints, held: Held) -> None:
    """A second save, a load and a `wait` each wait until the save before has written its files. No thread
    remains."""
    before = threading.active_count()
    checkpoints.save(1, {"w": torch.ones(1)}, {})
    assert held.began.wait(60)
    assert threading.active_count() == before + 1
    second = threading.Thread(target=checkpoints.save, args=(2, {"w": torch.ones(1)}, {}))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    assert checkpoints.saved == 1
    held.go.set()
    second.join(60)
    checkpoints.wait()
    assert (checkpoints.steps, checkpoints.oldest, threading.active_count()) == ([1, 2], 1, before)


@pytest.mark.parametrize("background", [True, False])
def test_the_last_one_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """The tensors of the last save are written without a copy, and those of any save if the step waits for
    it. Two names of one storage are two tensors on disk."""
    given, weight = [], torch.ones(4)
    write = safetensors.torch.save_file

    def seen(tensors: dict[str, torch.Tensor], file: Path) -> None:
        given.append(sum(tensor.data_ptr() == weight.data_ptr() for tensor in tensors.values()))
        write(tensors, file)

    monkeypatch.setattr(safetensors.torch, "save_file", seen)
    checkpoints = Checkpoints(tmp_path, every=1, keep_last=3, background=background)
    for step, is_last in enumerate((False, True), start=1):
        checkpoints.save(step, {"w": weight, "again": weight}, {}, is_last=is_last)
        assert background or checkpoints.steps == list(range(1, step + 1))
    checkpoints.wait()
    assert given == [0 if background else 1, 1]


def test_an_error_of_the_writer_is_raised_once_at_the_next_call(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: checkpoints.save(3, {}, {}),
        checkpoints.load,
        checkpoints.wait,
    ]
    save(checkpoints, 1)
    for call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "_publish", lambda self, new, step: 1 / 0)
            checkpoints.save(2, {"w": torch.zeros(5)}, {})
            assert checkpoints._writer is not None
            checkpoints._writer[0].join()
        with pytest.raises(
            CheckpointError,
            match=r"step 2 could not be written \(ZeroDivisionError.* bytes, and [\d,]+ bytes are free there",
        ):
            call()
        checkpoints.wait()
        assert on_disk(checkpoints) == ["latest", "step_00000001"]
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_publish", lambda self, new, step: 1 / 0)
        checkpoints.save(2, {}, {})
        assert checkpoints._writer is not None
        checkpoints._writer[0].join()
    with pytest.raises(CheckpointError, match="step 2 could not be written"):
        checkpoints.due(3)


@pytest.mark.parametrize(
    "last_call",
    ["safetensors.torch.save_file", "write_manifest", "sync_to_disk", "write_atomically", "verify"],
)
def test_a_folder_that_vanishes_while_a_checkpoint_is_written_is_named(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, last_call: str
) -> None:
    """Wherever the writer is, the message says that the folder is gone, and not that the disk is at fault.

    Args:
        last_call: the folder is moved right before the writer makes this call.
    """
    save(checkpoints, 1)
    elsewhere = checkpoints.directory.with_name("elsewhere")
    module, name = (safetensors.torch, "save_file") if "." in last_call else (checkpoints_module, last_call)
    call = getattr(module, name)

    def move_first(*arguments: Any) -> Any:
        if checkpoints.directory.exists():
            checkpoints.directory.rename(elsewhere)
        return call(*arguments)

    monkeypatch.setattr(module, name, move_first)
    with pytest.raises(DirectoryError, match="no checkpoint is written"):
        save(checkpoints, 2)
    assert not checkpoints.directory.exists()
    monkeypatch.undo()
    assert loaded_step(Checkpoints(elsewhere, every=1, keep_last=2)) == (2 if last_call == "verify" else 1)


@pytest.mark.slow(instead="tests/faults/test_full_disk.py", seconds=2.5)
def test_a_run_whose_checkpoint_fails_ends_with_the_message(world: World, tmp_path: Path) -> None:
    """If a checkpoint cannot be written, the run ends with an error instead of the line that it finished.
    This includes the last checkpoint. The same command continues the run."""
    config, log = world.config("dpo", tmp_path), tmp_path / "log"
    (tmp_path / "unbroken").mkdir()
    assert logged(log, "train", world.config("dpo", tmp_path / "unbroken")) == 0

    def failing(at: int) -> int:
        publish, calls = Checkpoints._publish, []

        def full(self: Checkpoints, new: Path, step: int) -> Path:
            calls.append(step)
            if len(calls) == at:
                raise OSError(28, "No space left on device")
            return publish(self, new, step)

        Checkpoints._publish = full  # type: ignore[method-assign]
        return oat("train", config)

    for at, step in ((1, 2), (2, 4)):
        log.unlink()
        assert forked(lambda at=at: failing(at), log) == 1  # type: ignore[misc]
        lines = log.read_text().splitlines()
        assert lines[-1].startswith(
            f"oat train: {tmp_path / 'dpo' / 'checkpoints'}: the checkpoint of step {step} could not be "
            "written"
        )
        assert "No space left on device" in lines[-1]
        assert "Traceback" not in log.read_text()
        assert not any("finished" in line for line in lines)
    assert logged(log, "train", config) == 0
    assert digest_run(tmp_path / "dpo") == digest_run(tmp_path / "unbroken" / "dpo")


@pytest.mark.parametrize("has_begun", [True, False])
def test_ctrl_c_while_the_writer_starts(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """Ctrl-C meets the run in the call that starts the writer. If the writer has begun by then, the run waits
    for it, and the checkpoint is complete; if not, there is none, and nothing is waited for."""
    start, begun, publish = threading.Thread.start, threading.Event(), Checkpoints._publish

    def interrupted(thread: threading.Thread) -> None:
        if thread.name == "checkpoint writer":
            if has_begun:
                start(thread)
                assert begun.wait(60)
            raise Again
        start(thread)

    def late(self: Checkpoints, new: Path, step: int) -> Path:
        begun.set()
        time.sleep(0.2)
        return publish(self, new, step)

    monkeypatch.setattr(Checkpoints, "_publish", late)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(Again):
        checkpoints.save(1, {}, {})
    checkpoints.wait()
    assert checkpoints.next_loaded == (1 if has_begun else None)
    assert not has_begun or on_disk(checkpoints) == ["latest", "step_00000001"]


def test_nothing_saved(checkpoints: Checkpoints) -> None:
    assert checkpoints.next_loaded is None
    assert checkpoints.load() is None
    assert [step for step in range(1, 8) if Checkpoints(Path("x"), every=3, keep_last=1).due(step)] == [3, 6]


def test_a_pointer_to_an_older_one_is_followed_aloud(checkpoints: Checkpoints) -> None:
    """The pointer `latest` names an older checkpoint, which is loaded with a warning. This happens after a
    kill between rename and pointer, when a user sets the run back, or by a flipped bit: 2 and 3 differ in one
    bit."""
    save(checkpoints, 2, 3)
    pointer = checkpoints.directory / "latest"
    pointer.write_bytes(bytes([*pointer.read_bytes()[:-2], pointer.read_bytes()[-2] ^ 1, ord("\n")]))
    assert checkpoints.next_loaded == 2
    with pytest.warns(UserWarning, match="latest: names step_00000002, and step_00000003 is there too"):
        assert loaded_step(checkpoints) == 2
    shutil.rmtree(checkpoints.directory)
    checkpoints = Checkpoints(checkpoints.directory, every=1, keep_last=2)
    save(checkpoints, 1, 2)
    pointer.write_text("step_00000001\n")
    assert loaded_step(checkpoints) == 1
    save(Checkpoints(checkpoints.directory, every=1, keep_last=1), 2)
    assert on_disk(checkpoints) == ["latest", "step_00000002.1"]
    assert loaded_step(checkpoints) == 2


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff\xfe\0", b"step_99999999\n", b"../../etc"])
def test_a_pointer_that_names_nothing_is_left_aside(checkpoints: Checkpoints, content: bytes) -> None:
    save(checkpoints, 1, 2)
    (checkpoints.directory / "latest").write_bytes(content)
    assert checkpoints.next_loaded == 2
    with pytest.warns(UserWarning, match=r"checkpoints/latest: .*; trying the newest checkpoint"):
        assert loaded_step(checkpoints) == 2


def test_a_damaged_space_in_a_manifest_is_no_damage_to_what_it_says(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    folder = checkpoints.directory / "step_00000001"
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert verify(folder) is None
    for content in (
        "[]",
        "null",
        '{"tensors.safetensors": 3}',
        '{"tensors.safetensors": {"bytes": 1}}',
        "[" * 100_000,
    ):
        (folder / "manifest.json").write_text(content)
        assert verify(folder) is not None


def test_all_damaged(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 2)
    for step in (1, 2):
        (checkpoints.directory / f"step_0000000{step}" / "state.json").write_text("{}")
    with (
        pytest.warns(UserWarning, match="does not match|has 2 bytes"),
        pytest.raises(
            CheckpointError, match=r"step_00000002: state.json.*step_00000001: state.json.*from its ledger"
        ),
    ):
        checkpoints.load()


def test_a_state_that_is_nested_too_deep_is_damaged(checkpoints: Checkpoints) -> None:
    """A checkpoint whose state is nested too deep counts as damaged, even if its manifest agrees with the
    state."""
    save(checkpoints, 1, 2, **{"eval/sampled": 1.0})
    folder, deep = checkpoints.directory / "step_00000002", "[" * 100_000
    (folder / "state.json").write_text(deep)
    checkpoints.refuse_others()
    assert checkpoints.best() == 1
    assert checkpoints.row(2) == {}
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["state.json"] = {"sha256": hashlib.sha256(deep.encode()).hexdigest(), "bytes": len(deep)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.warns(
        UserWarning, match="step_00000002: ValueError: it is nested too deep; trying the checkpoint before it"
    ):
        assert loaded_step(checkpoints) == 1


def test_another_schema_is_refused(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oat.rundir.checkpoints.SCHEMA_VERSION", 99)
    save(checkpoints, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="another version of oat"):
        checkpoints.load()


def test_leftovers_of_a_killed_save_are_harmless_and_cleaned(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    for name in (".new-step_00000002", ".new-step_00000007"):
        (checkpoints.directory / name).mkdir()
        (checkpoints.directory / name / "tensors.safetensors").write_bytes(b"half")
    (checkpoints.directory / ".new-latest").write_text("step_000")
    assert loaded_step(checkpoints) == 1
    save(checkpoints, 2)
    assert loaded_step(checkpoints) == 2
    assert on_disk(checkpoints) == ["latest", "step_00000001", "step_00000002"]


def test_a_step_that_is_saved_again_stands_beside_the_first_until_it_verifies(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is saved again. The new checkpoint stands beside the old one until it is verified, so a kill
    leaves one of them. Afterwards the old ones of this step are removed; other folders stay."""
    save(checkpoints, 1, 2)
    (checkpoints.directory / "step_of_mine").mkdir()
    both: list[list[str]] = []
    prune = Checkpoints._prune
    monkeypatch.setattr(
        Checkpoints,
        "_prune",
        lambda self, newest, keep: (both.append(on_disk(self)), prune(self, newest, keep)),
    )
    for number in range(1, 12):
        (checkpoints.directory / on_disk(checkpoints)[2] / "state.json").write_text("{}")
        save(checkpoints, 2)
        assert loaded_step(checkpoints) == 2
        assert on_disk(checkpoints) == ["latest", "step_00000001", f"step_00000002.{number}", "step_of_mine"]
    assert both[0] == ["latest", "step_00000001", "step_00000002", "step_00000002.1", "step_of_mine"]
    assert checkpoints.steps == [1, 2]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_atomically(tmp_path / "f", "old")
    write_atomically(tmp_path / "f", "ü\r\n\u2028")
    assert (tmp_path / "f").read_bytes() == "ü\r\n\u2028".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_checkpoint_of_another_version_is_refused_before_the_ledger_is_touched(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of another version is refused, and the ledger stays unchanged. Otherwise the version that
    wrote both could not continue the run either."""
    config = world.config("dpo", tmp_path, {"stop.max_steps": 2, "evaluation": None})
    assert oat("train", config) == 0
    (state,) = (tmp_path / "dpo" / "checkpoints").glob("step_*/state.json")
    state.write_text(json.dumps(json.loads(state.read_text()) | {"schema": 1}))
    with sqlite3.connect(tmp_path / "dpo" / "ledger.sqlite") as database:
        database.execute("UPDATE meta SET value = '3' WHERE name = 'schema'")
    database.close()
    capsys.readouterr()
    assert oat("train", config) == 1
    assert "written by another version of oat" in capsys.readouterr().err
    with sqlite3.connect(tmp_path / "dpo" / "ledger.sqlite") as database:
        assert database.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone() == ("3",)
    database.close()
