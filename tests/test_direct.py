"""The direct losses as algorithms: pairs from feedback, one term a pair, against plain Python on the numbers of each token."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import make_group, make_questions

from oat.algorithms.base import View
from oat.algorithms.direct import BNF, DPO, IPO, Direct, RobustDPO, SimPO, SLiC, pair_batch
from oat.build import ALGORITHMS
from oat.errors import ConfigError
from oat.learner.batching import select_rows, view_of
from oat.learner.reduction import Reduction
from oat.types import Answer, Batch, Feedback, Item, Mark, Trajectory

WINNER, LOSER = ("abcd", "ab"), ("a", "abcde")
"""Texts of two pairs, chosen first; a response has one token a character."""


def item(number: int, texts: tuple[str, str], label: int | None = 0, mark: Mark = "ok") -> Item:
    group = make_group(number, *texts)
    (question,) = make_questions([group], "compare", 0, oracle="o")
    return Item(group, question, Answer(question.key, (0.5 if label is None else 1.0 - label,), (mark,), 2), label)


def feedback(*items: Item) -> Feedback:
    return Feedback(0, items, 2 * len(items))


def numbers(rows: Sequence[Trajectory], kind: str) -> torch.Tensor:
    """(K,) made-up log-probabilities or entropies, which depend on the row's length and the token's place only; float64."""
    low, high = {"policy": (-2.5, -0.1), "reference": (-1.5, -0.5), "entropy": (0.2, 2.0)}[kind]
    parts = [low + (high - low) * (0.5 + 0.5 * np.sin(len(row.ids) * np.arange(1, row.trained.sum() + 1) + len(kind))) for row in rows]
    return torch.from_numpy(np.concatenate(parts))


def forward(model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
    assert (model, wants) == ("reference", {"raw"})
    return {"raw": numbers(rows, "reference")}


def outputs(batch: Batch) -> dict[str, dict[str, torch.Tensor]]:
    return {"policy": {"raw": numbers(batch.rows, "policy").requires_grad_(), "entropy": numbers(batch.rows, "entropy")}}


def objective(cls: type[Direct], **options: Any) -> Any:
    return cls(cls.Config(prompts=2, **options))  # type: ignore[attr-defined]


def prepared(algorithm: Any, *items: Item) -> tuple[Batch, View, dict[str, dict[str, torch.Tensor]]]:
    batch = algorithm.prepare(feedback(*items), forward, np.random.default_rng(0))
    return batch, view_of(batch), outputs(batch)


def total(algorithm: Any, batch: Batch, found: dict[str, dict[str, torch.Tensor]]) -> torch.Tensor:
    view, reduction = view_of(batch), Reduction(batch)
    losses = algorithm.losses(found, view).values()
    return torch.stack([loss.coef * reduction(loss, view, view.group_of_N, first=True) for loss in losses]).sum()


@dataclass(frozen=True)
class Response:
    """Lists of one number a token; `frozen` are the policy's where a loss takes no gradient of them."""

    policy: list[float]
    reference: list[float]
    entropy: list[float]
    frozen: list[float]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def slow_margin(c: Response, r: Response, over: Callable[[list[float]], float] = sum) -> float:
    return over(c.policy) - over(r.policy) - over(c.reference) + over(r.reference)


def slow_dpo(c: Response, r: Response) -> float:
    """beta 0.3, smoothing 0.1, length 0.2, lambda 0.7, SFT 0.4, in the order of the specification."""
    h = slow_margin(c, r)
    h += 0.2 / 0.3 * (len(c.policy) - len(r.policy))
    h -= 0.7 * max(0.0, sum(c.reference) - sum(c.policy))
    return -0.9 * math.log(sigmoid(0.3 * h)) - 0.1 * math.log(sigmoid(-0.3 * h)) - 0.4 * sum(c.policy) / len(c.policy)


