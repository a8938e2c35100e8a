"""The sinks by name: their options, and what they need."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from oat.config.load import Origins, convert, unknown_field, where
from oat.config.settings import Config, SinkConfig, TrackingConfig
from oat.errors import ConfigError, did_you_mean
from oat.files import seen
from oat.tracking.child import Described
from oat.tracking.mlflow import MlflowConfig
from oat.tracking.tensorboard import TensorBoardConfig
from oat.tracking.wandb import WandbConfig

FILES = "files"
"""May be named among the sinks, and is there in any case."""


@dataclass(frozen=True)
class Listed:
    """A sink of ours.

    Attributes:
        options: the class of its options.
        place: the options that say where the rows go.
        extra: of this package, which brings its library of the same name.
    """

    symbol: str
    options: type
    extra: str
    place: tuple[str, ...] = ()


SINKS = {
    "tensorboard": Listed("oat.tracking.tensorboard:TensorBoard", TensorBoardConfig, "tensorboard"),
    "wandb": Listed("oat.tracking.wandb:Wandb", WandbConfig, "wandb", ("project", "entity", "mode")),
    "mlflow": Listed("oat.tracking.mlflow:Mlflow", MlflowConfig, "mlflow", ("tracking_uri", "experiment")),
}


def with_sinks(config: Config, origins: Origins) -> Config:
    """The configuration with every sink as a section, and the options of ours filled in.

    Raises:
        ConfigError: there is no such sink, it stands twice, or it has no such option.
    """
    found, keys = [], set[str]()
    for place, given in enumerate(config.tracking.sinks):
        path = ("tracking", "sinks", str(place))
        sink = SinkConfig(given) if isinstance(given, str) else given
        _refuse_unknown(sink, path, origins)
        if (key := key_of(sink.name)) in keys:
            raise ConfigError(
                f"{where(path, origins)}: tracking.sinks has {sink.name!r} twice, and its files are "
                f"{key}.*; remove one"
            )
        keys.add(key)
        if sink.name in SINKS:
            cls = SINKS[sink.name].options
            known = {f.name for f in fields(cls)}
            for option in sink.options.keys() - known:
                raise unknown_field(
                    (*path, option), {*known, "samples", "wait_s"}, origins, f" of {sink.name}"
                )
            sink = replace(sink, options=asdict(convert(cls, sink.options, path, origins)))
        found.append(sink)
    return replace(config, tracking=replace(config.tracking, sinks=tuple(found)))


def sinks_of(tracking: TrackingConfig) -> list[SinkConfig]:
    """Those that have a process; `tensorboard: true` is one of them."""
    named = [SinkConfig(sink) if isinstance(sink, str) else sink for sink in tracking.sinks]
    alias = (
        [SinkConfig("tensorboard")]
        if tracking.tensorboard and "tensorboard" not in [sink.name for sink in named]
        else []
    )
    return [sink for sink in (*named, *alias) if sink.name != FILES]


def described_sinks(tracking: TrackingConfig) -> list[Described]:
    """What makes their processes."""
    return [_described(sink) for sink in sinks_of(tracking)]


def refuse_missing(config: Config, origins: Origins) -> None:
    """Sinks that cannot be made here. Nothing of them is imported or run: that is left to their processes.

    Raises:
        ConfigError: a library is missing, or there is no such file, module or class.
    """
    for sink in sinks_of(config.tracking):
        field = (
            "tracking.tensorboard"
            if sink.name == "tensorboard" and config.tracking.tensorboard
            else "tracking.sinks"
        )
        place = where(tuple(field.split(".")), origins)
        if sink.name in SINKS:
            if importlib.util.find_spec(sink.name) is None:
                extra = SINKS[sink.name].extra
                named = f"{field} is set" if field == "tracking.tensorboard" else f"{field} has {sink.name}"
                raise ConfigError(
                    f"{place}: {named}, and its library is missing: pip install 'oat-align[{extra}]', or "
                    "remove it"
                )
        elif problem := _problem(sink.name):
            raise ConfigError(f"{place}: {field} has {sink.name!r}: {problem}")


def key_of(name: str) -> str:
    """What a sink's files are called: its name, or for a user's own the file's or module's and the
    class's."""
    place, colon, attribute = name.rpartition(":")
    return f"{Path(place).stem if place.endswith('.py') else place}-{attribute}" if colon else name


def _described(sink: SinkConfig) -> Described:
    ours = SINKS.get(sink.name)
    place, _, attribute = sink.name.rpartition(":")
    symbol = ours.symbol if ours else f"{seen(place)}:{attribute}" if place.endswith(".py") else sink.name
    options: dict[str, Any] = {**(asdict(ours.options()) if ours else {}), **sink.options}
    return Described(
        key=key_of(sink.name),
        symbol=symbol,
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
    if sink.name not in (FILES, *SINKS) and not re.fullmatch(r".+:\w+", sink.name):
        known = did_you_mean(sink.name, (FILES, *SINKS))
        raise ConfigError(
            f"{place}: there is no sink {sink.name!r}; {known}, or your own as path/to/file.py:Class or "
            "package.module:Class"
        )


def _problem(name: str) -> str:
    """Why a user's own sink cannot be made, as far as can be seen without running it."""
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
        tree = ast.parse(seen(place).read_text(encoding="utf-8"))
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
    """What the statements of a file give a name to, at its top and in what stands there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
