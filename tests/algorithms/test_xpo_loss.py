"""The loss of XPO against that of DPO."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pairs import LOSER, WINNER, item, objective, prepared, total

from oat.algorithms.direct import DPO
from oat.algorithms.xpo import XPO
from oat.types import Item


def with_slots(made: Item) -> Item:
    """Return the pair with its first response from the sampler, and its second from the reference."""
    first, second = made.group.trajectories
    rows = (replace(first, slot="sampler"), replace(second, slot="reference"))
    return replace(made, group=replace(made.group, trajectories=rows))


def slopes(algorithm: Any) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss of two pairs, and its gradient in each response's log-probabilities, by text."""
    batch, _, found = prepared(algorithm, with_slots(item(0, WINNER)), with_slots(item(1, LOSER, 1)))
    loss = total(algorithm, batch, found)
    loss.backward(inputs=[found["policy"]["raw"]])
    parts = found["policy"]["raw"].grad.split([int(row.trained.sum()) for row in batch.rows])
    return loss.item(), {row.text: part.numpy() for row, part in zip(batch.rows, parts, strict=True)}


@pytest.mark.inventory(16)
def test_with_alpha_zero_it_is_dpo() -> None:
    loss, of_xpo = slopes(objective(XPO, alpha=0.0, beta=0.3))
    expected, of_dpo = slopes(objective(DPO, beta=0.3))
    assert loss == pytest.approx(expected, rel=1e-7)
    for text, slope in of_dpo.items():
        np.testing.assert_allclose(of_xpo[text], slope, rtol=1e-6)


@pytest.mark.inventory(16)
def test_with_alpha_the_references_responses_become_less_probable() -> None:
    """The loss grows with the log-probability of a response of the reference, by alpha over the number of
    pairs, whoever won. That of the sampler's responses is DPO's."""
    _, of_xpo = slopes(objective(XPO, alpha=0.5, beta=0.3))
    _, of_dpo = slopes(objective(DPO, beta=0.3))
    for first, second in (WINNER, LOSER):
        np.testing.assert_allclose(of_xpo[first], of_dpo[first], rtol=1e-6)
        np.testing.assert_allclose(of_xpo[second], of_dpo[second] + 0.25, rtol=1e-5)
