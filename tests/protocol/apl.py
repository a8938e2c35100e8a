"""Active preference learning as a user would add it (arXiv:2402.08114). It samples more prompts than it asks
about, and keeps those with the largest predictive entropy. For each it asks about the two responses whose
implicit rewards differ most."""

from dataclasses import dataclass, replace

import numpy as np

from oat.types import UNASKED, Question


@dataclass(frozen=True)
class APLConfig:
    oversample: int = 3
    """Sampled prompts per prompt that is asked about."""
    samples: int = 3
    """Responses per prompt, of which two are chosen."""


class APL:
    Config = APLConfig
    needs = frozenset({"sampler", "reference"})

    def __init__(self, kind, config):
        assert kind == "compare"
        self.config = config

    def widen(self, plan):
        return replace(
            plan, prompts=plan.prompts * self.config.oversample, samples={"sampler": self.config.samples}
        )

    def choose(self, groups, keys, scores, generator):
        entropies = np.array([-logps.mean() for logps in scores["sampler"]])
        kept = np.sort(np.argsort(-entropies, kind="stable")[: len(groups) // self.config.oversample])
        return [self._ask(groups[g], keys[g], scores["sampler"][g] - scores["reference"][g]) for g in kept]

    def _ask(self, group, key, rewards):
        margins = np.abs(rewards[:, None] - rewards[None, :])
        np.fill_diagonal(margins, -1.0)
        picks = tuple(int(i) for i in np.unravel_index(margins.argmax(), margins.shape))
        same = group.trajectories[picks[0]].text == group.trajectories[picks[1]].text
        return Question.about(group, key, "compare", picks, oracle=UNASKED if same else "")
