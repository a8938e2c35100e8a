"""The whole loss of a policy gradient and of DPO, with options drawn together, equals a statement of the
papers' equations: the total and its slopes, in float64. The statement calls nothing of `oat.functional`."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives import VOCABULARY, row
from tiny_models import save_llama

from oat.algorithms.base import Outputs, View
from oat.learner.batching import view_of
from oat.learner.models import LanguageModel
from oat.learner.reduction import Reduction
from oat.models.loading import load_lm
from oat.plugins.registry import ALGORITHMS
from oat.types import Batch

Values = dict[str, torch.Tensor]
QUICK = settings(derandomize=True, deadline=None, max_examples=200)
LENGTHS = (1, 4, 3)
ROW_OF_K = np.arange(len(LENGTHS)).repeat(LENGTHS)
SIZE = len(ROW_OF_K)
ONE, BOTH = "one tensor of log-probabilities", "raw and sampled ones apart"


def options(draw: Callable[[Any], Any]) -> dict[str, Any]:
    """Draw settings of `grpo` that are read in the loss, none of which another refuses."""

    def often(name: str, *values: Any) -> dict[str, Any]:
        value = draw(st.sampled_from([None, *values]))
        return {} if value is None else {name: value}

    found = {"policy_loss": draw(st.sampled_from([*LOSSES]))}
    if found["policy_loss"] not in ("reinforce", "sapo", "vespo"):
        found |= often("clip_low", 0.05, 0.5) | often("clip_high", 0.1, 2.0)
    if found["policy_loss"] == "clipped":
        found |= often("dual_clip", 1.5, 3.0)
    found |= often("drift_coef", 0.3) | often("kl_coef", 0.2, 1.0)
    if "kl_coef" in found:
        found["kl_estimator"] = draw(st.sampled_from(["k1", "k2", "k3"]))
        found |= often("kl_max_log_ratio", 0.3, 2.0)
        if found["kl_estimator"] != "k2":
            found |= often("kl_unbiased", True)
    sections = {"entropy": often("coef", 0.1), "tokens": often("covariance_kl", 0.4)}
    sections["correction"] = often("off_policy_bound", 0.2)
    found["reduction"] = draw(st.sampled_from(["sequence", "token", "sequence_sum"]))
    return {**found, **{name: values for name, values in sections.items() if values}}


def made(name: str, given: dict[str, Any]) -> Any:
    cls: Any = ALGORITHMS[name]
    built = {
        key: type(getattr(cls.Config(), key))(**value) if isinstance(value, dict) else value
        for key, value in given.items()
    }
    return cls(cls.Config(**built))


def numbers(seed: int, scale: float) -> Values:
    """Return made-up values and columns of the tokens, of which log-ratios go up to about 3 times `scale`."""
    drawn = np.random.default_rng(seed).normal(size=(8, SIZE))
    old = drawn[0] - 5
    found = {
        "sampled": old + scale * drawn[1],
        "old_logps_K": old,
        "reference_logps_K": old + scale * drawn[2],
        "recorded_logps_K": old + 0.3 * drawn[3],
        "advantages_K": drawn[4],
        "gradient_weight_K": np.abs(drawn[5]),
        "covariance_kl_K": (drawn[6] > 0).astype(float),
        "entropy": 1 + np.tanh(drawn[7]),
    }
    found["raw"] = found["sampled"] + 0.2 * drawn[7]
    return {name: torch.from_numpy(values) for name, values in found.items()}


def smaller(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.where(other < one, other, one)


def by_row(values: torch.Tensor, over: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a number of each row at each of its tokens."""
    parts = [over(values[n == ROW_OF_K]).expand(length) for n, length in enumerate(LENGTHS)]
    return torch.cat(parts)


def clip(c: Any, values: torch.Tensor) -> torch.Tensor:
    return values.clamp(0.0 if c.clip_low is None else 1 - c.clip_low, 1 + c.clip_high)


