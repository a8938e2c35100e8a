"""Online alignment of language models: sample, choose, ask, learn, repeat.

oat.Trainer(model="org/name", oracle=reward, prompts="prompts.jsonl", algorithm="grpo").train()
oat.load_run("runs/grpo").metrics
"""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oat.rundir.reading import load_run
    from oat.trainer import Trainer

__all__ = ["Trainer", "load_run"]

_HOMES = {"Trainer": "oat.trainer", "load_run": "oat.rundir.reading"}


def _move_compiler_cache() -> None:
    """Name a folder of the user's for the compiler of torch, unless the environment does; nobody else may
    write there, and what it holds is loaded as code.

    transformers imports the compiler, and with it comes the folder; by default it stands in TMPDIR, where
    each run would leave one. Nothing of ours compiles.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "torch" / "inductor"
    existing = next(folder for folder in (cache, *cache.parents) if os.path.exists(folder))
    if cache.is_absolute() and os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


_move_compiler_cache()


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `import oat` is quick and brings no torch
    along."""
    if name not in _HOMES:
        raise AttributeError(f"module 'oat' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
