"""The provenance of a run's rows: `RUN/environment.json`, a list with one entry for each process that made
rows.

The file has no environment variables. The values of flags with a secret's name, such as `--api_key`, are left
out. Names of users or machines occur only if the command line has them.

When entries are written:
* A process that begins at step 0 writes its entry when it opens the run's files, before the evaluation.
* Any other process writes its entry immediately before its first row. So re-running a finished run changes no
  file.
* If a process imports files of the user later, it adds them to its entry before the next checkpoint. A
  continued run starts from a checkpoint, so this is early enough.

An entry has `inputs` only if they differ from those of the last entry that has `inputs`. The entries of a
fork begin with the fork's first row.

Where a fork begins: what `fork.json`, the first file of its directory, says of the run that it was made
from.
"""

import datetime
import functools
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import torch

from oat.errors import ConfigError, DirectoryError, printable, warn
from oat.files import DirectoryGuard, parse_json, start, write_atomically

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
"""Libraries that can affect what a run computes, reads or writes. If one is installed, its version is
recorded."""

_SECRET = re.compile(r"(--)?(.*[._])?(api_key|token|secret|password)")
_SECRET_WITHIN = re.compile(r"""((?:api_key|token|secret|password)['"]?\s*:\s*)[^,}\s]+""")
_PATIENCE_S = 5.0


_Model = TypedDict("_Model", {"of": str, "is": dict[str, dict[str, Any]]})


class _Oracle(TypedDict):
    of: str
    version: str | None
    made_of: dict[str, dict[str, Any]]


class _Inputs(TypedDict, total=False):
    """The form of the inputs of an entry; `assemble/fingerprints.py` says what they mean."""

    readers: dict[str, str]
    models: dict[str, _Model]
    weights: dict[str, _Model]
    prompts: list[str]
    held_out: dict[str, Any]
    oracles: dict[str, _Oracle]
    modules: dict[str, str]
    engine: Any
    template: dict[str, Any]


def environment_of(seed: int) -> dict[str, Any]:
    """Return the entry of this process for `environment.json`: time, command, seed, versions, machine, and
    the git state of the working directory."""
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
    """Return the entries of an `environment.json`, oldest first: one for each process that began or continued
    the run and wrote rows. Return an empty list if there is no file.

    Raises:
        ConfigError: the file is not JSON, or not a list of entries.
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
    """Append an entry to an `environment.json`."""
    _write(file, [*entries(file), entry])


def recorded_inputs(found: Sequence[Any], first_row: int | None = None) -> dict[str, Any] | None:
    """Return the inputs with which a run's rows of metrics were made: those of the last entry that has
    `inputs`. Return None if no entry has them.

    Args:
        found: the entries of `environment.json`.
        first_row: use only entries that begin at this row of metrics or before it; if there are none, use the
            first entry with `inputs`. None: use all entries.

    Raises:
        ConfigError: the inputs have not the form in which `oat` writes them.
    """
    told = [entry for entry in found if isinstance(entry, dict) and isinstance(entry.get("inputs"), dict)]
    by_then = [entry for entry in told if first_row is None or entry["first_row"] <= first_row] or told[:1]
    if not by_then:
        return None
    try:
        msgspec.convert(by_then[-1]["inputs"], _Inputs)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"environment.json: somebody has changed the `inputs` of an entry ({error}); put the file back "
            "as `oat` wrote it, or fork the run"
        ) from None
    return dict(by_then[-1]["inputs"])


class ProvenanceWriter:
    """Writes the entry of one process into `environment.json`. A process that makes no rows writes no entry.

    Args:
        environment: function that returns the entry.
        inputs: the inputs of the rows (`assemble/fingerprints.py`), without the user's modules. They are
            written only if they or the modules differ from those that were recorded last.
        modules: function that returns a hash of each of the user's own files that the process has imported so
            far.
        news: sentences about the inputs, which people are told when the entry is written.

    Attributes:
        untold: number of the process's first row. It is None before `begin`, and after the entry is written.
    """

    def __init__(
        self,
        file: Path,
        environment: Callable[[], Mapping[str, Any]],
        inputs: Mapping[str, Any],
        modules: Callable[[], Mapping[str, str]],
        news: Iterable[str] = (),
    ):
        self.file = file
        self.environment = environment
        self.inputs = inputs
        self.modules = modules
        self.news = news
        self.untold: int | None = None
        self.said: dict[str, str] | None = None
        self.written = DirectoryGuard()

    def begin(self, row: int) -> None:
        """Note the number of the first row that this process makes.

        Raises:
            ConfigError: `environment.json` is not a list of entries.
        """
        entries(self.file)
        self.untold = row

    def tell(self) -> None:
        """Append the entry of this process to the file, if `begin` was called and the entry is not there yet.

        Raises:
            DirectoryError: the file that this process wrote is gone.
        """
        self.written.refuse_lost(DirectoryError)
        if self.untold is not None:
            self.said = dict(self.modules())
            now = {**self.inputs, "modules": self.said}
            own = {} if now == recorded_inputs(entries(self.file)) else {"inputs": now}
            add_entry(self.file, {"first_row": self.untold, **self.environment(), **own})
            for sentence in self.news:
                warn(sentence)
            self.untold, self.written = None, DirectoryGuard(self.file)

    def amend(self) -> None:
        """Add to the entry of this process the user's files that the process has imported since it wrote the
        entry.

        Raises:
            DirectoryError: the file that this process wrote is gone.
        """
        self.written.refuse_lost(DirectoryError)
        if self.said is not None and (now := dict(self.modules())) != self.said:
            *before, own = entries(self.file)
            self.said = now
            _write(self.file, [*before, {**own, "inputs": {**self.inputs, "modules": now}}])
            self.written = DirectoryGuard(self.file)


def _write(file: Path, entries: Sequence[Any]) -> None:
    write_atomically(file, printable(json.dumps(entries, indent=1, ensure_ascii=False)) + "\n")


def command_line(argv: Sequence[str]) -> list[str]:
    """Return a command line as typed, without the folder of the program. If a flag has a secret's name, `***`
    replaces its value."""
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
    """Return True if a field has a secret's name, such as `api_key`."""
    return _SECRET.fullmatch(name) is not None


