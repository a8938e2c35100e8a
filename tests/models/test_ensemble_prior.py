"""The start of an ensemble's networks, and the prior that pulls them back to it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from fixtures import make_group, make_questions
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.algorithms.ensemble import EnsembleLearning
from oat.explore.settings import EnsembleConfig
from oat.learner.batching import view_of
from oat.models.ensemble import Ensemble, PriorForm
from oat.types import ENSEMBLE, Answer, Feedback, Item, Trajectory

NAMES = tuple(f"{kind}{layer}" for layer in (1, 2, 3) for kind in ("weight", "bias"))


def ensemble(
    *,
    features: int = 4,
    members: int = 2,
    hidden: int = 1,
    form: PriorForm = "mean",
    activation: Literal["relu", "swish"] = "relu",
    seed: int = 0,
) -> Ensemble:
    return Ensemble(
        features=features,
        members=members,
        hidden=hidden,
        activation=activation,
        prior_form=form,
        generator=np.random.default_rng(seed),
    )


@torch.no_grad()
def move(model: Ensemble, **by: float) -> None:
    """Add a number to every entry of the parameters of these names."""
    for name, amount in by.items():
        model.tensors()[name].add_(amount)


def moved(model: Ensemble, seed: int = 5, scale: float = 0.3) -> Ensemble:
    """Move every parameter by random numbers, and return the model."""
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.from_numpy(scale * generator.normal(size=parameter.shape)))
    return model


@pytest.mark.inventory(58)
@pytest.mark.parametrize("form", ["mean", "map"])
def test_the_prior_of_the_start_is_zero(form: PriorForm) -> None:
    assert ensemble(form=form).prior().item() == 0.0


@pytest.mark.parametrize(
    ("by", "mean", "per_member"),
    [
        # 2 members with 4 + 1 + 1 + 1 + 1 + 1 parameters. Variances are 1/16 with 4 inputs, 1/4 with one
        ({"weight1": 0.5}, 8 * 0.25 / 18, 4 * 0.25 * 16 / 2),
        ({"bias1": 0.5}, 2 * 0.25 / 18, 0.25 * 16 / 2),
        ({"weight2": 2.0}, 2 * 4.0 / 18, 4.0 * 4 / 2),
        ({"bias2": -2.0}, 2 * 4.0 / 18, 4.0 * 4 / 2),
        ({"weight3": -1.0}, 2 * 1.0 / 18, 4 / 2),
        ({"bias3": 1.0, "weight2": 1.0}, 4 * 1.0 / 18, 2 * 4 / 2),
    ],
)
def test_the_prior_by_hand(by: dict[str, float], mean: float, per_member: float) -> None:
    for form, expected in (("mean", mean), ("map", per_member)):
        model = ensemble(form=form)  # type: ignore[arg-type]
        move(model, **by)
        assert model.prior().item() == pytest.approx(expected, rel=1e-5)


def test_a_member_that_moves_alone_counts_for_its_share() -> None:
    """The form `map` is the mean over members of each member's own prior."""
    model = ensemble(form="map", members=4)
    with torch.no_grad():
        model.tensors()["weight2"][3] += 2.0
    assert model.prior().item() == pytest.approx(4.0 * 4 / 2 / 4, rel=1e-5)


def log_density(model: Ensemble) -> torch.Tensor:
    """Return the logarithm of the density of each member's parameters under normal distributions around its
    start, (M,). The standard deviation of a layer's weights and biases is 1 / (2 sqrt(inputs))."""
    total = torch.zeros(model.members, dtype=torch.float64)
    for layer in (1, 2, 3):
        inputs = model.tensors()[f"weight{layer}"].shape[1]
        for name in (f"weight{layer}", f"bias{layer}"):
            anchor = model.get_buffer(f"anchor_{name}").double()
            normal = torch.distributions.Normal(anchor, 1 / (2 * math.sqrt(inputs)))
            total = total + normal.log_prob(model.tensors()[name].double()).flatten(1).sum(dim=1)
    return total


