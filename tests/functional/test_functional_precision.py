"""Losses in float32 have the digits of float64, in value and slope, also where a margin is large or small.

Each loss is a function of one number x, a log-ratio or a margin. Log-probabilities of ratios lie around
`BASE`, so that digits are lost if anything is added to one before their difference is taken.
"""

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from oat.functional import contrast, kl, policy, preference, rewards, surrogates, values

Term = Callable[[torch.Tensor], torch.Tensor]
X = [*torch.linspace(-60, 60, 81).tolist(), *(sign * 10.0**-n for n in range(1, 7) for sign in (-1, 1))]
BOUNDS = {"clip_low": 0.2, "clip_high": 0.2}
BASE = -100.0
RTOL = 3e-6
SMALLEST = 1e-30
"""Numbers below this may be 0 in float32."""


def alike(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full_like(x, value)


def rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return torch.arange(len(x)) // 2, -(-len(x) // 2)


def of_ratio(loss: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]) -> Term:
    """Return a loss of log-probabilities and old ones as a function of their difference, for advantages of
    both signs."""

    def term(x: torch.Tensor) -> torch.Tensor:
        old = alike(x, BASE)
        logps = (x.float() + BASE).to(x.dtype)  # the numbers of float32 in both precisions
        found = [loss(logps, old, alike(x, advantage)) for advantage in (1.5, -1.5)]
        return torch.stack([each[0] if isinstance(each, tuple) else each for each in found])

    return term


def of_margin(loss: Callable[[torch.Tensor, float], torch.Tensor]) -> Term:
    return lambda x: torch.stack([loss(x, beta) for beta in (0.3, 1.0)])


def of_kl(estimator: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Term:
    return lambda x: estimator(x, torch.zeros_like(x))


LOSSES: dict[str, Term] = {
    "kl_k1": of_kl(kl.kl_k1),
    "kl_k2": of_kl(kl.kl_k2),
    "kl_k3": of_kl(kl.kl_k3),
    "unbiased_kl": lambda x: torch.stack(
        [kl.unbiased_kl(name, x, alike(x, 0.0), x, x.detach()) for name in ("k1", "k3")]
    ),
    "log_ratio": of_kl(policy.log_ratio),
    "clipped_policy_loss": of_ratio(
        lambda *given: policy.clipped_policy_loss(*given, **BOUNDS, dual_clip=3.0)
    ),
    "reinforce_loss": of_ratio(lambda logps, old, advantages: surrogates.reinforce_loss(logps, advantages)),
    "cispo_loss": of_ratio(lambda *given: surrogates.cispo_loss(*given, clip_high=4.0)),
    "gspo_loss": of_ratio(
        lambda *given: surrogates.gspo_loss(*given, *rows(given[0]), **BOUNDS, per_token=True)
    ),
    "luspo_loss": of_ratio(lambda *given: surrogates.luspo_loss(*given, *rows(given[0]), **BOUNDS)),
    "sapo_loss": of_ratio(surrogates.sapo_loss),
    "vespo_loss": of_ratio(lambda *given: surrogates.vespo_loss(*given, *rows(given[0]))),
    "cpgd_loss": of_ratio(lambda *given: surrogates.cpgd_loss(*given, **BOUNDS)),
    "policy_drift": of_kl(surrogates.policy_drift),
    "dpo_margin": lambda x: preference.dpo_margin(x, -x, alike(x, -5.0), alike(x, -3.0)),
    "length_desensitised": lambda x: preference.length_desensitised(
        x, (torch.arange(len(x)) > len(x) // 3).long(), 2, alpha=0.3
    ),
    "length_margin": lambda x: preference.length_margin(x, alike(x, 3), alike(x, 8), alpha=0.1, beta=0.3),
    "positive_margin": lambda x: preference.positive_margin(x, x, alike(x, 0.0), weight=4.0),
    "simpo_margin": lambda x: preference.simpo_margin(x, -x, gamma_beta_ratio=0.5),
    "dpo_loss": of_margin(lambda x, beta: preference.dpo_loss(x, beta=beta, label_smoothing=0.1)),
    "robust_dpo_loss": of_margin(
        lambda x, beta: preference.robust_dpo_loss(x, beta=beta, label_smoothing=0.1)
    ),
    "ipo_loss": of_margin(lambda x, beta: preference.ipo_loss(x, beta=beta)),
    "hinge_loss": of_margin(lambda x, beta: preference.hinge_loss(x, beta=beta)),
    "bnf_scores": lambda x: torch.stack(
        [
            preference.bnf_scores(-x.abs(), alike(x, math.log(q)), alike(x, 0.3))
            for q in (1e-3, 0.5, 0.99, 0.9999)
        ]
    ),
    "bnf_loss": lambda x: preference.bnf_loss(x, -x, alike(x, 3.0), alike(x, 8.0)),
    "exo_loss": of_margin(lambda x, beta: contrast.exo_loss(x, beta=beta, label_smoothing=1e-3)),
    "nca_loss": of_margin(lambda x, beta: contrast.nca_loss(x, -x, beta=beta)),
    "apo_zero_loss": of_margin(lambda x, beta: contrast.apo_zero_loss(x, -x, beta=beta)),
    "apo_down_loss": of_margin(lambda x, beta: contrast.apo_down_loss(x, -x, beta=beta)),
    "sppo_hard_loss": of_margin(lambda x, beta: contrast.sppo_hard_loss(x, -x, beta=beta)),
    "discopop_loss": of_margin(lambda x, beta: contrast.discopop_loss(x, beta=beta, tau=0.5)),
    "orpo_loss": lambda x: torch.stack(
        [
            contrast.orpo_loss(-x.abs() - 1e-5, alike(x, -1.0)),
            contrast.orpo_loss(alike(x, -1.0), -x.abs() - 1e-5),
        ]
    ),
    "cpo_loss": of_margin(lambda x, beta: contrast.cpo_loss(x, alike(x, 0.0), beta=beta)),
    "kto_loss": of_margin(
        lambda x, beta: torch.stack(
            [contrast.kto_loss(x, alike(x, sign) > 0, alike(x, 0.0), beta=beta) for sign in (1.0, -1.0)]
        )
    ),
    "reward_loss": lambda x: rewards.reward_loss(x, alike(x, 0.0)),
    "centring": lambda x: rewards.centring(x, 3 * x),
    "clipped_value_loss": lambda x: values.clipped_value_loss(x, alike(x, 0.0), alike(x, 2.0), clip=0.5)[0],
}
NONE = {
    "adapted_coef": "a number",
    "bradley_terry": "a probability, without gradient",
    "brier_score": "a measurement",
    "confidence": "a measurement",
    "rank_matches": "places",
    "vtrace": "without gradient",
    "monte_carlo_values": "without gradient",
    "step_advantages": "without gradient",
}
"""Functions that are no part of a loss, and what they return."""


@pytest.mark.parametrize("name", LOSSES)
def test_float32_has_the_digits_of_float64(name: str) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor(X, dtype=torch.float32).to(dtype).requires_grad_()
        terms = LOSSES[name](x)
        slopes = [torch.autograd.grad(each.sum(), x, retain_graph=True)[0] for each in terms.view(-1, len(X))]
        found.append([terms.detach().double().view(-1, len(X)), torch.stack(slopes).double()])
    for single, double in zip(*found, strict=True):
        assert ((single - double).abs() <= RTOL * double.abs() + SMALLEST).all()


def public(module: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if callable(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def test_every_loss_is_tried() -> None:
    modules = (kl, policy, surrogates, preference, contrast, rewards, values)
    assert set().union(*map(public, modules)) == LOSSES.keys() | NONE.keys()
