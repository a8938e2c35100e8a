"""The coefficient of the ensemble's prior is a metric, so that a run shows how the prior fades."""

import json
from pathlib import Path

import pytest
from exploring import EXPLORING
from fixtures import Finished

from oat.explore.settings import EnsembleConfig
from oat.metrics import NAMES
from oat.metrics.counterparts import PREDECESSOR, ours


@pytest.mark.inventory(58)
def test_a_run_reports_how_its_prior_fades(finished: Finished) -> None:
    """The sources report `train/rm/lambda`: the strength times the size of a batch, divided by the number of
    queries, here of labelled pairs."""
    algorithm, changes = EXPLORING["reference"]
    rows = rows_of(finished.only_read(algorithm, changes))
    learned = [row for row in rows if "loss/ensemble" in row]
    config = EnsembleConfig()
    assert len(learned) == 4
    for row in learned:
        assert row["ensemble/prior_coef"] == pytest.approx(
            config.prior * config.batch / row["ensemble/pairs"]
        )
        total = row["loss/ensemble"] + row["ensemble/prior_coef"] * row["loss/prior"]
        assert row["loss/ensemble_total"] == pytest.approx(total, rel=1e-4)
    coefficients = [row["ensemble/prior_coef"] for row in learned]
    assert coefficients == sorted(coefficients, reverse=True)
    assert coefficients[0] > coefficients[-1]
    assert "ensemble/prior_coef" not in rows[0], "row 0 learns nothing"


def test_the_predecessors_names_of_the_prior_lead_to_it() -> None:
    assert ours("train/rm/lambda") == "ensemble/prior_coef"
    assert ours("actor/same_response_ratio") == "answers/tied_frac"
    assert "before its coefficient" in PREDECESSOR["train/rm/loss_reg"].note
    assert "time/explore_s" in NAMES["time/sample_s"]


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
