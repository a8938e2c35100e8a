"""The configurations that commands read: those of a file, of a run, or of a run under another evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oat.build.fixed import known_by_file
from oat.build.resolve import resolve
from oat.build.resolved import Resolved
from oat.config.load import Origins, convert, load_config, stored_config
from oat.config.settings import Config
from oat.errors import ConfigError


def resolve_file(path: str | Path, flags: Sequence[str] = ()) -> Resolved:
    """Resolve the configuration in a file, with flags that override it.

    Raises:
        ConfigError: see `load_config` and `resolve`.
    """
    return resolve(*load_config(path, flags))


def resolve_tree(tree: Mapping[str, Any], origins: Origins) -> Resolved:
    """Resolve the configuration that is given as a tree of plain data.

    Raises:
        ConfigError: see `convert` and `resolve`.
    """
    return resolve(convert(Config, tree, (), origins), origins)


def resolve_evaluated(target: Path, flags: Sequence[str] = ()) -> Resolved:
    """Resolve the configuration of a file, or of a run, that is to be evaluated.

    Args:
        target: the file, or the run directory.

    Raises:
        ConfigError: the configuration has no section `evaluation`, or `resolve_file` would refuse it.
    """
    if target.is_dir():
        config, origins = stored_config(target, flags)
        config = known_by_file(config, target / "config.yaml")
        given = {path: place for path, place in origins.items() if place.startswith("--")}
    else:
        config, origins = load_config(target, flags)
        given = origins
    resolved = replace(resolve(config, given), origins=origins)
    if resolved.config.evaluation is None:
        raise ConfigError(
            f"{target}: has no section `evaluation`; add --evaluation.path PROMPTS.jsonl, or "
            "--evaluation.pairs PAIRS.jsonl"
        )
    return resolved


def evaluated_as(run: Resolved, asked: Resolved) -> Resolved:
    """Return the resolved configuration for an evaluation of a run: the settings of the run, but the section
    `evaluation` of another configuration. The objective, the explorer and the origins of settings are those
    of the other configuration, too.

    Args:
        run: the configuration of the run.
        asked: the other configuration; the run does not keep it.
    """
    return replace(asked, config=replace(run.config, evaluation=asked.config.evaluation))
