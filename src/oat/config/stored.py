"""Reading the configuration that a run wrote into its directory, perhaps with an earlier version of `oat`.
Writing it too."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import yaml

from oat.config.fields import UNSAID, said
from oat.config.load import Origins, config_of, dump, load_tree, parse_tree, read_tree, to_yaml
from oat.config.settings import Config
from oat.errors import ConfigError, warn
from oat.files import write_atomically


@functools.cache
def earlier() -> Mapping[tuple[str, str], Any]:
    """Return what runs did that an earlier version began (`Said.earlier`), by section and field. It holds
    where a run's own `config.yaml` lacks the field. A configuration of the user that leaves the field open
    gets today's default instead."""
    kinds = get_type_hints(Config)
    return MappingProxyType(
        {
            (section.name, field.name): said(field).earlier
            for section in dataclasses.fields(Config)
            if dataclasses.is_dataclass(kind := kinds[section.name])
            for field in dataclasses.fields(kind)
            if said(field).earlier is not UNSAID
        }
    )


def load_stored(file: Path, overrides: Sequence[str] = ()) -> tuple[Config, Origins]:
    """Read the `config.yaml` of a run directory, as `load_config` does. What the file lacks is what the
    version of `oat` that wrote it did (`earlier`).

    Raises:
        ConfigError: see `load_config`.
    """
    tree, origins = read_tree(file)
    for section, field in _lacking(tree):
        tree[section] = {**(tree.get(section) or {}), field: earlier()[section, field]}
    return load_tree(tree, origins, file, overrides)


def lacking(file: Path) -> list[str]:
    """Return the settings of `earlier` that the `config.yaml` of a run directory lacks.

    Raises:
        ConfigError: see `load_config`.
    """
    return [".".join(each) for each in _lacking(read_tree(file)[0])]


def _lacking(tree: dict[str, Any]) -> list[tuple[str, str]]:
    sections = {each: {} if tree.get(each) is None else tree[each] for each, _ in earlier()}
    return [
        (section, field)
        for section, field in earlier()
        if isinstance(sections[section], dict) and field not in sections[section]
    ]


def stored_config(run_dir: Path, overrides: Sequence[str] = ()) -> tuple[Config, Origins]:
    """Read the configuration of a run directory with `load_stored`. If the directory was moved, paths to
    files in its folder `given/` are adapted (`with_given`)."""
    config, origins = load_stored(run_dir / "config.yaml", overrides)
    return with_given(config, load_stored(run_dir / "config.yaml")[0].run_dir, str(run_dir)), origins


def with_given(config: Config, before: str, now: str) -> Config:
    """Return the configuration of a run that was moved to another directory, with the present paths of the
    files in the run's folder `given/`. These files hold the model and the records that the user passed from
    Python.

    Args:
        before, now: the run's directory before and after the move.
    """

    def moved(section: Any) -> Any:
        own = f"{before}/given/"
        paths = {field: getattr(section, field, None) for field in ("path", "pairs")}
        new = {
            field: f"{now}/given/{path.removeprefix(own)}"
            for field, path in paths.items()
            if isinstance(path, str) and path.startswith(own)
        }
        return dataclasses.replace(section, **new) if new else section

    return dataclasses.replace(
        config, **{name: moved(getattr(config, name)) for name in ("model", "prompts", "evaluation")}
    )


def write_stored(file: Path, config: Config) -> None:
    """Write the `config.yaml` of a run. If the file has these settings already, nothing is written. A file
    with comments keeps them where that is possible; otherwise warn.

    Raises:
        ConfigError: the file is there, and cannot be read.
        OSError: the file cannot be written.
    """
    text = to_yaml(config)
    if file.exists():
        before, found = read_tree(file)[0], file.read_text(encoding="utf-8")
        if before == dump(config):
            return
        if _has_comments(found):
            kept = _edited(found, before, config)
            if kept is None:
                warn(f"{file}: is written anew, since settings are new or have changed, without its comments")
            text = kept or text
    write_atomically(file, text)


def _has_comments(text: str) -> bool:
    """Return True if there is a `#` between two tokens of YAML text."""
    end = 0
    try:
        for token in yaml.scan(text, yaml.SafeLoader) if "#" in text else ():
            if "#" in text[end : token.start_mark.index]:
                return True
            end = token.end_mark.index
    except yaml.YAMLError:  # libyaml reads some texts that the scanner refuses
        return True
    return "#" in text[end:]


def _edited(text: str, before: Mapping[str, Any], config: Config) -> str | None:
    """Return the text of a configuration with the values of `config`. All else in it, such as comments, is as
    before. Return None if other fields are set than in `text`, or a value cannot be replaced in its place."""
    parts, end = [], 0
    try:
        for start, stop, value in _changes(yaml.compose(text, yaml.SafeLoader), before, dump(config)):
            parts += [text[end:start], value]
            end = stop
        found = "".join([*parts, text[end:]])
        return found if dump(config_of(parse_tree(found))[0]) == dump(config) else None
    except (KeyError, ConfigError, yaml.YAMLError):  # libyaml reads some texts that the scanner refuses
        return None


def _changes(node: Any, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[int, int, str]]:
    """Yield the values that differ: for each the begin and the end of its text, and its new text.

    Raises:
        KeyError: the two have different fields, or a value of several lines differs.
    """
    if before.keys() != now.keys():
        raise KeyError
    for key, value in node.value:
        old, new = before[key.value], now[key.value]
        if isinstance(value, yaml.MappingNode) and isinstance(new, dict):
            yield from _changes(value, old, new)
        elif old != new and isinstance(value, yaml.CollectionNode) and not value.flow_style:
            raise KeyError  # it ends somewhere in the lines below it
        elif old != new:
            yield value.start_mark.index, value.end_mark.index, json.dumps(new, ensure_ascii=False)
