"""Functions that resolve the configuration for a command: that of a file, of a run, or of a run with another
section `evaluation`.

A configuration that cannot be read is refused before anything else is imported, so that the user does not
wait for torch.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oat.config.load import Origins, convert, load_config, read_tree
from oat.config.parts import with_settings
from oat.config.settings import Config
from oat.config.stored import stored_config, with_given
from oat.errors import ConfigError, plural, warn
from oat.files import absolute
from oat.rundir.mark import is_begun

if TYPE_CHECKING:
    from oat.resolve.resolved import Resolved


def load_file(path: str | Path, flags: Sequence[str] = ()) -> tuple[Config, Origins]:
    """Read a configuration file, as `load_config` does. If it is the `config.yaml` of a run that was moved or
    copied, `run_dir` and the paths to the run's own files are those of the run in its present folder. A flag
    `--run_dir` overrides the former.

    Raises:
        ConfigError: see `load_config`.
    """
    config, origins = load_config(path, flags)
    own, before = _run_of(Path(path)), str(read_tree(Path(path))[0].get("run_dir"))
    is_given = origins.get(("run_dir",)) == "--run_dir"
    if own is None or _are_one(before, own) or (is_given and _are_one(before, config.run_dir)):
        return config, origins
    if not is_given:
        config = replace(config, run_dir=str(own))
    now = config.run_dir if _are_one(config.run_dir, own) else str(absolute(own).resolve())
    return with_given(config, before, now), origins


def loaded_for(config: Config, *, trains: bool = True) -> str:
    """Return what is loaded for a run, for people: the model, and the processes that are started.

    Args:
        trains: False if no actors are started.
    """
    if trains and config.compute.runtime != "local":
        return f"{config.model.path}, and starting {plural(config.compute.actors, 'actor')}"
    return config.model.path


def _run_of(file: Path) -> Path | None:
    """Return the directory of the run whose `config.yaml` a file is, or is a link to; None: of no run."""
    for place in (file, absolute(file).resolve()):
        if place.name == "config.yaml" and is_begun(absolute(place.parent)):
            return place.parent
    return None


def _are_one(one: str | Path, other: str | Path) -> bool:
    """Return True if two names are those of one directory. Where this user may not look, they are not."""
    places = absolute(one), absolute(other)
    return all(map(os.path.exists, places)) and os.path.samefile(*places)


def resolve_file(path: str | Path, flags: Sequence[str] = ()) -> "Resolved":
    """Resolve the configuration in a file, for a run. If the file is that of a run which was moved or copied,
    say which folder is taken (`load_file`).

    Args:
        flags: settings from the command line, which override those in the file.

    Raises:
        ConfigError: see `load_config` and `resolve`.
    """
    config, origins = load_file(path, flags)
    if (named := load_config(path, flags)[0].run_dir) != config.run_dir:
        warn(
            f"{path}: its run_dir is {named}, which is not the folder of this run, as after a move or a "
            f"copy; the run in {config.run_dir} is taken (--run_dir names another)"
        )
    config = with_settings(config, origins)  # a mistake in a part's settings is told before more is imported
    from oat.resolve.resolve import resolve

    return resolve(config, origins)


def resolve_present(path: str | Path, flags: Sequence[str] = ()) -> "Resolved":
    """Resolve the configuration in a file (`resolve_file`), and refuse it if a file that it names is missing.

    Raises:
        ConfigError, DataError, ModelError: see `resolve_file` and `refuse_missing`.
    """
    resolved = resolve_file(path, flags)
    from oat.resolve.missing import refuse_missing

    refuse_missing(resolved)
    return resolved


def resolve_tree(tree: Mapping[str, Any], origins: Origins) -> "Resolved":
    """Resolve a configuration that is a tree of plain data.

    Raises:
        ConfigError: see `convert` and `resolve`.
    """
    config = convert(Config, tree, (), origins)
    from oat.resolve.resolve import resolve

    return resolve(config, origins)


def load_evaluated(target: Path, flags: Sequence[str] = ()) -> tuple[Config, Origins]:
    """Read the configuration of a run directory or a file, as `stored_config` and `load_file` do.

    Raises:
        ConfigError: see `load_config`.
    """
    return stored_config(target, flags) if target.is_dir() else load_file(target, flags)


def resolve_evaluated(target: Path, flags: Sequence[str] = ()) -> "Resolved":
    """Resolve the configuration of an evaluation that `oat eval` makes.

    Args:
        target: a configuration file, or a run directory.
        flags: settings from the command line, which override those of the target.

    Raises:
        ConfigError: the configuration has no section `evaluation`, or `resolve_file` would refuse it.
    """
    config, origins = load_evaluated(target, flags)
    from oat.resolve.fixed import known_by_file
    from oat.resolve.resolve import resolve

    given = origins
    if target.is_dir():
        config = known_by_file(config, target / "config.yaml")
        given = {path: place for path, place in origins.items() if place.startswith("--")}
    resolved = replace(resolve(config, given), origins=origins)
    if resolved.config.evaluation is None:
        raise ConfigError(
            f"{target}: has no section `evaluation`; add --evaluation.path PROMPTS.jsonl, or "
            "--evaluation.pairs PAIRS.jsonl"
        )
    return resolved


def evaluated_as(run: "Resolved", asked: "Resolved") -> "Resolved":
    """Return the configuration for an evaluation of a run. Its section `evaluation`, its objective, its
    explorer and its origins are those of `asked`. All other settings are those of `run`.

    Args:
        run: the configuration of the run.
        asked: the configuration that the user asked for.
    """
    return replace(asked, config=replace(run.config, evaluation=asked.config.evaluation))
