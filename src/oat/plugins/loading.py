"""Users' own code, by name: `path/to/file.py:Name` or `package.module:Name`; and `python:Name`, an object
that was given from Python."""

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from oat.errors import ConfigError, did_you_mean
from oat.files import seen
from oat.plugins.calls import bare, guarded

given: dict[str, Any] = {}
"""What `python:Name` names: objects of this process (`oat.Trainer`)."""

elsewhere: dict[str, str] = {}
"""What `own_files` gives in processes that run a user's code for this one."""

_PREFIX = "oat_plugin_"
_named: dict[Path, str] = {}
"""The files that were named, each with the hash of what was run of it last."""
_folders: dict[Path, None] = {}
"""The folders of the files and modules that were named."""
_seen: dict[str, tuple[Any, Path, str]] = {}
"""Of imported files the module's spec, which is a new one when it is imported anew, and the hash they had
then."""
_INSTALLED = (
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")),
    f"{Path(__file__).parent.parent}/",
)


@contextmanager
def naming(objects: Mapping[str, Any]) -> Iterator[None]:
    """Within it `python:Name` names these objects too; afterwards only what it named before."""
    before = dict(given)
    given.update(objects)
    try:
        yield
    finally:
        given.clear()
        given.update(before)


def same_by_file(stored: Any, now: Any) -> Any:
    """What a run's configuration is given now, where `file.py:Name` or `module:Name` stands for its
    `python:Name`: such names are as the run has them, and from here on (within `naming`) they name what the
    file has.

    Args:
        stored: a value of the run's configuration, as plain data.
        now: what stands in its place.

    Raises:
        ConfigError: as `load_symbol`.
    """
    if isinstance(stored, dict) and isinstance(now, dict):
        return {name: same_by_file(stored.get(name), value) for name, value in now.items()}
    if isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        return [same_by_file(*pair) for pair in zip(stored, now, strict=True)]
    if not (
        isinstance(stored, str) and isinstance(now, str) and stored != now and stored.startswith("python:")
    ):
        return now
    name = stored.partition(":")[2]
    if now.rpartition(":")[0] in ("", "python") or now.rpartition(":")[2] != name:
        return now
    given[name] = load_symbol(now)
    return stored


def load_symbol(spec: str) -> Any:
    """What `path/to/file.py:Name`, `package.module:Name` or `python:Name` names.

    A file is run once for each content it has; naming it twice gives the same objects. The author of a config
    is trusted: its code runs.

    Raises:
        ConfigError: the name has neither form, the file or module is missing or fails while it is imported,
        or has no such attribute.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise ConfigError(f"{spec!r} names no code; write path/to/file.py:Name or package.module:Name")
    if place == "python":
        if name not in given:
            raise ConfigError(
                f"{spec}: the run was begun from Python, with this object; go on with it through "
                "oat.Trainer, or name "
                f"the file that has it in its place, as path/to/file.py:{name}"
            )
        return given[name]
    module = _load_file(Path(place), spec) if place.endswith(".py") else _load_module(place, spec)

    def refuse(what: str) -> ConfigError:
        return ConfigError(
            f"{spec}: {place} fails when it is asked for {name}: {bare(what)}; install what it lacks, or "
            "repair it"
        )

    with guarded(place, refuse):  # a module may import what it has only when it is asked for it
        has_it = hasattr(module, name)
    if not has_it:
        public = [attribute for attribute in vars(module) if not attribute.startswith("_")]
        raise ConfigError(f"{spec}: {place} has no {name}; {did_you_mean(name, public)}")
    return getattr(module, name)


def own_files(base: Path) -> dict[str, str]:
    """The user's own code in this process: a hash of each file below the working directory, or below the
    folder of code that was named, that a module was imported from, as it was when it was first seen; nothing
    that is installed, and not the script itself. By `shown_name`.

    Args:
        base: the working directory.
    """
    files = {}
    for unique, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None)
        if not isinstance(place, str) or unique.startswith((_PREFIX, "__main")) or _is_installed(place):
            continue
        spec = getattr(module, "__spec__", None)
        if (place not in _seen or _seen[place][0] is not spec) and Path(place).is_file():
            _seen[place] = spec, Path(place).resolve(), _hash(Path(place).read_bytes())
        if place in _seen and (name := shown_name(_seen[place][1], base)) is not None:
            files[name] = _seen[place][2]
    own = {name: digest for path, digest in _named.items() if (name := shown_name(path, base)) is not None}
    return dict(sorted({**elsewhere, **files, **own}.items()))


def shown_name(path: Path, base: Path) -> str | None:
    """A user's file by its path from the working directory, or from a folder of code that was named, with
    that folder's name; None for others."""
    if _is_installed(str(path)):
        return None
    if path.is_relative_to(base):
        return path.relative_to(base).as_posix()
    folder = next((folder for folder in _folders if path.is_relative_to(folder)), None)
    return None if folder is None else (folder.name / path.relative_to(folder)).as_posix()


def _is_installed(place: str) -> bool:
    return place.startswith(_INSTALLED) or "/site-packages/" in place or "/dist-packages/" in place


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _load_file(path: Path, spec: str) -> ModuleType:
    file = seen(path).resolve()
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{spec}: cannot read {path} ({error.strerror or error}); check the path, which is relative "
            "to where you are"
        ) from error
    _named.pop(file, None)
    _named[file] = _hash(content)  # behind those that another run named
    _folders[file.parent] = None
    digest = hashlib.blake2b(str(file).encode() + b"\0" + content, digest_size=8).hexdigest()
    unique = f"{_PREFIX}{path.stem}_{digest}"
    if unique in sys.modules:
        return sys.modules[unique]
    found = importlib.util.spec_from_file_location(unique, seen(path))
    assert found is not None, path
    assert found.loader is not None, path
    module = sys.modules[unique] = importlib.util.module_from_spec(found)

    def refuse(what: str) -> ConfigError:
        return ConfigError(
            f"{spec}: {path} fails when imported: {bare(what)}; run `python {path}` to see where, and "
            "repair it"
        )

    try:
        with guarded(str(path), refuse, partial(_line, file=found.origin)):
            found.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


def _load_module(name: str, spec: str) -> ModuleType:
    def refuse(what: str) -> ConfigError:
        hint = "install it, put its folder on PYTHONPATH, or name a file as path/to/file.py:Name"
        return ConfigError(f"{spec}: the module {name} cannot be imported: {bare(what)}; {hint}")

    with guarded(name, refuse):
        module = importlib.import_module(name)
        if file := getattr(module, "__file__", None):
            _folders[Path(file).resolve().parent] = None
        return module


def place_of(error: BaseException) -> str | None:
    """Where an error passed last through code that was named, or lies beside it, as "line 7 of file.py"; None
    where it did not."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_named(Path(frame.filename))]
    return f"line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else None


def _is_named(file: Path) -> bool:
    return not _is_installed(str(file)) and (
        file.resolve() in _named or any(file.is_relative_to(folder) for folder in _folders)
    )


def _line(error: BaseException, file: str | None) -> str:
    """The last line of the file that an error passed through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {lines[-1]})" if lines else ""
