"""The section `rewards` of policy gradients: from the scores of responses to the rewards of estimators.

The steps, in this order; by default none of them changes a number:

1. `sources`: if the answer has the scores of several sources (the oracle `mixture`), each source's scores are
   normalised, and the reward is their weighted sum, in place of the answer's value.
2. `missing_end_penalty` and `overlong_penalty` are subtracted. A penalty is never negative.
3. `scale` multiplies.
4. `normalise: running` divides by the standard deviation of all rewards so far, after subtracting their mean.
5. `clip` bounds.

A KL in the rewards (`kl_reward_coef`) comes after that, so it is never clipped. `whiten` then scales the
rewards of tokens.

The running statistics are a state of the objective. They change in `prepare`, by the recorded feedback of the
step, before the step's rewards are normalised. So a continued run has the statistics of the unbroken one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from oat.algorithms.credit import CreditedRewards
from oat.algorithms.rows import ScoredRows
from oat.errors import ConfigError, ContractError, did_you_mean, warn
from oat.lazy import lazily
from oat.types import Trajectory

if TYPE_CHECKING:
    import torch

    from oat import functional as F
else:
    torch, F = lazily("torch"), lazily("oat.functional")


_STD_EPS = 1e-4
_TOTAL, _SOURCE = "total", "source/"
"""The name of the running statistics of the rewards themselves, and the beginning of the names of those of
sources, which the source's label follows."""


