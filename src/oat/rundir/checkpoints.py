"""Checkpoints of a run. A checkpoint holds everything that decides how the run goes on. After the first save,
a kill at any moment leaves at least one complete checkpoint.

A save blocks its caller only while it copies the tensors and turns the state into text. A thread then writes
the checkpoint. Only one checkpoint is written at a time:

1. The files are written into a new directory and synced to disk. The manifest (SHA-256 and size of each file)
   is the last of them.
2. The directory is renamed and synced to disk. Then the pointer is replaced.
3. The checkpoint is read back and verified. Only then are other checkpoints removed (`Retention`).
   One with files that it did not write stays.

Tensors are stored as safetensors, the state and the manifest as JSON.

    checkpoints/step_00000010/    tensors.safetensors, state.json, manifest.json
    checkpoints/step_00000010.1/  the same step, saved again; both stay until this one is verified
    checkpoints/latest            the pointer: the name of the newest checkpoint

The rules for the checkpoints that stay: the newest, and the best by a metric, within a limit of size.
"""

import json
import math
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from oat.errors import CheckpointError, DirectoryError, warn
from oat.files import DirectoryGuard, bytes_free, parse_json, sync_to_disk, write_atomically
from oat.rundir.checkpoint_files import (
    bytes_of,
    halves_in,
    in_the_way,
    names_in,
    place_of,
    pointed,
    row_of,
    verify,
    write_manifest,
)

_GB = 10**9


@dataclass(frozen=True)
class Retention:
    """The rules by which checkpoints stay or are removed.

    Attributes:
        keep_last: number of the newest checkpoints that stay.
        keep_best: number of the checkpoints with the highest `best_metric` that stay. If values are equal,
            the newer checkpoint counts as better.
        max_gb: limit of the size of all checkpoints together, in 10^9 bytes. Above it, the oldest are
            removed, also the best ones. The newest and the target of a roll back stay. None: no limit.
    """

    keep_last: int
    keep_best: int = 0
    best_metric: str = "eval/sampled"
    max_gb: float | None = None

    def ranked(self, directory: Path, names: list[str]) -> list[str]:
        """Return those of `names` whose checkpoint has a finite `best_metric`, the best checkpoint last."""
        values = {
            name: value
            for name in names
            if isinstance(value := row_of(directory / name).get(self.best_metric), float)
            and math.isfinite(value)
        }
        return sorted(values, key=lambda name: (values[name], place_of(name)))

    def kept(self, directory: Path, newest: str, keep: int | None) -> set[str]:
        """Return the names of the checkpoints that stay. For each step, at most one checkpoint stays. A
        checkpoint of a later step than that of `newest` does not stay.

        Args:
            newest: the name of the checkpoint that was just written, which stays.
            keep: a step whose checkpoint stays even beyond `max_gb`; None: no such step.
        """
        behind = list(
            {
                place_of(name)[0]: name for name in names_in(directory) if place_of(name) <= place_of(newest)
            }.values()
        )
        best = self.ranked(directory, behind)[-self.keep_best :] if self.keep_best else []
        needed = {newest, *(name for name in behind if place_of(name)[0] == keep)}
        chosen = {*behind[-self.keep_last :], *best, *needed}
        sizes = {name: bytes_of(directory / name) for name in behind if name in chosen}
        most = math.inf if self.max_gb is None else self.max_gb * _GB
        while sum(sizes.values()) > most and len(sizes) > len(needed):
            del sizes[next(name for name in sizes if name not in needed)]
        if (taken := sum(sizes.values())) > most:
            warn(
                f"{directory}: the checkpoints that are needed take {taken / _GB:.3g} GB, more than "
                f"checkpoint.max_gb {self.max_gb:g}; no others are kept"
            )
        return set(sizes)


SCHEMA_VERSION = 2

Loaded = tuple[int, dict[str, torch.Tensor], dict[str, Any]]
"""Step, tensors and state of a checkpoint."""

