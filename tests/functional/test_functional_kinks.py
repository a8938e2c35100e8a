"""Every kink of the losses: its subgradient, and different slopes on its two sides."""

import ast
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fixtures import World
from fixtures import oat as run
from pairs import WINNER, item, objective, prepared

import oat.functional
from oat.algorithms.direct import DPO, ROUNDING
from oat.functional.contrast import ORPO_EPS, orpo_loss
from oat.functional.kl import kl_k1
from oat.functional.policy import clipped_policy_loss, log_ratio
from oat.functional.preference import (
    bnf_scores,
    dpo_loss,
    dpo_margin,
    hinge_loss,
    positive_margin,
    simpo_margin,
)
from oat.functional.rewards import confidence
from oat.functional.surrogates import cpgd_loss, gspo_loss
from oat.functional.values import clipped_value_loss


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


Term = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Kink:
    """A function of one number, and its slopes slightly below a place, at it, and slightly above."""

    function: str
    term: Term
    place: float
    slopes: tuple[float, float, float]


def surrogate(advantage: float, low: float, high: float) -> Term:
    return lambda x: clipped_policy_loss(
        x, torch.zeros_like(x), torch.full_like(x, advantage), clip_low=low, clip_high=high
    )[0]


def positive(rounding: float | None = None) -> Term:
    """Return the positive term as a function of the chosen response's log-probability, at a reference of -2.
    beta is 1 and lambda 4, and the margin's own slope is left out."""

    def term(x: torch.Tensor) -> torch.Tensor:
        rounding_U = None if rounding is None else torch.full_like(x, rounding)
        return positive_margin(
            torch.zeros_like(x), x, torch.full_like(x, -2.0), weight=4.0, rounding_U=rounding_U
        )

    return term


def dual(advantage: float, bound: float) -> Term:
    return lambda x: clipped_policy_loss(
        x,
        torch.zeros_like(x),
        torch.full_like(x, advantage),
        clip_low=1.0,
        clip_high=0.0,
        dual_clip=bound,
    )[0]


def of_sequences(advantage: float, low: float, high: float) -> Term:
    return lambda x: gspo_loss(
        x,
        torch.zeros_like(x),
        torch.full_like(x, advantage),
        torch.arange(len(x)),
        len(x),
        clip_low=low,
        clip_high=high,
    )[0]


def of_logarithms(advantage: float, low: float, high: float) -> Term:
    return lambda x: cpgd_loss(
        x, torch.zeros_like(x), torch.full_like(x, advantage), clip_low=low, clip_high=high
    )[0]


def of_values(target: float, clip: float) -> Term:
    return lambda x: clipped_value_loss(x, torch.zeros_like(x), torch.full_like(x, target), clip=clip)[0]


