"""The comparison of priors (benchmarks/exploration/priors.py)."""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from oat.explore.find_rule import find_rule
from oat.laboratory.trial import Curve, learn_rewards

FOLDER = Path(__file__).parents[2] / "benchmarks" / "exploration"


@pytest.fixture
def priors(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    import priors

    yield priors
    sys.modules.pop("priors")


def test_without_a_prior_it_is_the_laboratorys_trial(
    priors: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a prior the members agree more than without one."""
    monkeypatch.setattr(priors, "ROUNDS", 4)
    none, strong = (priors.Trial("independent", "bai_ts", name, 3).run() for name in (priors.NONE, "map 1"))
    assert none.curve == learn_rewards("independent", "ensemble", find_rule("bai_ts", {}), 3, 4)
    assert 0 < strong.variance < none.variance
    assert 0 < strong.margin < none.margin


def test_trials_are_kept_and_half_a_line_is_not(priors: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "trials.csv"
    trials = [priors.Trial("mlp", "eets", "none", seed) for seed in (1, 2)]
    kept = {trial: priors.Result(Curve([16, 32], [0.5, 0.25], 0.125), 2.0, 4.0) for trial in trials}
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows([priors._FIELDS, *(priors._row(*each) for each in kept.items())])
        stream.write("mlp,eets,none,3,2.")
    assert priors.run_trials(trials, file, 1) == kept


def test_a_prior_is_compared_with_none_of_the_same_rule(priors: ModuleType) -> None:
    """Without a prior the threshold is reached after 32 queries, with `mean 5000` never, and with the others
    after 16."""
    slow = Curve([16, 32, 48, 64], [0.9, 0.1, 0.1, 0.1], 0.0)
    fast = Curve([16, 32, 48, 64], [0.15, 0.15, 0.15, 0.15], 0.0)
    never = Curve([16, 32, 48, 64], [0.9] * 4, 0.0)
    found = {
        priors.Trial(world, rule, prior, seed): priors.Result(curve, 1.0, 4.0)
        for world in priors.WORLDS
        for rule in priors.RULES
        for prior in priors.PRIORS
        for seed, curve in enumerate([{priors.NONE: slow, "mean 5000": never}.get(prior, fast)] * 3)
    }
    shown = priors.summary(found)
    assert "| `mlp` | `eets` | 1.00 (1.00-1.00); 0.300 | 0.50 (0.50-0.50); 0.150 |" in shown
    assert "2.00 (2.00-2.00, 3 never); 0.900 |" in shown
    cells = "16 | 0.50 (0.50-0.50) | 0.150 | -0.150 (-0.150 to -0.150) | 1.00 | 0.250 |"
    assert f"| `mlp` | `eets` | map 1 | {cells}" in priors.table(found)
