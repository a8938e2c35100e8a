"""AOT: sorted differences over a whole step, compared with a loss that sorts. The partner of a pair does not
depend on any batch size."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from pairs import feedback, item, numbers, objective, outputs, total

from oat.algorithms.contrast import AOT
from oat.algorithms.direct import DPO
from oat.functional.segments import segment_sum
from oat.learner.batching import select_rows, view_of
from oat.types import Batch, Trajectory

PAIRS = [("abcd", "ab"), ("a", "abcde"), ("abc", "abcdefg"), ("ab", "abc"), ("abcdef", "a")]
PAIRED = feedback(*(item(n, texts) for n, texts in enumerate(PAIRS)))
FORMS = ["paired", "unpaired"]


def forward(model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
    assert wants == {"raw"}
    return {"raw": numbers(rows, model)}


def prepared(form: str) -> tuple[AOT, Batch]:
    algorithm = objective(AOT, beta=0.3, form=form)
    return algorithm, algorithm.prepare(PAIRED, forward, np.random.default_rng(0))


def sums(batch: Batch, values_K: torch.Tensor) -> torch.Tensor:
    view = view_of(batch)
    return segment_sum(values_K, view.row_of_K, batch.size)


def sorted_loss(batch: Batch, raw: torch.Tensor, form: str) -> torch.Tensor:
    """Return the paper's AOT loss, which sorts the differences itself. The rows may be in any order."""
    row_of = {
        (row.text, group): n for n, (row, group) in enumerate(zip(batch.rows, batch.group_of_N, strict=True))
    }
    chosen, rejected = (
        [row_of[texts[place], group] for group, texts in enumerate(PAIRS)] for place in range(2)
    )
    policy, reference = sums(batch, raw), sums(batch, numbers(batch.rows, "reference"))
    if form == "paired":
        first, second = policy[chosen] - policy[rejected], reference[chosen] - reference[rejected]
    else:
        first, second = (policy - reference)[chosen], (policy - reference)[rejected]
    return -torch.nn.functional.logsigmoid(0.3 * (first.sort().values - second.sort().values)).mean()


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradient_are_those_of_sorting_in_the_loss(form: str) -> None:
    algorithm, batch = prepared(form)
    found = outputs(batch)
    raw = found["policy"]["raw"]
    loss, expected = total(algorithm, batch, found), sorted_loss(batch, raw, form)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    dpo = objective(DPO, beta=0.3)
    as_they_are = dpo.prepare(PAIRED, forward, np.random.default_rng(0))
    assert loss.item() != pytest.approx(total(dpo, as_they_are, outputs(as_they_are)).item(), rel=1e-3), (
        "sorting changes something"
    )
    torch.testing.assert_close(torch.autograd.grad(loss, raw)[0], torch.autograd.grad(expected, raw)[0])


def test_ranks_by_hand() -> None:
    """Each response has one token. The policy's margins are 1, 3, 2 and the reference's 5, 4, 6. So 1 is
    matched with 4, 3 with 6, and 2 with 5."""
    policy, reference = [-1.0, -2.0, -1.0, -4.0, -1.0, -3.0], [-1.0, -6.0, -1.0, -5.0, -1.0, -7.0]

    def given(model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        return {"raw": torch.tensor(policy if model == "policy" else reference)}

    pairs = feedback(*(item(n, ("a", "b")) for n in range(3)))
    batch = objective(AOT).prepare(pairs, given, np.random.default_rng(0))
    assert batch.columns["matched_U"].tolist() == [4.0, 6.0, 5.0]
    # Log-ratios 0 of all chosen ones, in their order, and 4, 1, 4 of the rejected ones: the first meets 1,
    # the others 4 and 4.
    batch = objective(AOT, form="unpaired").prepare(pairs, given, np.random.default_rng(0))
    assert batch.group_of_N.tolist() == [0, 1, 1, 0, 2, 2]
    assert batch.columns["reference_logps_K"].tolist() == [-1.0, -5.0, -1.0, -6.0, -1.0, -7.0]


@pytest.mark.parametrize("form", FORMS)
def test_columns_stay_with_their_rows(form: str) -> None:
    _, batch = prepared(form)
    assert batch.unit_of_N.tolist() == np.arange(5).repeat(2).tolist()
    assert {row.text for row in batch.rows[0::2]} == {chosen for chosen, _ in PAIRS}
    assert all(row.text in PAIRS[group] for row, group in zip(batch.rows, batch.group_of_N, strict=True))
    torch.testing.assert_close(batch.columns["reference_logps_K"], numbers(batch.rows, "reference"))


@pytest.mark.parametrize("form", FORMS)
def test_a_term_does_not_depend_on_who_is_in_the_pass(form: str) -> None:
    algorithm, batch = prepared(form)
    together = algorithm.losses(outputs(batch), view_of(batch))["loss/preference"].terms
    for unit in range(5):
        alone = select_rows(batch, np.array([2 * unit, 2 * unit + 1]))
        torch.testing.assert_close(
            algorithm.losses(outputs(alone), view_of(alone))["loss/preference"].terms[0], together[unit]
        )


def test_nothing_to_sort() -> None:
    batch = objective(AOT).prepare(
        feedback(item(0, ("a", "b"), None, "tie")), forward, np.random.default_rng(0)
    )
    assert batch.size == 0
