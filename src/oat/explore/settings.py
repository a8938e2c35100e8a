"""The settings of features, of the ensemble reward model, and of the explorer that uses them."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from oat.errors import ConfigError
from oat.explore.base import Explorer
from oat.types import ENSEMBLE

WITHIN_RUN = ("reference", "policy")
"""The backbones that a run has anyway. Any other backbone is a model's path or hub id."""


def _at_least(name: str, value: float, least: int) -> None:
    if value < least:
        raise ConfigError(f"explorer.{name} is {value}; it must be at least {least}")


@dataclass(frozen=True)
class FeaturesConfig:
    backbone: str = "reference"
    """The frozen model whose hidden states are the features of a response. `reference`: the run's reference.
    `policy`: the sampling model itself; its hidden states are kept while it samples, which costs no second
    pass, and they change as it learns. Otherwise a directory or hub id: a PairRM, an encoder such as DeBERTa,
    or a causal model."""
    layer: int | Literal["all"] = -1
    """The layer whose hidden states are read: -1 is the last one, 1 the first one. `all`: the states of all
    layers, one after another, so features are as many times as wide."""
    pooling: Literal["mean", "last"] = "mean"
    """`mean`: the mean over the response's tokens. `last`: the state at the last token, or at the first token
    of an encoder."""
    max_tokens: int = 2048
    """Largest number of tokens that a backbone of its own reads. Prompts that are too long lose their
    beginning (of a PairRM: their end), and then responses lose their end. A backbone with fewer positions
    than the default reads as many as it has; any other number above them is refused. Not read with
    `reference` and `policy`."""
    refresh_every: int | None = None
    """Only with `policy`: number of steps after which the features of all pairs in the ensemble's buffer are
    computed again, under the policy's weights of that step. This is a pass over all of these responses.
    None: the features stay those of the time of sampling."""

    def __post_init__(self) -> None:
        if self.layer == 0:
            raise ConfigError("explorer.features.layer is 0; layers count from 1, or from the end with -1")
        _at_least("features.max_tokens", self.max_tokens, 8)
        if self.refresh_every is not None:
            _at_least("features.refresh_every", self.refresh_every, 1)
            if self.backbone != "policy":
                raise ConfigError(
                    f"explorer.features.refresh_every is set, and the backbone {self.backbone} does not "
                    "learn, so its features do not change; remove the field, or set backbone to policy"
                )

    @property
    def is_own(self) -> bool:
        """True if the backbone is loaded for the features alone."""
        return self.backbone not in WITHIN_RUN


FORMER_FEATURES = FeaturesConfig(pooling="last")
"""The features of an explorer whose `Config` has no field `features`."""


@dataclass(frozen=True)
class EnsembleConfig:
    members: int = 20
    """Number of networks."""
    hidden: int = 128
    """Width of each network's two hidden layers."""
    activation: Literal["relu", "swish"] = "relu"
    """Activation between the layers."""
    learning_rate: float = 1e-3
    """Constant learning rate of the ensemble's Adam."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of Adam."""
    eps: float = 1e-8
    """Epsilon of Adam, added to the root of the second moment."""
    weight_decay: float = 5e-5
    """Weight decay of all parameters, as a part of their gradient (L2)."""
    max_grad_norm: float | None = None
    """Largest norm of the gradient. A gradient with a larger norm is scaled down to it. None: no clipping."""
    prior: float = 0.5
    """Strength with which the prior pulls the parameters towards their initial values."""
    prior_form: Literal["mean", "map"] = "mean"
    """`mean`: as in the papers' code, `prior` times `batch` divided by the number of labelled pairs, times
    the squared distance averaged over all parameters of all members. At usual widths this is nearly nothing.
    `map`: `prior` divided by the number of labelled pairs, times half the squared distance in units of each
    layer's initial standard deviation, summed over a member's parameters and averaged over members. With
    `prior` 1 this is the maximum of the posterior under the initial distribution."""
    prior_fades: bool = True
    """False: the prior keeps the strength that it has with `batch` labelled pairs."""
    batch: int = 128
    """Largest number of pairs in one optimiser step. While the buffer has fewer, all of them are a batch."""
    steps: int = 5
    """Number of optimiser steps in a step of the run."""
    buffer: int = 50_000
    """Largest number of pairs in the buffer. When the buffer is full, a new pair replaces the oldest one."""
    start: str | None = None
    """Directory of an exported ensemble (`oat export RUN OUT --ensemble`) from which the ensemble starts. Its
    features must be those of this run. None: random initial weights."""
    learn: bool = True
    """False: the ensemble stays as it starts."""
    max_pairs: int | None = None
    """Number of labelled pairs after which the ensemble learns no more. None: no limit."""

    def __post_init__(self) -> None:
        for name in ("members", "hidden", "batch", "steps", "buffer"):
            _at_least(f"ensemble.{name}", getattr(self, name), 1)
        if self.max_pairs is not None:
            _at_least("ensemble.max_pairs", self.max_pairs, 1)
        for name in ("learning_rate", "weight_decay", "prior"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"explorer.ensemble.{name} is {getattr(self, name)}; it must be at least 0, and finite"
                )
        for name in ("eps", "max_grad_norm"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ConfigError(f"explorer.ensemble.{name} is {value}; it must be above 0, and finite")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"explorer.ensemble.betas is {list(self.betas)}; both must be at least 0, and below 1"
            )
        if self.buffer < self.batch:
            raise ConfigError(
                f"explorer.ensemble.buffer is {self.buffer}, smaller than a batch of {self.batch}; raise it"
            )

    def weight_of_prior(self, labelled: float) -> float:
        """Return the coefficient of the prior in the loss (`prior_form`).

        Args:
            labelled: number of labelled pairs taken so far.
        """
        strength = self.prior if self.prior_form == "map" else self.prior * self.batch
        return strength / (labelled if self.prior_fades else self.batch)


