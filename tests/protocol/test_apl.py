"""APL: an explorer that reads log-probabilities of two slots, samples more than it asks about, and does not
change the loss."""

from pathlib import Path

import pytest
import straight
import torch
from bench import HERE, Bench, assert_a_kill_changes_nothing
from fixtures import kill_at, named, oat

from oat.ledger.store import Store

BETA = 0.4
PROMPTS = 4
OVERSAMPLE = 3
SAMPLES = 3
STEPS = 4


@pytest.fixture(scope="module")
def config(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench.config(
        tmp_path_factory.mktemp("apl") / "apl.yaml",
        algorithm={"name": "dpo", "prompts": PROMPTS, "beta": BETA},
        sampling={"max_new_tokens": 5, "temperature": 0.8, "top_k": 9},
        explorer={"name": "apl", "oversample": OVERSAMPLE, "samples": SAMPLES},
        oracle={"name": f"{HERE / 'rewards.py'}:graded"},
        learner={"learning_rate": 3e-3},
        checkpoint={"every": 2},
        stop={"max_steps": STEPS},
    )


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    assert oat("train", config) == 0
    return config.with_suffix("")


def test_it_asks_what_the_straight_line_version_asks(bench: Bench, run: Path) -> None:
    """The explorer asks the same questions as the reference implementation, which computes the
    log-probabilities again from the models."""
    policy, reference = (straight.load(bench.folder / name) for name in ("model", "reference"))
    optimiser = straight.Optimiser(list(policy.parameters()), rate=3e-3, decay=0.0, max_norm=1.0)
    store = Store(run / "ledger.sqlite")
    for step, items in enumerate(straight.recorded_steps(run)):
        groups = store.groups("train", step, 0)
        assert len(groups) == PROMPTS * OVERSAMPLE
        expected = []
        for group in groups:
            batch = straight.pad(group.trajectories)
            with torch.no_grad():
                policy_G, reference_G = (
                    straight.sequence_logps(policy, batch),
                    straight.sequence_logps(reference, batch),
                )
            rewards = (policy_G - reference_G).tolist()
            pairs = [
                (abs(rewards[i] - rewards[j]), -i, -j)
                for i in range(SAMPLES)
                for j in range(SAMPLES)
                if i != j
            ]
            _, first, second = max(pairs)
            expected.append((-policy_G.mean().item(), group.prompt.occurrence, {-first, -second}))
        kept = sorted(sorted(expected, reverse=True)[:PROMPTS], key=lambda entry: entry[1])
        assert [(item.question.key.occurrence, set(item.question.picks)) for item in items] == [
            (place, pair) for _, place, pair in kept
        ]
        straight.dpo_curve([items], policy, reference, optimiser, BETA)
    store.close()


def test_every_step_is_the_straight_line_version(bench: Bench, run: Path) -> None:
    policy, reference, start = (
        straight.load(bench.folder / name) for name in ("model", "reference", "model")
    )
    optimiser = straight.Optimiser(list(policy.parameters()), rate=3e-3, decay=0.0, max_norm=1.0)
    straight.assert_same_curve(
        run, straight.dpo_curve(straight.recorded_steps(run), policy, reference, optimiser, BETA)
    )
    straight.assert_same_weights(run, policy, start)


@pytest.mark.slow(instead="tests/faults/test_exploration_killed.py::test_killed_once", seconds=1.0)
def test_killed_and_over_the_wire(config: Path, run: Path, tmp_path: Path) -> None:
    def die() -> None:

        kill_at(*named("an optimiser step"), 4)

    assert_a_kill_changes_nothing(config, run, tmp_path, die, "--compute.serialise", "true")
