"""Functions that make the parts of an ensemble reward model: its features, its networks, and its learning."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from oat.algorithms.ensemble import EnsembleLearning, refuse_other_features
from oat.assemble.fingerprints import START
from oat.errors import ConfigError, ModelError
from oat.explore.base import Explorer
from oat.explore.settings import (
    FORMER_FEATURES,
    WITHIN_RUN,
    EnsembleConfig,
    FeaturesConfig,
    ensemble_of,
    features_of,
)
from oat.learner.optimiser import OptimiserSettings
from oat.models.causal_lm import CausalLM
from oat.models.ensemble import DESCRIPTION, Ensemble, EnsembleDescription, load_ensemble
from oat.models.frozen import frozen_checksum
from oat.rollout.ensemble_scorer import EnsembleScorer
from oat.rollout.features import Features, FromSampling, SecondPass, load_backbone
from oat.seeds import Seeds
from oat.types import ENSEMBLE


class EnsembleParts(NamedTuple):
    """The parts of an ensemble.

    Attributes:
        objective: its learning; None if it stays as it starts.
        model: the learner's networks.
        scorer: the features, and the actor's copy of the networks.
    """

    objective: EnsembleLearning | None
    model: Ensemble
    scorer: EnsembleScorer


def ensemble_optimiser(config: EnsembleConfig) -> OptimiserSettings:
    """Return the settings of the ensemble's optimiser: Adam at a constant learning rate, as in the papers'
    code (`oat.algorithms.ensemble`)."""
    norm = math.inf if config.max_grad_norm is None else config.max_grad_norm
    return OptimiserSettings(
        config.learning_rate,
        config.betas,
        config.weight_decay,
        config.eps,
        decoupled=False,
        max_grad_norm=norm,
    )


def make_features(
    lms: Mapping[str, CausalLM], settings: FeaturesConfig, device: torch.device | None = None
) -> Features:
    """Make the backbone of the features that an ensemble reads of sampled responses.

    Args:
        lms: the run's models, by name. If the backbone is the policy, it needs no weights.
        device: device of a backbone of its own; None: that of the policy.

    Raises:
        ConfigError: the backbone has no such layer.
        ModelError: a backbone of its own cannot be loaded.
    """
    if settings.backbone == "policy":
        _check_layer(settings, lms["policy"])
        return FromSampling(lms["policy"], settings.layer, settings.pooling)
    return features_with(lms, settings, device)


def features_with(
    lms: Mapping[str, CausalLM], settings: FeaturesConfig, device: torch.device | None = None
) -> Features:
    """Make a backbone that makes a pass of its own, also over the policy's responses.

    Args:
        lms, device: as in `make_features`.

    Raises:
        ConfigError, ModelError: as `make_features`.
    """
    if settings.is_own:
        policy = lms["policy"]
        place = device or (policy.device if policy.has_weights else torch.device("cpu"))
        return load_backbone(
            settings.backbone, settings.layer, settings.pooling, settings.max_tokens, str(place)
        )
    lm = lms[settings.backbone]
    _check_layer(settings, lm)
    weights = frozen_checksum(lm.module, ()) if lm.has_weights else 0
    return SecondPass(
        lm,
        settings.layer,
        settings.pooling,
        name=settings.backbone,
        weights=weights,
        is_policy=settings.backbone == "policy",
        is_former=settings is FORMER_FEATURES,
    )


def _check_layer(settings: FeaturesConfig, lm: CausalLM) -> None:
    if settings.layer != "all" and abs(settings.layer) > lm.num_layers:
        raise ConfigError(
            f"explorer.features.layer is {settings.layer}, and the {settings.backbone} has {lm.num_layers} "
            "layers; give one of them, or all"
        )


def make_ensemble(
    explorer: Explorer,
    features: Features | None,
    seeds: Seeds,
    *,
    has_weights: bool = True,
    is_begun: bool = False,
) -> EnsembleParts | None:
    """Make the ensemble's objective, the learner's networks, and the actor's copy of them. Return None if the
    explorer needs no ensemble.

    Args:
        has_weights: False: the run's models have no weights. Then an ensemble to start from is checked, and
            its weights are not taken.
        is_begun: True if the run has begun before, so its settings are right, and files may have changed.

    Raises:
        ConfigError: the explorer has no settings for its ensemble.
        OatError: the ensemble of `explorer.ensemble.start` cannot be used (`_start`).
    """
    if ENSEMBLE not in explorer.needs:
        return None
    settings = ensemble_of(explorer)
    if settings is None:
        raise ConfigError(
            "an explorer that needs the ensemble has a field `ensemble: EnsembleConfig` in its Config, "
            "and keeps it as `config`"
        )
    assert features is not None, "an ensemble reads features"
    read = features_of(explorer)
    start = _start(settings, features.identity, read, has_weights=has_weights, is_begun=is_begun)
    model, copy = (_networks(settings, features.width, seeds, start, has_weights) for _ in range(2))
    objective = ensemble_learning(explorer, features.identity)
    return EnsembleParts(objective, model, EnsembleScorer(features, copy))


def ensemble_learning(explorer: Explorer, features: Mapping[str, Any] | None) -> EnsembleLearning | None:
    """Return the objective of the ensemble; None if the explorer has none, or it stays as it starts.

    Args:
        features: the identity of the features that it reads.
    """
    settings, read = ensemble_of(explorer), features_of(explorer)
    if ENSEMBLE not in explorer.needs or settings is None or not settings.learn:
        return None
    return EnsembleLearning(settings, features, read.refresh_every if read is not None else None)


def make_scorer(settings: EnsembleConfig, features: Features, seeds: Seeds) -> EnsembleScorer:
    """Make an ensemble that scores responses and does not learn. If it starts from another one, its settings
    are those of that one, or of a run that has begun.

    Raises:
        OatError: the ensemble of `settings.start` cannot be used (`_start`).
    """
    start = _start(settings, features.identity, None, has_weights=True, is_begun=True)
    return EnsembleScorer(features, _networks(settings, features.width, seeds, start, has_weights=True))


def _networks(
    settings: EnsembleConfig,
    width: int,
    seeds: Seeds,
    start: Mapping[str, torch.Tensor] | None,
    has_weights: bool,
) -> Ensemble:
    ensemble = Ensemble(
        features=width,
        members=settings.members,
        hidden=settings.hidden,
        activation=settings.activation,
        prior_form=settings.prior_form,
        generator=seeds.at("init", ENSEMBLE),
    )
    if start is not None:
        _check_shapes(start, ensemble, str(settings.start))
        if has_weights:
            ensemble.start_from(start)
    return ensemble


def _check_shapes(start: Mapping[str, torch.Tensor], ensemble: Ensemble, path: str) -> None:
    wanted = {name: tuple(parameter.shape) for name, parameter in ensemble.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in start.items()}
    if wanted != found:
        raise ModelError(
            f"the weights of the ensemble {path} have the shapes {found}, and are expected to have {wanted}; "
            "export the ensemble again (`oat export RUN OUT --ensemble`)"
        )


def _start(
    settings: EnsembleConfig,
    features: Mapping[str, Any],
    read: FeaturesConfig | None,
    *,
    has_weights: bool,
    is_begun: bool,
) -> dict[str, torch.Tensor] | None:
    """Return the weights from which the ensemble starts; None: random ones.

    Args:
        features: the identity of this run's features.
        read: the settings of these features; None: they are unknown.
        has_weights, is_begun: see `make_ensemble`.

    Raises:
        ModelError: there is no ensemble in `explorer.ensemble.start`.
        ConfigError: its shape is not that of the settings, or a new run reads other features than it.
        CheckpointError: a run that has begun reads other features than it.
    """
    if settings.start is None:
        return None
    try:
        weights, description = load_ensemble(settings.start)
    except ModelError as error:
        raise ModelError(f"{START}: {error}") from error
    for name in ("members", "hidden", "activation"):
        own, its = getattr(settings, name), getattr(description, name)
        if own != its and is_begun:
            raise ConfigError(
                f"{START}: {name} in {settings.start}/{DESCRIPTION} is {its}, and the run has {own}; put the "
                "files back as they were"
            )
        if own != its:
            raise ConfigError(
                f"explorer.ensemble.{name} is {own}, and that of {settings.start} is {its}; set it to this"
            )
    learned, present = description.features, features
    if not has_weights:
        learned, present = {**learned, "weights": None}, {**present, "weights": None}
    if learned != present and read is not None and not is_begun:
        raise ConfigError(_other_features(settings.start, description, present, read))
    refuse_other_features(
        learned,
        present,
        f"the ensemble of {settings.start}",
        advice="put its files and those of the backbone back as they were, or begin a new run",
    )
    return weights


def _other_features(
    start: str, description: EnsembleDescription, present: Mapping[str, Any], read: FeaturesConfig
) -> str:
    """Say by what the features of an exported ensemble differ from those that a new run reads, and what to
    set."""
    learned, backbone = description.features, description.features.get("backbone")
    its = {**learned, "backbone": backbone if backbone in WITHIN_RUN else description.backbone}
    own = {**present, "backbone": read.backbone}
    is_same = learned.get("backbone") == present["backbone"]
    names = [
        name
        for name in ("backbone", "layer", "pooling", "max_tokens")
        if name in its and name in own and its[name] != own[name] and not (name == "backbone" and is_same)
    ]
    if names:
        theirs, ours = (", ".join(f"{name} {each[name]!r}" for name in names) for each in (its, own))
        return (
            f"explorer.features.{names[0]} is not that of {start}, which has learned from features with "
            f"{theirs}, and this configuration has {ours}; set explorer.features as it was there, or "
            f"remove {START}"
        )
    which = {"policy": "model.path", "reference": "model.reference or model.path"}
    field = which.get(read.backbone, "explorer.features.backbone")
    return (
        f"{START}: {start} has learned from features of the {read.backbone} of another model: its files or "
        f"its precision are not those of {field} here; give that model, or remove {START}"
    )
