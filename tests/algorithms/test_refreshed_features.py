"""An ensemble whose features are the policy's: its buffer keeps the responses, and computes their features
again under the policy's present weights."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engines import KEYS, build_engine, run
from fixtures import make_group, make_questions
from tiny_models import NUM_TOKENS, build_config, save_model

from oat.algorithms.ensemble import EnsembleConfig, EnsembleLearning
from oat.engines.decoding import Pooling
from oat.errors import ConfigError
from oat.explore.settings import FeaturesConfig
from oat.learner.learner import Learner
from oat.learner.models import LanguageModel
from oat.models.loading import load_lm
from oat.rollout.features import FromSampling, SecondPass
from oat.seeds import Seeds
from oat.types import Answer, Feedback, Item, Request, Sampling, Segment, Trajectory

CONFIG = EnsembleConfig(members=3, hidden=8, batch=4, steps=1, buffer=5)
POOLINGS = [Pooling(-1, False), Pooling("all", False), Pooling(1, True)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("refreshed") / "model", build_config("llama"))


class Case:
    """A policy that changes, and pairs of its responses."""

    def __init__(self, path: str, pooling: Pooling, refresh_every: int | None):
        self.lm, self.pooling = load_lm(path), pooling
        self.name = "last" if pooling.takes_last else "mean"
        self.engine = build_engine(self.lm, pooling=pooling)
        self.features = FromSampling(self.lm, pooling.layer, self.name)
        self.objective = EnsembleLearning(CONFIG, self.features.identity, refresh_every)
        policy = LanguageModel(self.lm, num_tokens=NUM_TOKENS)
        self.learner = Learner({"policy": policy}, {}, micro_batch_size=3, seeds=Seeds(0))

    def sample(self, version: int, labels: list[int]) -> list[Item]:
        groups = []
        for number in range(len(labels)):
            ids = (
                np.random.default_rng([version, number]).integers(1, NUM_TOKENS, 3 + number).astype(np.int32)
            )
            requests = [
                Request(ids, Sampling(5), KEYS.key("refresh", version, number, sample)) for sample in range(2)
            ]
            rows = []
            for each in run(self.engine, requests):
                size = len(each.ids)
                segment = Segment("model", each.ids, np.ones(size, bool), np.full(size, version, np.int32))
                segments = Segment("context", ids), segment
                rows.append(Trajectory("sampler", segments, "stop", "", features=each.features))
            groups.append(replace(make_group(number, "a", "b"), trajectories=tuple(rows)))
        questions = make_questions(groups, "compare", version, oracle="judge")
        return [
            Item(
                group,
                replace(question, features=self.features.of([group])[0]),
                Answer(question.key, (1.0 - label,), ("ok",), 1),
                label,
            )
            for group, question, label in zip(groups, questions, labels, strict=True)
        ]

    def step(self, number: int, items: list[Item]) -> dict[str, float]:
        feedback = Feedback(number, tuple(items), 0)
        batch = self.objective.prepare(feedback, self.learner.forward, np.random.default_rng(number))
        return batch.metrics

    @torch.no_grad()
    def change(self) -> None:
        for parameter in self.lm.module.parameters():
            parameter.mul_(1.1)

    def wanted(self, items: list[Item]) -> torch.Tensor:
        """Return the features of both responses of pairs under the present weights, the chosen one first."""
        whole = SecondPass(self.lm, self.pooling.layer, self.name, name="policy", weights=0, is_policy=True)
        pairs = [
            found[[item.label, 1 - item.label]] if item.label is not None else found
            for item, found in zip(items, whole.of([item.group for item in items]), strict=True)
        ]
        return torch.from_numpy(np.stack(pairs))


@pytest.mark.sample("two lives-*", seconds=0.4)
@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
@pytest.mark.parametrize("is_restored", [False, True], ids=["one life", "two lives"])
def test_features_are_computed_again_when_it_is_due(path: str, pooling: Pooling, is_restored: bool) -> None:
    """The buffer has room for 5 pairs, so the last pair of the second step replaces the first one."""
    case = Case(path, pooling, 2)
    first = case.sample(0, [0, 1, 1])
    before = case.wanted(first)
    assert case.step(0, first)["ensemble/feature_age"] == 1.0
    torch.testing.assert_close(case.objective.buffer.pairs, before, rtol=1e-4, atol=1e-5)
    case.change()
    second = case.sample(1, [1, 0, 0])
    if is_restored:
        state, case.objective = case.objective.state, Case(path, pooling, 2).objective
        case.objective.load_state(state)
    case.change()
    assert case.step(1, second)["ensemble/feature_age"] == 0.0
    kept = [second[2], first[1], first[2], *second[:2]]
    torch.testing.assert_close(case.objective.buffer.pairs, case.wanted(kept), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(case.objective.buffer.pairs[1:3], before[1:3], rtol=1e-3)
    assert case.objective.buffer.versions == dict.fromkeys(range(5), 2)


def test_without_it_features_stay_and_their_age_is_told(path: str) -> None:
    case = Case(path, POOLINGS[0], None)
    items = case.sample(0, [0, 1])
    case.step(0, items)
    before = case.objective.buffer.pairs.clone()
    case.change()
    assert case.step(1, [])["ensemble/feature_age"] == 2.0
    assert case.step(2, case.sample(2, [0, 1]))["ensemble/feature_age"] == 2.0
    assert torch.equal(case.objective.buffer.pairs[:2], before)


def test_features_of_a_frozen_backbone_have_no_age(path: str) -> None:
    case = Case(path, POOLINGS[0], None)
    case.objective.features["backbone"] = "reference"
    assert "ensemble/feature_age" not in case.step(0, case.sample(0, [0, 1]))
    assert "ids" not in case.objective.state


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"backbone": "reference", "refresh_every": 2}, "the backbone reference does not learn"),
        ({"backbone": "org/name", "refresh_every": 2}, "the backbone org/name does not learn"),
        ({"backbone": "policy", "refresh_every": 0}, "features.refresh_every is 0"),
    ],
)
def test_what_cannot_be_computed_again_is_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        FeaturesConfig(**fields)
