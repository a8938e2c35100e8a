"""Reading and writing a configuration: a YAML file and command-line flags become the typed tree of
`oat.config.settings`. A flag overrides the file.

A field that nothing reads is an error. Its message says what another library's name is called here, and
proposes similar fields that exist (`unknown_field`).
"""

import dataclasses
import datetime
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import msgspec
import yaml

from oat.config.flags import read_flags
from oat.config.part_names import fields_of_parts
from oat.config.settings import DEFAULT_PARTS, MAIN_FIELDS, Config
from oat.config.yaml_text import SlowLoader, loader_of, tree_to_yaml
from oat.errors import ConfigError, DataError, EngineError, ModelError, TemplateError
from oat.files import absolute, start

Origins = dict[tuple[str, ...], str]
"""The place where each field was set, by the field's path: "file.yaml:12" or "--learner.learning_rate". The
path () has the name of the file."""

_UNREADABLE = (yaml.YAMLError, RecursionError, ValueError)
"""Errors of a YAML loader; `ValueError` for a date such as 2026-02-30."""
_MOST_LEVELS = 100
"""Deepest nesting of a configuration."""
_FIELD = re.compile(r"[a-z_]+(\.[a-z_]+)+(?=[ :])")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, Origins]:
    """Read a YAML file, with the flags that override it, as the typed tree.

    Args:
        path: the YAML file.
        overrides: flags as typed (`read_flags`): `--a.b value`, `--a.b=value`, or `--a.b` alone for true.
            `--model DIR` is short for `--model.path DIR`, `--algorithm dpo` for `--algorithm.name dpo`
            (`MAIN_FIELDS`), and `--serialise` for `--compute.serialise`.

    Raises:
        ConfigError: the file or a flag cannot be read, or a field is unknown, missing or ill-typed. The
            message names the place and says what to do.
    """
    return load_tree(*read_tree(Path(path)), path, overrides)


def load_tree(
    tree: dict[str, Any], origins: Origins, path: str | Path, overrides: Sequence[str]
) -> tuple[Config, Origins]:
    """Do the work of `load_config` with the tree of a file that was read (`read_tree`). Both `tree` and
    `origins` are changed."""
    for flag, name, value in read_flags(overrides):
        is_short = name in MAIN_FIELDS and isinstance(value, str)
        _set(tree, [name, MAIN_FIELDS[name]] if is_short else name.split("."), value, flag, origins)
    tree.setdefault("run_dir", str(Path("runs") / Path(path).stem))
    return _converted(tree, origins), origins


def config_of(tree: Mapping[str, Any]) -> tuple[Config, Origins]:
    """Return the configuration that `dump` made plain, for example in another process.

    Raises:
        ConfigError: see `load_config`.
    """
    origins: Origins = {(): "the run's configuration"}
    return _converted(_copied(tree), origins), origins


def parse_tree(text: str, path: Path = Path("the configuration")) -> dict[str, Any]:
    """Return the tree of YAML text, as `read_tree` does of a file."""
    found: dict[str, Any] = _copied(_parsed(path, text)[0])
    return found


def _converted(tree: dict[str, Any], origins: Origins) -> Config:
    for section, name in DEFAULT_PARTS.items():
        if isinstance(tree.get(section), dict):
            tree[section].setdefault("name", name)
    config: Config = convert(Config, tree, (), origins)
    return config


def _is_given(name: str, origins: Origins) -> bool:
    """Return True if the user gave a field. `load_tree` gives `run_dir` if nobody did."""
    return name != "run_dir" or (name,) in origins


