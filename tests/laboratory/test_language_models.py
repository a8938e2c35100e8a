"""The comparison with language models (benchmarks/explore.py, benchmarks/exploration), without its runs, and
the tables that it writes into docs/exploration.md."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("explore", "provenance", "exploration", "exploration.arms", "exploration.page")
OTHERS = ("exploration.priors", "exploration.records", "exploration.task")


@pytest.fixture
def explore(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("explore")
    for name in (*PARTS, *OTHERS):
        sys.modules.pop(name, None)


@pytest.fixture
def page(explore: Any) -> Any:
    return sys.modules["exploration.page"]


@pytest.fixture
def size(explore: Any) -> Any:
    """Two arms, two rates, two tuning seeds, two seeds, and 100 pairs a run."""
    arms = ("passive", "sea")
    whole = explore.SIZES["stories"]
    return replace(whole, arms=arms, rates=(0.1, 0.2), tuning_seeds=(1, 2), seeds=(8, 9), pairs=100)


def run_of(explore: Any, *rewards: float, every: int = 10) -> list[Any]:
    """Return evaluations after 0, 10, 20, ... pairs."""
    make = sys.modules["exploration.records"].Evaluation
    return [make(number, every * number, reward, 0.5, None) for number, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("rewards", "level", "pairs"),
    [
        ((0.0, 0.0, 1.0, 1.0), 1.0, 25.0),  # the mean of two reaches the level between its two evaluations
        ((0.0, 1.0, 0.0, 0.0), 0.6, float("inf")),  # one evaluation is not enough
        ((0.0, 2.0, 2.0), 1.5, 10.0),  # on a straight line from 1 at 5 pairs to 2 at 15
        ((3.0, 3.0), 1.0, 5.0),
    ],
)
def test_pairs_to_a_level(
    explore: Any, page: Any, rewards: Sequence[float], level: float, pairs: float
) -> None:
    assert page.pairs_to(run_of(explore, *rewards), level) == pairs


def record(explore: Any, file: Path, size: Any, runs: dict[tuple[str, float, str], Sequence[float]]) -> None:
    """Write runs, by arm, rate and purpose: for all seeds of the purpose the same."""
    for (arm, rate, purpose), rewards in runs.items():
        for seed in size.tuning_seeds if purpose == "tuning" else size.seeds:
            job = explore.Job(arm, rate, seed, purpose, "stories")
            explore.append(file, job, run_of(explore, *rewards), "machine", "commit")


TUNED = {
    ("passive", 0.1, "tuning"): (0.0, 1.0, 1.0, 1.0),
    ("passive", 0.2, "tuning"): (0.0, 2.0, 2.0, 2.0),
    ("sea", 0.1, "tuning"): (0.0, 3.0, 3.0, 3.0),
    ("sea", 0.2, "tuning"): (0.0, 2.0, 2.0, 2.0),
}


def test_an_arm_is_tuned_before_its_runs_are_made(explore: Any, size: Any, tmp_path: Path) -> None:
    """First the runs of both rates are missing, then those of the better rate, and at last none."""
    file = tmp_path / "runs.csv"
    searches = explore.jobs_of(size, file)
    assert {job.purpose for job in searches} == {"tuning"}
    assert len(searches) == 2 * 2 * 2
    record(explore, file, size, TUNED)
    finals = explore.jobs_of(size, file)
    assert [(job.arm, job.rate, job.seed, job.purpose) for job in finals] == [
        ("passive", 0.2, 8, "final"),
        ("passive", 0.2, 9, "final"),
        ("sea", 0.1, 8, "final"),
        ("sea", 0.1, 9, "final"),
    ]
    ends = {("passive", 0.2, "final"): (0.0, 1.0), ("sea", 0.1, "final"): (0.0, 1.0)}
    record(explore, file, size, ends)
    assert explore.jobs_of(size, file) == []


def test_the_table_by_hand(explore: Any, page: Any, size: Any, tmp_path: Path) -> None:
    """Passive ends at 1, which it reaches after 15 pairs. SEA never does, and ends after
    30 pairs; it counts with the 100 pairs of the budget."""
    file = tmp_path / "runs.csv"
    ends = {
        ("passive", 0.2, "final"): (0.0, 1.0, 1.0, 1.0),
        ("sea", 0.1, "final"): (0.0, 0.5, 0.5, 0.5),
    }
    record(explore, file, size, {**TUNED, **ends})
    shown = page.table(file, size)
    assert (
        "| passive | nothing: two random samples | 0.2 | 1.00 (1.00 to 1.00) | 0.50 (0.50 to 0.50) | 1.00"
        in shown
    )
    assert "| 0.1 | 0.50 (0.50 to 0.50) | 0.50 (0.50 to 0.50) | 6.67 (6.67 to 6.67), 2 never |" in shown
    assert "| exploration" not in shown
    assert "| arm | 0.1 | 0.2 |" in shown
    assert "| passive | 1.00; 15 | 2.00; 5 |" in shown


def test_a_table_is_put_between_its_marks(explore: Any, tmp_path: Path) -> None:
    text = "before\n<!-- one -->\nold\n<!-- end of one -->\nafter\n"
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    for _ in range(2):
        explore.write_page(tmp_path / "page.md", "one", "new\n")
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == text.replace("old", "new")


def test_the_page_has_the_tables_of_the_records(explore: Any, page: Any) -> None:
    """docs/exploration.md is what `--tables` would write, and no run is missing."""
    text = (ROOT / "docs" / "exploration.md").read_text(encoding="utf-8")
    priors = explore.priors
    for folder in explore.LABORATORIES:
        assert explore.laboratory_table(folder) in text
    assert priors.summary(priors.read(explore.CSVS / "priors" / "trials.csv")) in text
    for name, task in (("stories260k", "stories"), ("sums", "sums")):
        file = explore.CSVS / f"{name}.csv"
        assert explore.jobs_of(explore.SIZES[task], file) == []
        assert page.table(file, explore.SIZES[task]) in text