@dataclass(frozen=True)
class ModelLabelsConfig:
    """Mixed preference learning (SEA, arXiv:2411.01493, Section 5): the ensemble labels some pairs itself."""

    share: float = 0.3
    """Largest share of a round's pairs that the ensemble labels. The number is rounded down."""
    burn_in: int = 5
    """Number of steps in which the ensemble labels nothing."""
    burn_in_pairs: int = 0
    """Number of pairs that the oracle must have been paid for before the ensemble labels any."""
    pick: Literal["random", "certain"] = "random"
    """The prompts whose pair the ensemble labels. `random`: drawn at random, as in the paper. `certain`:
    those with the least variance over members of the probability that the preferred response wins."""
    max_variance: float | None = None
    """The ensemble labels only pairs for which the variance over members of the probability that the
    preferred response wins is at most this. None: no limit."""
    labels: Literal["hard", "sampled", "soft"] = "hard"
    """The label of a pair. `hard`: the response that more probably wins, by the mean over members. `sampled`:
    the winner is drawn with this probability. `soft`: the loss is the mean over both winners, weighted with
    this probability; only for losses of pairs."""
    pure: bool = False
    """True: after the burn-in, the policy learns from the ensemble's pairs alone. The oracle is asked
    only about audited pairs."""
    audit: float = 0.0
    """Share of the ensemble's pairs for which the oracle is asked and paid instead, so that the metrics
    `explorer/audit_*` say how right the ensemble's labels are."""

    def __post_init__(self) -> None:
        for name in ("share", "audit"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"explorer.model_labels.{name} is {getattr(self, name)}; it is a share, from 0 to 1"
                )
        for name in ("burn_in", "burn_in_pairs"):
            _at_least(f"model_labels.{name}", getattr(self, name), 0)
        if self.pure and self.share == 0:
            raise ConfigError(
                "explorer.model_labels.pure is true and share is 0; nothing would be learned; raise share"
            )
        if self.max_variance is not None and not 0 <= self.max_variance < math.inf:
            raise ConfigError(
                f"explorer.model_labels.max_variance is {self.max_variance}; it must be at least 0 (a "
                "variance of probabilities is at most 0.25)"
            )

    def is_burnt_in(self, step: int, pairs: int) -> bool:
        """Return True if the ensemble may label pairs in this step.

        Args:
            pairs: number of pairs that the oracle has labelled before the step.
        """
        return step >= self.burn_in and pairs >= self.burn_in_pairs


@dataclass(frozen=True)
class EnsembleExplorerConfig:
    rule: str | dict[str, Any] = "bai_ts"
    """The rule that chooses each pair: a name (docs/exploration.md lists them), your own as
    `path/to/file.py:function`, or a section with the name and the rule's options: `{name: bai_ts, variance:
    probability}`."""
    samples: int = 20
    """Responses per prompt, of which two are chosen."""
    clash: Literal["unasked", "random"] = "unasked"
    """What follows if the rule `eets` chooses one response twice. `unasked`: no oracle is asked, and nothing
    is learned. `random`: the second response is drawn from the others. A rule of your own must not do it."""
    model_labels: ModelLabelsConfig | None = None
    """The ensemble labels some pairs itself (mixed preference learning). None: it labels none."""
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    """The features that the ensemble reads."""
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    """The ensemble and its learning."""

    def __post_init__(self) -> None:
        _at_least("samples", self.samples, 2)


def ensemble_of(explorer: Explorer) -> EnsembleConfig | None:
    """Return the settings of an explorer's ensemble; None if it has none."""
    found = getattr(getattr(explorer, "config", None), "ensemble", None)
    return found if isinstance(found, EnsembleConfig) else None


def model_labels_of(explorer: Explorer) -> ModelLabelsConfig | None:
    """Return the settings of the pairs that an explorer's ensemble labels; None if it labels none."""
    found = getattr(getattr(explorer, "config", None), "model_labels", None)
    return found if isinstance(found, ModelLabelsConfig) else None


def features_of(explorer: Explorer) -> FeaturesConfig | None:
    """Return the settings of the features that an explorer reads; None if it reads none.

    Raises:
        ConfigError: its Config has a field `features` of another type.
    """
    if not explorer.needs & {ENSEMBLE, "features"}:
        return None
    found = getattr(getattr(explorer, "config", None), "features", FORMER_FEATURES)
    if not isinstance(found, FeaturesConfig):
        raise ConfigError(
            "the field `features` of the explorer's Config is no FeaturesConfig (oat.explore.settings); make "
            "it one, or give it another name"
        )
    return found
