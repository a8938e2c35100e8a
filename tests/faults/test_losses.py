"""R22: laws of every loss of `functional/`, tested with Hypothesis: order, masks, shifts, gradients,
bfloat16, and extreme numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from learners import trajectory

from oat.functional import contrast, preference
from oat.functional.advantages import group_advantages
from oat.functional.kl import kl_k1, kl_k2, kl_k3
from oat.functional.logprobs import sampled_logps, token_entropy, token_logps
from oat.functional.policy import clipped_policy_loss
from oat.learner.batching import view_of
from oat.learner.reduction import Reduction
from oat.types import Batch, Loss, Per

Figure = Callable[[str], None]
often = settings(
    derandomize=True,
    deadline=None,
    max_examples=60 if settings.default.max_examples > 100 else 12,
    phases=[Phase.generate],
)
"""12 examples; 60 in `make faults`, whose profile has more (conftest.py)."""
SEEDS = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Law:
    """A loss of log-probabilities in columns, and the laws that hold for it.

    Attributes:
        loss: maps (columns, U) to (U,).
        columns: number of columns.
        learned: number of columns with a gradient; they are the first ones.
        shifts: sets of columns to which one common number may be added.
        size: maps (columns, U) to (U,), the size of the loss's largest term, in float64.
        is_derivative: the gradient is the derivative of the value, without stopped gradients.
        is_bounded: the loss stays finite in float32 down to log-probabilities of -1e4 nats.
    """

    loss: Callable[[torch.Tensor], torch.Tensor]
    columns: int
    size: Callable[[torch.Tensor], torch.Tensor]
    learned: int = 2
    shifts: tuple[tuple[int, ...], ...] = ()
    is_derivative: bool = True
    is_bounded: bool = True


def steep(columns: torch.Tensor) -> torch.Tensor:
    """Return the size of a loss that contains a probability ratio."""
    return (columns[0] - columns[1]).abs().exp() * (1 + columns.abs().sum(0))


def flat(columns: torch.Tensor) -> torch.Tensor:
    return 1 + columns.abs().sum(0)


def lengths(columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full_like(columns[0], 5.0), torch.full_like(columns[0], 3.0)


def bnf(columns: torch.Tensor) -> torch.Tensor:
    chosen, rejected, chosen_reference, rejected_reference = columns
    entropy = torch.full_like(chosen, 0.5)
    scores = (
        preference.bnf_scores(chosen, chosen_reference, entropy),
        preference.bnf_scores(rejected, rejected_reference, entropy),
    )
    return preference.bnf_loss(*scores, *lengths(columns))


def ratios(columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-ratios of the chosen and of the rejected response."""
    return columns[0] - columns[2], columns[1] - columns[3]


