"""Best of n outside of training: the ensemble that chooses among a speaker's responses, with its features.

A run's own ensemble is that of the checkpoint from which the policy is loaded, and its features are those of
the run. An exported ensemble (`oat export RUN OUT --ensemble`) names its features:

* `policy`: the hidden states of the model that answers.
* `reference`: those of the run's reference; for a model without a run, those of the model itself.
* another backbone: those of the model at the path that the export names.

The identity of the features is then compared with that of the features from which the ensemble has learned.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from oat.algorithms.ensemble import refuse_other_features
from oat.answering.learned import LearnedPolicy
from oat.assemble.ensemble import make_features, make_scorer
from oat.assemble.fingerprints import inputs_of_explorer, recorded, refuse_other_weights
from oat.assemble.models import model_sources
from oat.config.load import Origins, blaming, convert
from oat.config.settings import Config
from oat.errors import ConfigError
from oat.explore.settings import (
    WITHIN_RUN,
    EnsembleConfig,
    FeaturesConfig,
    ensemble_of,
    features_of,
)
from oat.files import absolute
from oat.models.causal_lm import CausalLM
from oat.models.ensemble import DESCRIPTION, EnsembleDescription, load_ensemble
from oat.models.sources import lms_of
from oat.resolve.resolve import make_explorer, make_objective
from oat.rollout.ensemble_scorer import EnsembleScorer
from oat.rundir.provenance import first_seed
from oat.seeds import Seeds
from oat.types import ENSEMBLE


@dataclass(frozen=True, eq=False)
class Chooser:
    """An ensemble that is to choose among responses, before its weights are loaded.

    Attributes:
        name: its name in messages.
        ensemble: its settings. `start` is the directory of an exported ensemble.
        features: the features that it reads.
        learned: the identity of the features from which an exported ensemble has learned; None: the ensemble
            is the run's own.
    """

    name: str
    ensemble: EnsembleConfig
    features: FeaturesConfig
    learned: Mapping[str, Any] | None = None


def run_chooser(run_dir: Path, config: Config) -> Chooser:
    """Return the ensemble of a run's explorer.

    Raises:
        ConfigError: the explorer has no ensemble, or cannot be made.
    """
    explorer = make_explorer(config, make_objective(config).requires)
    ensemble, features = ensemble_of(explorer), features_of(explorer)
    if ENSEMBLE not in explorer.needs or ensemble is None or features is None:
        raise ConfigError(
            f"{run_dir}: the run's explorer ({config.explorer.name}) has no ensemble that could choose the "
            "best response; give one by --ensemble, a directory that `oat export RUN OUT --ensemble` wrote, "
            "or leave --best-of out"
        )
    return Chooser(f"the ensemble of {run_dir}", ensemble, features)


def exported_chooser(path: str) -> Chooser:
    """Return an exported ensemble.

    Raises:
        ModelError: there is no ensemble that can be read.
        ConfigError: its description does not name its features, or has a value that is out of range.
    """
    found = load_ensemble(path)[1]
    backbone = found.features.get("backbone")
    if backbone not in WITHIN_RUN:
        backbone = found.backbone
    if backbone is None:
        raise ConfigError(
            f"{path}: its {DESCRIPTION} does not say where the backbone of its features is, as in exports of "
            "earlier versions of oat; export it again (`oat export RUN OUT --ensemble`)"
        )
    return Chooser(f"the ensemble {path}", *_settings(path, found, backbone), found.features)


def _settings(path: str, found: EnsembleDescription, backbone: str) -> tuple[EnsembleConfig, FeaturesConfig]:
    shape = {name: getattr(found, name) for name in ("members", "hidden", "activation")}
    names = {"layer", "pooling", "max_tokens"} & found.features.keys()
    features = {name: found.features[name] for name in names}
    place: Origins = {(): str(absolute(path) / DESCRIPTION)}
    return (
        convert(EnsembleConfig, {**shape, "start": path, "learn": False}, (), place),
        convert(FeaturesConfig, {**features, "backbone": backbone}, ("features",), place),
    )


def run_scorer(chooser: Chooser, run_dir: Path, config: Config, found: LearnedPolicy) -> EnsembleScorer:
    """Load the ensemble that chooses among the responses of a run's policy.

    Args:
        found: the policy, and what its checkpoint has of the run's own ensemble.

    Raises:
        CheckpointError: the ensemble has learned from other features.
        ConfigError, ModelError: the features or the ensemble cannot be made.
    """
    device = found.source.device
    lms, seeds = {"policy": found.outline}, Seeds(config.seed, first_seed(run_dir, config.seed))
    if chooser.features.backbone == "reference":
        lms["reference"] = _reference(config, device, seeds)
    if chooser.learned is not None:
        return _exported_scorer(chooser, lms, device, str(run_dir), chooser.learned)
    features = make_features(lms, chooser.features, device)
    settings = chooser.ensemble
    if found.ensemble:
        refuse_other_features(found.features or features.identity, features.identity, chooser.name)
        scorer = make_scorer(replace(settings, start=None), features, seeds)
        scorer.load(ENSEMBLE, found.step, found.ensemble)
    else:
        field = "explorer.ensemble.start"
        error_context = partial(blaming, config, {(): str(run_dir)})
        refuse_other_weights(
            recorded(run_dir),
            {"weights": inputs_of_explorer(None, settings.start, error_context)},
            [field],
            error_context,
        )
        scorer = make_scorer(settings, features, seeds)
    return scorer


def model_scorer(chooser: Chooser, lm: CausalLM, device: torch.device, target: str) -> EnsembleScorer:
    """Load the exported ensemble that chooses among the responses of a model without a run.

    Args:
        lm: the model. It needs no weights if the features are not those of `reference`.
        target: the model's name, for messages.

    Raises:
        CheckpointError: the ensemble has learned from other features.
        ConfigError, ModelError: the features or the ensemble cannot be made.
    """
    assert chooser.learned is not None, "a model without a run has no ensemble of its own"
    return _exported_scorer(chooser, {"policy": lm, "reference": lm}, device, target, chooser.learned)


def _exported_scorer(
    chooser: Chooser,
    lms: Mapping[str, CausalLM],
    device: torch.device,
    target: str,
    learned: Mapping[str, Any],
) -> EnsembleScorer:
    backbone, layer = chooser.features.backbone, chooser.features.layer
    advice = {
        "policy": "give the run that it was exported from, or a run or model with the same start model",
        "reference": (
            "give the model that was the reference, in its precision (--dtype), or a run that has it as its "
            "reference, such as the one that the ensemble was exported from"
        ),
    }.get(backbone, f"put the files of {backbone} back as they were, or export the ensemble again")
    if backbone in lms and layer != "all" and abs(layer) > lms[backbone].num_layers:
        raise ConfigError(
            f"{chooser.name} reads layer {layer} of the {backbone}, and that of {target} has "
            f"{lms[backbone].num_layers} layers; {advice}"
        )
    features = make_features(lms, chooser.features, device)
    refuse_other_features(
        learned, features.identity, chooser.name, whose=f"that of the features of {target}", advice=advice
    )
    return make_scorer(chooser.ensemble, features, Seeds(0))


def _reference(config: Config, device: torch.device, seeds: Seeds) -> CausalLM:
    """Load the reference of a run as the run began with it."""
    profile: Literal["cpu", "gpu"] = "gpu" if device.type == "cuda" else "cpu"
    config = replace(
        config,
        model=replace(config.model, reference_device=None),
        compute=replace(config.compute, profile=profile),
    )
    source = model_sources(config, ("reference",), seeds)["reference"]
    return lms_of({"reference": source})["reference"]