@dataclass(frozen=True)
class RewardsConfig:
    """The way from scores to rewards."""

    sources: Literal["sum", "group", "batch", "running"] = "sum"
    """What becomes of the scores of several sources. `sum`: the oracle's own value, a sum of scores. `group`,
    `batch`, `running`: each source's scores are shifted and scaled to mean 0 and standard deviation 1 within
    their group, the step, or the run so far, and then added up with `source_weights`."""
    source_weights: dict[str, float] = field(default_factory=dict)
    """Weight of each source in this sum, by its label; a source that is not named has the weight 1."""
    missing_end_penalty: float = 0.0
    """Is subtracted from the score of a response that did not stop."""
    missing_end: Literal["length", "no_end"] = "length"
    """Which responses did not stop. `length`: those that the length limit cut. `no_end`: those without an
    end-of-text or end-of-turn token, so also those that a stop string ended; of an episode, its last turn."""
    overlong_penalty: float = 0.0
    """Is subtracted from the score of a response of `overlong_to` tokens or more. Between `overlong_from` and
    `overlong_to` the penalty grows linearly from 0 (DAPO, arXiv:2503.14476, Eq. 13)."""
    overlong_from: int | None = None
    """Number of tokens above which a response is penalised. It must be set with `overlong_penalty`."""
    overlong_to: int | None = None
    """Number of tokens from which the whole penalty counts. It must be set with `overlong_penalty`."""
    truncated: Literal["keep", "mask", "drop"] = "keep"
    """Responses that the length limit cut. `mask`: they count in the statistics of their group, and nothing
    is learned from them. `drop`: they do not count at all, as if they had no score."""
    scale: float = 1.0
    """Multiplies every reward."""
    normalise: Literal["none", "running"] = "none"
    """`running`: subtract the mean of all rewards of the run so far, and divide by their standard
    deviation."""
    clip: tuple[float, float] | None = None
    """Lowest and highest reward. None: no bounds."""
    whiten: bool = False
    """Scale the rewards of all tokens of the step, KL included, to standard deviation 1, and keep their
    mean."""
    flat_group_weight: float | None = None
    """Weight of the advantages of a group whose rewards are equal. The other groups then get the weight
    (number of groups) / (number of groups with spread), at most 3, so that a step with many flat groups does
    not learn less (LightRFT's clip filter). None: every group has the weight 1."""

    def __post_init__(self) -> None:
        for name in ("missing_end_penalty", "overlong_penalty", "flat_group_weight"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(
                    f"algorithm.rewards.{name} is {value}; it must be at least 0, and finite"
                    + (", since it is subtracted" if name.endswith("penalty") else "")
                )
        if not 0 < self.scale < math.inf:
            raise ConfigError(f"algorithm.rewards.scale is {self.scale}; it must be positive, and finite")
        if self.clip is not None and not (self.clip[0] < self.clip[1] and all(map(math.isfinite, self.clip))):
            raise ConfigError(
                f"algorithm.rewards.clip is {list(self.clip)}; give the lowest and the highest reward"
            )
        if not all(map(math.isfinite, self.source_weights.values())):
            raise ConfigError(
                f"algorithm.rewards.source_weights is {self.source_weights}; give finite numbers"
            )
        self._check_read()
        self._check_overlong()

    def _check_read(self) -> None:
        """Check that the settings that were changed are read."""
        readers = {
            "missing_end": (self.missing_end_penalty > 0, "missing_end_penalty"),
            "overlong_from": (self.overlong_penalty > 0, "overlong_penalty"),
            "overlong_to": (self.overlong_penalty > 0, "overlong_penalty"),
            "source_weights": (self.sources != "sum", "sources other than sum"),
        }
        for each in fields(self):
            is_read, by = readers.get(each.name, (True, ""))
            default = {} if each.name == "source_weights" else each.default
            if not is_read and getattr(self, each.name) != default:
                raise ConfigError(
                    f"algorithm.rewards.{each.name} is {getattr(self, each.name)}, and nothing reads it "
                    f"without {by}; remove it"
                )

    def _check_overlong(self) -> None:
        """Check the range of lengths in which the penalty for length grows."""
        if not self.overlong_penalty:
            return
        for name in ("overlong_from", "overlong_to"):
            if getattr(self, name) is None:
                raise ConfigError(
                    f"algorithm.rewards.{name} is not set; give the number of tokens at which the penalty "
                    f"for length {'begins' if name == 'overlong_from' else 'is complete'}"
                )
        if not 0 <= self.overlong_range[0] < self.overlong_range[1]:
            raise ConfigError(
                f"algorithm.rewards.overlong_from is {self.overlong_from}, and overlong_to "
                f"{self.overlong_to}; overlong_from must be at least 0, and below overlong_to"
            )

    @property
    def overlong_range(self) -> tuple[int, int]:
        """The lengths between which the penalty grows."""
        assert self.overlong_from is not None, "_check_overlong asks for it"
        assert self.overlong_to is not None, "_check_overlong asks for it"
        return self.overlong_from, self.overlong_to


class RewardShaping:
    """Makes the rewards of scored rows, and keeps the running statistics.

    Args:
        earned: which rewards a response has: the algorithm's `credit`, or `vine`.
    """

    def __init__(self, config: RewardsConfig, earned: str = "response"):
        self.config = config
        self.earned = earned
        self.moments: dict[str, F.reward_shaping.Moments] = {}
        self._unsure: set[str] = set()
        """Labels of `source_weights` that may be misspelled: the oracle does not tell its sources, and no
        answer has had a score of one with this label."""

    def check_sources(self, sources: Sequence[str] | None) -> None:
        """Check that the oracle has the sources whose scores the settings read.

        Args:
            sources: their labels; None: not known.

        Raises:
            ConfigError: it has no sources, or `source_weights` names another.
        """
        if self.config.sources == "sum":
            return
        if sources is None:
            self._unsure.update(self.config.source_weights)
            return
        if not sources:
            raise ConfigError(
                f"algorithm.rewards.sources is {self.config.sources}, and the oracle's answers have no "
                "scores of sources; set oracle.name to mixture, or remove it"
            )
        for name in self.config.source_weights:
            if name not in sources:
                raise ConfigError(
                    f"algorithm.rewards.source_weights names the source {name!r}, and the oracle has "
                    f"{', '.join(sources)}; {did_you_mean(name, sources)}"
                )

    def considered(self, scored: ScoredRows) -> ScoredRows:
        """Return the rows that have a score and are not dropped."""
        kept_N = scored.valid_N
        if self.config.truncated == "drop":
            kept_N = kept_N & ~_are_truncated(scored)
        return scored.only(kept_N)

    def learned(self, scored: ScoredRows) -> torch.Tensor | None:
        """Return True for the rows that are learned from, and False for the masked ones, (N,) bool; None if
        all are learned from."""
        return ~_are_truncated(scored) if self.config.truncated == "mask" else None

    @property
    def reads_other_groups(self) -> bool:
        """True if a reward depends on scores of other groups, of the step or of the run."""
        return self.config.sources in ("batch", "running") or self.config.normalise == "running"

    def differ(self, scored: ScoredRows) -> bool:
        """Return True if a source that has a weight gave two of the rows different scores.

        Raises:
            ContractError: an answer has no scores of sources.
        """
        weights, found = self.config.source_weights, _scores_of_sources(scored)
        counted = [scores_N for name, scores_N in found.items() if weights.get(name, 1.0)]
        return any(len(scores_N[~scores_N.isnan()].unique()) > 1 for scores_N in counted)

    def sources(self, scored: ScoredRows) -> ScoredRows:
        """Return the rows with the weighted sum of their sources' normalised scores as rewards, if the
        settings ask for it. Running statistics are updated before they are used.

        Args:
            scored: rows that all have a score.

        Raises:
            ContractError: an answer has no scores of sources.
        """
        if self.config.sources == "sum" or not scored.rows:
            return scored
        found = _scores_of_sources(scored)
        self._check_weights(found)
        total_N = torch.zeros_like(scored.rewards_N)
        for name, scores_N in found.items():
            has_score_N = ~scores_N.isnan()
            normal_N = self._normalised(name, scores_N, has_score_N, scored)
            total_N = total_N + self.config.source_weights.get(name, 1.0) * torch.where(
                has_score_N, normal_N, 0.0
            )
        return scored.with_rewards(total_N)

    def shaped(
        self,
        given: CreditedRewards,
        scored: ScoredRows,
        *,
        end_ids: Collection[int],
        learns: bool,
    ) -> tuple[CreditedRewards, dict[str, float]]:
        """Return rewards after penalties, scale, normalisation and bounds, and metrics of those steps that
        the settings ask for.

        Args:
            given: rewards. A response may have several of them (`credit.py`); penalties are subtracted from
                its last one.
            scored: the N rows.
            end_ids: ids that end a response.
            learns: True: the running statistics are updated and used. False: they, and the bounds after them,
                are left out.
        """
        c, metrics = self.config, dict[str, float]()
        rewards_E, is_earned_E = given.rewards_E, given.counted_E
        if c.missing_end_penalty or c.overlong_penalty:
            penalties_N = self._penalties(scored, end_ids)
            last_N = given.last_of_rows()
            rewards_E = rewards_E.index_add(0, last_N, -penalties_N)
            is_earned_E = is_earned_E.index_put((last_N,), is_earned_E[last_N] | (penalties_N > 0))
            metrics["reward/penalty"] = float(penalties_N.mean())
        if c.scale != 1:
            rewards_E = rewards_E * c.scale
        if c.normalise == "running" and learns:
            rewards_E = self._running(_TOTAL, rewards_E, is_earned_E)
        if c.clip is not None and (learns or c.normalise == "none"):
            bounded_E = rewards_E.clamp(*c.clip)
            metrics["reward/clipped_frac"] = float((bounded_E != rewards_E).float().mean())
            rewards_E = bounded_E
        rewards_E = torch.where(is_earned_E, rewards_E, 0.0)
        return replace(given, rewards_E=rewards_E, is_earned_E=is_earned_E), metrics

    @property
    def state(self) -> dict[str, Any]:
        """The running statistics; empty if the settings keep none."""
        moments = {name: list(moments) for name, moments in self.moments.items()}
        return {"moments": moments, "moments_of": self._read_by_moments} if moments else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the running statistics. A fork drops them if its settings do not read them, or make other
        numbers of the scores."""
        is_read = self.config.normalise == "running" or self.config.sources == "running"
        saved_of = {"earned": self.earned, **state.get("moments_of", self._read_by_moments)}
        is_same = saved_of == self._read_by_moments
        saved = state.get("moments", {}) if is_read and is_same else {}
        self.moments = {name: F.reward_shaping.Moments(*values) for name, values in saved.items()}

    @property
    def _read_by_moments(self) -> dict[str, Any]:
        """The settings on which the running statistics depend."""
        after = ("clip", "whiten", "flat_group_weight")
        read = {name: value for name, value in asdict(self.config).items() if name not in after}
        return {"earned": self.earned, **read}

    def _check_weights(self, found: Collection[str]) -> None:
        """Warn once of weights of sources that are in no answer, if the oracle does not tell its sources."""
        if unknown := sorted(self._unsure.difference(found)):
            warn(
                f"algorithm.rewards.source_weights names {', '.join(map(repr, unknown))}, and no answer of "
                f"this step has a score of such a source; the answers have {', '.join(map(repr, found))}. "
                "Correct the label if it is misspelled"
            )
        self._unsure.clear()

    def _penalties(self, scored: ScoredRows, end_ids: Collection[int]) -> torch.Tensor:
        """Return what is subtracted from the score of each row, (N,)."""
        c, total_N = self.config, torch.zeros_like(scored.rewards_N)
        if c.missing_end_penalty:
            has_ended_N = ~_are_truncated(scored)
            if c.missing_end == "no_end":
                has_ended_N = torch.tensor(
                    [not {*_last_response(row).tolist()}.isdisjoint(end_ids) for row in scored.rows]
                )
            total_N = total_N + F.reward_shaping.missing_end_penalty(
                has_ended_N, penalty=c.missing_end_penalty
            )
        if c.overlong_penalty:
            begin, end = c.overlong_range
            total_N = total_N + F.reward_shaping.overlong_penalty(
                scored.lengths_N, begin=begin, end=end, penalty=c.overlong_penalty
            )
        return total_N

    def _normalised(
        self,
        name: str,
        scores_N: torch.Tensor,
        has_score_N: torch.Tensor,
        scored: ScoredRows,
    ) -> torch.Tensor:
        if self.config.sources == "running":
            return self._running(_SOURCE + name, scores_N, has_score_N)
        is_group = self.config.sources == "group"
        groups_N = scored.group_of_N if is_group else torch.zeros_like(scored.group_of_N)
        count = scored.num_groups if is_group else 1
        return F.advantages.group_advantages(scores_N, groups_N, count, valid_N=has_score_N, eps=_STD_EPS)

    def _running(self, name: str, values_N: torch.Tensor, kept_N: torch.Tensor) -> torch.Tensor:
        """Add values to the running statistics. Return them minus the running mean, divided by the running
        standard deviation. A value beyond the range of float32 makes its own step's rewards not finite, and
        no later one's."""
        counted_N = kept_N & values_N.isfinite()
        self.moments[name] = F.reward_shaping.merged_moments(
            self.moments.get(name, F.reward_shaping.Moments()), values_N, valid_N=counted_N
        )
        return F.reward_shaping.normalised(values_N, self.moments[name])


def _last_response(row: Trajectory) -> np.ndarray:
    """Return the ids of the last response: of an episode, those of its last turn."""
    found: np.ndarray = next((s.ids for s in reversed(row.segments) if s.author == "model"), row.completion)
    return found


def _are_truncated(scored: ScoredRows) -> torch.Tensor:
    return torch.tensor([row.finish_reason == "length" for row in scored.rows], dtype=torch.bool)


def _scores_of_sources(scored: ScoredRows) -> dict[str, torch.Tensor]:
    """Return the scores of each source, (N,), by its label; NaN where it has none."""
    labels = dict.fromkeys(label for answer in scored.answers for label in answer.sources)
    if not labels:
        raise ContractError(
            "algorithm.rewards.sources is set, and the oracle's answers have no scores of sources; set "
            "oracle.name to mixture, or remove it"
        )
    return {
        label: torch.tensor(
            [
                _score(answer.sources.get(label), place)
                for answer, place in zip(scored.answers, scored.places, strict=True)
            ],
            dtype=scored.rewards_N.dtype,
        )
        for label in labels
    }


def _score(scores: Sequence[float | None] | None, place: int) -> float:
    value = None if scores is None else scores[place]
    return math.nan if value is None else value
