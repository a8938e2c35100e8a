"""The configurations that commands are pointed at: a file, a run, or a run under another evaluation."""

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
    """The configuration in a file, with flags over it.

    Raises:
        ConfigError: as `load_config` and `resolve`.
    """
    return resolve(*load_config(path, flags))


def resolve_tree(tree: Mapping[str, Any], origins: Origins) -> Resolved:
    """The configuration that a tree of plain data is.

    Raises:
        ConfigError: as `convert` and `resolve`.
    """
    return resolve(convert(Config, tree, (), origins), origins)


def resolve_evaluated(target: Path, flags: Sequence[str] = ()) -> Resolved:
    """The configuration of a file, or of a run, that is to be evaluated.

    Raises:
        ConfigError: it has no section `evaluation`; or as `resolve_file`.
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
    """The run of one configuration under the evaluation of another.

    Args:
        asked: with a section `evaluation`, used for this evaluation alone.
    """
    return replace(asked, config=replace(run.config, evaluation=asked.config.evaluation))
