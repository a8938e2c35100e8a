"""Worlds of the laboratory. A world draws prompts, each with candidates: their features, which an agent sees,
and their utilities, which it does not see. Candidate i wins against j with probability sigmoid(u_i - u_j),
unless the world says otherwise.

To add a world, write its function here, under `@world`. The function draws the world's own parameters from
the generator, and returns a function that draws prompts. The parameters of all worlds are constants here:

* Features have `DIM` numbers, and a prompt has `SIZE` candidates.
* Utilities are scaled such that the best candidate of a prompt wins against a random other one with
  probability `BEST_WINS` in the mean.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from oat.explore.uncertainty import sigmoid

DIM, SIZE, BEST_WINS = 32, 20, 0.88
FAR_SHARE, FAR, NEAR = 0.2, 1.0, 0.1
"""`redundant`: share of candidates far from the prompt's centre; standard deviations of both kinds."""
FLIPPED = 0.2
"""`noisy`: probability that a label is turned around."""
UNSEEN = 0.3
"""`misspecified`: share of the utility's variance that the features do not show."""
HIDDEN = 32
"""`mlp`: number of hidden units of the utility."""
TURN = 1.0
"""`non_transitive`: standard deviation of the antisymmetric part of a pair's log-odds, in units of the
standard deviation of the utilities."""
_TRIED = 400
"""Prompts from which the scale of the utilities is computed."""


@dataclass(frozen=True, eq=False)
class Prompts:
    """B prompts with G candidates each.

    Attributes:
        features_BGD: what an agent sees.
        utilities_BG: what it wants.
        turn_BGG: antisymmetric part of the log-odds that candidate i wins against j.
        flipped: probability that a label is turned around.
    """

    features_BGD: np.ndarray
    utilities_BG: np.ndarray
    turn_BGG: np.ndarray | None = None
    flipped: float = 0.0

    def win_probabilities(self, pairs_B2: np.ndarray) -> np.ndarray:
        """Return the probability that the first candidate of each pair is named the winner, (B,)."""
        every_B = np.arange(len(pairs_B2))
        first_B, second_B = pairs_B2.T
        odds_B = self.utilities_BG[every_B, first_B] - self.utilities_BG[every_B, second_B]
        if self.turn_BGG is not None:
            odds_B = odds_B + self.turn_BGG[every_B, first_B, second_B]
        p_B = sigmoid(odds_B)
        return p_B + self.flipped * (1 - 2 * p_B)


Draw = Callable[[np.random.Generator, int, int], Prompts]
"""Draws so many prompts with so many candidates each."""

WORLDS: dict[str, Callable[[np.random.Generator], Draw]] = {}


def world(make: Callable[[np.random.Generator], Draw]) -> Callable[[np.random.Generator], Draw]:
    """Register a world under its function's name."""
    WORLDS[make.__name__] = make
    return make


def make_world(name: str, generator: np.random.Generator) -> Draw:
    """Make a world, with its utilities scaled (`BEST_WINS`).

    Args:
        generator: draws the world's parameters, and the prompts from which the scale is computed.
    """
    draw = WORLDS[name](generator)
    tried = draw(generator, _TRIED, SIZE)
    scale = _scale(tried.utilities_BG)

    def scaled(generator: np.random.Generator, prompts: int, size: int) -> Prompts:
        found = draw(generator, prompts, size)
        turn_BGG = None if found.turn_BGG is None else scale * found.turn_BGG
        return replace(found, utilities_BG=scale * found.utilities_BG, turn_BGG=turn_BGG)

    return scaled


def weight_std(prompts: Prompts) -> float:
    """Return the standard deviation of the weights of a linear utility that differs as much among the
    candidates of a prompt as this one does, if the features are alike in all directions."""
    features_BGD = prompts.features_BGD - prompts.features_BGD.mean(axis=1, keepdims=True)
    utilities_BG = prompts.utilities_BG - prompts.utilities_BG.mean(axis=1, keepdims=True)
    return float(np.sqrt((utilities_BG**2).mean() / (features_BGD**2).sum(axis=2).mean()))


def _scale(utilities_BG: np.ndarray) -> float:
    """Return the factor with which the best candidates win as often as `BEST_WINS` says, by bisection."""
    gap_BG = utilities_BG.max(axis=1, keepdims=True) - utilities_BG
    others_BG = gap_BG > 0
    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = np.sqrt(low * high)
        is_above = sigmoid(middle * gap_BG)[others_BG].mean() > BEST_WINS
        low, high = (low, middle) if is_above else (middle, high)
    return float(middle)