def kto(*, is_desirable: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda c: contrast.kto_loss(
        c[0] - c[1], torch.full(c[0].shape, is_desirable), torch.full_like(c[0], 0.5), beta=0.3
    )


def clipped(advantage: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda c: clipped_policy_loss(
        c[0], c[1], torch.full_like(c[0], advantage), clip_low=0.2, clip_high=0.3
    )[0]


BOTH = ((0, 1), (2, 3), (0, 2), (1, 3))
LAWS = {
    "dpo": Law(
        lambda c: preference.dpo_loss(preference.dpo_margin(*c), beta=0.3, label_smoothing=0.1),
        4,
        flat,
        shifts=BOTH,
    ),
    "robust_dpo": Law(
        lambda c: preference.robust_dpo_loss(preference.dpo_margin(*c), beta=0.3, label_smoothing=0.1),
        4,
        flat,
        shifts=BOTH,
    ),
    "ipo": Law(
        lambda c: preference.ipo_loss(preference.dpo_margin(*c), beta=0.5),
        4,
        lambda c: flat(c).square(),
        shifts=BOTH,
    ),
    "slic": Law(lambda c: preference.hinge_loss(preference.dpo_margin(*c), beta=0.3), 4, flat, shifts=BOTH),
    "length": Law(
        lambda c: preference.dpo_loss(
            preference.length_margin(preference.dpo_margin(*c), *lengths(c), alpha=0.1, beta=0.3), beta=0.3
        ),
        4,
        flat,
        shifts=BOTH,
    ),
    "positive": Law(
        lambda c: preference.dpo_loss(
            preference.positive_margin(preference.dpo_margin(*c), c[0], c[2], weight=2.0), beta=0.3
        ),
        4,
        flat,
        shifts=((2, 0), (1, 3)),
    ),
    "simpo": Law(
        lambda c: preference.dpo_loss(preference.simpo_margin(*c, gamma_beta_ratio=0.5), beta=2.0),
        2,
        flat,
        shifts=((0, 1),),
    ),
    "simpo by a hinge": Law(
        lambda c: preference.hinge_loss(preference.simpo_margin(*c, gamma_beta_ratio=0.5), beta=2.0),
        2,
        flat,
        shifts=((0, 1),),
    ),
    "bnf": Law(bnf, 4, lambda c: flat(c) / -torch.expm1(c[:2].max(0).values), is_derivative=False),
    "exo": Law(
        lambda c: contrast.exo_loss(preference.dpo_margin(*c), beta=0.3, label_smoothing=0.1),
        4,
        flat,
        shifts=BOTH,
    ),
    "nca": Law(lambda c: contrast.nca_loss(*ratios(c), beta=0.3), 4, flat, shifts=((0, 2), (1, 3))),
    "apo_zero": Law(lambda c: contrast.apo_zero_loss(*ratios(c), beta=0.3), 4, flat, shifts=((0, 2), (1, 3))),
    "apo_down": Law(lambda c: contrast.apo_down_loss(*ratios(c), beta=0.3), 4, flat, shifts=((0, 2), (1, 3))),
    "sppo_hard": Law(
        lambda c: contrast.sppo_hard_loss(*ratios(c), beta=0.3),
        4,
        lambda c: flat(c).square(),
        shifts=((0, 2), (1, 3)),
    ),
    "discopop": Law(
        lambda c: contrast.discopop_loss(preference.dpo_margin(*c), beta=0.3, tau=0.5), 4, flat, shifts=BOTH
    ),
    "orpo": Law(lambda c: contrast.orpo_loss(*c), 2, lambda c: flat(c) / -torch.expm1(c.max(0).values)),
    "cpo": Law(lambda c: contrast.cpo_loss(*c, beta=0.3), 2, flat, shifts=((0, 1),)),
    "kto, desirable": Law(kto(is_desirable=True), 2, flat, learned=1, shifts=((0, 1),)),
    "kto, undesirable": Law(kto(is_desirable=False), 2, flat, learned=1, shifts=((0, 1),)),
    "bradley_terry": Law(
        lambda c: preference.bradley_terry(c[0] - c[1], scale=2.0), 2, flat, shifts=((0, 1),)
    ),
    "policy, better than its group": Law(clipped(1.5), 2, steep, learned=1, shifts=((0, 1),)),
    "policy, worse than its group": Law(clipped(-0.75), 2, steep, learned=1, shifts=((0, 1),)),
    "k1": Law(lambda c: kl_k1(*c), 2, flat, shifts=((0, 1),)),
    "k2": Law(lambda c: kl_k2(*c), 2, lambda c: flat(c).square(), shifts=((0, 1),)),
    "k3": Law(lambda c: kl_k3(*c), 2, steep, shifts=((0, 1),), is_bounded=False),
}


def drawn(
    law: Law, low: float, high: float, dtype: torch.dtype = torch.float64
) -> st.SearchStrategy[torch.Tensor]:
    """Draw (columns, U) log-probabilities, small numbers such as -0.0 included."""
    rows = st.lists(st.tuples(*[st.floats(low, high, width=32)] * law.columns), min_size=1, max_size=6)
    return rows.map(lambda rows: torch.tensor(rows, dtype=dtype).T.contiguous())


def random_columns(law: Law, seed: int) -> torch.Tensor:
    """Return (columns, 4) random log-probabilities. Almost surely none is where a loss has a kink."""
    return (
        -6 * torch.rand(law.columns, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        - 0.05
    )


@pytest.mark.fault("R22")
@pytest.mark.parametrize("name", LAWS)
def test_order_changes_nothing(name: str, figure: Figure) -> None:
    law = LAWS[name]

    @often
    @given(drawn(law, -50.0, 0.0, torch.float32), st.randoms(use_true_random=False))
    def holds(columns: torch.Tensor, randomness: Any) -> None:
        order = randomness.sample(range(columns.shape[1]), columns.shape[1])
        torch.testing.assert_close(law.loss(columns[:, order]), law.loss(columns)[order])

    holds()
    figure("1 of 1 laws of losses hold")


@pytest.mark.fault("R22")
@pytest.mark.parametrize("name", [name for name, law in LAWS.items() if law.shifts])
def test_a_constant_in_both_changes_nothing(name: str, figure: Figure) -> None:
    law = LAWS[name]

    @often
    @given(drawn(law, -50.0, 0.0), st.floats(-100, 100), st.sampled_from(law.shifts))
    def holds(columns: torch.Tensor, shift: float, together: tuple[int, ...]) -> None:
        moved = columns.clone()
        moved[list(together)] += shift
        size = law.size(columns) * (1 + abs(shift))
        assert ((law.loss(moved) - law.loss(columns)).abs() <= 1e-12 * size).all()

    holds()
    figure("1 of 1 laws of losses hold")


@pytest.mark.fault("R22")
@pytest.mark.parametrize("name", [name for name, law in LAWS.items() if law.is_derivative])
def test_gradients_in_float64(name: str, figure: Figure) -> None:
    law = LAWS[name]

    @often
    @given(SEEDS)
    def holds(seed: int) -> None:
        learned, others = random_columns(law, seed).split([law.learned, law.columns - law.learned])
        assert torch.autograd.gradcheck(
            lambda learned: law.loss(torch.cat([learned, others])), learned.clone().requires_grad_()
        )

    holds()
    figure("1 of 1 laws of losses hold")


@pytest.mark.fault("R22")
@pytest.mark.parametrize("name", LAWS)
def test_bfloat16_errs_by_a_few_roundings(name: str, figure: Figure) -> None:
    law = LAWS[name]

    @often
    @given(drawn(law, -8.0, -0.125, torch.bfloat16))
    def holds(columns: torch.Tensor) -> None:
        exact = law.loss(columns.double())
        assert ((law.loss(columns).double() - exact).abs() <= 4 * 2**-8 * law.size(columns.double())).all()

    holds()
    figure("1 of 1 laws of losses hold")


@pytest.mark.fault("R22")
@pytest.mark.parametrize("name", LAWS)
def test_log_probabilities_down_to_minus_10000(name: str, figure: Figure) -> None:
    """Values and gradients are finite. The loss k3 has no clamp: it overflows when log-probabilities are more
    than 88 nats apart, but is never NaN, so the guard of R20 sees it."""
    law = LAWS[name]

    @often
    @given(drawn(law, -1e4, 0.0, torch.float32))
    def holds(columns: torch.Tensor) -> None:
        learned = columns[: law.learned].clone().requires_grad_()
        values = law.loss(torch.cat([learned, columns[law.learned :]]))
        (gradient,) = torch.autograd.grad(values.sum(), learned)
        is_near = (
            (columns[0] - columns[1]).abs() < 80
            if not law.is_bounded
            else torch.ones_like(values, dtype=torch.bool)
        )
        assert values[is_near].isfinite().all()
        assert gradient[:, is_near].isfinite().all()
        assert not values.isnan().any()
        assert not gradient.isnan().any()

    holds()
    figure("1 of 1 laws of losses hold")


REDUCTIONS: tuple[Per, ...] = ("token", "sequence", "sequence_sum", "prompt", "constant")


def reduced(
    sizes: list[int], terms: torch.Tensor, per: Per, columns: dict[str, torch.Tensor] | None = None
) -> tuple[float, torch.Tensor]:
    """Return the loss of rows with `sizes` tokens, two rows per group, and its gradient by term."""
    rows = tuple(trajectory(range(size)) for size in sizes)
    batch = Batch(rows, np.arange(len(rows)), np.arange(len(rows)) // 2, columns or {})
    view, terms = view_of(batch), terms.clone().requires_grad_()
    total = Reduction(batch)(Loss(terms, per, constant=7.0), view, view.group_of_N, first=True)
    total.backward()
    assert terms.grad is not None
    return total.item(), terms.grad


@pytest.mark.fault("R22")
@pytest.mark.parametrize("per", REDUCTIONS)
def test_a_masked_token_is_a_token_that_is_not_there(per: Per, figure: Figure) -> None:
    """A masked token may have any term, also NaN. It changes neither the loss nor the gradient of the other
    tokens."""

    @often
    @given(
        st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=6),
        SEEDS,
        st.sampled_from([1e9, math.nan, math.inf]),
    )
    def holds(masks: list[list[bool]], seed: int, padding: float) -> None:
        mask = torch.tensor([kept for row in masks for kept in row], dtype=torch.bool)
        values = torch.randn(len(mask), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        padded = torch.where(mask, values, padding)
        loss, gradient = reduced([len(row) for row in masks], padded, per, {"mask_K": mask.double()})
        expected, slopes = reduced([sum(row) for row in masks], values[mask], per)
        assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)
        torch.testing.assert_close(gradient[mask], slopes)
        assert (gradient[~mask] == 0).all()

    holds()
    figure("1 of 1 laws of losses hold")


logits_and_ids = SEEDS.map(
    lambda seed: (
        4 * torch.randn(5, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),
        torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(seed)),
    )
)


def sampled(logits: torch.Tensor, ids: torch.Tensor, *, is_kept: bool) -> torch.Tensor:
    """Return log-probabilities at temperature 0.7, over the whole vocabulary, or over the id and one other
    id."""
    kept = torch.stack([ids, (ids + 3) % 7], 1).flatten(), torch.arange(len(ids)).repeat_interleave(2)
    return sampled_logps(
        logits, ids, torch.full(ids.shape, 0.7, dtype=torch.float64), 7, kept if is_kept else None
    )


TOKENS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "raw": token_logps,
    "entropy": lambda logits, ids: token_entropy(logits),
    "sampled": lambda logits, ids: sampled(logits, ids, is_kept=False),
    "sampled of a kept set": lambda logits, ids: sampled(logits, ids, is_kept=True),
}


@pytest.mark.fault("R22")
@pytest.mark.parametrize("name", TOKENS)
def test_laws_of_token_log_probabilities(name: str, figure: Figure) -> None:
    """A constant added to a row of logits changes nothing. Rows do not depend on each other. Gradients are
    right. Logits in bfloat16 are computed in float32. Logits of 1e4 give finite values."""
    values = TOKENS[name]

    @often
    @given(logits_and_ids, st.floats(-1e3, 1e3), st.permutations(range(5)))
    def holds(drawn: tuple[torch.Tensor, torch.Tensor], shift: float, order: list[int]) -> None:
        logits, ids = drawn
        torch.testing.assert_close(values(logits + shift, ids), values(logits, ids), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(values(logits[order], ids[order]), values(logits, ids)[order])
        assert torch.autograd.gradcheck(lambda logits: values(logits, ids), logits.clone().requires_grad_())
        half = logits.bfloat16()
        torch.testing.assert_close(
            values(half, ids), values(half.double(), ids), rtol=1e-5, atol=1e-5, check_dtype=False
        )
        far = (2e3 * logits.float()).clamp(-1e4, 1e4).requires_grad_()
        found = values(far, ids)
        assert found.isfinite().all()
        assert torch.autograd.grad(found.sum(), far)[0].isfinite().all()

    holds()
    figure("1 of 1 laws of losses hold")


@pytest.mark.fault("R22")
@pytest.mark.parametrize("normalise", [True, False])
def test_laws_of_advantages(normalise: bool, figure: Figure) -> None:
    """The order of the rewards of a group, and a constant added to all of them, change nothing. Advantages of
    a group sum to zero. Large rewards give finite advantages."""

    @often
    @given(
        st.lists(st.tuples(st.integers(0, 2), st.floats(-100, 100)), min_size=1, max_size=9),
        st.floats(-1e3, 1e3),
        st.randoms(use_true_random=False),
    )
    def holds(samples: list[tuple[int, float]], shift: float, randomness: Any) -> None:
        groups, rewards = (
            torch.tensor([group for group, _ in samples]),
            torch.tensor([reward for _, reward in samples], dtype=torch.float64),
        )
        found = group_advantages(rewards, groups, 3, normalise=normalise)
        order = randomness.sample(range(len(samples)), len(samples))
        torch.testing.assert_close(
            group_advantages(rewards[order], groups[order], 3, normalise=normalise), found[order]
        )
        torch.testing.assert_close(
            group_advantages(rewards + shift, groups, 3, normalise=normalise), found, rtol=1e-6, atol=1e-6
        )
        torch.testing.assert_close(
            torch.zeros(3).double().index_add(0, groups, found), torch.zeros(3).double(), rtol=0, atol=1e-9
        )
        assert group_advantages((1e4 * rewards).float(), groups, 3, normalise=normalise).isfinite().all()

    holds()
    figure("1 of 1 laws of losses hold")


def is_noticed(test: Callable[[str, Figure], None]) -> bool:
    """Return True if a law fails for the loss `broken`. No figure is kept of it."""
    try:
        test("broken", lambda text: None)
    except (AssertionError, RuntimeError):
        return True
    return False


@pytest.mark.fault("R22")
def test_a_broken_loss_breaks_the_laws() -> None:
    """The laws find each of five broken losses: it reads its neighbour, depends on a common constant, doubles
    its gradient, loses digits in bfloat16, or overflows."""
    dpo = LAWS["dpo"]
    broken = {
        "order": (test_order_changes_nothing, replace(dpo, loss=lambda c: dpo.loss(c).cumsum(0))),
        "shift": (
            test_a_constant_in_both_changes_nothing,
            replace(dpo, loss=lambda c: dpo.loss(c) + 0.5 * c[0]),
        ),
        "gradient": (
            test_gradients_in_float64,
            replace(dpo, loss=lambda c: 2 * dpo.loss(c) - dpo.loss(c).detach()),
        ),
        "bfloat16": (
            test_bfloat16_errs_by_a_few_roundings,
            replace(dpo, loss=lambda c: dpo.loss(c) + (1024 + c[0]) - 1024),
        ),
        "edge": (
            test_log_probabilities_down_to_minus_10000,
            replace(dpo, loss=lambda c: (-preference.dpo_margin(*c)).exp()),
        ),
    }
    noticed = 0
    for test, law in broken.values():
        LAWS["broken"] = law
        try:
            noticed += any(is_noticed(test) for _ in range(10))  # not each set of examples shows it
        finally:
            del LAWS["broken"]
    assert noticed == len(broken)
