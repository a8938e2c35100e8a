"""The user's own code of the run in this folder: an algorithm with a critic, an explorer with an ensemble,
and an oracle whose answers come late by a rule.

The program that began the run and today's both load this file, so it imports only names that users were told.
The run remembers a hash of its text: an edit here is a change of the run's oracle, which is refused.
"""

import hashlib
import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from oat.algorithms.base import Objective
from oat.algorithms.ensemble import EnsembleConfig
from oat.types import ENSEMBLE, UNASKED, Answer, Batch, Key, Loss, Plan, Price, Question, Requires


@dataclass(frozen=True)
class CriticisedConfig:
    prompts: int
    """Prompts a step."""
    samples: int = 2
    """Responses a prompt."""
    beta: float = 0.3
    """Strength of the tie to the reference."""
    value_coef: float = 0.5
    """Of the critic's loss."""
    kl_coef: float = 0.05
    """Of the KL to the reference, where it starts."""
    kl_target: float = 0.02
    """Nats a token that the coefficient is moved towards."""
    entropy_coef: float = 0.01
    """Of the entropy bonus."""
    epochs: int = 2
    """Passes over a step's pairs."""
    minibatches: int = 2
    """Optimiser steps a pass."""


class Criticised(Objective):
    """Learns pairs by DPO, each weighted by how much its outcome surprises a critic, which learns outcomes.

    Remembers a number (the coefficient of the KL) and a tensor (mean and mean square of the critic's errors).
    """

    name = "criticised"
    Config = CriticisedConfig
    requires = Requires(feedback="compare", models=frozenset({"policy", "critic", "reference"}))
    wants = {"policy": {"raw", "entropy"}, "critic": {"value"}}  # noqa: RUF012
    watched = frozenset({"response/length", "response/truncated_frac", "policy/entropy", "kl/reference"})
    reuses = True

    def __init__(self, config):
        self.config = config
        self.kl_coef = config.kl_coef
        self.errors = torch.zeros(2)

    def plan(self, step):
        return Plan(self.config.prompts, {"sampler": self.config.samples}, self.config.prompts)

    def prepare(self, feedback, forward, generator):
        decided = [item for item in feedback.learned if item.label is not None]
        rows = tuple(
            item.group.trajectories[item.question.picks[place]]
            for item in decided
            for place in (item.label, 1 - item.label)
        )
        units = np.arange(len(decided)).repeat(2)
        c, metrics = self.config, {"user/kl_coef": self.kl_coef}
        if not rows:
            return Batch((), units, units, metrics=metrics)
        row_of_K = torch.arange(len(rows)).repeat_interleave(
            torch.tensor([int(row.trained.sum()) for row in rows])
        )
        reference_K = forward("reference", rows, {"raw"})["raw"]
        values_K = forward("critic", rows, {"value"})["value"]
        outcome_N = torch.tensor([1.0, -1.0]).repeat(len(decided))
        error_K = outcome_N[row_of_K] - values_K
        surprise_N = torch.zeros(len(rows)).index_add(0, row_of_K, error_K.abs())
        metrics["user/error"] = float(self.errors[0])
        self.errors = 0.5 * self.errors + 0.5 * torch.stack([error_K.mean(), error_K.square().mean()])
        self._adapt(float((forward("policy", rows, {"raw"})["raw"] - reference_K).square().mean()))
        columns = {
            "reference_logps_K": reference_K,
            "outcome_N": outcome_N,
            "surprise_U": (surprise_N[0::2] + surprise_N[1::2]).sigmoid(),
            "kl_coef_N": torch.full((len(rows),), self.kl_coef),
        }
        return Batch(rows, units, units, columns, c.epochs, c.minibatches, metrics)

    def _adapt(self, divergence):
        off = min(0.2, max(-0.2, divergence / self.config.kl_target - 1.0))
        self.kl_coef *= 1.0 + 0.5 * off

    def losses(self, outputs, view):
        c, raw_K, value_K = self.config, outputs["policy"]["raw"], outputs["critic"]["value"]
        moved_K = raw_K - view["reference_logps_K"]
        moved_N = view.row_sum(moved_K)
        preference_U = -view["surprise_U"] * logsigmoid(c.beta * (moved_N[0::2] - moved_N[1::2]))
        kl_K = view["kl_coef_N"][view.row_of_K] * (torch.exp(-moved_K) + moved_K - 1.0)
        value_K = (value_K - view["outcome_N"][view.row_of_K]).square()
        entropy_K = outputs["policy"]["entropy"]
        return {
            "user/preference": Loss(preference_U, per="pair"),
            "user/kl": Loss(kl_K, per="sequence_sum"),
            "user/value": Loss(value_K, per="token", coef=c.value_coef),
            "user/entropy": Loss(entropy_K, per="constant", coef=-c.entropy_coef, constant=5),
        }

    def metrics(self, outputs, view):
        moved_K = outputs["policy"]["raw"] - view["reference_logps_K"]
        return {
            "policy/entropy": (outputs["policy"]["entropy"], "K"),
            "kl/reference": (torch.exp(-moved_K) + moved_K - 1.0, "K"),
            "user/value": (outputs["critic"]["value"], "K"),
        }

    @property
    def state(self):
        return {"kl_coef": self.kl_coef, "errors": self.errors}

    def load_state(self, state):
        self.kl_coef, self.errors = state["kl_coef"], state["errors"].clone()


