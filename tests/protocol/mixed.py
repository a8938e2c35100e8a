"""Mixed preference learning as a user would add it (SEA, arXiv:2411.01493): a best-arm rule over an ensemble.
After a burn-in the ensemble itself answers a share of the questions."""

from dataclasses import dataclass, field, replace

from oat.algorithms.ensemble import EnsembleConfig
from oat.types import ENSEMBLE, UNASKED, Question


@dataclass(frozen=True)
class MixedConfig:
    samples: int = 4
    """Responses per prompt, of which two are chosen."""
    share: float = 0.5
    """The share of a round's questions that the ensemble answers."""
    burn_in: int = 2
    """Number of steps before the ensemble answers its first question."""
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    """The ensemble and its learning."""


class Mixed:
    Config = MixedConfig
    needs = frozenset({ENSEMBLE})

    def __init__(self, kind, config):
        assert kind == "compare"
        self.config = config

    def widen(self, plan):
        return replace(plan, samples={"sampler": self.config.samples})

    def choose(self, groups, keys, scores, generator):
        believed = set()
        if keys[0].step >= self.config.burn_in:
            believed = set(
                generator.choice(len(groups), int(len(groups) * self.config.share), replace=False).tolist()
            )
        return [
            self._ask(group, key, scores[ENSEMBLE][g], scores["features"][g], g in believed, generator)
            for g, (group, key) in enumerate(zip(groups, keys, strict=True))
        ]

    def _ask(self, group, key, rewards_MG, features_GD, is_believed, generator):
        rewards_G = rewards_MG[generator.integers(len(rewards_MG))]
        if is_believed:
            picks = (int(rewards_G.argmax()), int(rewards_G.argmin()))
        else:
            first = int(rewards_G.argmax())
            variance_G = (rewards_MG[:, first, None] - rewards_MG).var(axis=0, ddof=1)
            variance_G[first] = -1.0
            picks = (first, int(variance_G.argmax()))
        first, second = (group.trajectories[pick] for pick in picks)
        if first.text == second.text:
            return Question.about(group, key, "compare", picks, oracle=UNASKED)
        question = replace(Question.about(group, key, "compare", picks), features=features_GD[list(picks)])
        return replace(question, oracle=ENSEMBLE, known=(1.0, 0.0)) if is_believed else question
