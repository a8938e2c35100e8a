"""Refuses a run whose ledger has lost trajectories that the run still reads."""

import math
from contextlib import closing
from functools import partial
from pathlib import Path

from oat.config.settings import Config
from oat.errors import LedgerError, plural
from oat.learner.replay_buffer import oldest_needed
from oat.ledger.reader import Reader
from oat.ledger.trajectory_files import TrajectoryFiles
from oat.loop import ROW
from oat.rundir.checkpoint_files import newest_state, place_of


def refuse_lost_trajectories(config: Config, run_dir: Path, step: int | None = None) -> None:
    """Refuse a ledger that lacks files of trajectories which the run reads when it goes on: those of
    questions that no step has taken, and of answers that a step after the checkpoint takes or learns from
    again. The content of a file is verified when it is read.

    Args:
        step: the step of the checkpoint from which a fork goes on. Rounds from this step on do not count,
            since the fork asks its own. None: the run itself goes on, from the checkpoint that `latest`
            names.

    Raises:
        LedgerError: a file is missing, the ledger cannot be read, or it is missing and its trajectories are
            there.
    """
    path = run_dir / "ledger.sqlite"
    files = TrajectoryFiles.beside(path)
    files.refuse_link()
    if not path.exists():
        if files.leftovers(()).paths:
            raise LedgerError(
                f"{path}: it is missing, and {files.directory} has trajectories of its rounds. What is lost "
                "would be asked and paid again: put the ledger back, or begin anew in another run_dir"
            )
        return
    name, state = newest_state(run_dir / "checkpoints", step) or ("", {})
    begin = place_of(name)[0] if name else 0
    with closing(Reader(path, at_a_glance=True)) as store:
        first = oldest_needed(config.learner.buffer, begin, partial(store.num_taken, "train"))
        since = first - (ROW in state)  # an unfinished row is about the step before it
        lost = store.lost(since, math.inf if step is None else step)
    if lost:
        raise LedgerError(
            f"{files.directory}: the trajectories of {plural(len(lost), 'round')} are missing there, and "
            f"the run still reads them (the first is the file {str(lost[0])[:80]}). Put back the folder that "
            "the run wrote, beside its ledger.sqlite; or begin anew in another run_dir"
        )
