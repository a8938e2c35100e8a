"""The estimator `vine`: values and advantages of steps by hand and against a slow version, which rows are
trained, and settings that are wrong."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from oat.algorithms.base import response_metrics, score_metrics
from oat.algorithms.rows import scored_rows
from oat.algorithms.vine import earned_by_steps
from oat.errors import ConfigError, OatWarning
from oat.functional.values import step_advantages
from oat.plugins.registry import ALGORITHMS
from oat.types import (
    Answer,
    Batch,
    Feedback,
    Group,
    Item,
    Key,
    Mark,
    Message,
    Prompt,
    Question,
    Segment,
    Trajectory,
)

Row = tuple[Sequence[int], int, float | None]
"""The tokens of a response, the number of those with which it begins as a branch, and its score."""

NEW_LINE = 9
BY_HAND: tuple[Row, ...] = (
    ((1, NEW_LINE, 2, NEW_LINE, 3), 0, 1.0),
    ((1, NEW_LINE, 4), 0, 0.0),
    ((5,), 0, 0.5),
    ((1, NEW_LINE, 6), 2, 1.0),
    ((1, NEW_LINE, 7, 8), 2, 0.0),
    ((1, NEW_LINE, 2, NEW_LINE, 1), 4, 1.0),
    ((1, NEW_LINE, 2, NEW_LINE, 2), 4, 1.0),
)
"""The first two responses share the state after `1 9`, which has two branches; so has `1 9 2 9`."""
ADVANTAGES = ([1 / 3 - 1 / 4, 1 - 1 / 3, 1 - 1], [2 / 3 - 3 / 4, 0 - 2 / 3], [0.5 - 0.5])
LENGTHS = ([2, 2, 1], [2, 1], [1])


def trajectory(ids: Sequence[int], begun: int) -> Trajectory:
    size = len(ids)
    logps = -np.arange(1, size + 1, dtype=np.float32) / 4
    response = Segment(
        "model",
        np.array(ids, dtype=np.int32),
        mask=np.arange(size) >= begun,
        versions=np.zeros(size, dtype=np.int32),
        raw_logps=logps,
        sampled_logps=logps,
    )
    context = Segment("context", np.array([0, 1], dtype=np.int32))
    return Trajectory("sampler", (context, response), "length" if begun else "stop", str(list(ids)))


def feedback(*groups: Sequence[Row]) -> Feedback:
    items = []
    for number, rows in enumerate(groups):
        group = Group(
            Prompt(number, number, (Message("user", "p"),)),
            tuple(trajectory(ids, begun) for ids, begun, _ in rows),
        )
        key = Key("train", 0, 0, number)
        marks: list[Mark] = ["failed" if score is None else "ok" for _, _, score in rows]
        values = tuple(math.nan if score is None else score for _, _, score in rows)
        question = Question.about(group, key, "score", tuple(range(len(rows))), "o")
        items.append(Item(group, question, Answer(key, values, tuple(marks), len(rows)), None))
    return Feedback(0, tuple(items), sum(map(len, groups)))


def forward(model: str, rows: Sequence[Trajectory], wants: set[str]) -> Mapping[str, torch.Tensor]:
    raw_K = torch.from_numpy(np.concatenate([row.recorded("raw_logps") for row in rows]))
    return {name: raw_K + (0.25 if model == "reference" else 0.0) for name in wants}


def made(name: str = "grpo", **options: Any) -> Any:
    cls: Any = ALGORITHMS[name]
    sections = {field: value for field, value in options.items() if isinstance(value, dict)}
    built = {field: type(getattr(cls.Config(), field))(**value) for field, value in sections.items()}
    return cls(cls.Config(**{"prompts": 1, "samples": 3, "advantage": "vine", **options, **built}))


def prepared(given: Feedback, objective: Any = None) -> Batch:
    batch: Batch = (objective or made()).prepare(given, forward, np.random.default_rng(0))
    return batch


def by_token(advantages: Sequence[Sequence[float]] = ADVANTAGES) -> list[float]:
    return [
        step
        for row, sizes in zip(advantages, LENGTHS, strict=True)
        for step, size in zip(row, sizes, strict=True)
        for _ in range(size)
    ]


def test_advantages_of_steps_by_hand() -> None:
    """The value of the prompt is the mean of the other responses. That of a state is the mean of its branches
    and of the other responses that pass through it."""
    batch = prepared(feedback(BY_HAND))
    assert batch.columns["advantages_K"].tolist() == pytest.approx(by_token())
    assert [row.completion.tolist() for row in batch.rows] == [list(ids) for ids, _, _ in BY_HAND[:3]]
    assert (batch.metrics["rows/trained"], batch.metrics["vine/branches"]) == (3, 4)
    assert (batch.metrics["vine/steps"], batch.metrics["vine/unvalued_frac"]) == (2, 0)


def test_a_step_whose_responses_have_no_steps_is_warned_of() -> None:
    with pytest.warns(OatWarning, match=r"no response .* two steps.*delimiter '\\n'.*set the delimiter"):
        prepared(feedback((((1, 2), 0, 1.0), ((3,), 0, 0.0))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(feedback(BY_HAND))


def test_advantages_of_a_response_add_up_to_its_reward_over_that_of_the_others() -> None:
    trained, found, _ = earned_by_steps(scored_rows(feedback(BY_HAND)))
    assert found.values_E is not None
    sums_N = found.by_row(step_advantages(found.rewards_E, found.values_E, found.row_of_E))
    assert sums_N.tolist() == pytest.approx([1 - 0.25, 0 - 0.75, 0.5 - 0.5])
    assert trained.rewards_N.tolist() == [1.0, 0.0, 0.5]


def slow_advantages(rows: Sequence[Row]) -> list[float]:
    """Return the advantage of each trained token of a group whose rows all have a score, token by token."""

    def value(own: Row, size: int) -> float | None:
        start = list(own[0][:size])
        scores = [
            score
            for row in rows
            for ids, begun, score in [row]
            if row is not own
            and list(ids[:size]) == start
            and (begun == size or (begun == 0 and size < len(ids)))
            and score is not None
        ]
        return sum(scores) / len(scores) if scores else None

    found = []
    for own in rows:
        if own[1]:
            continue
        cuts = {begun for ids, begun, _ in rows if 0 < begun < len(own[0]) and ids[:begun] == own[0][:begun]}
        bounds = [0, *sorted(cuts), len(own[0])]
        for begin, end in pairwise(bounds):
            after = own[2] if end == len(own[0]) else value(own, end)
            before = value(own, begin)
            assert after is not None
            found += [0.0 if before is None else after - before] * (end - begin)
    return found


def random_group(generator: np.random.Generator) -> list[Row]:
    rows: list[Row] = []
    for _ in range(int(generator.integers(2, 5))):
        rows.append((tuple(generator.integers(0, 2, int(generator.integers(1, 6))).tolist()), 0, 0.0))
    for ids, _, _ in [*rows]:
        for size in range(1, len(ids)):
            if generator.random() < 0.5:
                rest = generator.integers(0, 2, 2).tolist()
                rows += [((*ids[:size], *rest), size, 0.0)] * int(generator.integers(1, 3))
    return [(ids, begun, float(generator.normal())) for ids, begun, _ in rows]


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_a_slow_version(seed: int) -> None:
    groups = [random_group(np.random.default_rng([seed, number])) for number in range(3)]
    batch = prepared(feedback(*groups))
    wanted = [each for group in groups for each in slow_advantages(group)]
    assert batch.columns["advantages_K"].tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_state_whose_branches_lack_scores_ends_no_step() -> None:
    rows = [(ids, begun, None if begun == 4 else score) for ids, begun, score in BY_HAND]
    wanted = ([ADVANTAGES[0][0], 1 - 1 / 3, 1 - 1 / 3], *ADVANTAGES[1:])
    assert prepared(feedback(rows)).columns["advantages_K"].tolist() == pytest.approx(by_token(wanted))


def test_without_other_responses_the_first_step_teaches_nothing() -> None:
    rows = [row for number, row in enumerate(BY_HAND) if number in (0, 5, 6)]
    rows[1:] = [(ids, begun, 0.25) for ids, begun, _ in rows[1:]]
    batch = prepared(feedback(rows))
    assert batch.columns["advantages_K"].tolist() == [0, 0, 0, 0, 0.75]
    assert batch.metrics["vine/unvalued_frac"] == 0.5
    assert made().is_usable(feedback(rows).items[0])


def test_a_response_without_a_score_is_not_trained() -> None:
    rows = [
        (ids, begun, None if number == 0 else score) for number, (ids, begun, score) in enumerate(BY_HAND)
    ]
    batch = prepared(feedback(rows))
    assert len(batch.rows) == 2
    assert batch.columns["advantages_K"].tolist() == pytest.approx([0, 0, -0.5, 0.5])
    assert prepared(feedback([row for row in BY_HAND if row[1]])).size == 0


def test_penalties_of_kl_are_added_up() -> None:
    """Each token's own penalty is that of the KL of 1/4 nat (k1), taken with a minus: reference - policy."""
    objective = made(kl_reward_coef=0.4)
    later = [5, 4, 3, 2, 1, 3, 2, 1, 1]
    wanted = [step + 0.1 * count for step, count in zip(by_token(), later, strict=True)]
    assert prepared(feedback(BY_HAND), objective).columns["advantages_K"].tolist() == pytest.approx(wanted)


