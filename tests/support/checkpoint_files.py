"""Helpers that save and load checkpoints of a few tensors."""

import torch

from oat.rundir.checkpoints import Checkpoints


def save(checkpoints: Checkpoints, *steps: int, **metrics: float) -> None:
    for step in steps:
        checkpoints.save(
            step, {"learner/w": torch.full((3,), float(step))}, {"learner": {"updates": step}}, metrics
        )
    checkpoints.wait()


def on_disk(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.directory.iterdir())


def loaded_step(checkpoints: Checkpoints) -> int:
    found = checkpoints.load()
    assert found is not None
    step, tensors, state = found
    assert torch.equal(tensors["learner/w"], torch.full((3,), float(step)))
    assert state == {"learner": {"updates": step}}
    return step
