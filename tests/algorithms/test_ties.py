"""Pairs without a winner are left out, or count one half in each order, according to a setting. Their number
is reported."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import World, oat
from pairs import LOSER, SLOW, WINNER, feedback, forward, item, objective, outputs, prepared, total

from oat.algorithms.base import step_metrics
from oat.algorithms.direct import DPO, Direct
from oat.learner.batching import select_rows, view_of
from oat.learner.reduction import Reduction
from oat.types import Item, Mark

HALF = {"ties": "half", "abstentions": "half"}


def halving(name: str, **changes: Any) -> Any:
    """Return the algorithm of `SLOW` that counts ties and abstentions one half in each order."""
    algorithm, _ = SLOW[name]
    return type(algorithm)(algorithm.Config(**{**vars(algorithm.config), **HALF, **changes}))


def loss_of(algorithm: Direct, *items: Item) -> float:
    batch, _, found = prepared(algorithm, *items)
    return total(algorithm, batch, found).item()


def test_a_tie_by_hand() -> None:
    """DPO has beta 1 and h = log 3. The loss of a tie is (-log(3/4) - log(1/4)) / 2, and the loss of a won
    pair is -log(3/4). The total is their mean."""
    algorithm = objective(DPO, beta=1.0, ties="half")
    batch, _, _ = prepared(algorithm, item(0, ("a", "b")), item(1, ("a", "b"), None, "tie"))
    raw = batch.columns["reference_logps_K"] + torch.tensor([np.log(3), 0.0, 0.0, -np.log(3)])
    won, tied = -np.log(3 / 4), -(np.log(3 / 4) + np.log(1 / 4)) / 2
    assert batch.columns["turned_U"].tolist() == [0, 0.5]
    assert total(algorithm, batch, {"policy": {"raw": raw}}).item() == pytest.approx((won + tied) / 2)


@pytest.mark.parametrize("name", SLOW)
def test_a_tie_is_the_mean_of_both_winners(name: str) -> None:
    """The loss and gradient of a tie beside a won pair are the means of those with either response as
    winner."""
    results = []
    for label, mark in ((None, "tie"), (0, "ok"), (1, "ok")):
        algorithm = halving(name)
        batch, _, found = prepared(algorithm, item(0, WINNER), item(1, LOSER, label, mark))  # type: ignore[arg-type]
        loss = total(algorithm, batch, found)
        (gradient,) = torch.autograd.grad(loss, found["policy"]["raw"])
        results.append(
            (
                loss.item(),
                gradient if label != 1 else torch.cat([gradient[:6], gradient[11:], gradient[6:11]]),
            )
        )
    (tied, slope), (first, of_first), (second, of_second) = results
    assert tied == pytest.approx((first + second) / 2)
    torch.testing.assert_close(slope, (of_first + of_second) / 2)


@pytest.mark.parametrize(
    ("mark", "probability", "counted_by"),
    [
        ("tie", 0.5, "ties"),
        ("ok", 0.5, "ties"),
        ("abstain", 0.5, "abstentions"),
        ("failed", 0.5, None),
        ("unpaid", 0.5, None),
    ],
)
def test_which_pairs_count_one_half(mark: Mark, probability: float, counted_by: str | None) -> None:
    """A tie, by its mark or its probability, and an abstention count by their own settings. A failed or
    unpaid pair never counts."""
    pairs = [item(0, WINNER), item(1, LOSER, None, mark)]
    answers = step_metrics(feedback(*pairs))
    assert answers["answers/tied_frac"] == (0.5 if counted_by == "ties" else 0.0)
    assert answers["answers/abstained_frac"] == (0.5 if mark == "abstain" else 0.0)
    for setting in ("ties", "abstentions"):
        batch, _, _ = prepared(objective(DPO, **{setting: "half"}), *pairs)
        is_counted = setting == counted_by
        assert batch.metrics["rows/trained"] == (4 if is_counted else 2)
        assert batch.metrics["pairs/halved_frac"] == (0.5 if is_counted else 0.0)
    batch, _, _ = prepared(objective(DPO), *pairs)
    assert (batch.metrics["rows/trained"], batch.metrics["pairs/halved_frac"]) == (2, 0.0)
    assert "turned_U" not in batch.columns


def test_equal_texts_and_empty_responses_are_always_left_out() -> None:
    pairs = [
        item(0, WINNER),
        item(1, ("abc", "abc"), None, "tie"),
        item(2, ("", "a"), None, "tie"),
        item(3, ("a", ""), None, "abstain"),
    ]
    batch = objective(DPO, **HALF).prepare(feedback(*pairs), forward, np.random.default_rng(0))
    assert [row.text for row in batch.rows] == list(WINNER)
    assert (batch.metrics["pairs/halved_frac"], batch.metrics["pairs/empty_frac"]) == (0.0, 0.5)


@pytest.mark.parametrize("name", SLOW)
def test_pairs_with_a_winner_are_learned_as_before(name: str) -> None:
    pairs = item(0, WINNER), item(1, LOSER[::-1], 1)
    assert loss_of(halving(name), *pairs) == loss_of(SLOW[name][0], *pairs)


def test_metrics_of_pairs_are_of_those_with_a_winner() -> None:
    algorithm = objective(DPO, ties="half")
    alone, among = (
        prepared(algorithm, item(0, WINNER), *rest) for rest in ([], [item(1, LOSER, None, "tie")])
    )
    found = algorithm.metrics(among[2], among[1])
    del found["logps/reference_gap"]  # of all tokens that are learned from, those of ties too
    for name, (values, _) in found.items():
        assert values.tolist() == algorithm.metrics(alone[2], alone[1])[name][0].tolist()


@pytest.mark.parametrize("size", [2, 4, 6])
def test_ties_in_micro_batches(size: int) -> None:
    """The losses of micro-batches, each with the halved pairs in it, add up to the loss of the step."""
    algorithm = objective(DPO, beta=0.3, sft_weight=0.4, **HALF)
    batch, _, found = prepared(
        algorithm, item(0, WINNER), item(1, LOSER, None, "tie"), item(2, ("abcdefg", "ab"), None, "abstain")
    )
    reduction, parts = Reduction(batch), []
    for start in range(0, 6, size):
        rows = np.arange(start, min(start + size, 6))
        part = select_rows(batch, rows)
        losses = algorithm.losses(outputs(part), view_of(part)).values()
        parts += [
            loss.coef
            * reduction(loss, view_of(part), torch.from_numpy(batch.group_of_N[rows]), first=start == 0)
            for loss in losses
        ]
    assert torch.stack(parts).sum().item() == pytest.approx(total(algorithm, batch, found).item(), rel=1e-12)


@pytest.mark.parametrize("labels", ["threshold", "bernoulli"])
def test_one_half_is_a_tie_however_labels_are_made(world: World, tmp_path: Path, labels: str) -> None:
    """A comparing function returns 0.5, its only way to report a tie. The answer counts as a tie for every
    setting of `oracle.labels`."""
    (tmp_path / "even.py").write_text(
        "def even(prompts, first, second, **columns):\n    return [0.5 for _ in prompts]\n", encoding="utf-8"
    )
    changes = {
        "oracle": {"name": f"{tmp_path / 'even.py'}:even", "labels": labels},
        "evaluation": None,
        "stop.max_steps": 1,
    }
    assert oat("train", world.config("dpo", tmp_path, changes)) == 0
    row = json.loads((tmp_path / "dpo" / "metrics.jsonl").read_text().splitlines()[1])
    assert (row["answers/tied_frac"], row["rows/trained"]) == (1.0, 0.0)
