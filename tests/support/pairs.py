"""Helpers for tests of losses of pairs: pairs with made-up log-probabilities, and each loss of two responses
in plain Python."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fixtures import make_group, make_questions

from oat.algorithms.base import View
from oat.algorithms.contrast import CPO, EXO, NCA, ORPO, APODown, APOZero, DiscoPOP, SPPOHard
from oat.algorithms.direct import BNF, DPO, IPO, Direct, RobustDPO, SimPO, SLiC
from oat.learner.batching import view_of
from oat.learner.reduction import Reduction
from oat.types import Answer, Batch, Feedback, Item, Mark, Trajectory

WINNER, LOSER = ("abcd", "ab"), ("a", "abcde")
"""Texts of two pairs: the chosen ones, then the rejected ones. A response has one token per character."""


def item(
    number: int,
    texts: tuple[str, str],
    label: int | None = 0,
    mark: Mark = "ok",
    scores: tuple[float | None, ...] = (),
) -> Item:
    group = make_group(number, *texts)
    (question,) = make_questions([group], "compare", 0, oracle="o")
    return Item(
        group,
        question,
        Answer(question.key, (0.5 if label is None else 1.0 - label,), (mark,), 2, scores=scores),
        label,
    )


def feedback(*items: Item) -> Feedback:
    return Feedback(0, items, 2 * len(items))


def numbers(rows: Sequence[Trajectory], kind: str) -> torch.Tensor:
    """Return (K,) made-up log-probabilities or entropies in float64. They depend only on the row's length and
    the token's place."""
    low, high = {"policy": (-2.5, -0.1), "reference": (-1.5, -0.5), "entropy": (0.2, 2.0)}[kind]
    parts = [
        low
        + (high - low) * (0.5 + 0.5 * np.sin(len(row.ids) * np.arange(1, row.trained.sum() + 1) + len(kind)))
        for row in rows
    ]
    return torch.from_numpy(np.concatenate(parts))


def forward(model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
    assert (model, wants) == ("reference", {"raw"})
    return {"raw": numbers(rows, "reference")}


def outputs(batch: Batch) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "policy": {
            "raw": numbers(batch.rows, "policy").requires_grad_(),
            "entropy": numbers(batch.rows, "entropy"),
        }
    }


def objective(cls: type[Direct], **options: Any) -> Any:
    return cls(cls.Config(prompts=2, **options))  # type: ignore[attr-defined]


def prepared(algorithm: Any, *items: Item) -> tuple[Batch, View, dict[str, dict[str, torch.Tensor]]]:
    batch = algorithm.prepare(feedback(*items), forward, np.random.default_rng(0))
    return batch, view_of(batch), outputs(batch)


def total(algorithm: Any, batch: Batch, found: dict[str, dict[str, torch.Tensor]]) -> torch.Tensor:
    view, reduction = view_of(batch), Reduction(batch)
    losses = algorithm.losses(found, view).values()
    return torch.stack(
        [loss.coef * reduction(loss, view, view.group_of_N, first=True) for loss in losses]
    ).sum()


@dataclass(frozen=True)
class Response:
    """Numbers of one response, one per token. `frozen` are the policy's log-probabilities in a loss that
    takes no gradient of them."""

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
    """Return the DPO loss, computed in the order of the specification, with beta 0.3, smoothing 0.1, length
    0.2, lambda 0.7 and SFT 0.4."""
    h = slow_margin(c, r)
    h += 0.2 / 0.3 * (len(c.policy) - len(r.policy))
    h -= 0.7 * max(0.0, sum(c.reference) - sum(c.policy))
    return (
        -0.9 * math.log(sigmoid(0.3 * h))
        - 0.1 * math.log(sigmoid(-0.3 * h))
        - 0.4 * sum(c.policy) / len(c.policy)
    )


def slow_ld_dpo(c: Response, r: Response) -> float:
    """Return the loss of LD-DPO with beta 0.3 and alpha 0.4."""
    n = min(len(c.policy), len(r.policy))

    def logp(values: list[float]) -> float:
        return sum(values[:n]) + 0.4 * sum(values[n:])

    return -math.log(sigmoid(0.3 * slow_margin(c, r, logp)))


def slow_simpo(c: Response, r: Response) -> float:
    logit = 2.0 * mean(c.policy) - 2.0 * mean(r.policy) - 1.0
    return -0.9 * math.log(sigmoid(logit)) - 0.1 * math.log(sigmoid(-logit))


def slow_bnf(response: Response) -> float:
    score = 0.0
    for logp, logq, entropy, frozen in zip(
        response.policy, response.reference, response.entropy, response.frozen, strict=True
    ):
        p, q = math.exp(frozen), math.exp(logq)
        tau = min(1.0, p / (q + 1e-6))
        score += tau * logp + (1 - tau + 1e-6) / (1 - p + 1e-6) * (-entropy - p * logp)
    return score


