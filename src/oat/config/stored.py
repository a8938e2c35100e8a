"""Reading the configuration that a run wrote into its directory, perhaps with an earlier version of `oat`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oat.config.load import Origins, load_tree, read_tree
from oat.config.settings import Config

EARLIER: dict[tuple[str, str], Any] = {
    ("oracle", "whole_groups"): False,
    ("render", "special_tokens"): "drop",
}
"""Settings that a run fixes when it begins (`CHOSEN` of `build/fixed.py`), and that earlier versions lacked:
by section and field, the value that says what those versions did. It holds where a run's own `config.yaml`
lacks the field. A configuration of the user that leaves the field open gets today's default instead."""


def load_stored(file: Path, overrides: Sequence[str] = ()) -> tuple[Config, Origins]:
    """Read the `config.yaml` of a run directory, as `load_config` does. What the file lacks is what the
    version of `oat` that wrote it did (`EARLIER`).

    Raises:
        ConfigError: see `load_config`.
    """
    tree, origins = read_tree(file)
    for section, field in _lacking(tree):
        tree[section] = {**(tree.get(section) or {}), field: EARLIER[section, field]}
    return load_tree(tree, origins, file, overrides)


def lacking(file: Path) -> list[str]:
    """Return the settings of `EARLIER` that the `config.yaml` of a run directory lacks.

    Raises:
        ConfigError: see `load_config`.
    """
    return [".".join(each) for each in _lacking(read_tree(file)[0])]


def _lacking(tree: dict[str, Any]) -> list[tuple[str, str]]:
    sections = {each: {} if tree.get(each) is None else tree[each] for each, _ in EARLIER}
    return [
        (section, field)
        for section, field in EARLIER
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
        own, path = f"{before}/given/", getattr(section, "path", None)
        if not (isinstance(path, str) and path.startswith(own)):
            return section
        return dataclasses.replace(section, path=f"{now}/given/{path.removeprefix(own)}")

    return dataclasses.replace(
        config, **{name: moved(getattr(config, name)) for name in ("model", "prompts", "evaluation")}
    )
