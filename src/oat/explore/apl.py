"""Active preference learning (APL, arXiv:2402.08114): of more prompts than it asks about, it keeps those that
promise most, and of each it asks about the two responses whose implicit rewards differ most.

The implicit reward of a response is its log-probability under the policy minus that under the reference, nats
(the factor beta changes no order). There are two variants:

* `entropy_certainty`: keep the prompts with the largest predictive entropy: minus the mean log-probability of
  their responses. Compare the two responses with the largest difference of implicit rewards.
* `certainty`: sample two responses of each prompt, and keep the prompts in which their implicit rewards
  differ most.

Departure from the predecessor: it keeps the prompts with the *smallest* entropy, since a minus sign is
missing there.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from oat.errors import ConfigError
from oat.explore.base import Round
from oat.explore.metrics import margin_metrics
from oat.types import UNASKED, Feedback, Kind, Plan, Question


@dataclass(frozen=True)
class APLConfig:
    variant: Literal["entropy_certainty", "certainty"] = "entropy_certainty"
    """How prompts are chosen: by predictive entropy, or by the difference of implicit rewards
    (docs/exploration.md)."""
    oversample: int = 4
    """Number of sampled prompts for each prompt that is asked about."""
    samples: int = 8
    """Responses per prompt, of which two are compared. With `variant: certainty` it is 2."""

    def __post_init__(self) -> None:
        if self.oversample < 1 or (self.variant == "certainty" and self.oversample < 2):
            raise ConfigError(
                f"explorer.oversample is {self.oversample}; it must be at least 1, and at least 2 with "
                "variant certainty, which otherwise chooses nothing"
            )
        if self.samples < 2:
            raise ConfigError(f"explorer.samples is {self.samples}; it must be at least 2")


class APL:
    """See the module's docstring.

    Raises:
        ConfigError: the algorithm does not learn from comparisons.
    """

    Config = APLConfig
    needs = frozenset({"sampler", "reference"})

    def __init__(self, kind: Kind, config: APLConfig):
        if kind != "compare":
            raise ConfigError(
                "the explorer apl chooses pairs, and the algorithm learns from scores; take an algorithm "
                "that learns from comparisons, such as dpo, or remove the section explorer"
            )
        self.config = config

    def widen(self, plan: Plan) -> Plan:
        """Return the plan with `oversample` times its prompts, and the samples of the variant."""
        samples = 2 if self.config.variant == "certainty" else self.config.samples
        return replace(plan, prompts=plan.prompts * self.config.oversample, samples={"sampler": samples})

    def choose(self, round: Round) -> list[Question]:
        """Return questions about the kept prompts, in the order of the groups."""
        asked = [self._ask(round, place) for place in range(len(round.groups))]
        worth_of = "entropy" if self.config.variant == "entropy_certainty" else "margin"
        worth = np.array([question.notes.get(worth_of, -1.0) for question in asked])
        kept = np.argsort(-worth, kind="stable")[: -(-len(asked) // self.config.oversample)]
        return [asked[place] for place in sorted(kept)]

    def _ask(self, round: Round, place: int) -> Question:
        """Return the question about a group."""
        logps_G = round.scores["sampler"][place]
        rewards_G = (logps_G - round.scores["reference"][place]).astype(float)
        margins_GG = np.abs(rewards_G[:, None] - rewards_G[None, :])
        is_pair_GG = np.logical_and.outer(round.candidates[place], round.candidates[place])
        np.fill_diagonal(is_pair_GG, False)
        notes = {"entropy": float(-logps_G.mean())}
        picks = (0, 1)
        is_askable = bool(is_pair_GG.any())
        if is_askable:
            flat = int(np.where(is_pair_GG, margins_GG, -1.0).argmax())
            picks = divmod(flat, len(rewards_G))
            margins = {"margin": margins_GG[picks], "mean_margin": margins_GG[is_pair_GG].mean()}
            notes |= {name: float(value) for name, value in margins.items()}
        oracle = "" if is_askable else UNASKED
        group, key = round.groups[place], round.keys[place]
        return replace(Question.about(group, key, "compare", picks, oracle=oracle), notes=notes)

    def metrics(self, feedback: Feedback) -> dict[str, float]:
        """Return the metrics that `margin_metrics` makes of the notes."""
        return margin_metrics(feedback)
