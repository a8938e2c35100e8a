"""The ensemble's optimiser and the fading of its prior, compared with the sources (SEA, arXiv:2411.01493;
EE4LLM, arXiv:2402.00396)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import pytest
import torch
from fixtures import gradient_of, make_group, make_questions
from weights import weights_of

from oat.algorithms.ensemble import EnsembleConfig, EnsembleLearning
from oat.assemble.learner import ensemble_optimiser
from oat.errors import ConfigError, OatWarning
from oat.learner.batching import view_of
from oat.learner.learner import Learner
from oat.models.ensemble import Ensemble
from oat.seeds import Seeds
from oat.types import ENSEMBLE, Answer, Feedback, Item, Trajectory

FEATURES = 4
MEMBERS = 3
STRENGTH = 0.5
CONFIG = EnsembleConfig(members=MEMBERS, hidden=8, batch=2, steps=1, buffer=3, prior=STRENGTH)


def pairs(
    count: int, *, label: int | None = 0, oracle: str = "judge", queries: int = 2, step: int = 1
) -> list[Item]:
    """Return compared pairs with features. Their price does not depend on their label."""
    groups, items = [make_group(number, "a", "b") for number in range(count)], []
    for group, question in zip(groups, make_questions(groups, "compare", step, oracle=oracle), strict=True):
        features = (
            np.random.default_rng([step, group.prompt.occurrence])
            .normal(size=(2, FEATURES))
            .astype(np.float32)
        )
        answer = Answer(
            question.key,
            (0.5 if label is None else 1.0 - label,),
            ("tie" if label is None else "ok",),
            queries,
        )
        items.append(Item(group, replace(question, features=features), answer, label))
    return items


def small(config: EnsembleConfig, weights: float = 1.0) -> Learner:
    ensemble = Ensemble(
        features=FEATURES, members=MEMBERS, hidden=8, activation="relu", generator=np.random.default_rng(0)
    )
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter.mul_(weights)
    return Learner(
        {ENSEMBLE: ensemble}, {ENSEMBLE: ensemble_optimiser(config)}, micro_batch_size=None, seeds=Seeds(0)
    )


def no_model(model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
    raise AssertionError("the ensemble learns from features")


def strength(objective: EnsembleLearning, items: list[Item], queries: int) -> float:
    """Return the coefficient of the prior in a step that takes these items, after so many queries were
    paid."""
    batch = objective.prepare(Feedback(1, tuple(items), queries), no_model, np.random.default_rng(0))
    outputs = {ENSEMBLE: {"rewards": torch.zeros(batch.size, MEMBERS), "prior": torch.tensor(1.0)}}
    return objective.losses(outputs, view_of(batch))["loss/prior"].coef


@pytest.mark.inventory(58)
@pytest.mark.parametrize("queries", [0, 3, 10_000], ids=["recorded or cached", "some cached", "dear"])
def test_the_prior_fades_with_labelled_pairs_and_not_with_what_they_cost(queries: int) -> None:
    objective = EnsembleLearning(CONFIG)
    silent = [*pairs(5, label=None), *pairs(7, oracle=ENSEMBLE)]
    assert strength(objective, pairs(4, queries=queries) + silent, queries) == pytest.approx(STRENGTH * 2 / 4)
    assert strength(objective, silent, 2 * queries) == pytest.approx(STRENGTH * 2 / 4)
    # of which the buffer holds 3
    assert strength(objective, pairs(6, step=2), 3 * queries) == pytest.approx(STRENGTH * 2 / 10)


@pytest.mark.inventory(77)
@pytest.mark.parametrize(("form", "constant"), [("mean", STRENGTH), ("map", STRENGTH / 2)])
def test_a_prior_may_keep_its_strength(form: Literal["mean", "map"], constant: float) -> None:
    """It is as strong as with a batch of labelled pairs."""
    objective = EnsembleLearning(replace(CONFIG, prior_form=form, prior_fades=False))
    for step, count in enumerate([1, 1, 20], 1):
        assert strength(objective, pairs(count, step=step), 0) == pytest.approx(constant)
        fading = replace(CONFIG, prior_form=form).weight_of_prior(objective.buffer.seen)
        assert (fading == pytest.approx(constant)) == (objective.buffer.seen == CONFIG.batch)


@pytest.mark.inventory(77)
def test_it_learns_no_more_from_the_step_that_finds_max_pairs() -> None:
    """The buffer has 4 labelled pairs before the second step. That is enough for a limit of 4, and not for
    one of 5."""
    for most, is_over in ((4, True), (5, False)):
        objective = EnsembleLearning(replace(CONFIG, max_pairs=most, buffer=9))
        sizes = [
            objective.prepare(
                Feedback(step, tuple(pairs(4, step=step)), 0), no_model, np.random.default_rng(0)
            ).size
            for step in (1, 2)
        ]
        assert sizes[0] > 0
        assert (sizes[1] == 0) == is_over
        assert objective.buffer.seen == 8, "pairs are stored further"


def linear_pairs(count: int, step: int) -> list[Item]:
    """Return pairs whose winner is the response with the larger sum of features, without noise."""
    items = []
    for item in pairs(count, step=step):
        assert item.question.features is not None
        first, second = item.question.features.sum(axis=1)
        items.append(replace(item, label=int(first < second)))
    return items


@pytest.mark.inventory(59)
def test_it_learns_pairs_that_a_linear_function_labels() -> None:
    """The objective of a run and the learner teach it. After 12 steps of 16 pairs it names the winner of
    nearly all other pairs. At the start it guesses."""
    config = replace(CONFIG, batch=32, steps=5, buffer=500, learning_rate=1e-2)
    learner, objective = small(config), EnsembleLearning(config)
    others = linear_pairs(300, step=99)
    features_ND = torch.from_numpy(np.concatenate([item.question.features for item in others]))  # type: ignore[misc]
    wins = np.array([item.label == 0 for item in others])

    def accuracy() -> float:
        with torch.no_grad():
            rewards_N = learner.models[ENSEMBLE].module.rewards(features_ND).mean(dim=1).numpy()
        return float(((rewards_N[0::2] > rewards_N[1::2]) == wins).mean())

    assert 0.4 < accuracy() < 0.6
    reports = []
    for step in range(12):
        taken = Feedback(step, tuple(linear_pairs(16, step)), 0)
        reports.append(
            learner.update(objective, objective.prepare(taken, no_model, np.random.default_rng(step)))
        )
    assert accuracy() > 0.9
    assert reports[-1]["ensemble/accuracy"] > 0.9
    assert reports[-1]["loss/ensemble"] < 0.5 * reports[0]["loss/ensemble"]


def test_it_learns_by_the_adam_of_the_sources() -> None:
    """Updates of the ensemble equal torch's Adam with the sources' settings. The gradients are far above the
    policy's clipping bound, and the weight decay is large enough to change biases."""
    config = replace(CONFIG, learning_rate=1e-2, weight_decay=0.3)
    learner, plain = small(config, weights=20.0), small(config, weights=20.0).models[ENSEMBLE].module
    objective = EnsembleLearning(config)
    adam = torch.optim.Adam(plain.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.3)
    norms = []
    for step in range(4):
        batch = objective.prepare(
            Feedback(step, tuple(pairs(3, label=step % 2, step=step)), 0),
            no_model,
            np.random.default_rng(step),
        )
        report = learner.update(objective, batch)
        rewards_NM = plain.rewards(batch.columns["features_N"])
        loss = torch.logaddexp(torch.tensor(0.0), rewards_NM[1::2] - rewards_NM[0::2]).mean()
        adam.zero_grad()
        (loss + STRENGTH * 2 / (3 * (step + 1)) * plain.prior()).backward()
        norms.append(float(torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()))
        adam.step()
        assert report["optim/ensemble_grad_norm"] == pytest.approx(norms[-1], rel=1e-4)
    assert max(norms) > 1
    for name, value in plain.named_parameters():
        torch.testing.assert_close(weights_of(learner, ENSEMBLE)[name], value.detach(), rtol=1e-4, atol=1e-5)


