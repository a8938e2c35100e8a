"""The order of operations of a save (R7), and damage to every file of a checkpoint (R8)."""

import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures import Finished, forked, oat
from known_checkpoints import NEW, OLD, loaded_step, two_good_ones
from saves import SAVED, recorded_save

from oat.commands.digest import digest_run
from oat.errors import CheckpointError
from oat.rundir.checkpoints import Checkpoints

Figure = Callable[[str], None]

FILES = ("tensors.safetensors", "state.json", "manifest.json")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return two_good_ones(tmp_path / "checkpoints")


# R7: the order


@pytest.mark.fault("R7")
@pytest.mark.parametrize("verifies", [True, False])
def test_the_order_of_a_save(
    checkpoints: Checkpoints, tmp_path: Path, figure: Figure, verifies: bool
) -> None:
    """Each file is on disk before a later operation relies on it. Old checkpoints are removed only after the
    new one is verified; if it is damaged, none is removed."""

    log = tmp_path / "log"
    assert (
        forked(
            lambda: recorded_save(
                str(checkpoints.directory), "verifies" if verifies else "", str(tmp_path / "events.json")
            ),
            log,
        )
        == 0
    ), log.read_text()
    events = [
        event
        for event in json.loads((tmp_path / "events.json").read_text())
        if not event.startswith("write events")
    ]
    assert events == SAVED + (["remove step_00000002"] if verifies else [])
    if verifies:
        assert (loaded_step(checkpoints), checkpoints.steps) == (6, [NEW, 6])
    else:
        assert "step_00000006: does not verify right after it was written (state.json" in log.read_text()
        with pytest.warns(UserWarning, match="step_00000006: state.json does not match"):
            assert loaded_step(checkpoints) == NEW
        assert checkpoints.steps == [OLD, NEW, 6]
    order = f"a save makes its {len(events)} system calls in the right order"
    figure(order if verifies else "a save that fails verification removes no older checkpoint")


# R8: damage


def detected(checkpoints: Checkpoints, place: str, words: str, step: int = OLD) -> bool:
    """Return True if loading warns of damage at `place` with a reason that contains `words`. The checkpoint
    of `step` must be loaded as it was saved."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert loaded_step(checkpoints) == step
    return any(
        f"{place}: " in (text := str(warning.message)) and words in text.partition(f"{place}: ")[2]
        for warning in caught
    )


def without(path: Path) -> Callable[[], None]:
    """Move a file away, and return a function that brings it back."""
    aside = path.with_name("aside")
    path.rename(aside)

    def back() -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        aside.rename(path)

    return back


@pytest.mark.fault("R8")
def test_a_damaged_file_means_the_checkpoint_before(checkpoints: Checkpoints, figure: Figure) -> None:
    """Each file is truncated to 0, 1, half and all but one of its bytes, made longer, deleted, or replaced by
    a directory."""
    folder, found = checkpoints.directory / f"step_{NEW:08d}", []
    for name in FILES:
        whole = (folder / name).read_bytes()
        for damaged in (
            *(whole[:size] for size in (0, 1, len(whole) // 2, len(whole) - 1)),
            whole + b"\0",
            None,
            "a directory",
        ):
            back = without(folder / name)
            if isinstance(damaged, bytes):
                (folder / name).write_bytes(damaged)
            elif damaged is not None:
                (folder / name).mkdir()
            found.append(detected(checkpoints, folder.name, name))
            back()
    assert loaded_step(checkpoints) == NEW
    figure(f"{sum(found)} of {len(found)} damaged files detected")
    assert all(found)


@pytest.mark.fault("R8")
def test_a_damaged_pointer_means_the_newest(checkpoints: Checkpoints, figure: Figure) -> None:
    pointer = checkpoints.directory / "latest"
    whole, found = pointer.read_bytes(), []
    cases: list[bytes | str | None] = [
        b"",
        whole[:1],
        whole[: len(whole) // 2],
        whole[:-2],
        whole + b"\0",
        b"step_00000099\n",
        None,
        "a directory",
    ]
    cases += [
        whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
        for place in range(len(whole))
        for bit in range(8)
    ]
    for damaged in cases:
        back = without(pointer)
        if isinstance(damaged, bytes):
            pointer.write_bytes(damaged)
        elif damaged is not None:
            pointer.mkdir()
        found.append(detected(checkpoints, "latest", "", step=NEW))
        back()
    pointer.write_bytes(whole[:-1])
    assert loaded_step(checkpoints) == NEW, "without its line end it says the same"
    figure(f"{sum(found)} of {len(found)} damaged pointers detected")
    assert all(found)


def flips(checkpoints: Checkpoints, count: int) -> tuple[int, int]:
    """Flip `count` single bits at random places of the checkpoint's files. Return how many flips were
    detected, and how many files were changed."""
    folder = checkpoints.directory / f"step_{NEW:08d}"
    rng = random.Random(0)
    found = 0
    names = set()
    contents = {name: (folder / name).read_bytes() for name in FILES}
    for number in range(count):
        name = FILES[number % len(FILES)]
        place, bit = rng.randrange(len(contents[name])), rng.randrange(8)
        flipped = bytearray(contents[name])
        flipped[place] ^= 1 << bit
        (folder / name).write_bytes(flipped)
        found += detected(checkpoints, folder.name, "" if name == "manifest.json" else name)
        (folder / name).write_bytes(contents[name])
        names.add(name)
    assert loaded_step(checkpoints) == NEW
    return found, len(names)


@pytest.mark.fault("R8")
def test_flipped_bits_are_detected(checkpoints: Checkpoints, figure: Figure) -> None:
    found = flips(checkpoints, 60)
    figure(f"{found[0]} of 60 flipped bits detected, 0 silent loads")
    assert found == (60, 3)


@pytest.mark.large
@pytest.mark.fault("R8")
def test_1000_flipped_bits_are_detected(checkpoints: Checkpoints, figure: Figure) -> None:
    found = flips(checkpoints, 1000)
    figure(f"{found[0]} of 1,000 flipped bits detected, 0 silent loads")
    assert found == (1000, 3)


@pytest.mark.fault("R8")
def test_both_damaged_is_an_error_and_never_a_load(checkpoints: Checkpoints, figure: Figure) -> None:
    for step in (OLD, NEW):
        (checkpoints.directory / f"step_{step:08d}" / "tensors.safetensors").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="tensors.safetensors has 0 bytes"),
        pytest.raises(
            CheckpointError, match=r"step_00000004: tensors.*step_00000002: tensors.*from its ledger"
        ),
    ):
        checkpoints.load()
    figure("without a good checkpoint: an error")


@pytest.fixture(scope="module")
def unbroken(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a finished run with two checkpoints, and its digest."""
    run_dir = finished.copy("dpo", tmp_path_factory.mktemp("unbroken"))
    return run_dir, digest_run(run_dir)


@pytest.mark.fault("R8")
@pytest.mark.inventory(114)
@pytest.mark.parametrize("name", FILES)
def test_a_run_goes_on_from_the_one_before(
    unbroken: tuple[Path, dict[str, str]],
    tmp_path: Path,
    figure: Figure,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(unbroken[0], run_dir)
    file = run_dir / "checkpoints" / "step_00000004" / name
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.warns(UserWarning, match="step_00000004: .*; trying the checkpoint before it"):
        assert oat("train", run_dir / "config.yaml", "--run_dir", run_dir) == 0
    printed = capsys.readouterr().out
    assert ("step 3/4" in printed, "step 2/4" in printed) == (True, False)
    assert digest_run(run_dir) == unbroken[1]
    figure("a run with a damaged checkpoint ends bitwise equal to the unbroken one")
