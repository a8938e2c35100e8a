"""Loads users' code by name: `path/to/file.py:Name`, `package.module:Name`, or `python:Name` for an object
that a Python program passed to `oat.Trainer`.

The options that users' classes and functions take.
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from oat.errors import ConfigError, did_you_mean
from oat.files import absolute
from oat.plugins.calls import bare, guarded, is_installed, last_place


def keywords(found: Callable[..., Any]) -> set[str] | None:
    """Return the names of the keywords that a function, or a class's constructor, takes. Return None if it
    takes any keyword (`**kwargs`), or has no signature that can be read."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # some built-in classes have no signature
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


given: dict[str, Any] = {}
"""The objects that `python:Name` names, by `Name`."""

elsewhere: dict[str, str] = {}
"""The users' files that worker processes of this process have loaded: for each file's name, the hash of its
content (`own_files`)."""

_PREFIX = "oat_plugin_"
_named: dict[Path, str] = {}
"""The files that `load_symbol` has loaded, each with the hash of the content that was loaded last."""
_folders: dict[Path, None] = {}
"""The folders of the files and modules that `load_symbol` has loaded."""
_seen: dict[str, tuple[Any, Path, str]] = {}
"""For each file of an imported module: the module's spec, the resolved path, and the hash of the content when
`own_files` first found this spec. A new import of the module makes a new spec."""
_installed: dict[str, ModuleType] = {}
"""Imported modules that `own_files` has found to be installed, by their names in `sys.modules`."""


@contextmanager
def naming(objects: Mapping[str, Any]) -> Iterator[None]:
    """A context in which `python:Name` also finds these objects, given by name."""
    before = dict(given)
    given.update(objects)
    try:
        yield
    finally:
        given.clear()
        given.update(before)


def same_by_file(stored: Any, now: Any) -> Any:
    """Return `now` with some names replaced. A name `file.py:Name` or `module:Name` becomes `python:Name` if
    `stored` has `python:Name` at the same place. The object of the file or module is loaded, and
    `python:Name` finds it until the enclosing `naming` ends.

    With this function, a run that was begun from Python can be continued with a configuration file.

    Args:
        stored: value of a setting in the stored configuration of the run, as plain data.
        now: value of this setting in the present configuration.

    Raises:
        ConfigError: an object cannot be loaded, as in `load_symbol`.
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
    """Return the object that `path/to/file.py:Name`, `package.module:Name` or `python:Name` names.

    The code of the file or module runs in this process. A file's code runs once for each content of the file:
    if the content has been loaded before, the earlier objects are returned.

    Raises:
        ConfigError: `spec` has none of these forms, the file or module is missing or fails while it is
            imported, or there is no attribute or object `Name`.
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

    with guarded(place, refuse):  # a module may import an attribute only when the attribute is read
        has_it = hasattr(module, name)
    if not has_it:
        public = [attribute for attribute in vars(module) if not attribute.startswith("_")]
        raise ConfigError(f"{spec}: {place} has no {name}; {did_you_mean(name, public)}")
    return getattr(module, name)


def travelling(spec: str) -> str:
    """Return the name by which another process finds the object that `spec` names here. An object that was
    given from Python, `python:Name`, becomes `package.module:Name`.

    Raises:
        ConfigError: another process cannot import the object from a module.
    """
    place, _, name = spec.rpartition(":")
    if place != "python":
        return spec
    found = load_symbol(spec)
    module, path = getattr(found, "__module__", None), getattr(found, "__qualname__", "")
    if module in (None, "__main__") or getattr(sys.modules.get(module), path, None) is not found:
        raise ConfigError(
            f"{name} was given from Python, and other processes cannot import it; define it at the top of a "
            "module of its own and import it from there, or name its file, as path/to/file.py:Name"
        )
    return f"{module}:{path}"


def own_files(base: Path) -> dict[str, str]:
    """Return the hashes of the user's own files in this process and its workers, by `shown_name`. The user's
    own files are:

    * the files that `load_symbol` has loaded;
    * the files of imported modules below the working directory, or below the folder of a file or module that
      `load_symbol` has loaded. The hash is that of the content when this function first found the file.

    Installed files and the main script are left out.

    Args:
        base: the working directory.
    """
    files = {}
    for unique, module in list(sys.modules.items()):
        if _installed.get(unique) is module:
            continue
        place = getattr(module, "__file__", None)
        if not isinstance(place, str) or unique.startswith((_PREFIX, "__main")):
            continue
        if is_installed(place):
            _installed[unique] = module
            continue
        spec = getattr(module, "__spec__", None)
        if (place not in _seen or _seen[place][0] is not spec) and Path(place).is_file():
            _seen[place] = spec, Path(place).resolve(), _hash(Path(place).read_bytes())
        if place in _seen and (name := shown_name(_seen[place][1], base)) is not None:
            files[name] = _seen[place][2]
    own = {name: digest for path, digest in _named.items() if (name := shown_name(path, base)) is not None}
    return dict(sorted({**elsewhere, **files, **own}.items()))


def shown_name(path: Path, base: Path) -> str | None:
    """Return the name under which a user's file is shown and stored:

    * for an installed file: None;
    * for a file below `base`: its path relative to `base`;
    * for a file below the folder of a file or module that `load_symbol` has loaded: the folder's name,
      followed by the path in the folder;
    * for any other file: None.
    """
    text = str(path)
    if is_installed(text):
        return None
    if text.startswith(os.path.join(base, "")):
        return path.relative_to(base).as_posix()
    folder = next((folder for folder in _folders if text.startswith(os.path.join(folder, ""))), None)
    return None if folder is None else (folder.name / path.relative_to(folder)).as_posix()


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


class _SourceLoader(SourceFileLoader):
    """A loader that compiles a user's file at each import, without Python's bytecode cache. The cache
    compares only size and modification time in whole seconds, so it could return an old version."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _load_file(path: Path, spec: str) -> ModuleType:
    file = absolute(path).resolve()
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{spec}: cannot read {path} ({error.strerror or error}); check the path, which is relative "
            "to where you are"
        ) from error
    _named.pop(file, None)
    _named[file] = _hash(content)  # now the last: `own_files` prefers it to an equal name of another run
    _folders[file.parent] = None
    digest = hashlib.blake2b(str(file).encode() + b"\0" + content, digest_size=8).hexdigest()
    unique = f"{_PREFIX}{path.stem}_{digest}"
    if unique in sys.modules:
        return sys.modules[unique]
    found = importlib.util.spec_from_file_location(unique, loader=_SourceLoader(unique, str(absolute(path))))
    assert found is not None, path
    assert found.loader is not None, path
    module = sys.modules[unique] = importlib.util.module_from_spec(found)

    def refuse(what: str) -> ConfigError:
        return ConfigError(
            f"{spec}: {path} fails when imported: {bare(what)}; run `python {path}` to see where, and "
            "repair it"
        )

    try:
        with guarded(str(path), refuse, found.origin):
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
    """Find the last frame of an error's traceback that is in the user's code, and return its place, such as
    "line 7 of file.py"; None if there is no such frame. The user's code is the files that `load_symbol` has
    loaded, and all files below their folders, without installed packages."""
    return last_place(error, lambda file: _is_named(Path(file)))


def _is_named(file: Path) -> bool:
    return not is_installed(str(file)) and (
        file.resolve() in _named or any(file.is_relative_to(folder) for folder in _folders)
    )