def clipped(c: Any, log_r: torch.Tensor, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    terms = -smaller(log_r.exp() * a, clip(c, log_r.exp()) * a)
    return terms if c.dual_clip is None else torch.where(a < 0, smaller(terms, -c.dual_clip * a), terms)


def gspo(c: Any, log_r: torch.Tensor, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    s = by_row(log_r, torch.mean).exp()
    return -smaller(s * a, clip(c, s) * a)


def gspo_token(c: Any, log_r: torch.Tensor, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    s = by_row(log_r, torch.mean).exp().detach() * (log_r - log_r.detach()).exp()
    return -smaller(s * a, clip(c, s) * a)


def cpgd(c: Any, log_r: torch.Tensor, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    low = -math.inf if c.clip_low is None else math.log(1 - c.clip_low)
    return -smaller(log_r * a, log_r.clamp(low, math.log(1 + c.clip_high)) * a)


def sapo(c: Any, log_r: torch.Tensor, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    tau = torch.where(a > 0, torch.tensor(1.0).double(), 1.05)
    return -4 / tau / (1 + (-tau * (log_r.exp() - 1)).exp()) * a


def vespo(c: Any, log_r: torch.Tensor, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    w = by_row(log_r, torch.sum).clamp(math.log(1e-8), 20).exp().detach()
    good, bad = w**2 * (3 * (1 - w)).exp(), w**3 * (2 * (1 - w)).exp()
    return -torch.where(a >= 0, good, bad) * a * x


LOSSES = {
    "clipped": clipped,
    "reinforce": lambda c, log_r, x, a: -a * x,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": lambda c, log_r, x, a: -clip(c, log_r.exp()).detach() * a * x,
    "cpgd": cpgd,
    "sapo": sapo,
    "vespo": vespo,
}
"""The loss of each token: log_r the logarithm of the ratio, x the log-probability, a the advantage."""


def kl(c: Any, v: Values) -> torch.Tensor:
    """Return the KL of each token. With `kl_unbiased`, r k(d) has the slope r (k(d) + k'(d)) at the bounded
    d, by the log-probability in the distribution that was drawn from."""
    d = v["raw"] - v["reference_logps_K"]
    bound = math.inf if c.kl_max_log_ratio is None else c.kl_max_log_ratio
    b = d.clamp(-bound, bound)
    forms = {"k1": b, "k2": b * b / 2, "k3": (-b).exp() - 1 + b}
    if not c.kl_unbiased:
        return forms[c.kl_estimator]
    r, k = (v["sampled"] - v["old_logps_K"]).detach().exp(), forms[c.kl_estimator].detach()
    slope = torch.ones(SIZE).double() if c.kl_estimator == "k1" else 1 - (-b.detach()).exp()
    return r * (k + (k + slope) * (v["sampled"] - v["sampled"].detach()))


def statement(c: Any, v: Values) -> torch.Tensor:
    """Return the whole loss."""
    a, log_r = v["advantages_K"], v["sampled"] - v["old_logps_K"]
    weight = v["gradient_weight_K"]
    if c.correction.off_policy_bound is not None:
        behind = by_row((v["recorded_logps_K"] - v["sampled"]).detach(), torch.mean)
        weight = torch.where((a < 0) & (behind > c.correction.off_policy_bound), 0.0, weight)
    terms = weight * LOSSES[c.policy_loss](c, log_r, v["sampled"], a)
    drift = log_r.exp() - 1 - log_r
    terms = terms + c.drift_coef * drift - c.entropy.coef * v["entropy"]
    if c.tokens.covariance_kl:
        terms = terms + c.tokens.covariance_kl_coef * drift * v["covariance_kl_K"]
    if c.kl_coef:
        terms = terms + c.kl_coef * kl(c, v)
    if c.reduction == "token":
        return terms.sum() / SIZE
    by = LENGTHS if c.reduction == "sequence" else (1,) * len(LENGTHS)
    return torch.stack([terms[n == ROW_OF_K].sum() / by[n] for n in range(len(LENGTHS))]).mean()


def total(objective: Any, batch: Batch, outputs: Outputs, view: View) -> torch.Tensor:
    reduction = Reduction(batch)
    losses = objective.losses(outputs, view).values()
    parts = [loss.coef * reduction(loss, view, view.group_of_N, first=True) for loss in losses]
    return torch.stack(parts).sum()


def slopes(value: torch.Tensor, leaves: Values) -> Values:
    found = torch.autograd.grad(value, [*leaves.values()], allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if slope is None else slope
        for (name, leaf), slope in zip(leaves.items(), found, strict=True)
    }


def assert_equal(found: torch.Tensor, expected: torch.Tensor, leaves: Values) -> None:
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(slopes(found, leaves), slopes(expected, leaves), rtol=1e-9, atol=1e-12)


@QUICK
@given(st.data(), st.sampled_from([ONE, BOTH]), st.sampled_from([0.1, 1.0, 3.0]), st.integers(0, 9))
def test_the_loss_of_a_policy_gradient(data: st.DataObject, form: str, scale: float, seed: int) -> None:
    c = options(data.draw)
    objective = made("grpo", c)
    v = numbers(seed, scale)
    leaves = {name: v[name].requires_grad_() for name in ("sampled", "raw", "entropy")}
    if form == ONE:
        v["raw"] = v["sampled"]
        del leaves["raw"]
    generator = np.random.default_rng(0)
    rows = tuple(row(generator, 2, length) for length in LENGTHS)
    columns = {name: values for name, values in v.items() if name.endswith("_K")}
    batch = Batch(rows, np.arange(len(rows)), np.zeros(len(rows), int), columns)
    policy = {name: v[name] for name in ("sampled", "raw", "entropy")}
    found = total(objective, batch, {"policy": policy}, view_of(batch))
    assert_equal(found, statement(objective.config, v), leaves)


PAIRS = ((4, 2), (1, 5), (3, 3))
"""Lengths of the chosen and of the rejected responses."""


def pair_options(draw: Callable[[Any], Any]) -> dict[str, Any]:
    """Draw settings of `dpo` and `robust_dpo`."""
    values = {
        "beta": (0.1, 1.0),
        "label_smoothing": (0.0, 0.2),
        "ld_alpha": (0.0, 0.4, 1.0),
        "length_alpha": (0.0, 0.3),
        "positive_lambda": (0.0, 2.0),
        "sft_weight": (0.0, 0.5),
    }
    return {name: draw(st.sampled_from(each)) for name, each in values.items()}


def pair_loss(
    c: Any, is_robust: bool, policy: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]
) -> Any:
    """Return the loss of a pair; the chosen response comes first."""
    n = min(len(policy[0]), len(policy[1]))
    of_policy, of_reference = (
        [x[:n].sum() + c.ld_alpha * x[n:].sum() for x in each] for each in (policy, reference)
    )
    h = of_policy[0] - of_policy[1] - of_reference[0] + of_reference[1]
    h = h + c.length_alpha / c.beta * (len(policy[0]) - len(policy[1]))
    h = h - c.positive_lambda * (of_reference[0] - of_policy[0]).clamp(min=0)
    e, won, lost = c.label_smoothing, (1 + (-c.beta * h).exp()).log(), (1 + (c.beta * h).exp()).log()
    loss = ((1 - e) * won - e * lost) / (1 - 2 * e) if is_robust else (1 - e) * won + e * lost
    return loss - c.sft_weight * policy[0].mean()


@settings(QUICK, max_examples=100)
@given(st.data(), st.sampled_from(["dpo", "robust_dpo"]), st.booleans(), st.integers(0, 9))
def test_the_loss_of_a_pair(data: st.DataObject, name: str, is_soft: bool, seed: int) -> None:
    objective = made(name, pair_options(data.draw))
    lengths = [length for pair in PAIRS for length in pair]
    drawn = np.random.default_rng(seed).normal(-1, 0.7, size=(2, sum(lengths)))
    raw, reference = (torch.from_numpy(values) for values in drawn)
    raw.requires_grad_()
    turned = torch.tensor([0.5, 0.0, 0.2], dtype=torch.float64)
    columns = {"reference_logps_K": reference, **({"turned_U": turned} if is_soft else {})}
    generator = np.random.default_rng(0)
    rows = tuple(row(generator, 2, length) for length in lengths)
    units = np.arange(len(PAIRS)).repeat(2)
    batch = Batch(rows, units, units, columns)
    found = total(objective, batch, {"policy": {"raw": raw}}, view_of(batch))
    parts, expected = [each.split(lengths) for each in (raw, reference)], []
    for u, weight in enumerate(turned.tolist() if is_soft else [0.0] * len(PAIRS)):
        both = [
            pair_loss(objective.config, name == "robust_dpo", *([each[i], each[j]] for each in parts))
            for i, j in ((2 * u, 2 * u + 1), (2 * u + 1, 2 * u))
        ]
        expected.append((1 - weight) * both[0] + weight * both[1])
    assert_equal(found, torch.stack(expected).mean(), {"raw": raw})


@pytest.mark.parametrize(
    ("temperature", "num_tokens"), [(1.0, VOCABULARY), (1.0, VOCABULARY - 1), (0.7, VOCABULARY)]
)
def test_the_gradient_of_a_kl_far_from_the_reference_reaches_the_weights(
    tmp_path: Path, temperature: float, num_tokens: int
) -> None:
    """The policy is 25 nats below the reference, where k3 and its slope are e^25 and -e^25. In float32 the
    weights get the gradient of float64, also if the last rows of the head are padding, and a step against it
    raises the probabilities."""
    path = str(save_llama(tmp_path, vocab_size=VOCABULARY, hidden=16, inner=24, spread=0.3))
    rows = tuple(
        row(np.random.default_rng(n), 2, length, temperature=temperature) for n, length in enumerate(LENGTHS)
    )
    assert all((made.ids < num_tokens).all() for made in rows)
    objective = made("grpo", {"kl_coef": 1.0, "kl_unbiased": True})
    found = []
    for dtype in (torch.float32, torch.float64):
        lm = load_lm(path)
        lm.module.to(dtype).requires_grad_()
        policy = LanguageModel(lm, num_tokens=num_tokens).outputs(rows, {}, {"raw", "sampled", "entropy"})
        raw_K = policy["raw"].detach()
        columns = {"old_logps_K": policy["sampled"].detach(), "reference_logps_K": raw_K + 25}
        columns["advantages_K"] = 0 * raw_K
        batch = Batch(rows, np.arange(len(rows)), np.zeros(len(rows), int), columns)
        weights = [*lm.module.parameters()]
        loss = total(objective, batch, {"policy": policy}, view_of(batch))
        found.append(torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True))
        rise = torch.autograd.grad(policy["raw"].sum(), weights, allow_unused=True)
        used = [(a, b) for a, b in zip(found[-1], rise, strict=True) if a is not None and b is not None]
        assert sum(float((a * b).sum()) for a, b in used) < 0
    single, double = (torch.cat([x.double().flatten() for x in each if x is not None]) for each in found)
    assert double.norm() > 1
    assert (single - double).norm() < 1e-4 * double.norm()
