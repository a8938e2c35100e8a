"""Users' own code, by name: `path/to/file.py:Name` or `package.module:Name`; and `python:Name`, an object that was given from Python."""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from oat.errors import ConfigError, did_you_mean

given: dict[str, Any] = {}
"""What `python:Name` names: objects of this process (`oat.Trainer`)."""


def load_symbol(spec: str) -> Any:
    """What `path/to/file.py:Name`, `package.module:Name` or `python:Name` names.

    A file is run once for each content it has; naming it twice gives the same objects. The author of a config is trusted: its code runs.

    Raises:
        ConfigError: the name has neither form, the file or module is missing or fails while it is imported, or has no such attribute.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise ConfigError(f"{spec!r} names no code; write path/to/file.py:Name or package.module:Name")
    if place == "python":
        if name not in given:
            raise ConfigError(f"{spec}: the run was begun from Python, with an object that no file has; go on with it through oat.Trainer")
        return given[name]
    module = _load_file(Path(place), spec) if place.endswith(".py") else _load_module(place, spec)
    if not hasattr(module, name):
        public = [attribute for attribute in vars(module) if not attribute.startswith("_")]
        raise ConfigError(f"{spec}: {place} has no {name}; {did_you_mean(name, public)}")
    return getattr(module, name)


def _load_file(path: Path, spec: str) -> ModuleType:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{spec}: cannot read {path} ({error.strerror or error}); check the path, which is relative to where you are") from error
    digest = hashlib.blake2b(str(path.resolve()).encode() + b"\0" + content, digest_size=8).hexdigest()
    unique = f"oat_plugin_{path.stem}_{digest}"
    if unique in sys.modules:
        return sys.modules[unique]
    found = importlib.util.spec_from_file_location(unique, path)
    assert found is not None, path
    assert found.loader is not None, path
    module = sys.modules[unique] = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[unique]
        raise ConfigError(
            f"{spec}: {path} fails when imported: {_describe(error, found.origin)}; run `python {path}` to see where, and repair it"
        ) from error
    return module


def _load_module(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{spec}: the module {name} cannot be imported: {_describe(error, None)}; install it, put its folder on PYTHONPATH, or name a file "
            "as path/to/file.py:Name"
        ) from error


def _describe(error: BaseException, file: str | None) -> str:
    """The error in one line, with the last line of the file that it passed through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")
