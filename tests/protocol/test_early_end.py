"""An objective ends its passes early (`target_kl`): the schedule skips what is left out, a kill changes
nothing, and the micro-batches do not decide."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench import HERE, Bench, assert_a_kill_changes_nothing
from fixtures import checked, kill_at, named, oat

from oat.commands.digest import digest_run
from oat.config.load import load_config

STEPS, EPOCHS, MINIBATCHES, RATE = 5, 3, 2, 0.03
PLANNED = EPOCHS * MINIBATCHES


def config_of(bench: Bench, file: Path, micro_batch_size: int = 5, **algorithm: object) -> Path:
    return write(bench, file, {"algorithm": algorithm, "learner": {"micro_batch_size": micro_batch_size}})


def write(bench: Bench, file: Path, changes: Mapping[str, Mapping[str, object]]) -> Path:
    """Write the configuration of a run of grpo, with these changes."""
    sections: dict[str, dict[str, object]] = {
        "model": {"path": str(bench.folder / "model")},
        "algorithm": {
            "name": "grpo",
            "prompts": 4,
            "samples": 4,
            "epochs": EPOCHS,
            "minibatches": MINIBATCHES,
            "target_kl": 0.02,
        },
        "oracle": {"name": f"{HERE}/rewards.py:graded"},
        "learner": {"learning_rate": RATE, "schedule": "linear", "micro_batch_size": 5},
        "sampling": {"max_new_tokens": 5},
        "checkpoint": {"every": 2},
        "stop": {"max_steps": STEPS},
    }
    for name, section in changes.items():
        sections[name] = {**sections[name], **section}
    own = sections["algorithm"]
    sections["algorithm"] = {field: value for field, value in own.items() if value != "absent"}
    return bench.config(file, **sections)


def rows_of(config: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (config.with_suffix("") / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def config(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = config_of(bench, tmp_path_factory.mktemp("early") / "early.yaml")
    assert oat("train", path) == 0
    return path


@pytest.mark.inventory(109)
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


def test_check_says_that_steps_may_be_left_out(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, _ = checked(capsys, config_of(bench, tmp_path / "new.yaml"))
    assert (said["epochs a step"], said["mini-batches an epoch"]) == (EPOCHS, MINIBATCHES)
    assert said["optimiser steps a step, most"] == PLANNED
    assert said["optimiser steps left, most"] == PLANNED * STEPS


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


@pytest.mark.slow(instead="tests/faults/test_inner_kills.py::test_killed_inside_an_update", seconds=3.4)
@pytest.mark.parametrize("call", [3, 6, 8])
def test_a_kill_inside_an_update_changes_nothing(config: Path, tmp_path: Path, call: int) -> None:
    assert_a_kill_changes_nothing(
        config, config.with_suffix(""), tmp_path, lambda: kill_at(*named("an optimiser step"), call)
    )


@pytest.mark.slow(instead="test_a_kill_inside_an_update_changes_nothing", seconds=1.3)
def test_a_fork_that_changes_nothing_is_the_run(config: Path, tmp_path: Path) -> None:
    run, fork = config.with_suffix(""), tmp_path / "fork"
    assert oat("train", config, "--run_dir", fork, "--from", f"{run}@4") == 0
    assert digest_run(fork)["weights"] == digest_run(run)["weights"]
    rows = [json.loads(line) for line in (fork / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["optim/left_out"] == rows_of(config)[-1]["optim/left_out"]


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


@dataclass(frozen=True)
class Case:
    """A run whose updates may end early, beside another feature.

    Attributes:
        changes: the settings of the feature.
        planned: number of optimiser steps planned for each step of the run.
    """

    changes: Mapping[str, Mapping[str, object]]
    planned: Sequence[int] = (PLANNED,) * STEPS


CASES = {
    "a limit on the optimiser steps": Case({"learner": {"max_updates": 4}}, (4,) * STEPS),
    "steps that are not finite": Case(
        {
            "algorithm": {"advantage": "none", "minibatches": 4},
            "oracle": {"name": f"{HERE}/rewards.py:rarely_endless"},
            "learner": {"on_nonfinite": "skip", "max_skips": 50},
        },
        (4 * EPOCHS,) * STEPS,
    ),
    "a replay buffer": Case(
        {
            "algorithm": {"name": f"{HERE}/early.py:Enough", "samples": 2, "target_kl": "absent"},
            "learner": {"buffer": {"questions": 10}, "max_updates": 13},
        },
        (6, 12, 13, 13, 13),
    ),
    "further rounds": Case(
        {"sampling": {"refill_rounds": 8}, "oracle": {"name": f"{HERE}/rewards.py:coarse"}}
    ),
    "a critic that learns first": Case(
        {"algorithm": {"name": "ppo", "target_kl": 0.1}, "learner": {"critic_only_steps": 1}},
        (0, *(PLANNED,) * (STEPS - 1)),
    ),
    "gradient checkpointing": Case({"learner": {"gradient_checkpointing": True}}),
    "an adapter": Case({"model": {"lora": {"rank": 2, "targets": ["q_proj", "lm_head"]}}}),
    "a reference that follows": Case(
        {"model": {"reference_update": {"every": 2, "mix": 0.5}}, "algorithm": {"kl_coef": 0.1}}
    ),
}


@pytest.mark.filterwarnings("ignore::oat.errors.OatWarning")
@pytest.mark.slow(instead="the other tests of the file, each feature alone", seconds=14.0)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_beside_other_features(bench: Bench, tmp_path: Path, case: Case) -> None:
    """The schedule counts what was planned. Neither the wire nor a kill inside an update changes anything."""
    config = write(bench, tmp_path / "early.yaml", case.changes)
    run = config.with_suffix("")
    assert oat("train", config) == 0
    assert load_config(run / "config.yaml")[0].learner.schedule_steps == sum(case.planned)
    before: Mapping[str, float] = {}
    for number, row in enumerate(rows_of(config)[1:]):
        counts = [row.get(f"optim/{name}", 0) for name in ("steps", "left_out", "skipped")]
        assert sum(counts) == sum(case.planned[: number + 1])
        made = counts[0] - before.get("optim/steps", 0)
        if made and counts[2] == before.get("optim/skipped", 0):
            last = before.get("optim/steps", 0) + before.get("optim/left_out", 0) + made - 1
            share = 1 - last / sum(case.planned)
            assert row["optim/learning_rate"] == pytest.approx(RATE * (0.1 + 0.9 * share))
        before = row
    assert 0 < before["optim/left_out"] < sum(case.planned) - STEPS
    assert (before["optim/skipped"] > 0) == ("on_nonfinite" in case.changes.get("learner", {}))
    assert before.get("reference/updates") == (2 if "kl_coef" in case.changes.get("algorithm", {}) else None)
    wire = ("--run_dir", tmp_path / "wire", "--compute.serialise", "true")
    assert oat("train", config, *wire) == 0
    assert digest_run(tmp_path / "wire") == digest_run(run)
    assert_a_kill_changes_nothing(
        config, run, tmp_path, lambda: kill_at(*named("an optimiser step"), 9, after=True)
    )


ONCE = """
from oat.algorithms.group import GRPO


class Once(GRPO):
    def ends_passes(self, values):
        return True
"""


def test_a_run_whose_updates_all_end_before_they_begin_says_so(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "once.py").write_text(ONCE, encoding="utf-8")
    config = config_of(bench, tmp_path / "run.yaml", name=f"{tmp_path / 'once.py'}:Once", target_kl=None)
    assert oat("train", config) == 0
    said = capsys.readouterr().out
    assert "learned nothing: every update ended before its first optimiser step (ends_passes of " in said
    assert rows_of(config)[-1]["optim/left_out"] == PLANNED * STEPS
