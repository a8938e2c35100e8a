"""Online alignment of language models: sample, choose, ask, learn, repeat.

oat.Trainer(model="org/name", oracle=reward, prompts="prompts.jsonl", algorithm="grpo").train()
oat.load_run("runs/grpo").metrics
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oat.reading import load_run
    from oat.trainer import Trainer

__all__ = ["Trainer", "load_run"]

_HOMES = {"Trainer": "oat.trainer", "load_run": "oat.reading"}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `import oat` is quick and brings no torch along."""
    if name not in _HOMES:
        raise AttributeError(f"module 'oat' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
