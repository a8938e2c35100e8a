"""Checkpoints: order of a save, corruption, pruning, exactness."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oat.checkpoint import Checkpoints, verify, write_atomically
from oat.errors import CheckpointError

FILES = ("tensors.safetensors", "state.json", "manifest.json")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", every=1, keep_last=2)


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, {"learner/w": torch.full((3,), float(step))}, {"learner": {"updates": step}})


def loaded_step(checkpoints: Checkpoints) -> int:
    found = checkpoints.load()
    assert found is not None
    step, tensors, state = found
    assert torch.equal(tensors["learner/w"], torch.full((3,), float(step)))
    assert state == {"learner": {"updates": step}}
    return step


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_bitwise(checkpoints: Checkpoints, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in {"matrix": (3, 4), "scalar": (), "empty": (0, 5), "one": (1,), "deep": (1, 2, 1, 3)}.items():
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
    checkpoints.save(1, {"odd": odd.view(torch.float32)}, {"part": {"x": number, "count": 2**62, "none": None, "words": ["ü", "\u2028"]}})
    found = checkpoints.load()
    assert found is not None
    assert torch.equal(found[1]["odd"].view(torch.int32), odd)
    assert found[2] == {"part": {"x": number, "count": 2**62, "none": None, "words": ["ü", "\u2028"]}}


def test_what_was_saved_does_not_change_with_the_weights(checkpoints: Checkpoints) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    checkpoints.save(1, {"w": weight}, {})
    weight.data += 1
    found = checkpoints.load()
    assert found is not None
    assert found[1]["w"].tolist() == [0.0, 0.0]


def test_nothing_saved(checkpoints: Checkpoints) -> None:
    assert checkpoints.load() is None
    assert [step for step in range(1, 8) if Checkpoints(Path("x"), every=3, keep_last=1).due(step)] == [3, 6]


def test_the_order_of_a_save(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file and its folder are on disk before the next relies on them; the manifest after the files, the pointer last."""
    events: list[str] = []

    def recorded(what: str, method: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            events.append(f"{what} {name(*args)}")
            return method(*args)

        return call

    monkeypatch.setattr(os, "fsync", recorded("sync", os.fsync, lambda descriptor: Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
    monkeypatch.setattr(Path, "rename", recorded("rename", Path.rename, lambda old, new: f"{old.name} {new.name}"))
    monkeypatch.setattr(Path, "replace", recorded("rename", Path.replace, lambda old, new: f"{old.name} {new.name}"))
    save(checkpoints, 5)
    assert events == [
        "sync tensors.safetensors",
        "sync state.json",
        "sync manifest.json",
        "sync .new-step_00000005",
        "rename .new-step_00000005 step_00000005",
        "sync checkpoints",
        "sync .new-latest",
        "rename .new-latest latest",
        "sync checkpoints",
    ]


def test_the_newest_is_loaded_and_old_ones_go(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 2, 10, 11)
    assert loaded_step(checkpoints) == 11
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["latest", "step_00000010", "step_00000011"]


def test_a_pointer_to_an_older_one_is_followed(checkpoints: Checkpoints) -> None:
    """As after a kill between rename and pointer, or when a person turns a run back; what stood beyond it goes with the next save."""
    save(checkpoints, 1, 2)
    (checkpoints.directory / "latest").write_text("step_00000001\n")
    assert loaded_step(checkpoints) == 1
    Checkpoints(checkpoints.directory, every=1, keep_last=1).save(2, {"learner/w": torch.full((3,), 2.0)}, {"learner": {"updates": 2}})
    assert loaded_step(checkpoints) == 2


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff\xfe\0", b"step_99999999\n", b"../../etc"])
def test_a_pointer_that_names_nothing_is_left_aside(checkpoints: Checkpoints, content: bytes) -> None:
    save(checkpoints, 1, 2)
    (checkpoints.directory / "latest").write_bytes(content)
    assert loaded_step(checkpoints) == 2
    (checkpoints.directory / "latest").unlink()
    assert loaded_step(checkpoints) == 2


def damages(size: int) -> dict[str, Callable[[bytes], bytes | None]]:
    """What can happen to a file: gone, cut short at some places, longer, one bit turned at some places."""
    found: dict[str, Callable[[bytes], bytes | None]] = {"deleted": lambda data: None, "grown": lambda data: data + b"\0"}
    places = sorted({0, 1, 7, 8, size // 3, size // 2, size - 2, size - 1})
    for place in places:
        found[f"cut at {place}"] = lambda data, place=place: data[:place]  # type: ignore[misc]
    for number, place in enumerate(places):
        bit = 1 << (number % 8)
        found[f"bit {bit} of byte {place}"] = (
            lambda data, place=place, bit=bit: (  # type: ignore[misc]
                data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]
            )
        )
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_means_the_checkpoint_before(checkpoints: Checkpoints, name: str) -> None:
    save(checkpoints, 1, 2)
    file = checkpoints.directory / "step_00000002" / name
    whole = file.read_bytes()
    for what, damage in damages(len(whole)).items():
        damaged = damage(whole)
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        reason = name if damaged is None or name != "manifest.json" else ""
        with pytest.warns(UserWarning, match=rf"step_00000002: .*{re.escape(reason)}.*; trying the checkpoint before it"):
            assert loaded_step(checkpoints) == 1, what
        file.write_bytes(whole)
    assert loaded_step(checkpoints) == 2


def test_a_damaged_space_in_a_manifest_is_no_damage_to_what_it_says(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    folder = checkpoints.directory / "step_00000001"
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert verify(folder) is None
    for content in ("[]", "null", '{"tensors.safetensors": 3}', '{"tensors.safetensors": {"bytes": 1}}', "[" * 100_000):
        (folder / "manifest.json").write_text(content)
        assert verify(folder) is not None


def test_all_damaged(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 2)
    for step in (1, 2):
        (checkpoints.directory / f"step_0000000{step}" / "state.json").write_text("{}")
    with (
        pytest.warns(UserWarning, match="does not match|has 2 bytes"),
        pytest.raises(CheckpointError, match=r"step_00000002: state.json.*step_00000001: state.json.*from its ledger"),
    ):
        checkpoints.load()


def test_another_schema_is_refused(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oat.checkpoint.SCHEMA_VERSION", 99)
    save(checkpoints, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="another version of oat"):
        checkpoints.load()


def test_pruning_never_removes_the_last_good_one(checkpoints: Checkpoints) -> None:
    """A damaged checkpoint of a later step is no reason to remove the good one that was just written."""
    strict = Checkpoints(checkpoints.directory, every=1, keep_last=1)
    save(checkpoints, 8, 12)
    (checkpoints.directory / "step_00000012" / "state.json").write_text("{}")
    with pytest.warns(UserWarning, match="step_00000012: state.json"):
        assert loaded_step(strict) == 8
    save(strict, 9)
    assert loaded_step(strict) == 9
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["latest", "step_00000009"]


def test_older_ones_stay_when_the_new_one_does_not_verify(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    save(checkpoints, 1, 2)
    publish = Checkpoints._publish

    def failing_disk(self: Checkpoints, new: Path, final: Path) -> None:
        publish(self, new, final)
        (final / "tensors.safetensors").write_bytes(b"zeros")

    monkeypatch.setattr(Checkpoints, "_publish", failing_disk)
    with pytest.raises(CheckpointError, match=r"step_00000003: does not verify.*older checkpoints are kept"):
        save(checkpoints, 3)
    with pytest.warns(UserWarning, match="step_00000003"):
        assert loaded_step(checkpoints) == 2


def test_leftovers_of_a_killed_save_are_harmless_and_cleaned(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    for name in (".new-step_00000002", ".new-step_00000007"):
        (checkpoints.directory / name).mkdir()
        (checkpoints.directory / name / "tensors.safetensors").write_bytes(b"half")
    (checkpoints.directory / ".new-latest").write_text("step_000")
    assert loaded_step(checkpoints) == 1
    save(checkpoints, 2)
    assert loaded_step(checkpoints) == 2
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["latest", "step_00000001", "step_00000002"]


def test_saving_a_step_again_replaces_it(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 2)
    (checkpoints.directory / "step_00000002" / "state.json").write_text("{}")
    save(checkpoints, 2)
    assert loaded_step(checkpoints) == 2


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_atomically(tmp_path / "f", "old")
    write_atomically(tmp_path / "f", "ü\r\n\u2028")
    assert (tmp_path / "f").read_bytes() == "ü\r\n\u2028".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
