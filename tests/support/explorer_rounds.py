"""Rounds of the explorer `ensemble` with rewards that a test gives or draws."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from fixtures import make_group

from oat.explore.base import Round, candidates_of
from oat.explore.ensemble import EnsembleExplorer
from oat.explore.settings import (
    EnsembleExplorerConfig,
    ModelLabelsConfig,
)
from oat.types import ENSEMBLE, Group, Key, Question
from oat.types.part import RunFacts

TEXTS = ("a", "b", "c", "d")
MEMBERS = 4


def labels(**options: Any) -> ModelLabelsConfig:
    """Return settings of model labels that begin at the first step."""
    return ModelLabelsConfig(**{"burn_in": 0, "share": 1.0, **options})


def explorer(**options: Any) -> EnsembleExplorer:
    return EnsembleExplorer("compare", EnsembleExplorerConfig(**options))


def aborted(group: Group, place: int) -> Group:
    """Return the group with an aborted episode at this place."""
    rows = list(group.trajectories)
    rows[place] = replace(rows[place], finish_reason="aborted")
    return replace(group, trajectories=tuple(rows))


def round_of(
    groups: Sequence[Group],
    rewards: Sequence[np.ndarray],
    *,
    step: int = 0,
    pairs: int = 0,
    seed: int = 0,
) -> Round:
    """Return a round. The feature of sample s of group number b is (b, s).

    Args:
        rewards: for each group, the rewards of its samples by member, (M, G).
    """
    features = [
        np.array([[place, sample] for sample in range(len(group.trajectories))], dtype=np.float32)
        for place, group in enumerate(groups)
    ]
    return Round(
        groups,
        [Key("train", step, 0, group.prompt.occurrence) for group in groups],
        {ENSEMBLE: [each.astype(np.float32) for each in rewards], "features": features},
        [candidates_of(group, reads_text=True) for group in groups],
        pairs,
        np.random.default_rng(seed),
    )


def plain_round(prompts: int, *, seed: int = 0, draw: int = 1, **options: Any) -> Round:
    """Return a round of prompts with four different responses and random rewards.

    Args:
        draw: seed of the rewards.
    """
    generator = np.random.default_rng(draw)
    groups = [make_group(number, *TEXTS) for number in range(prompts)]
    rewards = [generator.normal(size=(MEMBERS, len(TEXTS))) for _ in groups]
    return round_of(groups, rewards, seed=seed, **options)


def mixed_round(seed: int = 0, **options: Any) -> Round:
    """Return a round of five prompts whose candidates are samples 1 and 3; none; 0, 2 and 3; 0; and 0, 1, 2
    and 4. The rewards of the other samples are NaN."""
    groups = [
        aborted(make_group(0, "a", "b", "b", "c"), 0),
        make_group(1, "", ""),
        make_group(2, "x", "x", "y", "z", "y"),
        make_group(3, "same", "same", "same"),
        make_group(4, "a", "b", "c", "", "d"),
    ]
    generator = np.random.default_rng(9)
    rewards = []
    for group in groups:
        rewards_MG = generator.normal(size=(MEMBERS, len(group.trajectories)))
        rewards.append(np.where(candidates_of(group, reads_text=True), rewards_MG, np.nan))
    return round_of(groups, rewards, seed=seed, **options)


def facts(**changes: Any) -> RunFacts:
    given: dict[str, Any] = {
        "profile": "cpu",
        "max_new_tokens": 8,
        "is_sampling": True,
        "has_recorded": False,
        "num_recorded": 0,
        "has_environment": False,
        "has_buffer": False,
        "measures_pairs": False,
    }
    return RunFacts(**{**given, **changes})


def addresses(questions: Sequence[Question]) -> list[str]:
    return [question.oracle for question in questions]


def chi_square(drawn: Iterable[Hashable], outcomes: Sequence[Hashable]) -> float:
    """Return the statistic of the chi-square test that all outcomes are equally probable. Nothing else may be
    drawn."""
    counts = Counter(drawn)
    assert counts.keys() <= set(outcomes)
    expected = counts.total() / len(outcomes)
    return sum((counts[outcome] - expected) ** 2 for outcome in outcomes) / expected
