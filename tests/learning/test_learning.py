"""Each algorithm learns: a run from YAML, online and offline, raises a held-out sampled score by a stated
amount. With the sign of its loss flipped, the same run ends below its start.

`make test` has six of these runs. test_signs.py tests the sign of every loss without a run.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import CASES, OFFLINE, Case
from learning_runs import HERE, run

RISE = 0.3


@pytest.mark.fault("R22")
@pytest.mark.slow(
    instead="test_reaches.py::test_reaches_nine_tenths; test_signs.py tests the sign of every loss",
    seconds=28.0,
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_learns(root: Path, tmp_path: Path, case: Case) -> None:
    start, end = run(root, tmp_path, case, case.name)
    assert end >= start + RISE


@pytest.mark.fault("R22")
@pytest.mark.sample("dpo", instead="test_signs.py flips the sign of every loss", seconds=27.5)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_flipped_sign_is_noticed(
    root: Path, tmp_path: Path, case: Case, figure: Callable[[str], None]
) -> None:
    start, end = run(root, tmp_path, case, f'"{HERE}/flipped.py:{case.flipped}"')
    figure(f"{int(end < start)} of 1 flipped losses noticed")
    assert end < start + RISE
    assert end < start


@pytest.mark.fault("R22")
@pytest.mark.sample("simpo", instead="test_signs.py tests the sign of every loss", seconds=16.5)
@pytest.mark.parametrize("case", OFFLINE.values(), ids=OFFLINE)
def test_learns_from_what_is_recorded(root: Path, tmp_path: Path, case: Case) -> None:
    start, end = run(root, tmp_path, case, case.name, is_offline=True)
    assert end >= start + RISE


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("case", OFFLINE.values(), ids=OFFLINE)
def test_learns_from_what_is_recorded_with_other_seeds(
    root: Path, tmp_path: Path, case: Case, seed: int
) -> None:
    start, end = run(root, tmp_path, case, case.name, "--seed", str(seed), is_offline=True)
    assert end >= start + RISE


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_learns_with_other_seeds(root: Path, tmp_path: Path, case: Case, seed: int) -> None:
    start, end = run(root, tmp_path, case, case.name, "--seed", str(seed))
    assert end >= start + RISE


FEW = ("--stop.max_steps", "6", "--learner.learning_rate", "2e-3")
AGAIN = (*FEW, "--learner.buffer.questions", "96", "--algorithm.epochs", "2")


def gains(root: Path, tmp_path: Path, *flags: str) -> tuple[float, float]:
    """Return the gains of two runs of six steps with a third of the queries. One learns from each answer
    once. The other makes two passes over the newest three takes."""
    scores = []
    for name, more in {"once": FEW, "again": AGAIN}.items():
        (tmp_path / name).mkdir()
        start, end = run(root, tmp_path / name, CASES["dpo"], "dpo", *more, *flags)
        scores.append(end - start)
    once, again = scores
    rows = [
        [json.loads(line) for line in (tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines()]
        for name in ("once", "again")
    ]
    assert max(of[-1]["oracle/queries"] for of in rows) <= 6 * 64
    return once, again


@pytest.mark.slow(
    instead="tests/learner/test_buffer.py tests what a buffer holds and learns from", seconds=1.9
)
def test_learning_again_gains_at_equal_queries(root: Path, tmp_path: Path) -> None:
    once, again = gains(root, tmp_path)
    assert again > once + 0.05


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learning_again_gains_with_other_seeds(root: Path, tmp_path: Path, seed: int) -> None:
    once, again = gains(root, tmp_path, "--seed", str(seed))
    assert again > once + 0.05
