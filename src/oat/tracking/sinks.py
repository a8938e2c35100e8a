"""Functions about the section `tracking.sinks`: they read each sink's options and check that the sink can be
made."""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

from oat.config.load import Origins, convert, unknown_field, where
from oat.config.settings import SinkConfig, TrackingConfig
from oat.errors import ConfigError, did_you_mean
from oat.files import absolute
from oat.plugins.registry import SINKS
from oat.tracking.sink_process import Described

FILES = "files"
"""Name in `tracking.sinks` for the run's own files. The files are written even if the name is not listed."""


def with_sinks(tracking: TrackingConfig, origins: Origins) -> TrackingConfig:
    """Return the section with each sink as a `SinkConfig`. If an option of one of the package's own sinks is
    not set, it gets its default.

    Raises:
        ConfigError: a sink is unknown or is named twice, or an option is unknown or has a wrong value.
    """
    found, keys = [], set[str]()
    for place, given in enumerate(tracking.sinks):
        path = ("tracking", "sinks", str(place))
        sink = SinkConfig(given) if isinstance(given, str) else given
        _refuse_unknown(sink, path, origins)
        if (key := key_of(sink.name)) in keys:
            raise ConfigError(
                f"{where(path, origins)}: tracking.sinks has {sink.name!r} twice, and its files are "
                f"{key}.*; remove one"
            )
        keys.add(key)
        if sink.name != FILES and sink.name in SINKS and not isinstance(sink, _Typed):
            sink = _typed(sink, path, origins)
        found.append(sink)
    return replace(tracking, sinks=tuple(found))


class _Typed(SinkConfig):
    """One of the package's own sinks, whose options were checked, and are complete."""


def _typed(sink: SinkConfig, path: tuple[str, ...], origins: Origins) -> SinkConfig:
    cls = SINKS[sink.name].Config
    known = {f.name for f in fields(cls)}
    for option in sink.options.keys() - known:
        raise unknown_field((*path, option), {*known, "samples", "wait_s"}, origins, f" of {sink.name}")
    options = asdict(convert(cls, sink.options, path, origins))
    return _Typed(sink.name, options, sink.samples, sink.wait_s)


def sinks_of(tracking: TrackingConfig) -> list[SinkConfig]:
    """Return the sinks that have a process: all of `tracking.sinks` except `files`. If `tracking.tensorboard`
    is true, add TensorBoard."""
    named = [SinkConfig(sink) if isinstance(sink, str) else sink for sink in tracking.sinks]
    alias = (
        [SinkConfig("tensorboard")]
        if tracking.tensorboard and "tensorboard" not in [sink.name for sink in named]
        else []
    )
    return [sink for sink in (*named, *alias) if sink.name != FILES]


def described_sinks(tracking: TrackingConfig) -> list[Described]:
    """Return a description of each sink, from which its process is started."""
    return [_described(sink) for sink in sinks_of(tracking)]


def told_of(tracking: TrackingConfig) -> list[str]:
    """Return a text about each sink for `oat check`: the sink's name, the values of the options in its
    attribute `told`, and "with texts" if it gets samples."""
    found = []
    for sink in sinks_of(tracking):
        told = SINKS[sink.name].told if sink.name in SINKS else ()
        about = [str(sink.options[name]) for name in told if sink.options.get(name)]
        about += ["with texts"] * sink.samples
        found.append(f"{sink.name} ({', '.join(about)})" if about else sink.name)
    return found


def refuse_missing(tracking: TrackingConfig, origins: Origins) -> None:
    """Refuse sinks that cannot be made on this machine. This function does not import the sinks; their
    processes do.

    Raises:
        ConfigError: a library is missing, or the file, module or class of a user's sink does not exist.
    """
    for sink in sinks_of(tracking):
        field = (
            "tracking.tensorboard"
            if sink.name == "tensorboard" and tracking.tensorboard
            else "tracking.sinks"
        )
        place = where(tuple(field.split(".")), origins)
        if sink.name in SINKS:
            extra: str | None = SINKS[sink.name].extra
            if extra is not None and importlib.util.find_spec(sink.name) is None:
                named = f"{field} is set" if field == "tracking.tensorboard" else f"{field} has {sink.name}"
                raise ConfigError(
                    f"{place}: {named}, and its library is missing: pip install 'oat-align[{extra}]', or "
                    "remove it"
                )
        elif problem := _problem(sink.name):
            raise ConfigError(f"{place}: {field} has {sink.name!r}: {problem}")


def key_of(name: str) -> str:
    """Return the name of a sink's files: `mlflow` for the sink `mlflow`, and `mine-Sink` for the user's sink
    `path/to/mine.py:Sink`."""
    place, colon, attribute = name.rpartition(":")
    return f"{Path(place).stem if place.endswith('.py') else place}-{attribute}" if colon else name


def _described(sink: SinkConfig) -> Described:
    ours = SINKS.get(sink.name)
    place, _, attribute = sink.name.rpartition(":")
    is_file = ours is None and place.endswith(".py")
    options = sink.options
    if ours is not None and not isinstance(sink, _Typed):  # `tracking.tensorboard: true` has no section
        options = asdict(ours.Config())
    return Described(
        key=key_of(sink.name),
        symbol=f"{absolute(place)}:{attribute}" if is_file else SINKS.symbol(sink.name),
        options=options,
        place={name: options[name] for name in (ours.place if ours else options)},
        samples=sink.samples,
        wait_s=sink.wait_s,
    )


def _refuse_unknown(sink: SinkConfig, path: tuple[str, ...], origins: Origins) -> None:
    place = where(path, origins)
    if sink.name == FILES and sink != SinkConfig(FILES):
        raise ConfigError(
            f"{place}: the sink files has no options; tracking.samples says how many groups are in "
            "samples.jsonl"
        )
    if sink.name.startswith("python:"):
        raise ConfigError(
            f"{place}: tracking.sinks has an object of this process, and a sink lives in one of its own; "
            "write its class into a file, and name it as "
            "path/to/file.py:Class"
        )
    try:
        SINKS.refuse_unknown(sink.name)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _problem(name: str) -> str:
    """Return the reason why a user's sink cannot be made; "" if none is found. The user's code is not run."""
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        try:
            is_there = importlib.util.find_spec(place) is not None
        except (ImportError, ValueError):
            is_there = False
        return (
            ""
            if is_there
            else f"there is no module {place} here; install it, or put its folder on PYTHONPATH"
        )
    try:
        tree = ast.parse(absolute(place).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        return (
            f"{place} cannot be read as Python ({error}); check the path, which is relative to where you are"
        )
    names = set(_names(tree))
    return (
        ""
        if attribute in names or "*" in names
        else f"{place} has no {attribute}; {did_you_mean(attribute, names)}"
    )


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a Python file defines or imports, also within its functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
