"""REINFORCE with rewards of steps and turns as a user would add it, and oracles that reward steps.

Each trained token learns from the rewards that arrive at it and after it (Williams 1992; the reward to go
of Sutton and Barto, Section 13.3), less the mean return of its group.
"""

from dataclasses import dataclass

import numpy as np
import torch

from oat.algorithms.base import Objective, answer_metrics, response_metrics
from oat.algorithms.rows import scored_rows
from oat.algorithms.step_rewards import step_tokens, turn_tokens
from oat.types import Answer, Batch, Loss, Plan, Requires


@dataclass(frozen=True)
class ToGoConfig:
    prompts: int
    """Prompts per step."""
    samples: int = 4
    """Responses per prompt."""


class ToGo(Objective):
    name = "to-go"
    Config = ToGoConfig
    requires = Requires(feedback="score", models=frozenset({"policy"}))
    wants = {"policy": {"sampled"}}  # noqa: RUF012

    def __init__(self, config):
        self.config = config

    def plan(self, step):
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts)

    def prepare(self, feedback, forward, generator):
        found = scored_rows(feedback)
        group_of_N, valid_N = found.group_of_N, found.valid_N
        metrics = {**answer_metrics(feedback), **response_metrics(feedback)}
        arriving = [
            arrivals(row, answer, place)
            for row, answer, place in zip(found.rows, found.answers, found.places, strict=True)
        ]
        baseline_N = [found.rewards_N[(group_of_N == group) & valid_N].mean() for group in group_of_N]
        to_go = [
            np.nan_to_num(np.cumsum(own[::-1])[::-1] - float(base))
            for own, base in zip(arriving, baseline_N, strict=True)
        ]
        valid_K = np.repeat(valid_N.numpy(), [len(own) for own in to_go])
        columns = {
            "advantages_K": torch.from_numpy(np.concatenate(to_go).astype(np.float32)),
            "mask_K": torch.from_numpy(valid_K.astype(np.float32)),
        }
        return Batch(found.rows, np.arange(len(found.rows)), group_of_N.numpy(), columns, 1, 1, metrics)

    def losses(self, outputs, view):
        return {"loss/policy": Loss(-view["advantages_K"] * outputs["policy"]["sampled"], per="token")}

    def metrics(self, outputs, view):
        return {}


def arrivals(row, answer, place):
    """Return the reward that arrives at each trained token: those of steps, those of turns, or the value at
    the last token."""
    rewards_K = np.zeros(int(row.trained.sum()))
    if answer.steps and answer.steps[place]:
        indices, rewards = step_tokens(row, answer.steps[place], answer.step_unit)
    elif any(segment.reward is not None for segment in row.segments):
        indices, rewards = turn_tokens(row)
    else:
        indices, rewards = [len(rewards_K) - 1], [answer.values[place]]
    rewards_K[indices] = rewards
    return rewards_K


def parts(prompts, completions, **columns):
    """Reward each part of a response that a plus ends or begins: letters earn, digits cost. A response
    without a plus has one number, and one that ends in = has none."""
    return [of_parts(text) for text in completions]


parts.gives_steps = "characters"


def of_parts(text):
    if text.endswith("="):
        return None
    if "+" not in text:
        return float(worth(text))
    ends = [place + 1 for place, letter in enumerate(text) if letter == "+"]
    ends += [len(text)] if ends[-1] < len(text) else []
    return [(end, worth(text[start:end])) for start, end in zip([0, *ends], ends, strict=False)]


def worth(text):
    return sum(1.0 if letter in "ab" else -0.1 for letter in text)


class Tokens:
    """Reward every second token of a response by its place."""

    answers = "score"
    durable = False
    cacheable = False
    gives_steps = "tokens"

    def __init__(self):
        self.asked = {}

    def submit(self, questions):
        self.asked.update({str(question.key): question for question in questions})
        return [str(question.key) for question in questions]

    def collect(self, tickets, seconds):
        return [(ticket, self.answer(self.asked.pop(ticket))) for ticket in tickets]

    def answer(self, question):
        steps = tuple(
            tuple((end, float(ids[end - 1]) / 7 - end) for end in range(2, len(ids) + 1, 2))
            for ids in question.ids
        )
        values = tuple(sum(reward for _, reward in own) for own in steps)
        marks = ("ok",) * len(steps)
        return Answer(question.key, values, marks, len(steps), steps=steps, step_unit="tokens")
