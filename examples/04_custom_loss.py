"""An algorithm of your own: what is made of the answers, and the loss.

This is all of REINFORCE with a leave-one-out baseline (RLOO, arXiv:2402.14740). The advantage of an answer
is its reward minus the mean reward of the other answers to its prompt. The loss of each of its tokens is
minus advantage times log-probability. `python examples/04_custom_loss.py` trains a tiny random model with it
in seconds. A loss of pairs needs less code: subclass one of `src/oat/algorithms/direct.py`, as
docs/extending.md shows.

`oat` does the rest: sampling, asking, micro-batches, means, clipping, checkpoints. Axes, as last letters of
names: N answers (rows), K trained tokens of all answers, end to end and without padding.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from oat.algorithms.base import Forward, Objective, Outputs, View
from oat.types import Batch, Feedback, Loss, Plan, Requires

CONFIG = f"""
sampling:
  max_new_tokens: 4
oracle:
  name: "{__file__}:echo"
algorithm:
  name: "{__file__}:RLOO"
  prompts: 8              # fields of RLOOConfig
  samples: 16
learner:
  learning_rate: 1e-2
stop:
  max_steps: 40
"""
PROMPTS = [f"{letter}=" for letter in "abcdefgh"]


@dataclass(frozen=True)
class RLOOConfig:
    """The fields of the section `algorithm` beside the name; any other field is refused."""

    prompts: int
    """Prompts a step."""
    samples: int
    """Responses a prompt."""


class RLOO(Objective):
    """The algorithm. A run makes one instance, with the settings of its configuration."""

    name = "rloo"
    Config = RLOOConfig
    requires = Requires(feedback="score")
    """What the algorithm needs of a run: a score of each answer, and no model but the policy. Others declare
    `Requires(feedback="compare", models=...)`."""
    wants: Mapping[str, set[str]] = {"policy": {"raw"}}
    """What `losses` reads of each trained model: here the log-probability of each token; "raw" is that at
    temperature 1."""

    def __init__(self, config: RLOOConfig):
        self.config = config

    def plan(self, step: int) -> Plan:
        """Return what a step collects: the number of prompts, of answers to each, and of questions, one about
        the answers to each prompt."""
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts)

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        """Return the rows to learn from, and columns with what the loss needs; the last letter of a column's
        name is its axis."""
        rows = []
        advantages = []
        groups = []
        for number, item in enumerate(feedback.items):
            scored = [
                (pick, value)
                for pick, value, mark in zip(
                    item.question.picks, item.answer.values, item.answer.marks, strict=True
                )
                if mark == "ok"
            ]
            # a single answer has no others to be compared with
            for pick, value in scored if len(scored) > 1 else []:
                others = (sum(value for _, value in scored) - value) / (len(scored) - 1)
                rows.append(item.group.trajectories[pick])
                advantages.append(value - others)
                groups.append(number)
        _, group_of_N = np.unique(groups, return_inverse=True)
        return Batch(
            tuple(rows), np.arange(len(rows)), group_of_N, {"advantages_N": torch.tensor(advantages)}
        )

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        """Return the terms of the loss, one a token, not reduced. `per` says how the learner reduces them:
        here it sums over each row's tokens, then takes the mean over rows. `view.row_of_K` is the row of
        each token."""
        advantages_K = view["advantages_N"][view.row_of_K]
        return {"loss/policy": Loss(-advantages_K * outputs["policy"]["raw"], per="sequence_sum")}

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        """Return metrics beside reward, lengths and queries, each with the axis over which its mean is taken.
        Names of your own begin with `user/`."""
        return {"user/surprise": (-outputs["policy"]["raw"], "K")}


def echo(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """Return 1 for an answer that is the prompt's first letter; less for one that begins with it and is
    longer; 0 for others."""
    return [
        text.startswith(prompt[0]) / max(1, len(text))
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def main(*flags: str) -> None:
    from oat.testing import check_algorithm, tiny_run

    check_algorithm(RLOO)
    rows = tiny_run(CONFIG, PROMPTS, flags=flags)
    first, last = rows[1], rows[-1]
    print(
        f"\nmean reward: {first['reward/mean']:.2f} in the first step, {last['reward/mean']:.2f} in the last"
        f"; surprise of a token: {first['user/surprise']:.2f} nats, and {last['user/surprise']:.2f}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
