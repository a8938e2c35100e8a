"""Named points of the code at which tests strike a run: kill it, interrupt it, let a write fail. Tests name
the event. Only this table knows the function in which the event happens, which may be private."""

import importlib
from typing import Any

POINTS = {
    "answers are recorded": "oat.ledger.outstanding:Outstanding._record",
    "what is taken is forgotten": "oat.ledger.ledger:Ledger._forget",
    "a round is asked": "oat.collector:Collector._ask",
    "a wave is recorded": "oat.ledger.budgets:BudgetedBatches._record",
    "an optimiser step": "oat.learner.learner:Learner._step",
    "a gradient is clipped": "oat.learner.learner:Learner._clip",
    "passes end": "oat.learner.learner:Learner._end_passes",
    "an evaluation samples": "oat.evaluation.evaluation:Evaluation._sample",
    "an evaluation asks": "oat.evaluation.evaluation:Evaluation._ask",
    "an evaluation is written": "oat.evaluation.evaluation:Evaluation._write",
    "a row is written": "oat.tracking.files:Tracking._write",
    "tensors are copied for a save": "oat.rundir.checkpoints:_with_own_storage",
    "a checkpoint is hashed": "oat.rundir.checkpoint_files:_sha256",
    "a checkpoint is published": "oat.rundir.checkpoints:Checkpoints._publish",
    "the newest checkpoint is named": "oat.rundir.checkpoints:Checkpoints._point",
    "old checkpoints are removed": "oat.rundir.checkpoints:Checkpoints._prune",
    "blobs become files": "oat.ledger.schema:Connection._move_blobs",
    "space of a ledger is given back": "oat.ledger.schema:Connection._give_space_back",
    "a ledger is opened": "oat.ledger.schema:_connect",
    "a folder of trajectories is made": "oat.ledger.trajectory_files:TrajectoryFiles._make_missing",
}
"""The function of each event, as "module:owner.name"."""


def named(place: str) -> tuple[Any, str]:
    """Return the owner and the name of a point, or of "module:owner.name"."""
    module, _, names = POINTS.get(place, place).partition(":")
    *owners, name = names.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return owner, name
