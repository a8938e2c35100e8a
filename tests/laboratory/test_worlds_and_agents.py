"""The laboratory's worlds and agents."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from fixtures import make_group, make_questions
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.algorithms.ensemble import EnsembleLearning
from oat.assemble.ensemble import ensemble_optimiser
from oat.explore.settings import EnsembleConfig
from oat.laboratory.agents import AGENTS, MEMBERS, Ideal, Learned
from oat.laboratory.worlds import (
    BEST_WINS,
    DIM,
    FAR,
    FAR_SHARE,
    FLIPPED,
    NEAR,
    SIZE,
    TURN,
    UNSEEN,
    WORLDS,
    Prompts,
    make_world,
    weight_std,
)
from oat.learner.learner import Learner
from oat.models.ensemble import Ensemble
from oat.seeds import Seeds
from oat.types import ENSEMBLE, Answer, Feedback, Item, Trajectory

PRIOR_STD = 0.8


def drawn(name: str, prompts: int = 300, *, of_world: int = 1, seed: int = 2, size: int = SIZE) -> Prompts:
    """Return prompts of a world, whose parameters `of_world` decides."""
    return make_world(name, np.random.default_rng(of_world))(np.random.default_rng(seed), prompts, size)


def sigmoid(values: Any) -> Any:
    return 1 / (1 + np.exp(-values))


# worlds


@pytest.mark.parametrize("name", sorted(WORLDS))
@pytest.mark.parametrize("of_world", [1, 7])
def test_the_best_candidate_wins_as_often_in_every_world(name: str, of_world: int) -> None:
    """Against a random other candidate, in the mean over new prompts, before labels are turned around."""
    utilities_BG = drawn(name, of_world=of_world).utilities_BG
    wins = []
    for utilities_G in utilities_BG:
        best = int(utilities_G.argmax())
        wins += [sigmoid(utilities_G[best] - utilities_G[other]) for other in range(SIZE) if other != best]
    assert np.mean(wins) == pytest.approx(BEST_WINS, abs=0.015)


@pytest.mark.parametrize("name", ["independent", "centred", "noisy", "redundant", "heavy_tailed"])
def test_the_scale_of_a_linear_utility_is_that_of_its_weights(name: str) -> None:
    """A prior with this scale is the right one for the ideal agent. The weights are found by least squares
    within prompts."""
    prompts = drawn(name)
    features_ND, utilities_N = (
        (each - each.mean(axis=1, keepdims=True)).reshape(-1, *each.shape[2:])
        for each in (prompts.features_BGD, prompts.utilities_BG)
    )
    weights_D = np.linalg.lstsq(features_ND, utilities_N)[0]
    np.testing.assert_allclose(features_ND @ weights_D, utilities_N, atol=1e-8)
    assert weight_std(prompts) == pytest.approx(np.sqrt((weights_D**2).mean()), rel=0.1)


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_one_of_two_candidates_wins(name: str) -> None:
    """If a pair is swapped, so are the probabilities. A candidate ties with itself."""
    prompts = drawn(name, 50)
    generator = np.random.default_rng(0)
    pairs_B2 = generator.integers(SIZE, size=(50, 2))
    p_B, swapped_B = prompts.win_probabilities(pairs_B2), prompts.win_probabilities(pairs_B2[:, ::-1])
    np.testing.assert_allclose(p_B + swapped_B, 1.0, rtol=1e-12)
    same_B2 = np.repeat(pairs_B2[:, :1], 2, axis=1)
    np.testing.assert_allclose(prompts.win_probabilities(same_B2), 0.5, rtol=1e-12)
    least = FLIPPED if name == "noisy" else 0.0
    assert ((p_B > least) & (p_B < 1 - least)).all()


def test_probabilities_by_hand() -> None:
    """The odds of the first candidate are 3 to 1. With turned labels it wins 0.75 * 0.8 + 0.25 * 0.2. A turn
    of log 3 makes 9 to 1 of them, and 1 to 1 for the pair in the other order."""
    utilities_BG = np.array([[math.log(3), 0.0]] * 2)
    turn_BGG = np.array([[[0.0, math.log(3)], [-math.log(3), 0.0]]] * 2)
    pairs_B2 = np.array([[0, 1], [1, 0]])
    features_BGD = np.zeros((2, 2, DIM))
    plain = Prompts(features_BGD, utilities_BG)
    assert plain.win_probabilities(pairs_B2) == pytest.approx([0.75, 0.25])
    assert replace(plain, flipped=0.2).win_probabilities(pairs_B2) == pytest.approx([0.65, 0.35])
    assert replace(plain, turn_BGG=turn_BGG).win_probabilities(pairs_B2) == pytest.approx([0.9, 0.1])
    turned = replace(plain, turn_BGG=-turn_BGG)
    assert turned.win_probabilities(pairs_B2) == pytest.approx([0.5, 0.5])


def test_noise_turns_labels_of_the_same_utilities() -> None:
    noisy, plain = drawn("noisy"), drawn("independent")
    np.testing.assert_array_equal(noisy.utilities_BG, plain.utilities_BG)
    pairs_B2 = np.tile([0, 1], (300, 1))
    p_B = plain.win_probabilities(pairs_B2)
    expected_B = (1 - FLIPPED) * p_B + FLIPPED * (1 - p_B)
    np.testing.assert_allclose(noisy.win_probabilities(pairs_B2), expected_B, rtol=1e-12)


def test_few_candidates_are_far_from_a_prompts_centre() -> None:
    """Their distances from the centre are those of the two standard deviations, and nothing lies between."""
    features_BGD = drawn("redundant").features_BGD
    centre_B1D = np.median(features_BGD, axis=1, keepdims=True)
    distance_BG = np.linalg.norm(features_BGD - centre_B1D, axis=2) / math.sqrt(DIM)
    is_far_BG = distance_BG > math.sqrt(NEAR * FAR)
    assert is_far_BG.mean() == pytest.approx(FAR_SHARE, abs=0.02)
    assert distance_BG[is_far_BG].mean() == pytest.approx(FAR, rel=0.05)
    assert distance_BG[~is_far_BG].mean() == pytest.approx(NEAR, rel=0.1)
    assert not ((distance_BG > 2 * NEAR) & (distance_BG < FAR / 2)).any()


def explained(prompts: Prompts) -> float:
    """Return the share of the variance of utilities within prompts that a linear function of the features
    explains."""
    x_ND = (prompts.features_BGD - prompts.features_BGD.mean(axis=1, keepdims=True)).reshape(-1, DIM)
    y_N = (prompts.utilities_BG - prompts.utilities_BG.mean(axis=1, keepdims=True)).reshape(-1)
    residual_N = y_N - x_ND @ np.linalg.lstsq(x_ND, y_N, rcond=None)[0]
    return float(1 - residual_N.var() / y_N.var())


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_what_features_tell_of_utilities(name: str) -> None:
    """In all worlds but two the utility is linear in the features."""
    share = explained(drawn(name))
    if name == "misspecified":
        assert share == pytest.approx(1 - UNSEEN, abs=0.03)
    elif name == "mlp":
        assert 0.2 < share < 0.95
    else:
        assert share == pytest.approx(1.0, abs=1e-9)


def test_candidates_beat_each_other_in_circles() -> None:
    """Only in `non_transitive`. The turn of a pair is about as large as the utilities."""
    prompts = drawn("non_transitive")
    assert prompts.turn_BGG is not None
    np.testing.assert_allclose(prompts.turn_BGG, -prompts.turn_BGG.swapaxes(1, 2), atol=1e-12)
    off = ~np.eye(SIZE, dtype=bool)
    assert prompts.turn_BGG[:, off].std() == pytest.approx(TURN * prompts.utilities_BG.std(), rel=0.15)
    circles = {name: circles_of(drawn(name, 20)) for name in ("non_transitive", "centred")}
    assert circles["non_transitive"] > 20
    assert circles["centred"] == 0


def circles_of(prompts: Prompts) -> int:
    """Return how often candidate 0 beats 1, 1 beats 2, and 2 beats 0, over shifted triples."""
    found = 0
    for shift in range(SIZE):
        beats = []
        for one, other in ((0, 1), (1, 2), (2, 0)):
            pair = [(one * 7 + shift) % SIZE, (other * 7 + shift) % SIZE]
            beats.append(prompts.win_probabilities(np.tile(pair, (len(prompts.utilities_BG), 1))) > 0.5)
        found += int((beats[0] & beats[1] & beats[2]).sum() + (~beats[0] & ~beats[1] & ~beats[2]).sum())
    return found


def test_candidates_lie_around_centres_or_at_lognormal_distances() -> None:
    centred = drawn("centred").features_BGD
    assert centred.mean(axis=1).var() == pytest.approx(1 + 1 / SIZE, rel=0.05)
    assert (centred - centred.mean(axis=1, keepdims=True)).var() == pytest.approx(1 - 1 / SIZE, rel=0.05)
    radii_N = np.linalg.norm(drawn("heavy_tailed").features_BGD, axis=2).reshape(-1) / math.sqrt(DIM)
    assert np.log(radii_N).std() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_a_world_is_what_its_generator_makes_it(name: str) -> None:
    one, same, other = (drawn(name, 4, of_world=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.utilities_BG, same.utilities_BG)
    np.testing.assert_array_equal(one.features_BGD, same.features_BGD)
    assert not np.array_equal(one.utilities_BG, other.utilities_BG)
    assert drawn(name, 3, size=5).features_BGD.shape == (3, 5, DIM)


# agents


def some_pairs(count: int, dim: int, seed: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    chosen_PD, rejected_PD = scale * generator.normal(size=(2, count, dim))
    return chosen_PD, rejected_PD


def slow_log_posterior(weights_D: np.ndarray, margins_PD: np.ndarray) -> float:
    total = sum(-0.5 * (weight / PRIOR_STD) ** 2 for weight in weights_D.tolist())
    for margin_D in margins_PD:
        total -= math.log1p(math.exp(-float(margin_D @ weights_D)))
    return total


def test_the_ideal_agent_is_laplaces_approximation() -> None:
    """Its mean is the maximum of a slow posterior, and its covariance the inverse of minus the matrix of
    second derivatives there, by finite differences. Pairs may come in several parts."""
    dim = 5
    chosen_PD, rejected_PD = some_pairs(12, dim, 3)
    agent = Ideal(dim, np.random.default_rng(0), PRIOR_STD)
    for some in (slice(0, 4), slice(4, 5), slice(5, 12)):
        agent.learn(chosen_PD[some], rejected_PD[some])
    margins_PD, step = chosen_PD - rejected_PD, 1e-4
    eye_DD = step * np.eye(dim)

    def at(offset_D: np.ndarray) -> float:
        return slow_log_posterior(agent.mean_D + offset_D, margins_PD)

    gradient_D = np.array([(at(one) - at(-one)) / (2 * step) for one in eye_DD])
    assert np.abs(gradient_D).max() < 2e-3
    curvature_DD = np.array(
        [
            [
                (at(one + two) - at(one - two) - at(two - one) + at(-one - two)) / (4 * step**2)
                for two in eye_DD
            ]
            for one in eye_DD
        ]
    )
    covariance_DD = agent.root_DD @ agent.root_DD.T
    np.testing.assert_allclose(covariance_DD @ -curvature_DD, np.eye(dim), atol=5e-3)
    whole = Ideal(dim, np.random.default_rng(0), PRIOR_STD)
    whole.learn(chosen_PD, rejected_PD)
    np.testing.assert_allclose(whole.mean_D, agent.mean_D, atol=1e-3)


@given(st.integers(1, 6), st.integers(0, 30), st.sampled_from([0.01, 1.0, 30.0, 1e3]), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_ideal_agent_finds_the_maximum_however_large_features_are(
    dim: int, count: int, scale: float, seed: int
) -> None:
    """No direction leads upwards from the mean. Pairs that a plane separates need many halved steps."""
    chosen_PD, rejected_PD = some_pairs(count, dim, seed, scale)
    agent = Ideal(dim, np.random.default_rng(0), PRIOR_STD)
    agent.learn(chosen_PD, rejected_PD)
    margins_PD = chosen_PD - rejected_PD
    p_P = sigmoid(np.clip(margins_PD @ agent.mean_D, -700, 700))
    gradient_D = margins_PD.T @ (1 - p_P) - agent.mean_D / PRIOR_STD**2
    covariance_DD = agent.root_DD @ agent.root_DD.T
    assert np.isfinite(agent.mean_D).all()
    assert gradient_D @ covariance_DD @ gradient_D < 1e-4, "a Newton step would gain less than half of this"


def test_the_ideal_agents_members_are_samples_of_its_belief() -> None:
    agent = Ideal(3, np.random.default_rng(0), PRIOR_STD)
    agent.learn(*some_pairs(20, 3, 1))
    features_BGD = np.eye(3)[None]
    draws_MD = np.concatenate([agent.rewards(features_BGD)[:, 0] for _ in range(400)])
    assert agent.rewards(features_BGD).shape == (MEMBERS, 1, 3)
    np.testing.assert_allclose(draws_MD.mean(axis=0), agent.mean_D, atol=0.03)
    np.testing.assert_allclose(np.cov(draws_MD.T), agent.root_DD @ agent.root_DD.T, atol=0.03)
    np.testing.assert_allclose(agent.means(features_BGD)[0], agent.mean_D)


def test_agents_without_pairs_keep_their_prior() -> None:
    nothing_PD = np.zeros((0, DIM))
    features_BGD = np.random.default_rng(1).normal(size=(2, 3, DIM))
    for make in AGENTS.values():
        agent = make(DIM, np.random.default_rng(0), PRIOR_STD)
        before = agent.means(features_BGD)
        agent.learn(nothing_PD, nothing_PD)
        np.testing.assert_allclose(agent.means(features_BGD), before)
    ideal = Ideal(DIM, np.random.default_rng(0), PRIOR_STD)
    ideal.learn(nothing_PD, nothing_PD)
    np.testing.assert_allclose(ideal.root_DD, PRIOR_STD * np.eye(DIM), atol=1e-12)


def no_model(model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
    raise AssertionError("the ensemble learns from features")


@pytest.mark.parametrize("form", ["mean", "map"])
def test_the_learned_agent_learns_as_the_ensemble_of_a_run(form: Literal["mean", "map"]) -> None:
    """It has the rewards of a run's ensemble that started from the same weights, and learned from the same
    pairs with the same random numbers."""
    config = EnsembleConfig(
        members=4, hidden=6, learning_rate=1e-2, prior=0.7, prior_form=form, batch=5, steps=3, buffer=12
    )
    dim = 7
    agent = Learned(dim, np.random.default_rng(3), config)
    generator = np.random.default_rng(3)
    model = Ensemble(
        features=dim, members=4, hidden=6, activation="relu", prior_form=form, generator=generator
    )
    learner = Learner(
        {ENSEMBLE: model}, {ENSEMBLE: ensemble_optimiser(config)}, micro_batch_size=None, seeds=Seeds(0)
    )
    objective = EnsembleLearning(config)
    features_BGD = np.random.default_rng(9).normal(size=(2, 5, dim)).astype(np.float32)
    for step in range(4):
        chosen_PD, rejected_PD = some_pairs(3 + step, dim, step)
        agent.learn(chosen_PD, rejected_PD)
        items = []
        for number, features in enumerate(np.stack([chosen_PD, rejected_PD], axis=1).astype(np.float32)):
            group = make_group(number, "a", "b")
            (question,) = make_questions([group], "compare", step, oracle="o")
            asked = replace(question, features=features)
            items.append(Item(group, asked, Answer(question.key, (1.0,), ("ok",), 1), 0))
        learner.update(objective, objective.prepare(Feedback(step, tuple(items), 0), no_model, generator))
    with torch.no_grad():
        expected_NM = model.rewards(torch.from_numpy(features_BGD.reshape(-1, dim)))
    expected_MBG, found_MBG = expected_NM.T.numpy().reshape(4, 2, 5), agent.rewards(features_BGD)
    # the last bias has no gradient but that of rounding, and adds the same to all rewards of a member
    for rewards_MBG in (expected_MBG, found_MBG):
        rewards_MBG -= rewards_MBG[:, :1, :1].copy()
    np.testing.assert_allclose(found_MBG, expected_MBG, rtol=1e-3, atol=1e-5)
    assert np.abs(expected_MBG).max() > 0.1
    np.testing.assert_allclose(agent.means(features_BGD), agent.rewards(features_BGD).mean(axis=0))
