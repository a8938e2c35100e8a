"""The provenance of a run's rows: `RUN/environment.json`, a list with one entry for each process that made
rows.

It has no environment variables and no names of users or machines, and no values of command-line flags that
are named like secrets.

A process writes its entry with its first row (in a new run before it), so re-running a finished run changes
no file. A fork has entries of its own from its first row on. An entry has `inputs` where they differ from
those of the entries before. User files that are imported later are added at the next checkpoint, since a kill
goes back no further.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from oat.errors import ConfigError, DirectoryError, printable
from oat.files import Standing, parse_json, start, write_atomically

LIBRARIES = (
    *(
        "oat-align",
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "numpy",
        "msgspec",
        "huggingface-hub",
    ),
    *("peft", "datasets", "pyarrow", "vaderSentiment", "tensorboard", "wandb", "mlflow-skinny"),
)
"""Libraries whose versions are recorded where they are installed: those that can touch what a run computes,
reads or writes."""

_SECRET = re.compile(r"(--)?(.*[._])?(api_key|token|secret|password)")
_SECRET_WITHIN = re.compile(r"""((?:api_key|token|secret|password)['"]?\s*:\s*)[^,}\s]+""")
_PATIENCE_S = 5.0


def environment_of(seed: int) -> dict[str, Any]:
    """The entry of this process: time, command, seed, versions, machine, and the git state of the working
    directory."""
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
    """The entries of an `environment.json`, the first process first; none if there is no file.

    Raises:
        ConfigError: it is no list of entries.
    """
    try:
        found = parse_json(file.read_text(encoding="utf-8")) if file.exists() else []
    except ValueError as error:
        raise ConfigError(
            f"{file}: this is not JSON ({error}); move it away, and run the same command again"
        ) from None
    if not isinstance(found, list):
        raise ConfigError(
            f"{file}: expected a list of entries, got {type(found).__name__}; move it away, and run the "
            "same command again"
        )
    return found


def add_entry(file: Path, entry: Mapping[str, Any]) -> None:
    """Append an entry; the entries before it stay as they are."""
    _write(file, [*entries(file), entry])


def recorded_inputs(found: Sequence[Any], first_row: int | None = None) -> dict[str, Any] | None:
    """The inputs of a run's rows, by the last entry that has `inputs`; None: no entry has.

    Args:
        found: entries.
        first_row: the last entry whose first row is not later than this one counts, or the first entry if all
            are later; None: the last of all.
    """
    told = [entry for entry in found if isinstance(entry, dict) and isinstance(entry.get("inputs"), dict)]
    by_then = [entry for entry in told if first_row is None or entry["first_row"] <= first_row] or told[:1]
    return dict(by_then[-1]["inputs"]) if by_then else None


class Told:
    """Writes the entry of one process, with its first row; a process without rows changes no file.

    Args:
        environment: gives the entry.
        inputs: the inputs of the rows (`build/fingerprints.py`) without the user's modules. They are written
            where they differ from those of the entries before.
        modules: gives the user's own files that the process has imported so far.

    Attributes:
        untold: the first row of this process, until its entry is written.
    """

    def __init__(
        self,
        file: Path,
        environment: Callable[[], Mapping[str, Any]],
        inputs: Mapping[str, Any],
        modules: Callable[[], Mapping[str, str]],
    ):
        self.file = file
        self.environment = environment
        self.inputs = inputs
        self.modules = modules
        self.untold: int | None = None
        self.said: dict[str, str] | None = None
        self.written = Standing()

    def begin(self, row: int) -> None:
        """Note that this process makes the rows from this one on.

        Raises:
            ConfigError: the file is no list of entries.
        """
        entries(self.file)
        self.untold = row

    def tell(self) -> None:
        """Write the entry of this process, once.

        Raises:
            DirectoryError: the file that this process wrote is gone.
        """
        self.written.refuse_lost(DirectoryError)
        if self.untold is not None:
            self.said = dict(self.modules())
            now = {**self.inputs, "modules": self.said}
            own = {} if now == recorded_inputs(entries(self.file)) else {"inputs": now}
            add_entry(self.file, {"first_row": self.untold, **self.environment(), **own})
            self.untold, self.written = None, Standing(self.file)

    def amend(self) -> None:
        """Add to the entry of this process the user's files that it has imported since.

        Raises:
            DirectoryError: as `tell`.
        """
        self.written.refuse_lost(DirectoryError)
        if self.said is not None and (now := dict(self.modules())) != self.said:
            *before, own = entries(self.file)
            self.said = now
            _write(self.file, [*before, {**own, "inputs": {**self.inputs, "modules": now}}])
            self.written = Standing(self.file)


def _write(file: Path, entries: Sequence[Any]) -> None:
    write_atomically(file, printable(json.dumps(entries, indent=1, ensure_ascii=False)) + "\n")


def command_line(argv: Sequence[str]) -> list[str]:
    """A command line as typed, without the folder of the program, and with `***` for the values of flags that
    are named like secrets."""
    name = Path(argv[0]).name if argv else ""
    told = ["oat" if name == "__main__.py" else name]
    hides = False
    for word in argv[1:]:
        flag, equals, _ = word.partition("=")
        plain = _SECRET_WITHIN.sub(r"\1***", word)
        told.append(
            "***"
            if hides and not word.startswith("--")
            else f"{flag}=***"
            if equals and _is_flag(flag)
            else plain
        )
        hides = not equals and _is_flag(flag)
    return told


def is_secret(name: str) -> bool:
    """True if a field is named like something that nobody should read."""
    return _SECRET.fullmatch(name) is not None


def _is_flag(word: str) -> bool:
    return word.startswith("--") and is_secret(word)


def versions() -> dict[str, str]:
    """The versions of the installed libraries of `LIBRARIES`."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any] | None:
    """The commit of the working directory, and in `dirty` whether files that git tracks differ from it (None:
    git did not say so in time). None: there is no git, or no commit.
    """
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "dirty": None if status is None else bool(status.strip())}


def _git(*arguments: str) -> str | None:
    """The output of a git command; None if it fails. Git starts no program that the repository names, and
    writes nothing."""
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *arguments],
            cwd=start(),
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None
