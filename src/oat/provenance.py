"""With what the rows of a run were made: `RUN/environment.json`, a list with an entry for each process that made some.

No variables of the environment, no names of users or machines; and of a command line no values of flags that are called like secrets.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from oat.errors import ConfigError
from oat.files import write_atomically

LIBRARIES = (
    *("oat-align", "torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "huggingface-hub"),
    *("peft", "datasets", "pyarrow", "vaderSentiment", "tensorboard"),
)
"""Whose versions are told, where they are installed: those that can touch what a run computes, reads or writes."""

_SECRET = re.compile(r"(--)?(.*[._])?(api_key|token|secret|password)")
_SECRET_WITHIN = re.compile(r"""((?:api_key|token|secret|password)['"]?\s*:\s*)[^,}\s]+""")
_PATIENCE_S = 5.0


def environment_of(seed: int) -> dict[str, Any]:
    """What this process is: when, by which command and seed, versions, machine, and the git state of the working directory."""
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
        "seed": seed,
        "versions": {"python": platform.python_version(), **versions()},
        "platform": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "devices": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        },
        "git": git_state(),
    }


def entries(file: Path) -> list[dict[str, Any]]:
    """What stands in an `environment.json`, the first process first; nothing where there is none.

    Raises:
        ConfigError: it is no list of entries.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    except ValueError as error:
        raise ConfigError(f"{file}: this is not JSON ({error}); move it away, and run the same command again") from None
    if not isinstance(found, list):
        raise ConfigError(f"{file}: expected a list of entries, got {type(found).__name__}; move it away, and run the same command again")
    return found


def add_entry(file: Path, entry: Mapping[str, Any]) -> None:
    """Append an entry; those before it stay as they are."""
    write_atomically(file, json.dumps([*entries(file), entry], indent=1, ensure_ascii=False) + "\n")


def command_line(argv: Sequence[str]) -> list[str]:
    """A command line as typed, but for the folder of the program, and for the values of flags that are called like secrets."""
    name = Path(argv[0]).name if argv else ""
    told = ["oat" if name == "__main__.py" else name]
    hides = False
    for word in argv[1:]:
        flag, equals, _ = word.partition("=")
        plain = _SECRET_WITHIN.sub(r"\1***", word)
        told.append("***" if hides and not word.startswith("--") else f"{flag}=***" if equals and _is_flag(flag) else plain)
        hides = not equals and _is_flag(flag)
    return told


def is_secret(name: str) -> bool:
    """Whether a field is called like something that nobody should read."""
    return _SECRET.fullmatch(name) is not None


def _is_flag(word: str) -> bool:
    return word.startswith("--") and is_secret(word)


def versions() -> dict[str, str]:
    """The installed ones of `LIBRARIES`."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any] | None:
    """The commit of the working directory, and whether files that git knows differ from it; None where there is no git or no commit.

    Of `dirty` None means that git did not say so in time.
    """
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "dirty": None if status is None else bool(status.strip())}


def _git(*arguments: str) -> str | None:
    """What git prints; None if it fails. It starts nothing that the repository names, and writes nothing."""
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *arguments],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None
