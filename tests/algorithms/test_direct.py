"""The direct losses as algorithms: pairs made from feedback, and one term per pair, compared with plain
Python on the numbers of each token."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from pairs import (
    LOSER,
    SLOW,
    WINNER,
    Response,
    feedback,
    forward,
    item,
    mean,
    numbers,
    objective,
    outputs,
    prepared,
    total,
)

from oat.algorithms.base import View, step_metrics
from oat.algorithms.contrast import AOT, CPO, EXO, ORPO, DiscoPOP
from oat.algorithms.direct import BNF, DPO, IPO, Direct, SimPO, SLiC, pair_batch
from oat.errors import ConfigError
from oat.learner.batching import select_rows, view_of
from oat.plugins.registry import ALGORITHMS


def slow_total(
    name: str,
    view: View,
    policy: Sequence[float],
    reference: Sequence[float],
    entropy: Sequence[float],
    frozen: Sequence[float],
) -> float:
    """Return the mean loss over two pairs, from lists with one number per token."""
    ends = np.flatnonzero(np.diff(view.row_of_K)) + 1
    columns = [np.split(np.array(column), ends) for column in (policy, reference, entropy, frozen)]
    responses = [Response(*(column[row].tolist() for column in columns)) for row in range(4)]
    return mean([SLOW[name][1](responses[0], responses[1]), SLOW[name][1](responses[2], responses[3])])


@pytest.mark.inventory(3, 4, 5, 6, 7, 8, 9, 10, 11)
@pytest.mark.parametrize("name", SLOW)
def test_loss_and_gradient_are_those_of_plain_python(name: str) -> None:
    """The loss equals plain Python's, and the gradient equals central differences in float64. The entropy
    gets no gradient: see `bnf_scores`."""
    algorithm, _ = SLOW[name]
    batch, view, found = prepared(
        algorithm, item(0, WINNER), item(1, LOSER[::-1], label=1), item(2, ("abc", "abc"), None, "tie")
    )
    assert [row.text for row in batch.rows] == [*WINNER, *LOSER]
    raw, entropy = found["policy"]["raw"], found["policy"]["entropy"].requires_grad_()
    loss = total(algorithm, batch, found)
    loss.backward()
    policy, others = raw.tolist(), (numbers(batch.rows, "reference").tolist(), entropy.tolist())
    assert loss.item() == pytest.approx(slow_total(name, view, policy, *others, policy), rel=1e-9)
    assert raw.grad is not None
    assert entropy.grad is None
    for token in range(len(policy)):
        ends = []
        for step in (1e-5, -1e-5):
            moved = [value + step * (place == token) for place, value in enumerate(policy)]
            ends.append(slow_total(name, view, moved, *others, policy))
        assert raw.grad[token].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-9)


@pytest.mark.inventory(13)
@pytest.mark.parametrize("name", SLOW)
def test_a_masked_pair_changes_neither_loss_nor_gradient(name: str) -> None:
    algorithm, _ = SLOW[name]
    results = []
    for mark in ("tie", "abstain", "failed", None):
        rest = [] if mark is None else [item(1, LOSER, None, mark)]  # type: ignore[arg-type]
        batch, _, found = prepared(algorithm, item(0, WINNER), *rest)
        loss = total(algorithm, batch, found)
        loss.backward()
        results.append((loss.item(), found["policy"]["raw"].grad))
        assert step_metrics(feedback(item(0, WINNER), *rest))["answers/tied_frac"] == (
            0.5 if mark == "tie" else 0.0
        )
    for loss, gradient in results[:-1]:
        assert loss == results[-1][0]
        assert torch.equal(gradient, results[-1][1])


@pytest.mark.inventory(12)
@pytest.mark.parametrize("name", SLOW)
def test_a_term_does_not_depend_on_other_pairs(name: str) -> None:
    algorithm, _ = SLOW[name]
    batch, view, found = prepared(algorithm, item(0, WINNER), item(1, LOSER), item(2, ("abcdefg", "ab")))
    together = {loss: value.terms for loss, value in algorithm.losses(found, view).items()}
    for unit in range(3):
        alone = select_rows(batch, np.array([2 * unit, 2 * unit + 1]))
        for loss, value in algorithm.losses(outputs(alone), view_of(alone)).items():
            torch.testing.assert_close(value.terms[0], together[loss][unit])


@pytest.mark.parametrize("name", SLOW)
def test_descent_raises_chosen_and_lowers_rejected_tokens(name: str) -> None:
    """A step down the gradient raises the chosen response and lowers the rejected one. Each has one token,
    and policy and reference agree. Only `apo_down` does not change the chosen response there."""
    algorithm, _ = SLOW[name]
    batch, view, _ = prepared(algorithm, item(0, ("a", "b")))
    raw = (
        view["reference_logps_K"].clone()
        if "reference_logps_K" in batch.columns
        else torch.full((2,), -1.0, dtype=torch.float64)
    )
    raw.requires_grad_()
    total(
        algorithm, batch, {"policy": {"raw": raw, "entropy": torch.full((2,), 0.5, dtype=torch.float64)}}
    ).backward()
    assert raw.grad is not None
    assert raw.grad[0] <= 0 < raw.grad[1]
    assert (raw.grad[0] == 0) == (name == "apo_down")


@pytest.mark.inventory(3)
def test_dpo_starts_at_log_two_and_prefers_nothing() -> None:
    algorithm = objective(DPO)
    batch, view, _ = prepared(algorithm, item(0, WINNER), item(1, LOSER))
    found = {"policy": {"raw": view["reference_logps_K"].clone()}}
    assert total(algorithm, batch, found).item() == pytest.approx(math.log(2))
    metrics = {name: values.mean().item() for name, (values, _) in algorithm.metrics(found, view).items()}
    assert (metrics["pairs/margin"], metrics["pairs/accuracy"], metrics["pairs/reward_chosen"]) == (0, 0, 0)


@pytest.mark.inventory(7)
def test_the_sft_term_is_the_mean_log_probability_of_the_chosen() -> None:
    plain, with_term = objective(DPO), objective(DPO, sft_weight=0.25)
    batch, _, found = prepared(plain, item(0, WINNER), item(1, LOSER))
    raw = found["policy"]["raw"]
    mean_logps = (raw[:4].mean() + raw[6:7].mean()) / 2
    assert (total(with_term, batch, found) - total(plain, batch, found)).item() == pytest.approx(
        -0.25 * mean_logps.item()
    )


@pytest.mark.inventory(10)
@pytest.mark.parametrize("cls", [SimPO, ORPO, CPO])
def test_those_without_a_reference_ask_for_none(cls: type[Direct]) -> None:
    algorithm = objective(cls)
    assert algorithm.requires.models == {"policy"}

    def forbidden(*_: Any) -> dict[str, torch.Tensor]:
        raise AssertionError(f"{cls.name} reads no reference")

    assert algorithm.prepare(feedback(item(0, WINNER)), forbidden, np.random.default_rng(0)).columns == {}


REWARDS = {
    "dpo": lambda c: 0.3 * (sum(c.policy) - sum(c.reference)),
    "ipo": lambda c: 0.3 * (mean(c.policy) - mean(c.reference)),
    "slic": lambda c: 0.3 * (sum(c.policy) - sum(c.reference)),
    "simpo": lambda c: 2.0 * mean(c.policy),
    "bnf": lambda c: sum(c.policy) - sum(c.reference),
    "exo": lambda c: 0.3 * (sum(c.policy) - sum(c.reference)),
    "sppo_hard": lambda c: 0.3 * (sum(c.policy) - sum(c.reference)),
    "orpo": lambda c: 0.3 * mean(c.policy),
    "cpo": lambda c: 0.3 * sum(c.policy),
}


@pytest.mark.parametrize("name", REWARDS)
def test_reported_rewards(name: str) -> None:
    algorithm, _ = SLOW[name]
    batch, view, found = prepared(algorithm, item(0, WINNER))
    tokens = found["policy"]["raw"].tolist(), numbers(batch.rows, "reference").tolist()
    chosen, rejected = (
        REWARDS[name](Response(*(column[part] for column in tokens), [], []))
        for part in (slice(0, 4), slice(4, 6))
    )
    metrics = {key: values.mean().item() for key, (values, _) in algorithm.metrics(found, view).items()}
    assert metrics["pairs/reward_chosen"] == pytest.approx(chosen)
    assert metrics["pairs/reward_rejected"] == pytest.approx(rejected)
    assert metrics["pairs/margin"] == pytest.approx(chosen - rejected)
    assert metrics["pairs/accuracy"] == float(chosen > rejected)
    assert metrics["logps/chosen"] == pytest.approx(sum(tokens[0][:4]))
    gap = mean([abs(own - other) for own, other in zip(*tokens, strict=True)])
    assert metrics.get("logps/reference_gap") == (
        None if name in ("simpo", "orpo", "cpo") else pytest.approx(gap)
    )


def test_the_gap_to_the_reference_by_hand() -> None:
    """Four tokens of one response rise by 1/2 nat each, and two tokens of the other fall by 1/4 and 3/4 nat.
    The gap is the mean of absolute values: 3 nats over 6 tokens."""
    algorithm = objective(DPO)
    _, view, _ = prepared(algorithm, item(0, WINNER), item(1, LOSER, None, "tie"))
    raw = view["reference_logps_K"] + torch.tensor([0.5, 0.5, 0.5, 0.5, -0.25, -0.75])
    values, over = algorithm.metrics({"policy": {"raw": raw}}, view)["logps/reference_gap"]
    assert (values.mean().item(), over) == (pytest.approx(0.5), "K")


@pytest.mark.parametrize("name", SLOW)
def test_a_pair_with_a_response_without_tokens_is_left_out_and_counted(name: str) -> None:
    algorithm, _ = SLOW[name]
    batch, _, _ = prepared(
        algorithm,
        item(0, WINNER),
        item(1, ("a", "")),
        item(2, ("", "a"), label=1),
        item(3, ("", "b"), None, "tie"),
    )
    assert [row.text for row in batch.rows] == list(WINNER)
    assert batch.metrics["pairs/empty_frac"] == 0.75
    assert batch.metrics["rows/trained"] == 2


def test_kept_ties_are_masked_in_the_order_they_were_asked() -> None:
    items = [item(0, LOSER[::-1], label=1), item(1, ("a", "b"), None, "tie"), item(2, ("", "b"))]
    batch = pair_batch(feedback(*items), forward, keep_ties=True)
    assert [row.text for row in batch.rows] == [*LOSER, "a", "b", "", "b"]
    assert batch.columns["mask_U"].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", SLOW)
def test_nothing_but_ties_is_an_empty_batch(name: str) -> None:
    assert (
        SLOW[name][0]
        .prepare(feedback(item(0, ("a", "b"), None, "tie")), forward, np.random.default_rng(0))
        .size
        == 0
    )


@pytest.mark.parametrize("level", [-1e4, -1e-7])
@pytest.mark.parametrize("name", SLOW)
def test_extreme_log_probabilities_stay_finite(name: str, level: float) -> None:
    algorithm, _ = SLOW[name]
    batch, _, _ = prepared(algorithm, item(0, WINNER), item(1, LOSER))
    raw = torch.full((12,), level, requires_grad=True)
    loss = total(algorithm, batch, {"policy": {"raw": raw, "entropy": torch.zeros(12)}})
    loss.backward()
    assert raw.grad is not None
    assert torch.isfinite(loss)
    assert torch.isfinite(raw.grad).all()


REFUSED = [
    (DPO, {"beta": 0.0}, "beta"),
    (BNF, {"samples": 1}, "samples"),
    (DPO, {"label_smoothing": 0.5}, "label_smoothing"),
    (DPO, {"length_alpha": -0.1}, "length_alpha"),
    (DPO, {"ld_alpha": 1.5}, "ld_alpha"),
    (DPO, {"ld_alpha": -0.1}, "ld_alpha"),
    (DPO, {"ld_alpha": math.nan}, "ld_alpha"),
    (DPO, {"positive_lambda": math.inf}, "positive_lambda"),
    (DPO, {"sft_weight": math.nan}, "sft_weight"),
    (IPO, {"beta": math.nan}, "beta"),
    (SLiC, {"beta": -1.0}, "beta"),
    (SimPO, {"gamma_beta_ratio": -0.5}, "gamma_beta_ratio"),
    (SimPO, {"loss": "hinge", "label_smoothing": 0.1}, "label_smoothing"),
    (EXO, {"label_smoothing": 0.0}, "label_smoothing"),
    (DiscoPOP, {"tau": 1.5}, "tau"),
    (AOT, {"ties": "half"}, "ties"),
    (AOT, {"abstentions": "half"}, "abstentions"),
    (ORPO, {"beta": 0.0}, "beta"),
    (CPO, {"sft_weight": -1.0}, "sft_weight"),
]


@pytest.mark.parametrize(("cls", "options", "field"), REFUSED)
def test_settings_out_of_range(cls: type[Direct], options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{field} is "):
        objective(cls, **options)


def test_names() -> None:
    of_pairs = [
        "dpo",
        "robust_dpo",
        "ipo",
        "slic",
        "simpo",
        "bnf",
        "exo",
        "nca",
        "apo_zero",
        "apo_down",
        "sppo_hard",
        "discopop",
        "aot",
    ]
    of_pairs += ["orpo", "cpo"]
    of_groups = ["rloo", "reinforce_pp", "gspo", "cispo", "cpgd", "sapo", "luspo", "vespo"]
    others = ["kto", "sft", "grpo", "dr_grpo", *of_groups, "ppo", "frozen", "reward_model"]
    assert list(ALGORITHMS) == [*of_pairs, "xpo", *others]


def test_rewards_that_pairs_are_made_of_are_reported() -> None:
    """If pairs are made from scores, the reward metrics are means over the candidates that have a score, with
    or without a winner of their pair. If an oracle compared the pairs, the metrics are absent."""
    items = [
        item(0, WINNER, scores=(3.0, 1.0)),
        item(1, LOSER, None, "tie", scores=(2.0, 2.0)),
        item(2, WINNER, None, "abstain"),
    ]
    items.append(item(3, WINNER, None, "abstain", scores=(None, 7.0)))
    metrics = step_metrics(feedback(*items))
    assert {name: metrics[name] for name in metrics if name.startswith("reward/")} == {
        "reward/mean": (3.0 + 1.0 + 2.0 + 2.0 + 7.0) / 5,
        "reward/std_within": pytest.approx(math.sqrt(2.0) / 3),
        "reward/zero_spread_frac": pytest.approx(2 / 3),
    }
    compared = step_metrics(feedback(item(0, WINNER)))
    assert not [name for name in compared if name.startswith("reward/")]