def slow_simpo(c: Response, r: Response) -> float:
    logit = 2.0 * mean(c.policy) - 2.0 * mean(r.policy) - 1.0
    return -0.9 * math.log(sigmoid(logit)) - 0.1 * math.log(sigmoid(-logit))


def slow_bnf(response: Response) -> float:
    score = 0.0
    for logp, logq, entropy, frozen in zip(response.policy, response.reference, response.entropy, response.frozen, strict=True):
        p, q = math.exp(frozen), math.exp(logq)
        tau = min(1.0, p / (q + 1e-6))
        score += tau * logp + (1 - tau + 1e-6) / (1 - p + 1e-6) * (-entropy - p * logp)
    return score


def slow_bnf_pair(c: Response, r: Response) -> float:
    return -(slow_bnf(c) - slow_bnf(r)) / min(len(c.policy), len(r.policy))


FULL_DPO = {"beta": 0.3, "label_smoothing": 0.1, "length_alpha": 0.2, "positive_lambda": 0.7, "sft_weight": 0.4}
SLOW: dict[str, tuple[Any, Callable[[Response, Response], float]]] = {
    "dpo": (objective(DPO, beta=0.3), lambda c, r: -math.log(sigmoid(0.3 * slow_margin(c, r)))),
    "dpo with every option": (objective(DPO, **FULL_DPO), slow_dpo),
    "robust_dpo": (
        objective(RobustDPO, beta=0.3, label_smoothing=0.2),
        lambda c, r: (0.2 * math.log(sigmoid(-0.3 * slow_margin(c, r))) - 0.8 * math.log(sigmoid(0.3 * slow_margin(c, r)))) / 0.6,
    ),
    "ipo": (objective(IPO, beta=0.3), lambda c, r: (slow_margin(c, r, mean) - 1 / 0.6) ** 2),
    "ipo of sums": (objective(IPO, beta=0.3, normalize="sum"), lambda c, r: (slow_margin(c, r) - 1 / 0.6) ** 2),
    "slic": (objective(SLiC, beta=0.3), lambda c, r: max(0.0, 1 - 0.3 * slow_margin(c, r))),
    "simpo": (objective(SimPO, label_smoothing=0.1), slow_simpo),
    "simpo by a hinge": (objective(SimPO, beta=3.0, loss="hinge"), lambda c, r: max(0.0, 1 - 3 * (mean(c.policy) - mean(r.policy) - 0.5))),
    "bnf": (objective(BNF), slow_bnf_pair),
    "bnf by own length": (objective(BNF, normalize="own"), lambda c, r: slow_bnf(r) / len(r.policy) - slow_bnf(c) / len(c.policy)),
}


def slow_total(
    name: str, view: View, policy: Sequence[float], reference: Sequence[float], entropy: Sequence[float], frozen: Sequence[float]
) -> float:
    """The mean over two pairs, from lists of one number a token."""
    ends = np.flatnonzero(np.diff(view.row_of_K)) + 1
    columns = [np.split(np.array(column), ends) for column in (policy, reference, entropy, frozen)]
    responses = [Response(*(column[row].tolist() for column in columns)) for row in range(4)]
    return mean([SLOW[name][1](responses[0], responses[1]), SLOW[name][1](responses[2], responses[3])])


@pytest.mark.inventory(3, 4, 5, 6, 7, 8, 9, 10, 11)
@pytest.mark.parametrize("name", SLOW)
def test_loss_and_gradient_are_those_of_plain_python(name: str) -> None:
    """The gradient by central differences, in float64. Of the entropy there is none: see `bnf_scores`."""
    algorithm, _ = SLOW[name]
    batch, view, found = prepared(algorithm, item(0, WINNER), item(1, LOSER[::-1], label=1), item(2, ("abc", "abc"), None, "tie"))
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
        assert batch.metrics["answers/tied_frac"] == (0.5 if mark == "tie" else 0.0)
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
    """Of one token each, where policy and reference agree."""
    algorithm, _ = SLOW[name]
    batch, view, _ = prepared(algorithm, item(0, ("a", "b")))
    raw = view["reference_logps_K"].clone() if "reference_logps_K" in batch.columns else torch.full((2,), -1.0, dtype=torch.float64)
    raw.requires_grad_()
    total(algorithm, batch, {"policy": {"raw": raw, "entropy": torch.full((2,), 0.5, dtype=torch.float64)}}).backward()
    assert raw.grad is not None
    assert raw.grad[0] < 0 < raw.grad[1]


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
    assert (total(with_term, batch, found) - total(plain, batch, found)).item() == pytest.approx(-0.25 * mean_logps.item())