def test_rewards_are_shaped_before_values_and_a_branch_is_as_long_as_its_text() -> None:
    """Responses of 4 tokens or more pay 1; the branches of 4 and 5 tokens have 2 and 1 new ones."""
    penalised = {"overlong_penalty": 1.0, "overlong_from": 3, "overlong_to": 4}
    scaled = made(rewards={"scale": 2.0})
    doubled = [2 * each for each in by_token()]
    assert prepared(feedback(BY_HAND), scaled).columns["advantages_K"].tolist() == pytest.approx(doubled)
    paid = [(ids, begun, (score or 0.0) - (len(ids) >= 4)) for ids, begun, score in BY_HAND]
    found = prepared(feedback(BY_HAND), made(rewards=penalised)).columns["advantages_K"]
    assert found.tolist() == pytest.approx(slow_advantages(paid))


def test_truncated_responses_count_in_values_if_they_are_masked_and_not_if_they_are_dropped() -> None:
    (item,) = feedback(BY_HAND).items
    rows = list(item.group.trajectories)
    rows[1] = replace(rows[1], finish_reason="length")
    given = Feedback(0, (replace(item, group=replace(item.group, trajectories=tuple(rows))),), 7)
    masked = prepared(given, made(rewards={"truncated": "mask"}))
    assert masked.columns["advantages_K"].tolist() == pytest.approx([*by_token()[:5], by_token()[8]])
    assert masked.metrics["rows/trained"] == 2
    dropped = prepared(given, made(rewards={"truncated": "drop"}))
    assert dropped.columns["advantages_K"].tolist() == pytest.approx([0.5] * 5 + [-0.5])