@given(
    features=st.integers(1, 6),
    hidden=st.integers(1, 5),
    members=st.integers(1, 4),
    seed=st.integers(0, 99),
    scale=st.sampled_from([0.01, 0.5, 3.0]),
)
@settings(max_examples=30, deadline=None)
def test_the_form_map_is_minus_the_logarithm_of_the_normal_prior(
    features: int, hidden: int, members: int, seed: int, scale: float
) -> None:
    """In the mean over members, and up to a constant that the parameters do not change."""
    model = ensemble(features=features, hidden=hidden, members=members, form="map", seed=seed)
    constant = log_density(model)
    moved(model, seed, scale)
    expected = (constant - log_density(model)).mean().item()
    assert model.prior().item() == pytest.approx(expected, rel=1e-4)


@given(
    form=st.sampled_from(["mean", "map"]),
    features=st.integers(1, 3),
    hidden=st.integers(1, 3),
    members=st.integers(1, 2),
    seed=st.integers(0, 99),
    scale=st.sampled_from([0.01, 0.3, 3.0]),
)
@settings(max_examples=15, deadline=None)
def test_the_gradient_is_that_of_finite_differences(
    form: PriorForm, features: int, hidden: int, members: int, seed: int, scale: float
) -> None:
    """In float64, for every parameter. The prior is a square, so that a long step makes no error."""
    made = ensemble(form=form, features=features, hidden=hidden, members=members, seed=seed)
    model = moved(made.double(), seed, scale)
    model.prior().backward()
    step = 1e-3
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for place in np.ndindex(*parameter.shape):
            sides = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter[place] += sign * step
                    sides.append(model.prior().item())
                    parameter[place] -= sign * step
            slope = (sides[0] - sides[1]) / (2 * step)
            assert parameter.grad[place].item() == pytest.approx(slope, rel=1e-6, abs=1e-9), (name, place)


