"""Adaptive KL in whole runs: the divergence reaches its target, and a killed run adapts like the unbroken
run."""

import json
import signal
from pathlib import Path

import pytest
from fixtures import World, forked, kill_at, oat

from oat.commands.digest import digest_run
from oat.learner.learner import Learner

ADAPTS = {
    "algorithm.kl_coef": 0.2,
    "algorithm.kl_horizon": 12,
    "learner.learning_rate": 0.02,
    "evaluation": None,
    "checkpoint.every": 1,
}


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow(instead="tests/faults/test_state.py walks over a run with such a coefficient", seconds=2.1)
def test_a_killed_run_has_the_coefficient_of_the_unbroken_one(world: World, tmp_path: Path) -> None:
    config = world.config("grpo", tmp_path, {**ADAPTS, "algorithm.kl_target": 1e-3})

    def run(name: str, kill: int | None = None) -> int:
        def action() -> int:
            if kill:
                kill_at(Learner, "update", kill)
            return oat("train", config, "--run_dir", tmp_path / name)

        return forked(action, tmp_path / "log")

    assert run("unbroken") == 0, (tmp_path / "log").read_text()
    assert [run("killed", kill=2), run("killed", kill=2), run("killed")] == [
        -signal.SIGKILL,
        -signal.SIGKILL,
        0,
    ]
    assert digest_run(tmp_path / "killed") == digest_run(tmp_path / "unbroken")
    coefs = [row["kl/coef"] for row in rows_of(tmp_path / "killed")[1:]]
    assert coefs[0] == 0.2 * 0.8, "before the first step there is no divergence"
    assert len(set(coefs)) == len(coefs)


def test_over_the_wire_the_learner_gets_the_coefficient_with_the_batch(world: World, tmp_path: Path) -> None:
    """Over the wire, the learner's objective is a copy, and the original adapts the KL coefficient. The run
    must equal the run without the wire."""
    config = world.config("grpo", tmp_path, {**ADAPTS, "algorithm.kl_target": 1e-3})
    for name, flags in (("plain", ()), ("wire", ("--compute.serialise", "true"))):
        assert oat("train", config, "--run_dir", tmp_path / name, *flags) == 0
    assert rows_of(tmp_path / "plain")[-1]["kl/coef"] != ADAPTS["algorithm.kl_coef"]
    assert digest_run(tmp_path / "wire") == digest_run(tmp_path / "plain")


@pytest.mark.slow(
    instead="tests/algorithms/test_group.py compares the coefficient of each step with one computed by hand",
    seconds=5.9,
)
def test_it_comes_to_its_target(world: World, tmp_path: Path) -> None:
    """With a fixed coefficient the divergence goes far above the target. With an adapted coefficient of the
    same initial value it stays near the target."""

    def last(name: str, *flags: str) -> tuple[float, float]:
        flags = ("--run_dir", str(tmp_path / name), "--stop.max_steps", "40", *flags)
        assert (
            oat("train", world.config("grpo", tmp_path, {**ADAPTS, "algorithm.kl_horizon": 10_000}), *flags)
            == 0
        )
        rows = rows_of(tmp_path / name)
        return sum(row["kl/reference"] for row in rows[-8:]) / 8, rows[-1].get("kl/coef", 0.2)

    fixed, _ = last("fixed")
    held, coef = last("held", "--algorithm.kl_target", "0.02", "--algorithm.kl_horizon", "12")
    assert fixed > 0.06
    assert held < 0.6 * fixed
    assert coef > 0.4
