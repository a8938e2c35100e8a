"""XPO: two slots in one group, a loss with one term that needs the winner and one that
does not, a sampler that lags behind."""

from collections.abc import Callable
from pathlib import Path

import pytest
import straight
import torch
from bench import HERE, Bench, assert_a_kill_changes_nothing
from fixtures import kill_at, named, oat

from oat.commands.digest import digest_run
from oat.types import Item

BETA = 0.5
SMOOTHING = 0.1
ALPHA = 0.05
EPOCHS = 2
MAX_NORM = 1.4


@pytest.fixture(scope="module")
def config(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench.config(
        tmp_path_factory.mktemp("xpo") / "xpo.yaml",
        algorithm={
            "name": "xpo",
            "prompts": 6,
            "alpha": ALPHA,
            "beta": BETA,
            "label_smoothing": SMOOTHING,
            "epochs": EPOCHS,
        },
        oracle={"name": f"{HERE / 'rewards.py'}:coarse", "labels": "bernoulli"},
        learner={
            "learning_rate": 4e-3,
            "weight_decay": 0.1,
            "max_grad_norm": MAX_NORM,
            "micro_batch_size": 4,
            "sync_every": 2,
        },
        checkpoint={"every": 3},
        stop={"max_steps": 5},
    )


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    assert oat("train", config) == 0
    return config.with_suffix("")


def reference_first(item: Item) -> tuple[int, int]:
    """Return the places of the reference's response and of the sampler's response in the pair."""
    slots = [item.group.trajectories[pick].slot for pick in item.question.picks]
    return slots.index("reference"), slots.index("sampler")


@pytest.mark.inventory(16)
def test_every_step_is_the_straight_line_version(bench: Bench, run: Path) -> None:
    policy, reference, start = (
        straight.load(bench.folder / name) for name in ("model", "reference", "model")
    )
    optimiser = straight.Optimiser(list(policy.parameters()), rate=4e-3, decay=0.1, max_norm=MAX_NORM)
    curve: list[dict[str, float] | None] = []
    winners = set()
    lengths = set()
    cut = set()
    for items in straight.recorded_steps(run):
        batch = straight.pad(
            [item.group.trajectories[pick] for item in items for pick in item.question.picks]
        )
        lengths |= set(batch.mask.sum(1).tolist())
        with torch.no_grad():
            reference_N = straight.picked(
                straight.log_softmax(straight.logits_of(reference, batch)), batch
            ).sum(1)
        losses = []
        norms = []
        preferences = []
        optimisms = []
        for _ in range(EPOCHS):
            policy_N = straight.picked(straight.log_softmax(straight.logits_of(policy, batch)), batch).sum(1)
            preference = torch.tensor(0.0)
            pairs = 0
            optimism = torch.tensor(0.0)
            for number, item in enumerate(items):
                winners.add(item.label)
                place, _ = reference_first(item)
                optimism = optimism + policy_N[2 * number + place] / len(items)
                if item.label is not None:
                    chosen, rejected = 2 * number + item.label, 2 * number + 1 - item.label
                    margin = (policy_N[chosen] - reference_N[chosen]) - (
                        policy_N[rejected] - reference_N[rejected]
                    )
                    right = torch.log(1 + torch.exp(-BETA * margin))
                    wrong = torch.log(1 + torch.exp(BETA * margin))
                    preference, pairs = preference + (1 - SMOOTHING) * right + SMOOTHING * wrong, pairs + 1
            preference = preference / max(pairs, 1)
            loss = preference + ALPHA * optimism
            loss.backward()
            norms.append(optimiser.step())
            cut.add(norms[-1] > MAX_NORM)
            losses.append(loss.item())
            preferences.append(preference.item())
            optimisms.append(optimism.item())
        names = ("loss/total", "optim/grad_norm", "loss/preference", "loss/optimism")
        curve.append(
            {
                name: sum(values) / EPOCHS
                for name, values in zip(names, (losses, norms, preferences, optimisms), strict=True)
            }
        )
    assert winners == {None, 0, 1}
    assert len(lengths) > 1
    assert cut == {True, False}
    straight.assert_same_curve(run, curve)
    straight.assert_same_weights(run, policy, start)


@pytest.mark.inventory(18)
def test_the_reference_stays_and_the_sampler_lags(run: Path) -> None:
    for step, items in enumerate(straight.recorded_steps(run)):
        versions = {
            row.slot: set(row.recorded("versions").tolist())
            for item in items
            for row in item.group.trajectories
        }
        assert versions == {"sampler": {step - step % 2}, "reference": {0}}


@pytest.mark.slow(
    instead="tests/golden and tests/faults/test_state.py send runs through the wire encoding", seconds=0.8
)
def test_over_the_wire(config: Path, run: Path) -> None:
    other = run.with_name("wire")
    assert oat("train", config, "--run_dir", other, "--compute.serialise", "true") == 0
    assert digest_run(other) == digest_run(run)


def die_behind_a_save() -> None:
    """Kill at step 3, when the sampler holds the weights of step 2."""

    kill_at(*named("old checkpoints are removed"), 1, after=True)


def die_in_an_epoch() -> None:

    kill_at(*named("an optimiser step"), 10)


@pytest.mark.slow(instead="tests/faults/test_inner_kills.py::test_killed_inside_an_update", seconds=1.7)
@pytest.mark.parametrize("arm", [die_behind_a_save, die_in_an_epoch])
def test_killed_and_continued(config: Path, run: Path, tmp_path: Path, arm: Callable[[], None]) -> None:
    assert_a_kill_changes_nothing(config, run, tmp_path, arm)