LOG_2 = math.log(2)
KINKS = [
    Kink("clipped_value_loss", of_values(2.0, 0.5), 0.5, (-1.5, -1.5, 0.0)),
    Kink("clipped_value_loss", of_values(-2.0, 0.5), -0.5, (0.0, 1.5, 1.5)),
    Kink("kl_k1", lambda x: kl_k1(x, torch.zeros_like(x), max_log_ratio=3.0), 3.0, (1.0, 1.0, 0.0)),
    Kink("clipped_policy_loss", dual(-1.5, 2.0), LOG_2, (3.0, 3.0, 0.0)),
    Kink("gspo_loss", of_sequences(1.5, 0.5, 1.0), LOG_2, (-3.0, -3.0, 0.0)),
    Kink("gspo_loss", of_sequences(-1.5, 0.5, 1.0), -LOG_2, (0.0, 0.75, 0.75)),
    Kink("cpgd_loss", of_logarithms(1.5, 0.5, 1.0), LOG_2, (-1.5, -1.5, 0.0)),
    Kink("cpgd_loss", of_logarithms(-1.5, 0.5, 1.0), -LOG_2, (0.0, 1.5, 1.5)),
    Kink("positive_margin", positive(), -2.0, (4.0, 0.0, 0.0)),
    Kink("positive_margin", positive(0.5), -2.5, (4.0, 0.0, 0.0)),
    Kink("hinge_loss", lambda x: hinge_loss(x, beta=0.5), 2.0, (-0.5, 0.0, 0.0)),
    Kink(
        "hinge_loss",
        lambda x: hinge_loss(simpo_margin(x, torch.zeros_like(x), gamma_beta_ratio=0.5), beta=2.0),
        1.0,
        (-2.0, 0.0, 0.0),
    ),
    Kink("log_ratio", lambda x: log_ratio(x, torch.zeros_like(x), max_log_ratio=3.0), 3.0, (1.0, 1.0, 0.0)),
    Kink("log_ratio", lambda x: log_ratio(x, torch.zeros_like(x), max_log_ratio=3.0), -3.0, (0.0, 1.0, 1.0)),
    Kink("clipped_policy_loss", surrogate(1.5, 0.5, 1.0), LOG_2, (-3.0, -3.0, 0.0)),
    Kink("clipped_policy_loss", surrogate(-1.5, 0.5, 1.0), -LOG_2, (0.0, 0.75, 0.75)),
    Kink("clipped_policy_loss", surrogate(1.5, 0.0, 0.0), 0.0, (-1.5, -1.5, 0.0)),
    Kink("clipped_policy_loss", surrogate(-1.5, 0.0, 0.0), 0.0, (0.0, 1.5, 1.5)),
    Kink("orpo_loss", lambda x: orpo_loss(x, torch.full_like(x, -1.0)), -ORPO_EPS, (-1.0, -1.0, 0.0)),
    Kink("confidence", lambda x: confidence(x, torch.full_like(x, 0.25)), 0.25, (-0.25, 0.0, 0.25)),
]
NONE = {
    "group_advantages": "counts",
    "leave_one_out": "counts",
    "leave_one_out_max": "rewards",
    "leave_responses_out": "counts",
    "_above_lowest": "rewards",
    "_divided": "counts",
    "length_weighted": "rewards",
    "batch_scaled": "counts",
    "length_desensitised": "places",
    "batch_centred": "rewards",
    "standardised": "counts",
    "first_of_best": "rewards",
    "whiten": "advantages",
    "whiten_biased": "advantages",
    "whiten_in_groups": "advantages",
    "clipped_advantages": "advantages",
    "monte_carlo_values": "returns",
    "gae": "values of a critic at `prepare`",
    "affine_scan": "the end of a row",
    "_blocks": "numbers of tokens",
    "_even_length": "numbers of tokens",
    "_sums_of_rows": "the end of a row",
    "_sums_of_even_rows": "powers of the discount",
    "vtrace": "values of a critic at `prepare`",
    "_next": "the end of a row",
    "sapo_loss": "a choice by the advantage's sign",
    "policy_drift": "the bounded exponent keeps its slope",
    "sigmoid": "a choice between two equal forms",
    "vespo_loss": "the weight is stopped",
    "moments_of": "advantages",
    "overlong_penalty": "lengths",
    "clip_filter_weights": "rewards",
    "cispo_loss": "the clipped ratio is stopped",
    "rank_matches": "places",
    "segment_mean": "counts",
    "bnf_scores": "the target is stopped, and meets its bound with the same slope",
    "bnf_loss": "lengths",
    "adapted_coef": "numbers",
    "kto_loss": "a choice by label",
    "truncated_weights": "weights without gradient",
    "masked_weights": "weights without gradient",
    "recorded_gap": "a measurement",
    "adapted_entropy_coef": "numbers",
    "top_share_of_rows": "a choice of tokens",
    "covariances": "the gradient is stopped",
    "outside_covariance_band": "a choice of tokens",
    "_rank_in_row": "places",
}
"""Functions with a bound that is no kink, since the bounded value has no gradient; and what that value is."""