def test_usable_is_a_group_with_an_advantage() -> None:
    equal = [(ids, begun, 1.0) for ids, begun, _ in BY_HAND]
    inner = [(ids, begun, 1.0 if number != 3 else 0.0) for number, (ids, begun, _) in enumerate(BY_HAND)]
    found = [made().is_usable(item) for item in feedback(BY_HAND, equal, inner).items]
    assert found == [True, False, True]


def test_metrics_of_responses_leave_branches_out() -> None:
    given = feedback(BY_HAND)
    assert score_metrics(given)["reward/mean"] == 0.5
    of_responses = response_metrics(given)
    assert (of_responses["response/length"], of_responses["response/truncated_frac"]) == (3, 0)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo", "cpgd", "vespo"]
)
def test_every_algorithm_of_the_family_has_it(name: str) -> None:
    options = {"max_length": 8} if name == "dr_grpo" else {}
    batch = prepared(feedback(BY_HAND), made(name, whiten=False, **options))
    assert batch.columns["advantages_K"].tolist() == pytest.approx(by_token())


def test_the_plan_has_the_branches() -> None:
    plan = made(vine={"branches": 2, "delimiter": ";", "most_steps": 4}).plan(0)
    assert plan.branching is not None
    assert (plan.branching.branches, plan.branching.delimiter, plan.branching.most_steps) == (2, ";", 4)
    assert (plan.responses, plan.most_candidates) == (3, 3 * (1 + 2 * 3))
    assert made(advantage="group_mean").plan(0).branching is None


WRONG = {
    "no branch": ({"vine": {"branches": 0}}, "algorithm.vine.branches is 0"),
    "no delimiter": ({"vine": {"delimiter": ""}}, "algorithm.vine.delimiter is empty"),
    "one step": ({"vine": {"most_steps": 1}}, "algorithm.vine.most_steps is 1"),
    "a discount": ({"gamma": 0.9}, "algorithm.gamma is 0.9, and nothing reads it with algorithm.advantage"),
    "credit": ({"credit": "steps"}, "algorithm.credit is steps, and nothing reads it"),
    "whitened rewards": ({"rewards": {"whiten": True}}, "algorithm.rewards.whiten is true"),
    "unread": ({"advantage": "group_norm", "vine": {"branches": 2}}, "algorithm.vine is set, and nothing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_are_refused(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        made(**options)
