"""The operations of a save, in their order."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
from known_checkpoints import save

from oat.errors import CheckpointError
from oat.rundir.checkpoints import Checkpoints


class Recorder:
    """Records the operations of a save in their order. For a forked child only, since an audit hook cannot be
    removed."""

    def __init__(self) -> None:
        self.events: list[str] = []
        sys.addaudithook(self._heard)
        write, sync = safetensors.torch.save_file, os.fsync

        def written(tensors: Any, file: Path) -> None:
            self.events.append(f"write {file.name}")
            write(tensors, file)

        def synced(descriptor: int) -> None:
            self.events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
            sync(descriptor)

        safetensors.torch.save_file, os.fsync = written, synced

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[1], str) and "checkpoints" in str(arguments[0]):
            self.events.append(
                f"{'read' if arguments[1].startswith('r') else 'write'} {Path(arguments[0]).name}"
            )
        elif event == "os.rename":
            self.events.append(f"rename {Path(arguments[0]).name} {Path(arguments[1]).name}")
        elif event == "shutil.rmtree":
            self.events.append(f"remove {Path(arguments[0]).name}")


SAVED = [
    "remove .new-step_00000006",
    "write tensors.safetensors",
    "write state.json",
    "sync tensors.safetensors",
    "sync state.json",
    "read tensors.safetensors",
    "read state.json",
    "write manifest.json",
    "sync manifest.json",
    "sync .new-step_00000006",
    "rename .new-step_00000006 step_00000006",
    "sync checkpoints",
    "write .new-latest",
    "sync .new-latest",
    "rename .new-latest latest",
    "sync checkpoints",
    "read manifest.json",
    "read tensors.safetensors",
    "read state.json",
]
"""The operations up to the end of the verification. The first one removes the remains of an earlier
attempt."""


def recorded_save(folder: str, verifies: str, events: str) -> int:
    """Save step 6, and write the list of its operations to a file.

    Args:
        verifies: "" damages the checkpoint after it is published.
    """
    recorder, point = Recorder(), Checkpoints._point

    def turned(self: Checkpoints, name: str) -> None:
        point(self, name)
        if not verifies:
            with os.fdopen(os.open(self.directory / name / "state.json", os.O_RDWR), "r+b") as file:
                file.write(b"[")

    Checkpoints._point = turned  # type: ignore[method-assign]
    try:
        save(Checkpoints(Path(folder), every=1, keep_last=2), 6)
    except CheckpointError as error:
        print(error)
    Path(events).write_text(json.dumps(recorder.events))
    return 0
