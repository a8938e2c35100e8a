"""Trials of the laboratory: one rule in one world, with one agent and one seed.

* `learn_rewards`: in each round the rule chooses one pair of each of `PROMPTS` new prompts, the world labels
  the pairs, and the agent learns. What is measured is the regret of the agent's best candidate of held-out
  prompts.
* `learn_policy`: candidates are drawn from a policy, which learns by DPO from the labels, and from pairs that
  the agent labels itself, if there are any. What is measured is the regret of the policy. So the gain of
  model labels can be told from that of a rule.

Regret is relative: the best candidate of a prompt has 0, and one drawn uniformly has 1 in the mean.

All rules see the same prompts with one seed.
"""

from dataclasses import dataclass

import numpy as np

from oat.explore.find_rule import Chooser, call_rule
from oat.explore.model_labels import model_pairs
from oat.explore.settings import ModelLabelsConfig
from oat.explore.uncertainty import sigmoid
from oat.laboratory.agents import AGENTS, MakeAgent
from oat.laboratory.worlds import DIM, SIZE, Prompts, make_world, weight_std
from oat.seeds import Seeds

PROMPTS, HELD_OUT = 16, 200
POOL = 200
"""`learn_policy`: candidates of a prompt from which the policy draws."""
BETA, POLICY_STEPS = 0.1, 20
"""`learn_policy`: beta of DPO, and its gradient steps in a round, each on all pairs of the round. The policy
is a softmax of features times weights; the reference has weights of 0."""
RATES = (3.0, 10.0, 30.0)
"""`learn_policy`: the learning rates from which each arm gets its best one (`report.with_rates`)."""


@dataclass(frozen=True)
class Curve:
    """The course of a trial.

    Attributes:
        queries: after each round, the number of pairs that the world has labelled.
        regrets: after each round, the regret.
        clashes: share of prompts for which the rule chose one candidate twice.
    """

    queries: list[int]
    regrets: list[float]
    clashes: float


def learn_rewards(world: str, agent: str | MakeAgent, rule: Chooser, seed: int, rounds: int) -> Curve:
    """Let an agent learn rewards from the pairs that a rule chooses.

    Args:
        agent: name of an agent, or a function that makes one.
    """
    make = AGENTS[agent] if isinstance(agent, str) else agent
    seeds = Seeds(seed)
    draw = make_world(world, seeds.at("world", world))
    held_out = draw(seeds.at("held out", world), HELD_OUT, SIZE)
    learner = make(DIM, seeds.at("agent", world), weight_std(held_out))
    queries: list[int] = []
    regrets: list[float] = []
    clashes = 0
    for round in range(rounds):
        prompts = draw(seeds.at("prompts", world, round), PROMPTS, SIZE)
        generator = seeds.at("rule", world, round)
        valid_BG = np.ones(prompts.utilities_BG.shape, dtype=bool)
        pairs_B2 = call_rule(rule, learner.rewards(prompts.features_BGD), valid_BG, generator)
        is_pair_B = pairs_B2[:, 0] != pairs_B2[:, 1]
        clashes += int((~is_pair_B).sum())
        learner.learn(*_labelled(prompts, pairs_B2, is_pair_B, seeds.at("labels", world, round)))
        queries.append((queries[-1] if queries else 0) + int(is_pair_B.sum()))
        best_B = learner.means(held_out.features_BGD).argmax(axis=1)
        picked_B = held_out.utilities_BG[np.arange(len(best_B)), best_B]
        regrets.append(_regret(held_out.utilities_BG, picked_B))
    return Curve(queries, regrets, clashes / (rounds * PROMPTS))


def learn_policy(
    world: str,
    agent: str,
    rule: Chooser,
    seed: int,
    rounds: int,
    labels: ModelLabelsConfig | None = None,
    rate: float = RATES[1],
) -> Curve:
    """Let a policy learn by DPO from the pairs that a rule chooses among its samples.

    Args:
        labels: the pairs that the agent labels itself, in addition to the world's: `share` of a round's
            prompts have one. None: there are none.
        rate: the policy's learning rate.
    """
    seeds = Seeds(seed)
    draw = make_world(world, seeds.at("world", world))
    held_out = draw(seeds.at("held out", world), HELD_OUT, POOL)
    learner = AGENTS[agent](DIM, seeds.at("agent", world), weight_std(held_out))
    policy_D = np.zeros(DIM)
    queries: list[int] = []
    regrets: list[float] = []
    clashes = 0
    for round in range(rounds):
        generator = seeds.at("rule", world, round)
        pool = draw(seeds.at("prompts", world, round), PROMPTS, POOL)
        prompts = _sampled(pool, policy_D, seeds.at("samples", world, round))
        valid_BG = _distinct(prompts.features_BGD)
        rewards_MBG = learner.rewards(prompts.features_BGD)
        pairs_B2 = call_rule(rule, rewards_MBG, valid_BG, generator)
        is_pair_B = pairs_B2[:, 0] != pairs_B2[:, 1]
        clashes += int((~is_pair_B).sum())
        chosen_PD, rejected_PD = _labelled(prompts, pairs_B2, is_pair_B, seeds.at("labels", world, round))
        margins_PD = chosen_PD - rejected_PD
        if labels is not None and labels.is_burnt_in(round, queries[-1] if queries else 0):
            believed_PD = _believed(prompts, rewards_MBG, valid_BG, labels, generator)
            margins_PD = np.concatenate([margins_PD, believed_PD])
        learner.learn(chosen_PD, rejected_PD)
        policy_D = _after_dpo(policy_D, margins_PD, rate)
        queries.append((queries[-1] if queries else 0) + int(is_pair_B.sum()))
        expected_B = (_probabilities(held_out.features_BGD, policy_D) * held_out.utilities_BG).sum(axis=1)
        regrets.append(_regret(held_out.utilities_BG, expected_B))
    return Curve(queries, regrets, clashes / (rounds * PROMPTS))