@dataclass(frozen=True)
class DuelsConfig:
    samples: int = 4
    """Responses a prompt to choose two from."""
    burn_in: int = 2
    """Steps before the ensemble answers a question itself."""
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    """The ensemble and its learning."""


class Duels:
    """Sets the best response of a drawn member against the one that members disagree on most; after the
    burn-in the ensemble answers the first question of a round itself."""

    Config = DuelsConfig
    needs = frozenset({ENSEMBLE})

    def __init__(self, kind, config):
        self.kind, self.config = kind, config

    def widen(self, plan):
        return replace(plan, samples={"sampler": self.config.samples})

    def choose(self, groups, keys, scores, generator):
        return [
            self._ask(group, key, scores[ENSEMBLE][g], scores["features"][g], g == 0, generator)
            for g, (group, key) in enumerate(zip(groups, keys, strict=True))
        ]

    def _ask(self, group, key, rewards_MG, features_GD, is_first, generator):
        first = int(rewards_MG[generator.integers(len(rewards_MG))].argmax())
        doubt_G = (rewards_MG[:, first, None] - rewards_MG).var(axis=0, ddof=1)
        doubt_G[first] = -1.0
        picks = (first, int(doubt_G.argmax()))
        if group.trajectories[picks[0]].text == group.trajectories[picks[1]].text:
            return Question.about(group, key, self.kind, picks, oracle=UNASKED)
        question = replace(Question.about(group, key, self.kind, picks), features=features_GD[list(picks)])
        if is_first and key.step >= self.config.burn_in:
            return replace(question, oracle=ENSEMBLE, known=(1.0, 0.0))
        return question


class Umpire:
    """Finds the response with more of the letters a and b better; abstains now and then.

    A ticket says how often its question is looked for in vain before the answer is there: up to twice, and
    `most` times for every fifth question. It says the answer too, so it is as good after a restart.
    """

    answers = "compare"
    durable = True

    def __init__(self, most=3):
        self.most = most
        self.looked = {}

    def price(self, question):
        return Price(queries=1, tokens=4)

    def submit(self, questions):
        return [f"{question.key} {self._wait(question)} {self._value(question)}" for question in questions]

    def collect(self, tickets, seconds):
        there = []
        for ticket in tickets:
            key, wait, value = ticket.split(" ")
            self.looked[ticket] = self.looked.get(ticket, 0) + 1
            if self.looked[ticket] > int(wait):
                there.append((ticket, self._answer(key, value)))
        if not there:
            time.sleep(min(seconds, 0.001))
        return there[::-1]

    def _answer(self, key, value):
        purpose, *numbers = key.split("/")
        mark = "abstain" if value == "none" else "ok"
        probability = 0.5 if value == "none" else float(value)
        address = Key(purpose, *map(int, numbers))
        return Answer(address, (probability,), (mark,), queries=1, by="umpire", tokens=3, seconds=0.25)

    def _wait(self, question):
        text = " ".join([question.messages[-1].content, *question.candidates])
        number = hashlib.sha256(text.encode()).digest()[0]
        return self.most if number % 5 == 0 else number % 3

    def _value(self, question):
        if sum(map(len, question.candidates)) % 7 == 0:
            return "none"
        first, second = map(letters_of, question.candidates)
        return 0.9 if first > second else 0.2 if first < second else 0.6


def letters_of(text):
    return text.count("a") + 0.5 * text.count("b") - 0.1 * len(text)


def letters(prompts, completions, **columns):
    """The evaluations' own oracle: a score of what the umpire compares."""
    return [letters_of(text) for text in completions]


def brevity(prompts, completions, **columns):
    """Their second oracle."""
    return [-float(len(text)) for text in completions]
