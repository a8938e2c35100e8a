"""The root of a model's modules.

Everything that the learner computes with a model is computed within one call of its root: the body, the head
in chunks, a value head. So hooks of the root see each pass once, and a root can be sharded, whose weights are
whole only within its `forward`.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class Root(torch.nn.Module):
    """The root of a module of transformers, which several models may share: a policy with an adapter, and
    its base.

    Args:
        module: None: a subclass is the root of its own modules.
    """

    def __init__(self, module: torch.nn.Module | None = None):
        super().__init__()
        if module is not None:
            self.body = module

    def forward(self, compute: Callable[[], T]) -> T:
        """Return what `compute()` returns: tensors, or containers of them. It uses the modules below this
        one."""
        return compute()