def _labelled(
    prompts: Prompts, pairs_B2: np.ndarray, is_pair_B: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the features of the winners and of the losers, (P, D) each. Clashes have neither."""
    first_wins_B = generator.random(len(pairs_B2)) < prompts.win_probabilities(pairs_B2)
    winner_B = np.where(first_wins_B, pairs_B2[:, 0], pairs_B2[:, 1])
    loser_B = np.where(first_wins_B, pairs_B2[:, 1], pairs_B2[:, 0])
    every_B = np.arange(len(pairs_B2))
    winners, losers = (prompts.features_BGD[every_B, picks] for picks in (winner_B, loser_B))
    return winners[is_pair_B], losers[is_pair_B]


def _believed(
    prompts: Prompts,
    rewards_MBG: np.ndarray,
    valid_BG: np.ndarray,
    labels: ModelLabelsConfig,
    generator: np.random.Generator,
) -> np.ndarray:
    """Return the differences of features of the pairs that the agent labels itself, (P, D)."""
    chosen = model_pairs(rewards_MBG, valid_BG, labels, generator)
    places = np.flatnonzero(chosen.is_chosen_B)
    first_B, second_B = chosen.pairs_B2[places].T
    return prompts.features_BGD[places, first_B] - prompts.features_BGD[places, second_B]


def _sampled(pool: Prompts, policy_D: np.ndarray, generator: np.random.Generator) -> Prompts:
    """Return prompts with `SIZE` candidates each, which the policy draws from the pool with replacement."""
    cumulative_BG = _probabilities(pool.features_BGD, policy_D).cumsum(axis=1)
    uniforms = generator.random((len(cumulative_BG), SIZE))
    drawn_BG = (uniforms[:, :, None] > cumulative_BG[:, None, :-1]).sum(axis=2)
    every_B1 = np.arange(len(drawn_BG))[:, None]
    turn_BGG = None
    if pool.turn_BGG is not None:
        turn_BGG = pool.turn_BGG[every_B1[..., None], drawn_BG[:, :, None], drawn_BG[:, None, :]]
    return Prompts(
        pool.features_BGD[every_B1, drawn_BG], pool.utilities_BG[every_B1, drawn_BG], turn_BGG, pool.flipped
    )


def _distinct(features_BGD: np.ndarray) -> np.ndarray:
    """Return True for candidates that differ from every candidate before them, (B, G)."""
    first_BG = features_BGD[..., 0]
    size = first_BG.shape[1]
    is_same_BGG = first_BG[:, :, None] == first_BG[:, None, :]
    return ~(is_same_BGG & np.tril(np.ones((size, size), dtype=bool), k=-1)).any(axis=2)


def _probabilities(features_BGD: np.ndarray, policy_D: np.ndarray) -> np.ndarray:
    logits_BG = features_BGD @ policy_D
    weights_BG = np.exp(logits_BG - logits_BG.max(axis=1, keepdims=True))
    return weights_BG / weights_BG.sum(axis=1, keepdims=True)


def _after_dpo(policy_D: np.ndarray, margins_PD: np.ndarray, rate: float) -> np.ndarray:
    """Return the policy after `POLICY_STEPS` gradient steps of DPO. The log-ratio of two responses of a
    prompt is the difference of their features times the weights."""
    for _ in range(POLICY_STEPS if len(margins_PD) else 0):
        wrong_P = sigmoid(-BETA * (margins_PD @ policy_D))
        policy_D = policy_D + rate / POLICY_STEPS * BETA * (wrong_P[:, None] * margins_PD).mean(axis=0)
    return policy_D


def _regret(utilities_BG: np.ndarray, reached_B: np.ndarray) -> float:
    best_B, mean_B = utilities_BG.max(axis=1), utilities_BG.mean(axis=1)
    return float((best_B - reached_B).mean() / (best_B - mean_B).mean())
