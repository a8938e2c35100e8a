"""An ensemble's belief is a soft label: losses of pairs weigh both winners with it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import LOSER, SLOW, WINNER, feedback, forward, item, objective, outputs, prepared, total

from oat.algorithms.base import step_metrics
from oat.algorithms.direct import DPO
from oat.algorithms.pairs import believed_share, pair_batch
from oat.learner.batching import select_rows, view_of
from oat.learner.reduction import Reduction
from oat.types import ENSEMBLE, Batch, Item

OTHER = ("abc", "abcdefg")
"""Texts of a third pair. All lengths differ from each other within a pair."""


def believed(number: int, texts: tuple[str, str], p: float) -> Item:
    """Return a pair that an ensemble answered: the first response wins with probability `p`. The ledger's
    label is the more probable winner."""
    made = item(number, texts, None if p == 0.5 else int(p < 0.5))
    answer = replace(made.answer, values=(p,), queries=0, by=ENSEMBLE)
    return replace(made, question=replace(made.question, oracle=ENSEMBLE), answer=answer)


def slope_by_text(algorithm: Any, *items: Item) -> tuple[float, dict[str, list[float]], Batch]:
    """Return the loss, its gradient in each response's log-probabilities by the response's text, and the
    batch."""
    batch, _, found = prepared(algorithm, *items)
    loss = total(algorithm, batch, found)
    (gradient_K,) = torch.autograd.grad(loss, found["policy"]["raw"])
    parts = gradient_K.split([int(row.trained.sum()) for row in batch.rows])
    return (
        loss.item(),
        {row.text: part.tolist() for row, part in zip(batch.rows, parts, strict=True)},
        batch,
    )


@pytest.mark.parametrize("p", [0.9, 0.25, 0.0, 1.0])
@pytest.mark.parametrize("name", SLOW)
def test_the_loss_is_the_mean_over_both_winners(name: str, p: float) -> None:
    """The loss and gradient of a soft pair beside a pair with a winner are the means of those with either
    response as winner, weighted with the belief."""
    algorithm, _ = SLOW[name]
    soft, slopes, _ = slope_by_text(algorithm, item(0, WINNER), believed(1, LOSER, p))
    first, second = (slope_by_text(algorithm, item(0, WINNER), item(1, LOSER, label)) for label in (0, 1))
    assert soft == pytest.approx(p * first[0] + (1 - p) * second[0], rel=1e-6)
    assert slopes.keys() == {*WINNER, *LOSER}
    for text, slope in slopes.items():
        expected = p * np.array(first[1][text]) + (1 - p) * np.array(second[1][text])
        np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-9)


def test_a_soft_label_by_hand() -> None:
    """DPO has beta 1. The margin of the first response is log 3, so it loses -log(3/4) as the winner, and the
    second -log(1/4). The belief in the first is 0.2, so the second is the chosen one."""
    algorithm = objective(DPO, beta=1.0)
    batch, _, _ = prepared(algorithm, believed(0, ("a", "b"), 0.2))
    assert [row.text for row in batch.rows] == ["b", "a"]
    assert batch.columns["turned_U"].tolist() == pytest.approx([0.2])
    raw = batch.columns["reference_logps_K"] + torch.tensor([-np.log(3), 0.0])
    expected = -0.2 * np.log(3 / 4) - 0.8 * np.log(1 / 4)
    assert total(algorithm, batch, {"policy": {"raw": raw}}).item() == pytest.approx(expected)


@given(st.floats(0.0, 1.0).filter(lambda p: abs(p - 0.5) > 1e-6))
@settings(max_examples=40, deadline=None)
def test_the_loss_is_linear_in_the_belief(p: float) -> None:
    """Also across one half, where the chosen response changes."""
    algorithm = objective(DPO, beta=0.3, sft_weight=0.4)
    soft, one, other = (
        slope_by_text(algorithm, each)[0]
        for each in (believed(0, LOSER, p), item(0, LOSER, 0), item(0, LOSER, 1))
    )
    assert soft == pytest.approx(p * one + (1 - p) * other, rel=1e-6)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_hard_belief_is_an_oracles_label(p: float) -> None:
    """It adds no column, so the loss is computed once, and it is the same bit for bit."""
    algorithm = objective(DPO, beta=0.3)
    hard = slope_by_text(algorithm, item(0, WINNER), believed(1, LOSER, p))
    told = slope_by_text(algorithm, item(0, WINNER), item(1, LOSER, int(p < 0.5)))
    assert hard[:2] == told[:2]
    assert "turned_U" not in hard[2].columns
    assert [row.text for row in hard[2].rows] == [row.text for row in told[2].rows]


@pytest.mark.parametrize(("p", "label"), [(0.8, 0), (0.3, 1)])
def test_only_the_ensembles_probability_is_a_soft_label(p: float, label: int) -> None:
    """An oracle's probability has become a label, and its winner counts whole. A belief counts for the
    response that the label names: with labels drawn at random, this may be the less probable one."""
    of_oracle = item(1, LOSER, label)
    of_oracle = replace(of_oracle, answer=replace(of_oracle.answer, values=(p,)))
    batch, _, _ = prepared(objective(DPO), item(0, WINNER), of_oracle)
    assert "turned_U" not in batch.columns
    assert believed_share(of_oracle) == 1.0
    assert believed_share(believed(0, LOSER, p)) == pytest.approx(max(p, 1 - p))
    drawn = replace(believed(0, LOSER, p), label=1 - label)
    assert believed_share(drawn) == pytest.approx(min(p, 1 - p))
    algorithm = objective(DPO, beta=0.3)
    assert slope_by_text(algorithm, drawn)[0] == pytest.approx(
        slope_by_text(algorithm, believed(0, LOSER, p))[0], rel=1e-6
    )


@pytest.mark.parametrize("ties", ["mask", "half"])
def test_a_belief_of_one_half_has_no_winner(ties: str) -> None:
    """It is a tie: left out, or counted one half in each order."""
    pairs = [item(0, WINNER), believed(1, LOSER, 0.5)]
    assert step_metrics(feedback(*pairs))["answers/tied_frac"] == 0.5
    batch, _, _ = prepared(objective(DPO, ties=ties), *pairs)
    assert batch.metrics["rows/trained"] == (2 if ties == "mask" else 4)
    assert batch.metrics["pairs/halved_frac"] == (0.0 if ties == "mask" else 0.5)
    assert ("turned_U" in batch.columns) == (ties == "half")
    if ties == "half":
        assert batch.columns["turned_U"].tolist() == [0.0, 0.5]


def test_soft_labels_stand_beside_ties_and_winners() -> None:
    """Each pair has its own weight, in the order of the pairs that are learned."""
    pairs = [
        item(0, WINNER),
        believed(1, LOSER, 0.3),
        item(2, ("a", "b"), None, "tie"),
        item(3, ("", "a")),
        believed(4, OTHER, 0.75),
    ]
    turned = {
        name: prepared(objective(DPO, **options), *pairs)[0].columns["turned_U"].tolist()
        for name, options in {"plain": {}, "halves": {"ties": "half"}}.items()
    }
    assert turned["plain"] == pytest.approx([0.0, 0.3, 0.25])
    assert turned["halves"] == pytest.approx([0.0, 0.3, 0.5, 0.25])
    kept = pair_batch(feedback(*pairs), forward, keep_ties=True)
    assert kept.columns["mask_U"].tolist() == [1, 1, 0, 0, 1]
    assert kept.columns["turned_U"].tolist() == pytest.approx([0.0, 0.3, 0.0, 0.0, 0.25])


def test_metrics_of_pairs_count_soft_pairs() -> None:
    """The chosen response is the one that the ensemble believes in."""
    algorithm = objective(DPO, beta=0.3)
    pairs: Sequence[Item] = [item(0, WINNER), believed(1, LOSER, 0.3)]
    hard: Sequence[Item] = [item(0, WINNER), item(1, LOSER, 1)]
    found, expected = (
        algorithm.metrics(prepared_outputs, view)
        for _, view, prepared_outputs in (prepared(algorithm, *each) for each in (pairs, hard))
    )
    assert set(found) == set(expected)
    for name, (values, axis) in found.items():
        assert axis == expected[name][1]
        assert values.tolist() == expected[name][0].tolist()


@pytest.mark.parametrize("size", [2, 4, 6])
def test_soft_labels_in_micro_batches(size: int) -> None:
    """The losses of micro-batches, of which some have no soft label, add up to the loss of the step."""
    algorithm = objective(DPO, beta=0.3, sft_weight=0.4)
    batch, _, found = prepared(
        algorithm, item(0, WINNER), believed(1, LOSER, 0.3), believed(2, ("abcdefg", "ab"), 0.9)
    )
    reduction, parts = Reduction(batch), []
    for start in range(0, 6, size):
        rows = np.arange(start, min(start + size, 6))
        part = select_rows(batch, rows)
        for loss in algorithm.losses(outputs(part), view_of(part)).values():
            groups = torch.from_numpy(batch.group_of_N[rows])
            parts.append(loss.coef * reduction(loss, view_of(part), groups, first=start == 0))
    assert torch.stack(parts).sum().item() == pytest.approx(total(algorithm, batch, found).item(), rel=1e-12)