@pytest.mark.inventory(10)
def test_simpo_asks_for_no_reference() -> None:
    algorithm = objective(SimPO)
    assert algorithm.requires.models == {"policy"}

    def forbidden(*_: Any) -> dict[str, torch.Tensor]:
        raise AssertionError("SimPO reads no reference")

    assert algorithm.prepare(feedback(item(0, WINNER)), forbidden, np.random.default_rng(0)).columns == {}


REWARDS = {
    "dpo": lambda c: 0.3 * (sum(c.policy) - sum(c.reference)),
    "ipo": lambda c: 0.3 * (mean(c.policy) - mean(c.reference)),
    "slic": lambda c: 0.3 * (sum(c.policy) - sum(c.reference)),
    "simpo": lambda c: 2.0 * mean(c.policy),
    "bnf": lambda c: sum(c.policy) - sum(c.reference),
}


@pytest.mark.parametrize("name", REWARDS)
def test_reported_rewards(name: str) -> None:
    algorithm, _ = SLOW[name]
    batch, view, found = prepared(algorithm, item(0, WINNER))
    tokens = found["policy"]["raw"].tolist(), numbers(batch.rows, "reference").tolist()
    chosen, rejected = (REWARDS[name](Response(*(column[part] for column in tokens), [], [])) for part in (slice(0, 4), slice(4, 6)))
    metrics = {key: values.item() for key, (values, _) in algorithm.metrics(found, view).items()}
    assert metrics["pairs/reward_chosen"] == pytest.approx(chosen)
    assert metrics["pairs/reward_rejected"] == pytest.approx(rejected)
    assert metrics["pairs/margin"] == pytest.approx(chosen - rejected)
    assert metrics["pairs/accuracy"] == float(chosen > rejected)
    assert metrics["logps/chosen"] == pytest.approx(sum(tokens[0][:4]))


@pytest.mark.parametrize("name", SLOW)
def test_a_pair_with_a_response_without_tokens_is_left_out_and_counted(name: str) -> None:
    algorithm, _ = SLOW[name]
    batch, _, _ = prepared(algorithm, item(0, WINNER), item(1, ("a", "")), item(2, ("", "a"), label=1), item(3, ("", "b"), None, "tie"))
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
    batch = SLOW[name][0].prepare(feedback(item(0, ("a", "b"), None, "tie")), forward, np.random.default_rng(0))
    assert batch.size == 0
    assert batch.metrics["answers/tied_frac"] == 1.0


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
    (DPO, {"positive_lambda": math.inf}, "positive_lambda"),
    (DPO, {"sft_weight": math.nan}, "sft_weight"),
    (IPO, {"beta": math.nan}, "beta"),
    (SLiC, {"beta": -1.0}, "beta"),
    (SimPO, {"gamma_beta_ratio": -0.5}, "gamma_beta_ratio"),
    (SimPO, {"loss": "hinge", "label_smoothing": 0.1}, "label_smoothing"),
]


@pytest.mark.parametrize(("cls", "options", "field"), REFUSED)
def test_settings_out_of_range(cls: type[Direct], options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{field} is "):
        objective(cls, **options)


def test_names() -> None:
    assert list(ALGORITHMS) == ["dpo", "robust_dpo", "ipo", "slic", "simpo", "bnf", "sft", "grpo", "dr_grpo"]
