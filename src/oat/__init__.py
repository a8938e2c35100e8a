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
    """Set the cache folder of torch's compiler to a folder of the user's own, unless the environment sets it.
    Files in this folder are loaded as code, so nobody else may be able to write there.

    transformers imports the compiler, which makes the folder even though our code compiles nothing. By
    default the folder would be in TMPDIR, and every run would leave one there.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "torch" / "inductor"
    existing = next(folder for folder in (cache, *cache.parents) if os.path.exists(folder))
    if cache.is_absolute() and os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


_move_compiler_cache()


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import oat` is quick and does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'oat' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