def convert(
    cls: type, data: Mapping[str, Any], path: tuple[str, ...], origins: Origins, algorithm: str | None = None
) -> Any:
    """Make a dataclass from a mapping.

    * If the class has a field `options`, the keys that name no field go into `options`. Otherwise every key
      must name a field.
    * A missing field gets its default. A missing or empty section gets the defaults of its fields.

    Args:
        path: the place of the mapping in the tree, for messages.
        algorithm: name of the run's algorithm, for messages; None: not known, or the mapping names it.

    Raises:
        ConfigError: a field is unknown, ill-typed, or missing and without a default.
    """
    fields, types = {f.name: f for f in dataclasses.fields(cls)}, _types_of(cls)
    needed = [
        f.name
        for f in fields.values()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if not isinstance(data, Mapping):
        raise ConfigError(_no_section(where(path, origins), _dotted(path), path, data))
    if cls is Config:
        data, algorithm = _without_router(data, origins), algorithm_in(data)
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    keys = sorted(data, key=lambda key: cls is Config and key in fields)  # unknown sections come first
    for key, value in ((key, data[key]) for key in keys):
        if key in fields and key != "options":
            values[key] = _value(types[key], value, (*path, key), origins, algorithm)
        elif "options" in fields and isinstance(key, str):
            options[key] = value
        else:
            unknown = {str(name): data[name] for name in data if name not in fields}
            own = {name: data[name] for name in data if name in fields and _is_given(name, origins)}
            tree = data if cls is Config else None
            raise unknown_field(
                (*path, str(key)),
                fields,
                origins,
                unknown=unknown,
                algorithm=algorithm,
                around=tree,
                given=own,
            )
    if "options" in fields:
        values["options"] = options
    for name in needed:
        if name not in values and dataclasses.is_dataclass(types[name]):
            values[name] = _value(types[name], None, (*path, name), origins, algorithm)
        elif name not in values:
            raise _lacking((*path, name), options, origins)
    return cls(**values)


def _lacking(path: tuple[str, ...], options: Mapping[str, Any], origins: Origins) -> ConfigError:
    """Return the error about a missing field. If the section `algorithm` has fields of another library's
    instead, as verl's has, it is about these.

    Args:
        path: the missing field.
        options: what the section has beside the fields of its class.
    """
    from oat.config.peers.table import is_peers

    if path == ("algorithm", "name"):
        theirs = {name: options[name] for name in options if name not in fields_of_parts("algorithm")}
        own = {name: options[name] for name in options if name not in theirs}
        first = next((name for name in theirs if is_peers(f"algorithm.{name}")), None)
        if first is not None:
            valid = ["name", *fields_of_parts("algorithm")]
            return unknown_field(("algorithm", first), valid, origins, unknown=theirs, given=own)
    field = _dotted(path)
    return ConfigError(
        f"{(place := where(path, origins))}: the field `{field}` is missing; add it"
        + ("" if place.startswith("oat.Trainer") else f", or pass --{field}")
    )


def _no_section(place: str, section: str, path: tuple[str, ...], value: Any) -> str:
    """Return the message about a value in place of a section."""
    from oat.config.peers.shown import as_text

    form = "`field: value` lines below it"
    if place.startswith("--"):
        form = f"one of its fields, as --{section}.field value"
    elif place.startswith("oat.Trainer("):
        form = f'{path[0]}={{"field": value}}' if len(path) == 1 else '{"field": value}'
    shown = as_text(path, value) if path else type(value).__name__
    return f"{place}: expected fields of {section}, got {shown}; write {form}"


@functools.lru_cache
def _types_of(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _without_router(tree: Mapping[str, Any], origins: Origins) -> dict[str, Any]:
    """Drop the section `router`, which older configurations have. The only router that it may name is
    `one`.

    Raises:
        ConfigError: the section names a router other than `one`, or has fields other than `name`.
    """
    section = tree.get("router")
    fields = section if isinstance(section, Mapping) else {"name": section}
    for key in fields:
        if key != "name":
            raise unknown_field(("router", str(key)), ["name"], origins)
    if fields.get("name") not in (None, "one"):
        raise ConfigError(
            f"{where(('router', 'name'), origins)}: router.name is {fields['name']!r}, and there are no "
            "routers: every question goes to the oracle of the section `oracle`; remove `router`, and where "
            "rows of the data need different oracles, name them in a mixture (docs/oracles/mixtures.md)"
        )
    return {name: value for name, value in tree.items() if name != "router"}


def unknown_field(
    path: tuple[str, ...],
    valid: Any,
    origins: Origins,
    hint: str = "",
    *,
    unknown: Mapping[str, Any] | None = None,
    algorithm: str | None = None,
    around: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
) -> ConfigError:
    """Return the error about a field that nothing reads, with the message of `oat.config.unknown`.

    Args:
        path: path of the unknown field.
        valid: names of the fields that its section has.
        hint: text that follows the field's name in the message.
        unknown: the unknown fields of its section, with their values; None: their values are not known.
        algorithm: name of the run's algorithm; None: not known.
        around: the whole tree if the section is the tree itself; None: it is another one.
        given: the known fields of its section, with their values; None: their values are not known.
    """
    from oat.config.unknown import described

    names = sorted(name for name in valid if name != "options")
    place = where(path, origins)
    return ConfigError(described(place, path, names, hint, unknown or {}, algorithm, around, given))


def algorithm_in(tree: Any) -> str | None:
    """Return the name of the algorithm in the tree of a configuration; None: it has none, or none by name."""
    section = tree.get("algorithm") if isinstance(tree, Mapping) else None
    name = section.get("name") if isinstance(section, Mapping) else section
    return name if isinstance(name, str) else None


def where(path: tuple[str, ...], origins: Origins) -> str:
    """Return the place where a field was set. If the field was not set, return the place of the nearest
    section around it."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return origins.get((), "the configuration")


@contextmanager
def blaming(config: Config, origins: Origins, field: str) -> Iterator[None]:
    """Within this context, add to the message of an error the place where the field at fault was set.

    * DataError: `field` is at fault. The place is added at the end, since the message begins with file and
      row.
    * ConfigError, EngineError, ModelError, TemplateError: if the message begins with a place, nothing is
      added. If it begins with the name of a field, that field is at fault. Otherwise `field` is at fault.

    Other errors are left alone. If `field` is at fault, the hint that `_beside` returns is added too.
    """
    value: Any = config
    for name in field.split("."):
        value = getattr(value, name, None)
    try:
        yield
    except DataError as error:
        raise DataError(
            f"{error}{_beside(value, origins)} ({field}, {where(tuple(field.split('.')), origins)})"
        ) from error
    except (ConfigError, EngineError, ModelError, TemplateError) as error:
        if any(str(error).startswith(f"{place}: ") for place in origins.values()):
            raise
        named = _FIELD.match(str(error))
        if named and hasattr(config, named[0].split(".")[0]):
            raise type(error)(f"{where(tuple(named[0].split('.')), origins)}: {error}") from error
        is_said = f" is {value!r}" if isinstance(value, str) else ""
        raise type(error)(
            f"{where(tuple(field.split('.')), origins)}: {field}{is_said}: {error}{_beside(value, origins)}"
        ) from error


def refuse_misplaced(path: str | None, origins: Origins) -> None:
    """Refuse a model's relative path if it exists in the configuration's folder, but not in the working
    directory. Without this check, the hub would be asked for a model of this name.

    Raises:
        ModelError: the path is refused.
    """
    if _beside(path, origins):
        raise ModelError(f"there is no directory {path} in {start()}")


def _beside(value: Any, origins: Origins) -> str:
    """Return a hint for an error message if a relative path does not exist in the working directory but
    exists in the configuration's folder; "" otherwise."""
    path = Path(value.partition(":")[0]) if isinstance(value, str) else Path()
    there = Path(origins.get((), "")).parent / path
    if path.is_absolute() or absolute(path).exists() or not absolute(there).exists():
        return ""
    return (
        f"; there is {there}, and paths are taken from the working directory, not from the "
        "configuration's folder: give that path"
    )


def dump(config: Config) -> dict[str, Any]:
    """Return a configuration as plain data, in the form that `load_config` reads."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            tree = {
                f.name: plain(getattr(value, f.name))
                for f in dataclasses.fields(value)
                if f.compare  # a part has its settings in `options` too
            }
            options = tree.pop("options", {})
            return {**tree, **options}
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return value.isoformat() if isinstance(value, datetime.date) else value

    tree: dict[str, Any] = plain(config)
    return tree


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML text. `load_config` reads an equal configuration from it."""
    return tree_to_yaml(dump(config))


def _value(
    annotation: Any, value: Any, path: tuple[str, ...], origins: Origins, algorithm: str | None
) -> Any:
    kinds = (annotation, *getattr(annotation, "__args__", ()))
    section: Any = next((t for t in kinds if dataclasses.is_dataclass(t)), None)
    if (
        section is not None
        and (value is not None or type(None) not in kinds)
        and not (isinstance(value, str) and str in kinds)
    ):
        return convert(section, {} if value is None else value, path, origins, algorithm)
    entry: Any = next((t.__args__[0] for t in kinds if get_origin(t) is tuple), None)
    if isinstance(value, list) and any(dataclasses.is_dataclass(t) for t in getattr(entry, "__args__", ())):
        return tuple(
            _value(entry, part, (*path, str(place)), origins, algorithm) for place, part in enumerate(value)
        )
    if value is False and "off" in kinds:  # YAML 1.1 reads `off` as False
        value = "off"
    try:
        return msgspec.convert(value, annotation)
    except msgspec.ValidationError as error:
        from oat.config.peers.answer import advice_on_value
        from oat.config.peers.shown import as_text

        raise ConfigError(
            f"{where(path, origins)}: the field `{_dotted(path)}` is {as_text(path, value)}: {error}; "
            f"{advice_on_value(path, value) or 'correct its value'}"
        ) from None


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(path) or "the configuration"


def read_tree(path: Path) -> tuple[dict[str, Any], Origins]:
    """Return the tree of a YAML file, and the place of each field. The caller may change both.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        text = absolute(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: the configuration cannot be read ({error}); give the path of a YAML file"
        ) from None
    tree, origins = _parsed(path, text)
    return _copied(tree), dict(origins)


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _copied(value) for name, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree


def _refuse_deep(tree: Any, levels: int = 0) -> None:
    if levels > _MOST_LEVELS:
        raise RecursionError(f"it has more than {_MOST_LEVELS} levels")
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        _refuse_deep(value, levels + 1)


@functools.lru_cache(maxsize=16)
def _parsed(path: Path, text: str) -> tuple[dict[str, Any], Origins]:
    """Parse the text of a configuration. The result is cached, since a command reads the same text several
    times."""
    try:
        try:
            tree, origins = _constructed(loader_of(text), path, text)
        except _UNREADABLE:
            tree, origins = _constructed(SlowLoader, path, text)  # for its message
        _refuse_deep(tree)
    except _UNREADABLE as error:
        raise ConfigError(_not_yaml(path, text, error)) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected `field: value` lines at the top, got {type(tree).__name__}")
    for section, field in MAIN_FIELDS.items():
        if isinstance(tree.get(section), str):  # `algorithm: grpo`
            tree[section] = {field: tree[section]}
            origins[section, field] = origins[section,]
    return tree, origins


def _constructed(kind: Any, path: Path, text: str) -> tuple[Any, Origins]:
    origins: Origins = {(): str(path)}
    loader = kind(text)
    node = loader.get_single_node()
    _mark(node, (), path, origins)
    return loader.construct_document(node) if node is not None else {}, origins


def _not_yaml(path: Path, text: str, error: Exception) -> str:
    place, what = str(path), str(error)
    if isinstance(error, yaml.MarkedYAMLError):
        marks = [mark for mark in (error.problem_mark, error.context_mark) if mark]
        place += f":{marks[0].line + 1}" if marks else ""
        begun = f" (from line {error.context_mark.line + 1})" if error.context and error.context_mark else ""
        what = ": ".join(
            part for part in (f"{error.context}{begun}" if error.context else "", error.problem) if part
        )
    elif isinstance(error, yaml.reader.ReaderError):
        place, what = (
            f"{path}:{text.count(chr(10), 0, error.position) + 1}",
            f"the character {chr(error.character)!r}: {error.reason}",
        )
    return f"{place}: this is not YAML: {' '.join(what.split())}; correct it"


def _mark(node: Any, at: tuple[str, ...], path: Path, origins: Origins) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        place = (*at, str(key.value))
        if place in origins:
            raise ConfigError(
                f"{path}:{key.start_mark.line + 1}: the field `{_dotted(place)}` stands twice; remove one"
            )
        origins[place] = f"{path}:{key.start_mark.line + 1}"
        _mark(value, place, path, origins)


def _set(tree: dict[str, Any], names: list[str], value: Any, flag: str, origins: Origins) -> None:
    for depth, name in enumerate(names[:-1]):
        if tree.get(name) is None:
            tree[name] = {}
            origins[tuple(names[: depth + 1])] = flag
        tree = tree[name]
        if not isinstance(tree, dict):
            raise ConfigError(f"{flag}: `{'.'.join(names[: depth + 1])}` is a value and has no fields")
    tree[names[-1]] = value
    place = tuple(names)
    for below in [other for other in origins if other[: len(place)] == place]:
        del origins[below]
    _claim(value, place, flag, origins)


def _claim(value: Any, at: tuple[str, ...], flag: str, origins: Origins) -> None:
    origins[at] = flag
    for name, part in value.items() if isinstance(value, dict) else ():
        _claim(part, (*at, str(name)), flag, origins)
