"""Checkpoints with known content, for tests that damage them."""

from pathlib import Path
from typing import Any

import torch

from oat.rundir.checkpoints import Checkpoints

Content = tuple[dict[str, torch.Tensor], dict[str, Any]]

OLD, NEW = 2, 4


def content(step: int) -> Content:
    """Return tensors of several types and a state; every step has other values."""
    generator = torch.Generator().manual_seed(step)
    tensors: dict[str, torch.Tensor] = {
        "learner/policy/weights/w": torch.randn(8, 12, generator=generator),
        "learner/policy/moments/step/w": torch.tensor(float(step)),
        "half": torch.randn(5, generator=generator).to(torch.bfloat16),
        "seen": torch.randint(0, 99, (7,), generator=generator),
    }
    return tensors, {
        "learner": {"updates": step, "rates": [0.1 * step, None]},
        "prompts": {"taken": 4 * step},
    }


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, *content(step), {"eval/sampled": 0.1 * step})
    checkpoints.wait()


def two_good_ones(folder: Path) -> Checkpoints:
    """Save checkpoints of the steps OLD and NEW, and return their store."""
    made = Checkpoints(folder, every=1, keep_last=2)
    save(made, OLD, NEW)
    return made


def loaded_step(checkpoints: Checkpoints) -> int:
    """Load a checkpoint, check that its content is what was saved, and return its step."""
    found = checkpoints.load()
    assert found is not None
    step, tensors, state = found
    expected, expected_state = content(step)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert state == expected_state
    return step
