"""An algorithm of your own: it makes a batch of the answers, and computes the loss.

This file is a complete REINFORCE with a leave-one-out baseline (RLOO, arXiv:2402.14740). The advantage of a
response is its reward minus the mean reward of the other responses to its prompt. The loss of a token is
minus the advantage times the token's log-probability. `oat` does everything else: sampling, asking,
micro-batches, means, clipping, checkpoints.

Axes, as last letters of names: N responses (rows), K trained tokens of all responses, flat and without
padding.

`python examples/04_custom_loss.py` trains a tiny random model with this algorithm in seconds. A loss of pairs
needs less code: subclass a class of `src/oat/algorithms/direct.py`, as docs/extending.md shows.
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
    """The fields of the section `algorithm` beside `name`. Any other field is refused."""

    prompts: int
    """Number of prompts per step."""
    samples: int
    """Number of responses per prompt."""


class RLOO(Objective):
    """The algorithm RLOO. A run makes one instance with the settings of its configuration."""

    name = "rloo"
    Config = RLOOConfig
    requires = Requires(feedback="score")
    """The algorithm's needs: a score for each response, and no model except the policy. An algorithm with
    preferences and further models declares `Requires(feedback="compare", models=...)`."""
    wants: Mapping[str, set[str]] = {"policy": {"raw"}}
    """The outputs of each trained model that `losses` reads. "raw" is each token's log-probability at
    temperature 1."""

    def __init__(self, config: RLOOConfig):
        self.config = config

    def plan(self, step: int) -> Plan:
        """Return the plan of a step: the number of prompts, the number of responses per prompt, and the
        number of questions. There is one question per prompt, about all its responses."""
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts)

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        """Return the rows to learn from, with the columns that the loss needs. The last letter of a column's
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
            # a single response has no baseline
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
        """Return the terms of the loss, one per token. The learner reduces them: with "sequence_sum", it
        takes the sum over the tokens of a row, and then the mean over rows. `view.row_of_K` is the row of
        each token."""
        advantages_K = view["advantages_N"][view.row_of_K]
        return {"loss/policy": Loss(-advantages_K * outputs["policy"]["raw"], per="sequence_sum")}

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        """Return further metrics, each with the axis over which the learner takes its mean. A name of your
        own begins with `user/`."""
        return {"user/surprise": (-outputs["policy"]["raw"], "K")}


def echo(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """Return the reward of each response: 1 divided by its length if it begins with the prompt's first
    letter, and 0 otherwise."""
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
