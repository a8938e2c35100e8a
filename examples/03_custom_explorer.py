"""An explorer of your own: it chooses the sampled responses that the oracle is asked about.

Asking costs more than sampling, so an explorer may request more samples than it asks about. This explorer
requests six responses per prompt. It asks about two of them: the most and the least probable response under
the sampling model. Active preference learning (arXiv:2402.08114) is a method of this kind. `python
examples/03_custom_explorer.py` runs the explorer with DPO and a tiny random model in seconds.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from oat.explore.base import Round
from oat.types import UNASKED, Group, Key, Kind, Plan, Question

CONFIG = f"""
sampling:
  max_new_tokens: 4
oracle:
  name: "{__file__}:vowels"
explorer:
  name: "{__file__}:FarApart"
  samples: 6              # a field of FarApartConfig
algorithm:
  name: dpo
  prompts: 32
learner:
  learning_rate: 2e-3
stop:
  max_steps: 20
"""
PROMPTS = [f"{a}{b}=" for a in "abcdefgh" for b in "aeio"]


@dataclass(frozen=True)
class FarApartConfig:
    """The fields of the section `explorer` beside `name`. Any other field is refused."""

    samples: int = 4
    """Number of responses per prompt, from which two are chosen."""


class FarApart:
    """An explorer that asks about the most and the least probable response.

    The results of an explorer's methods must depend only on their arguments. Then a run that is killed and
    continued asks the same questions.
    """

    Config = FarApartConfig
    needs = frozenset({"sampler"})
    """The scores that `choose` reads. "sampler": log-probabilities under the weights that sampled the
    responses, at no cost. "reference": log-probabilities under the reference. "ensemble": its scores."""

    def __init__(self, kind: Kind, config: FarApartConfig):
        self.kind = kind
        self.config = config

    def widen(self, plan: Plan) -> Plan:
        """Return the algorithm's plan with the number of samples from which `choose` chooses."""
        return replace(plan, samples={"sampler": self.config.samples})

    def choose(self, round: Round) -> list[Question]:
        """Return at most one question per group. Random choices use only `round.generator`."""
        return [
            self.ask(group, key, logps_G)
            for group, key, logps_G in zip(round.groups, round.keys, round.scores["sampler"], strict=True)
        ]

    def ask(self, group: Group, key: Key, logps_G: np.ndarray) -> Question:
        picks = (int(logps_G.argmax()), int(logps_G.argmin()))
        texts = {group.trajectories[pick].text for pick in picks}
        # the oracle is not asked to compare two equal texts
        return Question.about(group, key, self.kind, picks, oracle="" if len(texts) == 2 else UNASKED)


def vowels(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """Return the number of vowels in each completion."""
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


def main(*flags: str) -> None:
    from oat.testing import check_explorer, tiny_run

    check_explorer(FarApart, samples=6)
    rows = tiny_run(CONFIG, PROMPTS, flags=flags)
    queries = rows[-1]["oracle/queries"]
    tied = np.mean([row["answers/tied_frac"] for row in rows[1:]])
    print(
        f"\n{queries:.0f} answers were asked about, of {len(rows[1:]) * 32 * 6} sampled; {tied:.0%} of the "
        "pairs were ties"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