def _linear(generator: np.random.Generator) -> Callable[[np.ndarray], np.ndarray]:
    """Draw a linear utility."""
    weights_D = generator.normal(size=DIM)
    return lambda features_BGD: features_BGD @ weights_D


@world
def independent(generator: np.random.Generator) -> Draw:
    """Normal features, a linear utility."""
    utility = _linear(generator)

    def draw(generator: np.random.Generator, prompts: int, size: int) -> Prompts:
        features_BGD = generator.normal(size=(prompts, size, DIM))
        return Prompts(features_BGD, utility(features_BGD))

    return draw


@world
def centred(generator: np.random.Generator) -> Draw:
    """As `independent`, but the candidates of a prompt lie around a centre of their own."""
    utility = _linear(generator)

    def draw(generator: np.random.Generator, prompts: int, size: int) -> Prompts:
        centres_B1D = generator.normal(size=(prompts, 1, DIM))
        features_BGD = centres_B1D + generator.normal(size=(prompts, size, DIM))
        return Prompts(features_BGD, utility(features_BGD))

    return draw


@world
def mlp(generator: np.random.Generator) -> Draw:
    """Normal features; the utility is a network with one hidden layer."""
    first_DH = generator.normal(size=(DIM, HIDDEN)) / np.sqrt(DIM)
    second_H = generator.normal(size=HIDDEN)

    def draw(generator: np.random.Generator, prompts: int, size: int) -> Prompts:
        features_BGD = generator.normal(size=(prompts, size, DIM))
        return Prompts(features_BGD, np.tanh(2 * features_BGD @ first_DH) @ second_H)

    return draw


@world
def misspecified(generator: np.random.Generator) -> Draw:
    """As `independent`, but the features do not show a part of the utility (`UNSEEN`)."""
    utility = _linear(generator)

    def draw(generator: np.random.Generator, prompts: int, size: int) -> Prompts:
        features_BGD = generator.normal(size=(prompts, size, DIM))
        seen_BG = utility(features_BGD)
        unseen_BG = seen_BG.std() * np.sqrt(UNSEEN / (1 - UNSEEN)) * generator.normal(size=seen_BG.shape)
        return Prompts(features_BGD, seen_BG + unseen_BG)

    return draw


@world
def noisy(generator: np.random.Generator) -> Draw:
    """As `independent`, but some labels are turned around (`FLIPPED`)."""
    draw_plain = independent(generator)
    return lambda generator, prompts, size: replace(draw_plain(generator, prompts, size), flipped=FLIPPED)


@world
def non_transitive(generator: np.random.Generator) -> Draw:
    """As `independent`, but the log-odds of a pair have an antisymmetric part (`TURN`). So A may beat B, B
    beat C, and C beat A. Regret is that of the utility."""
    utility = _linear(generator)
    turn_DD = generator.normal(size=(DIM, DIM))
    turn_DD = (turn_DD - turn_DD.T) / np.sqrt(2) / DIM

    def draw(generator: np.random.Generator, prompts: int, size: int) -> Prompts:
        features_BGD = generator.normal(size=(prompts, size, DIM))
        utilities_BG = utility(features_BGD)
        turn_BGG = features_BGD @ turn_DD @ features_BGD.swapaxes(1, 2)
        return Prompts(features_BGD, utilities_BG, TURN * utilities_BG.std() * turn_BGG)

    return draw


@world
def redundant(generator: np.random.Generator) -> Draw:
    """A linear utility. A few candidates of a prompt lie far from its centre, and most lie near it, so most
    pairs tell little (`FAR_SHARE`, `FAR`, `NEAR`)."""
    utility = _linear(generator)

    def draw(generator: np.random.Generator, prompts: int, size: int) -> Prompts:
        is_far_BG = generator.random((prompts, size)) < FAR_SHARE
        std_BG1 = np.where(is_far_BG, FAR, NEAR)[..., None]
        features_BGD = generator.normal(size=(prompts, 1, DIM)) + std_BG1 * generator.normal(
            size=(prompts, size, DIM)
        )
        return Prompts(features_BGD, utility(features_BGD))

    return draw


@world
def heavy_tailed(generator: np.random.Generator) -> Draw:
    """A linear utility; the distances of features from 0 are lognormal."""
    utility = _linear(generator)

    def draw(generator: np.random.Generator, prompts: int, size: int) -> Prompts:
        radii_BG1 = generator.lognormal(size=(prompts, size, 1))
        features_BGD = radii_BG1 * generator.normal(size=(prompts, size, DIM))
        return Prompts(features_BGD, utility(features_BGD))

    return draw
