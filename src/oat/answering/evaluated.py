"""The explorer of an evaluation that `oat eval` makes of a run.

Only `evaluation.best_of` reads an explorer: it takes the response that the ensemble prefers. Without it, no
ensemble and no backbone of features is loaded. With it, the ensemble is that of the run, and settings that
make another one of it are refused. A path may differ, since files may have been moved; then their content is
compared when the checkpoint is loaded (`answering/learned.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from oat.answering.learned import run_config
from oat.config.settings import Component, Config
from oat.errors import ConfigError
from oat.explore.base import Explorer, NoExploration
from oat.explore.settings import WITHIN_RUN, EnsembleConfig, FeaturesConfig, ensemble_of, features_of
from oat.files import absolute
from oat.resolve.resolve import make_explorer, make_objective
from oat.resolve.resolved import Resolved
from oat.rundir.provenance import first_seed
from oat.seeds import Seeds
from oat.types import ENSEMBLE


def with_ensemble_of(resolved: Resolved, run_dir: Path | None) -> Resolved:
    """Return the configuration with the explorer that an evaluation reads. An ensemble that has learned comes
    from the checkpoint, so `explorer.ensemble.start` is not read.

    Args:
        run_dir: the run whose checkpoint is evaluated; None: the model that the configuration starts from.

    Raises:
        ConfigError: the configuration asks for another ensemble than the run's, or for one that has random
            weights.
    """
    e = resolved.config.answering
    if e is None or e.best_of is None:
        return without_explorer(resolved)
    ensemble = ensemble_of(resolved.explorer)
    if run_dir is None or ensemble is None:
        return resolved
    begun = run_config(absolute(run_dir))
    its_explorer = make_explorer(begun, make_objective(begun).requires)
    its = ensemble_of(its_explorer) if ENSEMBLE in its_explorer.needs else None
    with resolved.error_context("explorer.name"):
        if its is None and ensemble.start is None:
            raise ConfigError(
                f"{run_dir} has no ensemble that could choose the best response; set explorer.ensemble.start "
                "to one that `oat export RUN OUT --ensemble` wrote, or remove evaluation.best_of"
            )
        if its is None:
            return replace(resolved, explorer=_with(resolved.config, learn=False))
        for field, now, before in _changes(resolved.explorer, ensemble, its_explorer, its):
            raise ConfigError(
                f"explorer.{field} is {now}, and that of {run_dir} is {before}; an evaluation takes the "
                "run's own ensemble with its own features, so leave the setting out"
            )
        return replace(resolved, explorer=_with(resolved.config, start=None)) if its.learn else resolved


def without_explorer(resolved: Resolved) -> Resolved:
    """Return the configuration with an explorer that reads neither rewards nor features, for a run that does
    not train."""
    return replace(resolved, explorer=NoExploration(resolved.requires.feedback))


def seeds_of(resolved: Resolved, run_dir: Path | None) -> Seeds:
    """Return the seeds of an evaluation. Its responses are drawn from the seed of the configuration, and
    initial weights as the run drew them."""
    if run_dir is None:
        return Seeds(resolved.config.seed)
    begun = absolute(run_dir)
    return Seeds(resolved.config.seed, first_seed(begun, run_config(begun).seed))


def _changes(
    explorer: Explorer, ensemble: EnsembleConfig, its_explorer: Explorer, its: EnsembleConfig
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each setting that makes another ensemble or other features: its name below `explorer`, its
    present value, and that of the run."""
    names = ["learn", "members", "hidden", "activation"]
    if its.learn or None in (its.start, ensemble.start):
        names.append("start")
    for name in names:
        if getattr(ensemble, name) != getattr(its, name):
            yield f"ensemble.{name}", getattr(ensemble, name), getattr(its, name)
    features, before = features_of(explorer), features_of(its_explorer)
    assert features is not None, "an explorer that needs the ensemble reads features"
    assert before is not None, "an explorer that needs the ensemble reads features"
    for name in _deciding(features, before):
        if getattr(features, name) != getattr(before, name):
            yield f"features.{name}", getattr(features, name), getattr(before, name)


def _deciding(features: FeaturesConfig, before: FeaturesConfig) -> list[str]:
    """Return the names of the settings of features that must be equal."""
    is_within = features.backbone in WITHIN_RUN or before.backbone in WITHIN_RUN
    return ["layer", "pooling", "backbone" if is_within else "max_tokens"]


def _with(config: Config, **ensemble: Any) -> Explorer:
    """Make the explorer of a configuration with other settings of its ensemble."""
    options = config.explorer.options
    options = {**options, "ensemble": {**options["ensemble"], **ensemble}}
    config = replace(config, explorer=Component(config.explorer.name, options))
    return make_explorer(config, make_objective(config).requires)