_OTHER = "{}: written by another version of oat; continue the run with that version"


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
        directory: the run's `checkpoints` folder.
        every: number of steps between two saves.
        background: True: a thread writes; False: `save` returns when the checkpoint is on disk.
        keep_last, keep_best, best_metric, max_gb: which checkpoints stay (`Retention`).
        standing: the folders of the run. If one of them was moved or removed, no checkpoint is written.

    Attributes:
        saved: the step of the checkpoint that this process has last begun to write, or has loaded with
            `load`; 0: none.
    """

    def __init__(
        self,
        directory: Path,
        *,
        every: int,
        keep_last: int,
        background: bool = True,
        keep_best: int = 0,
        best_metric: str = "eval/sampled",
        max_gb: float | None = None,
        standing: DirectoryGuard | None = None,
    ):
        self.directory = directory
        self.every = every
        self.background = background
        self.saved = 0
        self.retention = Retention(keep_last, keep_best, best_metric, max_gb)
        self._standing = standing or DirectoryGuard()
        self._is_made = directory.exists()
        self._left: set[str] = set()  # those that are not removed, as was said
        self._writer: tuple[threading.Thread, threading.Event] | None = None  # the event: writing is over
        self._error: CheckpointError | DirectoryError | None = None  # of the writer

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints on disk, ascending. Damaged checkpoints are included."""
        return sorted({place_of(name)[0] for name in self._names()})

    @property
    def oldest(self) -> int | None:
        """The step of the oldest checkpoint on disk; None: there is none. Checkpoints that a running save
        will remove are included."""
        return min(self.steps, default=None)

    @property
    def next_loaded(self) -> int | None:
        """The step of the checkpoint that `load` tries first; None: there is none. The checkpoint may be
        damaged."""
        names, _ = pointed(self.directory)
        return place_of(names[-1])[0] if names else None

    def due(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step` steps.

        Raises:
            CheckpointError: the previous checkpoint could not be written.
            DirectoryError: the run's folder was moved or removed meanwhile.
        """
        if self._writer is not None and self._writer[1].is_set():
            self.wait()
        return step % self.every == 0

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        keep: int | None = None,
        is_last: bool = False,
    ) -> None:
        """Save the state before step `step`. The caller may change the arguments after the return, except
        with `is_last`.

        Args:
            tensors: by name, on any device, contiguous or not; several may share one storage.
            state: plain JSON data.
            metrics: the metrics of the last row before this state, if that row is complete. The value of
                `best_metric` is read from them.
            keep: the step of an older checkpoint that is not removed; None: no such step.
            is_last: True: the tensors are not copied; the caller changes them only after a `wait`.

        Raises:
            CheckpointError: the previous checkpoint could not be written.
            DirectoryError: the run's folder was moved or removed meanwhile.
            KeyboardInterrupt: Ctrl-C was pressed meanwhile. If the new checkpoint is being written, `wait`
                waits for it.
        """
        self.wait()
        content = {"schema": SCHEMA_VERSION, "step": step, "metrics": dict(metrics or {}), **state}
        text = json.dumps(content, indent=1, sort_keys=True).encode()
        own = _with_own_storage(tensors, copy=self.background and not is_last)
        begun, done = threading.Lock(), threading.Event()
        writer = threading.Thread(
            target=self._write, args=(step, own, text, keep, begun, done), name="checkpoint writer"
        )
        try:
            self._writer = writer, done
            writer.start()
        except KeyboardInterrupt:
            if begun.acquire(blocking=False):  # the thread has not begun to write, and so never will
                self._writer = None
            raise
        self.saved = step
        if not self.background:
            self.wait()

    def wait(self) -> None:
        """Wait until no checkpoint is being written. Ctrl-C does not shorten the wait.

        Raises:
            CheckpointError: the last checkpoint could not be written; raised once.
            DirectoryError: the run's folder was moved or removed meanwhile.
            KeyboardInterrupt: Ctrl-C was pressed meanwhile; the checkpoint is on disk.
        """
        ended: KeyboardInterrupt | None = None
        if self._writer is not None:
            writer, done = self._writer
            while not done.is_set():
                try:
                    while not done.is_set():
                        done.wait()  # not `join`: interrupted, it marks the thread as ended (Python 3.11)
                except KeyboardInterrupt as again:
                    ended = again
            writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        if ended is not None:
            raise ended

    def refuse_others(self) -> None:
        """Refuse the run if one of its checkpoints has another schema version than `SCHEMA_VERSION`. A
        checkpoint whose version cannot be read is passed over.

        Raises:
            CheckpointError: a checkpoint has another schema version.
        """
        for name in self._names():
            try:
                schema = parse_json((self.directory / name / "state.json").read_text(encoding="utf-8"))[
                    "schema"
                ]
            except (OSError, ValueError, KeyError, TypeError):
                continue  # `load` reports the damage
            if schema != SCHEMA_VERSION:
                raise CheckpointError(_OTHER.format(self.directory / name))

    def load(self) -> Loaded | None:
        """Return the newest checkpoint that is not damaged. Checkpoints after the one that
        `checkpoints/latest` names are left out. If there are no checkpoints, return None.

        Raises:
            CheckpointError: there are checkpoints, and none of them can be used.
        """
        self.wait()
        names = self._pointed()
        if not names:
            return None
        loaded = self._newest(
            names,
            "put one back, or begin anew in another run_dir; a run with tracking.keep_trajectories is "
            "replayed from its ledger once the folder `checkpoints` is removed",
        )
        self.saved = loaded[0]
        return loaded

    def load_back(self, step: int) -> Loaded:
        """Return the checkpoint of a step. If it is missing or damaged, return the newest checkpoint before
        it that is not damaged.

        Raises:
            CheckpointError: no checkpoint of this step or of an earlier one can be used.
        """
        self.wait()
        names = [name for name in self._names() if place_of(name)[0] <= step]
        hint = (
            "no earlier one is there to go back to; put one back, or let the alarm warn instead (`action: "
            "warn`)"
        )
        if not any(place_of(name)[0] == step for name in names):
            missing = f"{self.directory}: has none of step {step}"
            if not names:
                raise CheckpointError(f"{missing}; {hint}")
            warn(f"{missing}; trying the checkpoint before it")
        return self._newest(names, hint)

    def load_step(self, step: int) -> Loaded:
        """Return the checkpoint of one step.

        Raises:
            CheckpointError: there is none, or it is damaged; the message lists the steps that have
                checkpoints.
        """
        folder = self._of(step)
        try:
            return _read(folder)
        except _Damaged as damage:
            raise CheckpointError(f"{folder}: {damage}; {self._listed}") from damage

    def verify_step(self, step: int) -> None:
        """Verify the checkpoint of one step without loading it.

        Raises:
            CheckpointError: see `load_step`.
        """
        folder = self._of(step)
        if (problem := verify(folder)) is not None:
            raise CheckpointError(f"{folder}: {problem}; {self._listed}")

    def _of(self, step: int) -> Path:
        self.wait()
        names = [name for name in self._names() if place_of(name)[0] == step]
        if not names:
            raise CheckpointError(f"{self.directory}: has none of step {step}; {self._listed}")
        return self.directory / names[-1]

    @property
    def _listed(self) -> str:
        return (
            f"there are checkpoints of the steps {', '.join(map(str, self.steps)) or 'none'} "
            "(checkpoint.keep_last says how many a run keeps)"
        )

    def row(self, step: int) -> dict[str, float]:
        """Return the metrics of the last row before a step's checkpoint. They are empty if that row was not
        complete at the save."""
        return row_of(self.directory / [name for name in self._names() if place_of(name)[0] == step][-1])

    def best(self) -> int:
        """Return the step of the checkpoint whose row has the highest `best_metric`.

        Raises:
            CheckpointError: no checkpoint has a value of `best_metric`.
        """
        ranked = self.retention.ranked(self.directory, self._names())
        if not ranked:
            raise CheckpointError(
                f"{self.directory}: no checkpoint has a value of {self.retention.best_metric}; give a step "
                f"({', '.join(map(str, self.steps)) or 'none'})"
            )
        return place_of(ranked[-1])[0]

    def _newest(self, names: Sequence[str], hint: str) -> Loaded:
        """Read the named checkpoints, beginning with the last, and return the first that is not damaged.

        Args:
            hint: advice for the error that is raised if all of them are damaged.
        """
        problems = []
        for name in reversed(names):
            try:
                return _read(self.directory / name)
            except _Damaged as damage:
                problems.append(f"{self.directory / name}: {damage}")
                warn(f"{problems[-1]}; trying the checkpoint before it")
        raise CheckpointError(f"{'; '.join(problems)}; {hint}")

    def _write(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        text: bytes,
        keep: int | None,
        begun: threading.Lock,
        done: threading.Event,
    ) -> None:
        """Write one checkpoint, unless `begun` is held. This method runs in the writer's thread."""
        if not begun.acquire(blocking=False):
            return
        new = self.directory / f".new-step_{step:08d}"
        try:
            self._stand()
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            safetensors.torch.save_file(dict(tensors), new / "tensors.safetensors")
            (new / "state.json").write_bytes(text)
            write_manifest(new)
            self._refuse_lost()
            self._prune(self._publish(new, step), keep)
        except Exception as error:  # the caller's next `wait` raises it
            self._error = self._failure(
                error, step, len(text) + sum(tensor.nbytes for tensor in tensors.values())
            )
            if new.exists():
                shutil.rmtree(new, ignore_errors=True)
        finally:
            done.set()

    def _failure(self, error: Exception, step: int, needed: int) -> CheckpointError | DirectoryError:
        """Return the exception that reports an error of the writer.

        Args:
            needed: number of bytes of the checkpoint.
        """
        try:
            self._refuse_lost()
        except DirectoryError as lost:
            return lost
        if isinstance(error, CheckpointError | DirectoryError):
            return error
        failure = CheckpointError(
            f"{self.directory}: the checkpoint of step {step} could not be written "
            f"({type(error).__name__}: {error}); it needs {needed:,} bytes, "
            f"and {bytes_free(self.directory):,} bytes are free there. The checkpoints before it are "
            "whole: make room, or mend what is wrong, and the same command goes on"
        )
        failure.__cause__ = error
        return failure

    def _stand(self) -> None:
        """Make the folder of checkpoints if the run has not had it yet.

        Raises:
            DirectoryError: the folder, or the run's folder, was moved or removed.
        """
        self._refuse_lost()
        if not self._is_made:
            self.directory.mkdir(exist_ok=True)
            sync_to_disk(self.directory.parent)
            self._is_made = True

    def _refuse_lost(self) -> None:
        """Refuse to go on if the folder of checkpoints, or the run's folder, was moved or removed."""
        self._standing.refuse_lost(DirectoryError)
        if self._is_made and not self.directory.exists():
            raise DirectoryError(
                f"{self.directory}: was moved or removed while a run worked with it, and no checkpoint is "
                "written; put it back, and the same command goes on from the last one in it"
            )

    def _publish(self, new: Path, step: int) -> Path:
        again = [place_of(name)[1] for name in self._names() if place_of(name)[0] == step]
        final = self.directory / (f"step_{step:08d}.{max(again) + 1}" if again else f"step_{step:08d}")
        new.rename(final)
        sync_to_disk(self.directory)
        self._point(final.name)
        return final

    def _point(self, name: str) -> None:
        write_atomically(self.directory / "latest", name + "\n")

    def _prune(self, newest: Path, keep: int | None) -> None:
        if (problem := verify(newest)) is not None:
            raise CheckpointError(
                f"{newest}: does not verify right after it was written ({problem}); older checkpoints are "
                "kept. Check the disk"
            )
        kept = self.retention.kept(self.directory, newest.name, keep)
        for name in self._names():
            if name in kept:
                continue
            if (why := in_the_way(self.directory / name)) is None:
                shutil.rmtree(self.directory / name)
            elif name not in self._left:
                self._left.add(name)
                warn(f"{self.directory / name}: {why}, so it stays; move that away, and a save removes it")
        for name in halves_in(self.directory):
            shutil.rmtree(self.directory / name)

    def _names(self) -> list[str]:
        return names_in(self.directory)

    def _pointed(self) -> list[str]:
        found, problem = pointed(self.directory)
        if problem is not None:
            warn(problem)
        return found


class _Damaged(Exception):
    """The error of a damaged checkpoint; its text says what is wrong."""


def _read(folder: Path) -> Loaded:
    """Verify and load a checkpoint.

    Raises:
        _Damaged: the checkpoint does not match its manifest, or cannot be read.
        CheckpointError: the checkpoint's schema version is not `SCHEMA_VERSION`.
    """
    if (problem := verify(folder)) is not None:
        raise _Damaged(problem)
    try:
        state = parse_json((folder / "state.json").read_text(encoding="utf-8"))
        if state.pop("schema") != SCHEMA_VERSION:
            raise CheckpointError(_OTHER.format(folder))
        state.pop("metrics", None)
        return state.pop("step"), safetensors.torch.load_file(folder / "tensors.safetensors"), state
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from error


def _with_own_storage(tensors: Mapping[str, torch.Tensor], *, copy: bool) -> dict[str, torch.Tensor]:
    """Return the tensors, contiguous, on the CPU and without shared storage, as safetensors requires.

    Args:
        copy: True: copy all tensors; False: copy a tensor only if it is necessary.
    """
    seen: set[int] = set()
    own = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        own[name] = tensor.detach().to("cpu", copy=copy or place in seen).contiguous()
        seen.add(place)
    return own
