"""Offline DPO from recorded pairs: the same loop with the recorded actor and the recorded oracle. No response
is sampled and no external oracle is asked."""

import json
from pathlib import Path

import pytest
import straight
from bench import Bench, assert_a_kill_changes_nothing
from fixtures import kill_at, named, oat, write_jsonl

BETA, STEPS = 0.3, 5


@pytest.fixture(scope="module")
def config(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline")
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "ab"[: 1 + a % 2] + str(b)}
        for a in range(1, 6)
        for b in range(4)
    ]
    pairs += [{"prompt": "7+7=", "chosen": "a", "rejected": "a"}]
    write_jsonl(folder / "pairs.jsonl", pairs)
    return bench.config(
        folder / "offline.yaml",
        prompts={"path": str(folder / "pairs.jsonl"), "responses": ["chosen", "rejected"]},
        algorithm={"name": "dpo", "prompts": 7, "beta": BETA},
        oracle={"name": "recorded"},
        learner={"learning_rate": 3e-3, "micro_batch_size": 6},
        checkpoint={"every": 2},
        stop={"max_steps": STEPS},
    )


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    from oat.engines.torch import TorchEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchEngine, "generate", lambda *_: pytest.fail("an offline run samples nothing"))
        assert oat("train", config) == 0
    return config.with_suffix("")


def test_every_step_is_the_straight_line_version(bench: Bench, run: Path) -> None:
    policy, reference, start = (
        straight.load(bench.folder / name) for name in ("model", "reference", "model")
    )
    optimiser = straight.Optimiser(list(policy.parameters()), rate=3e-3, decay=0.0, max_norm=1.0)
    steps = straight.recorded_steps(run)
    straight.assert_same_curve(run, straight.dpo_curve(steps, policy, reference, optimiser, BETA))
    straight.assert_same_weights(run, policy, start)
    for item in (item for items in steps for item in items):
        assert [item.group.trajectories[pick].text for pick in item.question.picks] == [
            item.question.columns[c] for c in ("chosen", "rejected")
        ]
        assert item.label == (None if item.question.columns["chosen"] == "a" else 0)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["oracle/queries"] for row in rows[1:]] == [0] * STEPS


def test_an_epoch_ends_the_run(config: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    assert oat("train", config, "--run_dir", other, "--prompts.epochs", "1", "--stop.max_steps", "50") == 0
    assert sum(map(len, straight.recorded_steps(other))) == 21
    assert len(straight.recorded_steps(other)) == 3


def test_a_missing_column_is_named(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        oat("train", config, "--run_dir", tmp_path / "run", "--prompts.responses", "[chosen, refused]") == 2
    )
    assert "'refused'" in capsys.readouterr().err


@pytest.mark.slow(
    instead="tests/golden and tests/faults/test_state.py, over the wire; tests/faults/test_kill.py",
    seconds=1.1,
)
def test_killed_and_over_the_wire(config: Path, run: Path, tmp_path: Path) -> None:
    def die() -> None:

        kill_at(*named("an optimiser step"), 4)

    assert_a_kill_changes_nothing(config, run, tmp_path, die, "--compute.serialise", "true")