@pytest.mark.parametrize("kink", KINKS, ids=[f"{kink.function} at {kink.place:g}" for kink in KINKS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_side_that_counts_at_a_kink(kink: Kink, dtype: torch.dtype) -> None:
    place = torch.tensor(kink.place, dtype=dtype)
    step = ORPO_EPS / 2 if kink.function == "orpo_loss" else 1e-3
    x = torch.stack([place - step, place, place + step]).requires_grad_()
    (slopes,) = torch.autograd.grad(kink.term(x).sum(), x)
    scale = abs(kink.slopes[1]) or 1.0
    # its slope is far from 1 near a probability of 1: held is where there is one
    if kink.function == "orpo_loss":
        slopes = slopes.sign()
    assert slopes[1].item() == pytest.approx(kink.slopes[1], rel=1e-6)
    assert slopes.tolist() == pytest.approx(kink.slopes, abs=2e-3 * scale)


def test_a_ratio_at_its_bound_is_not_clipped() -> None:
    x = torch.tensor([LOG_2, -LOG_2], dtype=torch.float64)
    _, clipped = clipped_policy_loss(
        x, torch.zeros_like(x), torch.tensor([1.0, -1.0], dtype=torch.float64), clip_low=0.5, clip_high=1.0
    )
    assert clipped.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("weight", [0.0, 5.0, 50.0])
def test_dpo_positive_is_dpo_where_policy_and_reference_agree(weight: float) -> None:
    chosen, rejected = (torch.tensor([-3.0], requires_grad=True) for _ in range(2))
    margin = positive_margin(
        dpo_margin(chosen, rejected, chosen.detach(), rejected.detach()),
        chosen,
        chosen.detach(),
        weight=weight,
    )
    dpo_loss(margin, beta=1.0).sum().backward()
    assert chosen.grad is not None
    assert chosen.grad.item() == -0.5


@pytest.mark.sample("64", seconds=0.4)
@pytest.mark.parametrize("micro_batch", [2, 64])
def test_the_first_step_of_dpo_positive_is_that_of_dpo(
    world: World, tmp_path: Path, micro_batch: int
) -> None:
    """The first step of DPO-Positive equals that of DPO, since policy and reference are equal. This also
    holds if their passes have different shapes, and so round differently."""
    norms = []
    for weight in (0.0, 50.0):
        changes = {
            "learner.micro_batch_size": micro_batch,
            "stop.max_steps": 1,
            "algorithm.prompts": 16,
            "evaluation": None,
        }
        file = world.config(
            "dpo",
            tmp_path,
            {**changes, "algorithm.positive_lambda": weight, "run_dir": str(tmp_path / f"{weight}")},
        )
        assert run("train", file) == 0
        norms.append(rows(tmp_path / f"{weight}")[1]["optim/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_a_fall_is_measured_against_the_rounding_of_all_tokens() -> None:
    """DPO-Positive's lambda has no effect if a response's tokens fall by half of the rounding. It has its
    full effect if they fall by twice the rounding."""
    plain, positive = objective(DPO), objective(DPO, positive_lambda=3.0)
    batch, view, _ = prepared(plain, item(0, WINNER))
    for share, times in ((0.5, 0.0), (2.0, 1.0)):
        raw = view["reference_logps_K"] - share * ROUNDING * (view.row_of_K == 0)
        margins = [float(algorithm.margin({"policy": {"raw": raw}}, view)) for algorithm in (plain, positive)]
        fall = share * ROUNDING * batch.rows[0].trained.sum()
        assert margins[0] - margins[1] == pytest.approx(times * 3.0 * fall, rel=1e-6)


@pytest.mark.parametrize("q", [0.1, 0.5, 0.9])
def test_the_slope_of_bnf_has_one_value_where_policy_and_reference_agree(q: float) -> None:
    logps = (torch.tensor([q - 1e-4, q, q + 1e-4], dtype=torch.float64)).log().requires_grad_()
    bnf_scores(
        logps, torch.full((3,), math.log(q), dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    ).sum().backward()
    assert logps.grad is not None
    assert logps.grad.tolist() == pytest.approx([1.0, 1.0, 1.0], abs=1e-2)


def test_every_bound_of_the_losses_is_listed() -> None:
    """A function of `functional/` that bounds, compares or takes a maximum is in KINKS, or in NONE with a
    reason. Sampling and matrix products have no kink. The maximum that log-probabilities subtract against
    overflow is added again."""
    words = {
        "clamp",
        "clip",
        "relu",
        "maximum",
        "minimum",
        "abs",
        "amax",
        "amin",
        "max",
        "min",
        "sign",
        "where",
        "fmax",
        "hinge",
        "argsort",
    }
    folder = Path(oat.functional.__path__[0])
    found = set()
    for file in folder.glob("*.py"):
        if file.stem in ("sampling", "products", "head", "logprobs"):
            continue
        for function in (
            node
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        ):
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            names = {
                call.attr if isinstance(call, ast.Attribute) else call.id
                for call in calls
                if isinstance(call, ast.Attribute | ast.Name)
            }
            if names & words:
                found.add(function.name)
    assert found == {kink.function for kink in KINKS} | set(NONE)
