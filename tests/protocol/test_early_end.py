"""An objective ends its passes early (`target_kl`): the schedule skips what is left out, a kill changes
nothing, and the micro-batches do not decide."""

import json
from pathlib import Path

import pytest
from bench import HERE, Bench, assert_a_kill_changes_nothing
from fixtures import kill_at, oat

STEPS, EPOCHS, MINIBATCHES, RATE = 5, 3, 2, 0.03
PLANNED = EPOCHS * MINIBATCHES


def config_of(bench: Bench, file: Path, micro_batch_size: int = 5, **algorithm: object) -> Path:
    return bench.config(
        file,
        model={"path": str(bench.folder / "model")},
        algorithm={
            "name": "grpo",
            "prompts": 4,
            "samples": 4,
            "epochs": EPOCHS,
            "minibatches": MINIBATCHES,
            "target_kl": 0.02,
            **algorithm,
        },
        oracle={"name": f"{HERE}/rewards.py:graded"},
        learner={"learning_rate": RATE, "schedule": "linear", "micro_batch_size": micro_batch_size},
        checkpoint={"every": 2},
        stop={"max_steps": STEPS},
    )


def rows_of(config: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (config.with_suffix("") / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def config(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = config_of(bench, tmp_path_factory.mktemp("early") / "early.yaml")
    assert oat("train", path) == 0
    return path


def test_the_schedule_goes_by_planned_steps(config: Path) -> None:
    """The last optimiser step that an update makes has the learning rate of its place in the plan."""
    made = 0.0
    for step, row in enumerate(rows_of(config)[1:]):
        of_update = row["optim/steps"] - made
        made = row["optim/steps"]
        assert 1 <= of_update <= PLANNED
        assert made + row.get("optim/left_out", 0) == PLANNED * (step + 1)
        last = PLANNED * step + of_update - 1
        assert row["optim/learning_rate"] == pytest.approx(
            RATE * (0.1 + 0.9 * (1 - last / (PLANNED * STEPS)))
        )
        assert row["kl/old"] > 0
    assert 0 < row["optim/left_out"] < PLANNED * STEPS - STEPS


def test_micro_batches_do_not_decide(bench: Bench, config: Path, tmp_path: Path) -> None:
    other = config_of(bench, tmp_path / "other.yaml", micro_batch_size=2)
    assert oat("train", other) == 0
    for mine, theirs in zip(rows_of(config)[1:], rows_of(other)[1:], strict=True):
        assert mine["optim/steps"] == theirs["optim/steps"]
        assert mine["kl/old"] == pytest.approx(theirs["kl/old"], rel=1e-3, abs=1e-6)


def test_without_a_target_every_step_is_made(bench: Bench, tmp_path: Path) -> None:
    path = config_of(bench, tmp_path / "all.yaml", target_kl=None)
    assert oat("train", path) == 0
    rows = rows_of(path)
    assert rows[-1]["optim/steps"] == PLANNED * STEPS
    assert not {"optim/left_out", "kl/old"} & {name for row in rows for name in row}


@pytest.mark.parametrize("call", [3, 6, 8])
def test_a_kill_inside_an_update_changes_nothing(config: Path, tmp_path: Path, call: int) -> None:
    from oat.learner.learner import Learner

    assert_a_kill_changes_nothing(
        config, config.with_suffix(""), tmp_path, lambda: kill_at(Learner, "_step", call)
    )


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [({"epochs": 1, "minibatches": 1}, "an update is one optimiser step"), ({"target_kl": 0}, "positive")],
)
def test_a_target_that_can_end_nothing_is_refused(
    bench: Bench,
    tmp_path: Path,
    algorithm: dict[str, object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert oat("check", config_of(bench, tmp_path / "mistake.yaml", **algorithm)) == 2
    said = capsys.readouterr().err
    assert "algorithm.target_kl" in said
    assert message in said