def test_its_gradient_is_clipped_only_where_that_is_set() -> None:
    norms = {}
    for norm in (None, 1e-3):
        config = replace(CONFIG, max_grad_norm=norm)
        learner, objective = small(config, weights=20.0), EnsembleLearning(config)
        batch = objective.prepare(Feedback(1, tuple(pairs(3)), 0), no_model, np.random.default_rng(0))
        report, found = gradient_of(learner, partial(learner.update, objective, batch), ENSEMBLE)
        norms[norm] = (
            report["optim/ensemble_grad_norm"],
            float(torch.cat([part.flatten() for part in found.values()]).norm()),
        )
    assert norms[None][1] == pytest.approx(norms[None][0])
    assert norms[1e-3] == pytest.approx((norms[None][0], 1e-3), rel=1e-3)


def test_a_state_of_before_is_taken_up_with_a_warning() -> None:
    before, after = EnsembleLearning(CONFIG), EnsembleLearning(CONFIG)
    strength(before, pairs(4), 8)
    old = {name: value for name, value in before.state.items() if name in ("pairs", "seen")}
    with pytest.warns(OatWarning, match="ensemble, by AdamW .*labelled pairs, 4 so far") as said:
        after.load_state(old)
    assert len(said) == 1
    assert (
        strength(after, pairs(1, step=2), 10)
        == strength(before, pairs(1, step=2), 10)
        == pytest.approx(STRENGTH * 2 / 5)
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.9)),
        ("eps", 0.0),
        ("max_grad_norm", 0.0),
        ("max_grad_norm", float("inf")),
    ],
)
def test_settings_that_no_optimiser_has_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"explorer\.ensemble\.{field} is"):
        replace(CONFIG, **{field: value})
