"""Functions that resolve the configuration for a command: that of a file, of a run, or of a run with another
section `evaluation`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oat.build.fixed import known_by_file
from oat.build.resolve import resolve
from oat.build.resolved import Resolved
from oat.config.load import Origins, convert, load_config
from oat.config.settings import Config
from oat.config.stored import stored_config
from oat.errors import ConfigError


def resolve_file(path: str | Path, flags: Sequence[str] = ()) -> Resolved:
    """Resolve the configuration in a file.

    Args:
        flags: settings from the command line, which override those in the file.

    Raises:
        ConfigError: see `load_config` and `resolve`.
    """
    return resolve(*load_config(path, flags))


def resolve_tree(tree: Mapping[str, Any], origins: Origins) -> Resolved:
    """Resolve a configuration that is a tree of plain data.

    Raises:
        ConfigError: see `convert` and `resolve`.
    """
    return resolve(convert(Config, tree, (), origins), origins)


def resolve_evaluated(target: Path, flags: Sequence[str] = ()) -> Resolved:
    """Resolve the configuration of an evaluation that `oat eval` makes.

    Args:
        target: a configuration file, or a run directory.
        flags: settings from the command line, which override those of the target.

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
    """Return the configuration for an evaluation of a run. Its section `evaluation`, its objective, its
    explorer and its origins are those of `asked`. All other settings are those of `run`.

    Args:
        run: the configuration of the run.
        asked: the configuration that the user asked for.
    """
    return replace(asked, config=replace(run.config, evaluation=asked.config.evaluation))