def slow_bnf_pair(c: Response, r: Response) -> float:
    return -(slow_bnf(c) - slow_bnf(r)) / min(len(c.policy), len(r.policy))


def log_ratio(response: Response) -> float:
    return sum(response.policy) - sum(response.reference)


def log_odds(response: Response) -> float:
    p = math.exp(mean(response.policy))
    return math.log(p / (1 - p))


def slow_exo(q: float, smoothing: float) -> float:
    """Return the KL divergence of (q, 1 - q) from the smoothed label."""
    return q * math.log(q / (1 - smoothing)) + (1 - q) * math.log((1 - q) / smoothing)


def slow_discopop(logit: float, tau: float) -> float:
    mixed = sigmoid(logit / tau)
    return -(1 - mixed) * math.log(sigmoid(logit)) + mixed * math.exp(-logit)


FULL_DPO = {
    "beta": 0.3,
    "label_smoothing": 0.1,
    "length_alpha": 0.2,
    "positive_lambda": 0.7,
    "sft_weight": 0.4,
}
SLOW: dict[str, tuple[Any, Callable[[Response, Response], float]]] = {
    "dpo": (objective(DPO, beta=0.3), lambda c, r: -math.log(sigmoid(0.3 * slow_margin(c, r)))),
    "dpo with ld_alpha": (objective(DPO, beta=0.3, ld_alpha=0.4), slow_ld_dpo),
    "dpo with every option": (objective(DPO, **FULL_DPO), slow_dpo),
    "robust_dpo": (
        objective(RobustDPO, beta=0.3, label_smoothing=0.2),
        lambda c, r: (
            (
                0.2 * math.log(sigmoid(-0.3 * slow_margin(c, r)))
                - 0.8 * math.log(sigmoid(0.3 * slow_margin(c, r)))
            )
            / 0.6
        ),
    ),
    "ipo": (objective(IPO, beta=0.3), lambda c, r: (slow_margin(c, r, mean) - 1 / 0.6) ** 2),
    "ipo of sums": (
        objective(IPO, beta=0.3, normalize="sum"),
        lambda c, r: (slow_margin(c, r) - 1 / 0.6) ** 2,
    ),
    "slic": (objective(SLiC, beta=0.3), lambda c, r: max(0.0, 1 - 0.3 * slow_margin(c, r))),
    "simpo": (objective(SimPO, label_smoothing=0.1), slow_simpo),
    "simpo by a hinge": (
        objective(SimPO, beta=3.0, loss="hinge"),
        lambda c, r: max(0.0, 1 - 3 * (mean(c.policy) - mean(r.policy) - 0.5)),
    ),
    "bnf": (objective(BNF), slow_bnf_pair),
    "bnf by own length": (
        objective(BNF, normalize="own"),
        lambda c, r: slow_bnf(r) / len(r.policy) - slow_bnf(c) / len(c.policy),
    ),
    "exo": (
        objective(EXO, beta=0.3, label_smoothing=0.1),
        lambda c, r: slow_exo(sigmoid(0.3 * slow_margin(c, r)), 0.1),
    ),
    "nca": (
        objective(NCA, beta=0.3),
        lambda c, r: (
            -math.log(sigmoid(0.3 * log_ratio(c)))
            - math.log(sigmoid(-0.3 * log_ratio(c))) / 2
            - math.log(sigmoid(-0.3 * log_ratio(r))) / 2
        ),
    ),
    "apo_zero": (
        objective(APOZero, beta=0.3),
        lambda c, r: 1 - sigmoid(0.3 * log_ratio(c)) + sigmoid(0.3 * log_ratio(r)),
    ),
    "apo_down": (
        objective(APODown, beta=0.3),
        lambda c, r: sigmoid(0.3 * log_ratio(c)) + 1 - sigmoid(0.3 * slow_margin(c, r)),
    ),
    "sppo_hard": (
        objective(SPPOHard, beta=0.3),
        lambda c, r: (log_ratio(c) - 1 / 0.6) ** 2 + (log_ratio(r) + 1 / 0.6) ** 2,
    ),
    "discopop": (
        objective(DiscoPOP, beta=0.3, tau=0.5),
        lambda c, r: slow_discopop(0.3 * slow_margin(c, r), 0.5),
    ),
    "orpo": (
        objective(ORPO, beta=0.3),
        lambda c, r: -0.3 * math.log(sigmoid(log_odds(c) - log_odds(r))) - mean(c.policy),
    ),
    "cpo": (
        objective(CPO, beta=0.3, sft_weight=0.4),
        lambda c, r: -math.log(sigmoid(0.3 * (sum(c.policy) - sum(r.policy)))) - 0.4 * mean(c.policy),
    ),
}
