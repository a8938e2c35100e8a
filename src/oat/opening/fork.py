"""Functions that make a fork: a new run that begins with a checkpoint of another run. Some settings of a fork
may differ from those of the other run (`may_change` in `config/fields.py`).

The fork's directory gets the checkpoint, the ledger as it was at the checkpoint, and the rows of metrics and
samples until then. The other run is only read. `fork.json` is written first and records where the fork
begins, and the seed of the initial weights (`first_seed`). If a kill interrupts the making of a fork, the
same command makes it again.
"""

import json
import sqlite3
from contextlib import closing
from functools import partial
from itertools import takewhile
from pathlib import Path

from oat.assemble.fingerprints import GIVEN, recorded
from oat.config.stored import load_stored
from oat.errors import ConfigError
from oat.files import absolute, parse_json, read_only_address, sync_to_disk, write_atomically
from oat.ledger import versions
from oat.ledger.outstanding import close_unanswered
from oat.ledger.reader import Reader
from oat.ledger.store import Store
from oat.ledger.trajectory_files import TrajectoryFiles
from oat.loop import ROW
from oat.rundir.checkpoints import Checkpoints
from oat.rundir.holdings import refuse_lost
from oat.rundir.mark import MARK, is_begun, is_own, is_run, remove_own
from oat.rundir.provenance import FORK_FILE, Origin, first_seed, origin_of, read_origin, told_of_fork
from oat.rundir.rows import content_of
from oat.tracking.files import STREAMS


def begin_fork(source: str, directory: Path) -> None:
    """Write `fork.json`, which records the origin of a fork, into the fork's directory. Once the
    state of the other run is copied (`copy_state`), the fork no longer needs that run.

    Args:
        source: `RUN@STEP`, a run and the step of a checkpoint; or `RUN`, for the checkpoint from which RUN
            itself would be continued.

    Raises:
        ConfigError: see `find_origin`.
    """
    origin = find_origin(source, directory)
    told = told_of_fork(directory)
    if origin != read_origin(directory):
        inputs = recorded(origin.run, origin.step)
        told = {"run": str(origin.run), "step": origin.step, "inputs": inputs}
    elif "seed" in told or not (origin.run / "config.yaml").exists():  # earlier versions wrote no seed
        return
    told["seed"] = first_seed(origin.run, load_stored(origin.run / "config.yaml")[0].seed)
    write_atomically(directory / FORK_FILE, json.dumps(told) + "\n")


def find_origin(source: str, directory: Path) -> Origin:
    """Return the origin of a fork, without writing anything. If the directory already has this fork, return
    the recorded origin.

    Args:
        source: see `begin_fork`.
        directory: the fork's directory.

    Raises:
        ConfigError: there is no such run or checkpoint, or the directory is not empty and has no such fork.
    """
    name, at, step = source.rpartition("@")
    if not (at and step.isdigit()):
        name, step = source, ""
    run, before = absolute(name), read_origin(directory)
    begun = (
        before
        if before is not None and before.run == run.resolve() and step in ("", str(before.step))
        else None
    )
    if begun and is_begun(directory):
        return begun
    if not (run / "config.yaml").exists():
        raise ConfigError(
            f"--from {source}: {run} holds no run; give RUN@STEP, a run directory and a step with a "
            "checkpoint"
        )
    if begun and is_run(directory):
        return begun
    names = [file.name for file in directory.iterdir() if file.name != f".new-{FORK_FILE}"]
    if not all(is_own(name, ("lock", GIVEN)) for name in names):
        raise ConfigError(f"{directory} is not empty; give a fork a --run_dir of its own")
    checkpoints = _checkpoints(run)
    steps, newest = checkpoints.steps, checkpoints.next_loaded
    if newest is None or (step and int(step) not in steps):
        listed = ", ".join(map(str, steps)) or "none"
        raise ConfigError(
            f"--from {source}: there is no such checkpoint; {run} has {listed} (checkpoint.keep_last says "
            "how many a run keeps)"
        )
    return Origin(run.resolve(), int(step or newest))


def verify_origin(origin: Origin) -> None:
    """Refuse an origin whose checkpoint cannot be used. The checkpoint is verified, but not loaded.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        LedgerError: the run's ledger lacks answers that the run had taken by the checkpoint.
    """
    _checkpoints(origin.run).verify_step(origin.step)
    refuse_lost(origin.run, origin.step)


def copy_state(directory: Path, *, same_evaluation: bool) -> None:
    """Fill a fork's directory with the state that the original run had at the checkpoint with which the fork
    begins.

    Args:
        same_evaluation: True if the fork has the same section `evaluation` as the original run. If False, the
            fork's checkpoint gets no metrics of evaluations, its ledger gets no cached answers of
            evaluations, and unanswered questions of evaluations are recorded as failed.

    Raises:
        CheckpointError: the checkpoint is damaged, or was removed meanwhile.
        LedgerError: the ledger cannot be copied.
    """
    origin = origin_of(directory)
    run, step = origin.run, origin.step
    remove_own(directory, keep=("lock", MARK, FORK_FILE, GIVEN))
    theirs = _checkpoints(run)
    tensors, state = theirs.load_step(step)[1:]
    state["alarms"]["back"] = None  # the fork has no checkpoint to roll back to yet
    row = {
        name: value
        for name, value in theirs.row(step).items()
        if same_evaluation or not name.startswith("eval/")
    }
    _checkpoints(directory).save(step, tensors, state, row)
    _copy_ledger(run / "ledger.sqlite", directory / "ledger.sqlite")
    with closing(Store(directory / "ledger.sqlite")) as store, store:
        store.cut(step, evaluated=step > 0 and ROW not in state)
        versions.cut(store, step)
        if not same_evaluation:
            store.forget_judgements()
            close_unanswered(store, "eval", "gold")
    rows = step + (ROW not in state) if step > 0 else 0
    for name in STREAMS.values():
        if (run / name).exists():  # when the fork begins, it reports a missing file
            lines = content_of(run / name).splitlines(keepends=True)
            # the advantages of a step are written before its row
            end = step + 1 if name == STREAMS["advantages"] else rows
            kept = b"".join(takewhile(partial(_is_before, end), lines))
            if kept or name != STREAMS["advantages"]:
                (directory / name).write_bytes(kept)
                sync_to_disk(directory / name)


def _copy_ledger(theirs: Path, own: Path) -> None:
    """Copy a ledger with its trajectories.

    The trajectories come first. So those that the other run drops meanwhile are dropped in the copied rows
    too. Trajectories that it adds meanwhile belong to rounds that the fork does not keep.
    """
    with closing(Reader(theirs)) as store:
        TrajectoryFiles.beside(own).take_over(store.files, store.kept_names())
    with (
        closing(sqlite3.connect(read_only_address(theirs), uri=True)) as old,
        closing(sqlite3.connect(own)) as new,
    ):
        old.backup(new)


def _is_before(row: int, line: bytes) -> bool:
    """Return True if a line of one of `STREAMS` has a step below `row`, or is damaged. The fork deals with
    damaged lines when it continues the file."""
    try:
        return bool(parse_json(line)["step"] < row)
    except (ValueError, KeyError, TypeError):
        return True


def _checkpoints(run_dir: Path) -> Checkpoints:
    return Checkpoints(run_dir / "checkpoints", every=1, keep_last=1, background=False)