@pytest.mark.parametrize("activation", ["relu", "swish"])
def test_the_loss_at_strength_one_is_the_posterior(activation: Literal["relu", "swish"]) -> None:
    """With the form `map`, the loss of a batch of all labelled pairs, times their number, is the mean over
    members of minus the logarithm of the posterior, up to a constant."""
    count, members, width = 5, 3, 4
    generator = np.random.default_rng(8)
    config = EnsembleConfig(members=members, hidden=3, batch=count, steps=1, prior=1.0, prior_form="map")
    groups = [make_group(number, "a", "b") for number in range(count)]
    items = []
    for group, question in zip(groups, make_questions(groups, "compare", 0, oracle="o"), strict=True):
        asked = replace(question, features=generator.normal(size=(2, width)).astype(np.float32))
        items.append(Item(group, asked, Answer(question.key, (1.0,), ("ok",), 1), 0))
    objective = EnsembleLearning(config)

    def no_model(model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        raise AssertionError("the ensemble learns from features")

    batch = objective.prepare(Feedback(0, tuple(items), count), no_model, np.random.default_rng(0))
    batch = replace(batch, columns={name: column.double() for name, column in batch.columns.items()})
    losses = []
    slow = []
    for seed in (1, 2):
        model = ensemble(features=width, members=members, hidden=3, form="map", activation=activation)
        model = moved(model.double(), seed)
        found = {ENSEMBLE: model.outputs((), batch.columns, {"rewards", "prior"})}
        terms = objective.losses(found, view_of(batch))
        pairs, prior = terms["loss/ensemble"], terms["loss/prior"]
        losses.append(count * (pairs.coef * pairs.terms.mean() + prior.coef * prior.terms).item())
        likelihood_M = torch.zeros(members, dtype=torch.float64)
        for item in items:
            assert item.question.features is not None
            chosen_M, rejected_M = model.rewards(torch.from_numpy(item.question.features).double())
            likelihood_M = likelihood_M - torch.log1p(torch.exp(rejected_M - chosen_M))
        slow.append(-(likelihood_M + log_density(model)).mean().item())
    assert losses[1] - losses[0] == pytest.approx(slow[1] - slow[0], rel=1e-9)


@pytest.mark.inventory(57)
def test_the_start_is_truncated_at_two_standard_deviations() -> None:
    """Weights are spread as a normal distribution that is cut there, whose standard deviation is 0.880 of the
    whole one's. Biases are 0, and members differ."""
    model = ensemble(features=50, hidden=40, members=10)
    for layer, inputs in ((1, 50), (2, 40), (3, 40)):
        std = 1 / (2 * math.sqrt(inputs))
        weights = model.tensors()[f"weight{layer}"].detach().numpy() / std
        assert np.abs(weights).max() <= 2.0 + 1e-6
        assert np.abs(weights).max() > 1.8
        tolerance = 3 / math.sqrt(weights.size)
        assert weights.std() == pytest.approx(0.8796, abs=tolerance)
        assert weights.mean() == pytest.approx(0.0, abs=tolerance)
        share_within_one = (np.abs(weights) < 1).mean()
        assert share_within_one == pytest.approx(0.6827 / 0.9545, abs=tolerance)
        assert not model.tensors()[f"bias{layer}"].any()
        assert len(np.unique(weights[:, 0, 0])) == 10


def test_a_seed_decides_the_start() -> None:
    one, same, other = (ensemble(hidden=3, seed=seed) for seed in (1, 1, 2))
    for name in NAMES:
        assert torch.equal(one.tensors()[name], same.tensors()[name])
    assert not torch.equal(one.tensors()["weight1"], other.tensors()["weight1"])


@pytest.mark.parametrize("form", ["mean", "map"])
def test_a_given_start_is_what_the_prior_pulls_to(form: PriorForm) -> None:
    """The values are copied: who gave them may change them."""
    model, source = ensemble(form=form, hidden=3), moved(ensemble(hidden=3, seed=1))
    given = {name: tensor.detach().clone() for name, tensor in source.tensors().items()}
    features_ND = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32))
    model.start_from(given)
    for tensor in given.values():
        tensor.add_(1.0)
    assert torch.equal(model.rewards(features_ND), source.rewards(features_ND))
    assert model.prior().item() == 0.0
    move(model, bias1=0.5)
    assert model.prior().item() > 0
    model.start_from({name: tensor.detach() for name, tensor in source.tensors().items()})
    assert model.prior().item() == 0.0
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert set(model.trainable()) == set(NAMES), "the anchor is not learned"


@pytest.mark.parametrize("features", [4, 256])
def test_many_candidates_have_the_rewards_of_few(features: int) -> None:
    """Without a gradient, members are computed in groups if there are many candidates."""
    model = ensemble(features=features, members=5, hidden=320)
    features_ND = torch.randn(700, features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rewards_NM = model.rewards(features_ND)
        few_NM = torch.cat([model.rewards(some) for some in features_ND.split(350)])
    assert rewards_NM.shape == (700, 5)
    torch.testing.assert_close(rewards_NM, model.rewards(features_ND).detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(rewards_NM, few_NM, rtol=0, atol=1e-6)


@pytest.mark.inventory(56)
def test_members_are_independent() -> None:
    """If the parameters of one member change, only its rewards do, and only it has a gradient of them."""
    model = moved(ensemble(members=3, hidden=4))
    features_ND = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    before_NM = model.rewards(features_ND).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[1] += 0.5
    after_NM = model.rewards(features_ND)
    assert (after_NM[:, [0, 2]] == before_NM[:, [0, 2]]).all()
    assert (after_NM[:, 1] != before_NM[:, 1]).all()
    after_NM[:, 1].sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad[[0, 2]].any()