def _is_flag(word: str) -> bool:
    return word.startswith("--") and is_secret(word)


@functools.cache
def versions() -> Mapping[str, str]:
    """Return the versions of those libraries of `LIBRARIES` that are installed. They are read once per
    process. Torch's version names its build too (`2.13.0+cu130`), which its package may leave out."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "torch": str(torch.__version__)}


def git_state() -> dict[str, Any] | None:
    """Return the git state of the working directory: `commit`, the commit's hash, and `dirty`, which is True
    if files that git tracks differ from the commit. If git cannot tell in time, `dirty` is None. If there is
    no commit, or git is missing or fails, return None."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "dirty": None if status is None else bool(status.strip())}


def _git(*arguments: str) -> str | None:
    """Return the output of a git command; None if it fails or takes too long. Git starts no file-system
    monitor that the repository names, and writes no file."""
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


FORK_FILE = "fork.json"


@dataclass(frozen=True)
class Origin:
    """The checkpoint with which a fork begins: that of step `step` of the run in the directory `run`."""

    run: Path
    step: int


def origin_of(directory: Path) -> Origin:
    """Return the origin that `opening.fork.begin_fork` has recorded."""
    origin = read_origin(directory)
    assert origin is not None, "begin_fork comes first"
    return origin


def begins_after(directory: Path) -> int:
    """Return the number of steps that were done when a run began: for a fork the step of the checkpoint that
    it began with, for any other run 0."""
    origin = read_origin(directory)
    return 0 if origin is None else origin.step


def first_seed(directory: Path, seed: int) -> int:
    """Return the seed of a run's initial weights (`Seeds`): for a fork that of the run that it was made from,
    for any other run its own.

    Args:
        seed: the run's own seed. It also counts for a fork that an earlier version of oat made.
    """
    found = told_of_fork(directory).get("seed")
    return found if isinstance(found, int) else seed


def read_origin(directory: Path) -> Origin | None:
    """Return where the run in a directory begins; None if it is no fork."""
    try:
        found = told_of_fork(directory)
        return Origin(Path(found["run"]), found["step"])
    except (KeyError, TypeError):
        return None


def told_of_fork(directory: Path) -> dict[str, Any]:
    """Return what `fork.json` says; empty if the directory has no such file, or it is damaged."""
    try:
        found = parse_json((directory / FORK_FILE).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}
