"""Online alignment of language models: sample, choose, ask, learn, repeat.

oat.Trainer(model="org/name", oracle=reward, prompts="prompts.jsonl", algorithm="grpo").train()
oat.load_run("runs/grpo").metrics
"""

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oat.rundir.reading import load_run
    from oat.trainer import Trainer

__all__ = ["Trainer", "load_run"]

_HOMES = {"Trainer": "oat.trainer", "load_run": "oat.rundir.reading"}


def _move_compiler_cache() -> None:
    """If the environment does not set the cache folder of torch's compiler, set it to a folder that only the
    user can write to. Files in this folder are loaded as code.

    By default, the folder would be in TMPDIR, and every run would leave one there: transformers imports the
    compiler, and the import makes the folder even if the run compiles nothing.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "torch" / "inductor"
    existing = next(folder for folder in (cache, *cache.parents) if os.path.exists(folder))
    if cache.is_absolute() and os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


_move_compiler_cache()


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used. So `import oat` is quick and does not import torch. The
    error about a name of another library's class says what to write."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    advice = ""
    if name.endswith(("Trainer", "Config")):
        from oat.config.peers.classes import advice_on_class

        advice = advice_on_class(name)
    message = f"module 'oat' has no attribute {name!r}{advice}"
    # `from oat import NAME` would put a text of its own in place of an AttributeError's
    if advice and sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
        raise ImportError(message, name=__name__, path=__file__)
    raise AttributeError(message)
