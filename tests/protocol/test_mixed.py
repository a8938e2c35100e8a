"""An ensemble that learns beside DPO, chooses the questions, and answers a share of them itself."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import straight
import torch
from bench import HERE, Bench, assert_a_kill_changes_nothing
from fixtures import kill_at, oat

from oat.rundir.checkpoints import Checkpoints
from oat.seeds import Seeds
from oat.types import ENSEMBLE, UNASKED, Item, Trajectory

BETA = 0.4
STEPS = 6
BURN_IN = 2
SEED = 3
SHAPE = {
    "members": 3,
    "hidden": 8,
    "batch": 6,
    "steps": 2,
    "buffer": 12,
    "prior": 0.5,
    "learning_rate": 1e-2,
    "weight_decay": 5e-5,
}


@pytest.fixture(scope="module")
def config(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench.config(
        tmp_path_factory.mktemp("mixed") / "mixed.yaml",
        seed=SEED,
        algorithm={"name": "dpo", "prompts": 8, "beta": BETA},
        explorer={
            "name": "ensemble",
            "samples": 4,
            "model_labels": {"share": 0.5, "burn_in": BURN_IN},
            "ensemble": SHAPE,
        },
        oracle={"name": f"{HERE / 'rewards.py'}:graded"},
        learner={"learning_rate": 3e-3},
        checkpoint={"every": 2},
        stop={"max_steps": STEPS},
    )


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    assert oat("train", config) == 0
    return config.with_suffix("")


def test_the_policy_is_the_straight_line_version(bench: Bench, run: Path) -> None:
    policy, reference, start = (
        straight.load(bench.folder / name) for name in ("model", "reference", "model")
    )
    optimiser = straight.Optimiser(list(policy.parameters()), rate=3e-3, decay=0.0, max_norm=1.0)
    straight.assert_same_curve(
        run, straight.dpo_curve(straight.recorded_steps(run), policy, reference, optimiser, BETA)
    )
    straight.assert_same_weights(run, policy, start)


@pytest.mark.inventory(72)
def test_the_ensembles_questions_cost_nothing_and_begin_after_the_burn_in(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    spent = 0
    for step, items in enumerate(straight.recorded_steps(run)):
        believed = [item for item in items if item.question.oracle == ENSEMBLE]
        asked = [item for item in items if item.question.oracle not in (ENSEMBLE, UNASKED)]
        assert bool(believed) == (step >= BURN_IN)
        assert all(item.label == 0 and item.answer.queries == 0 for item in believed)
        spent += 2 * len(asked)
        assert rows[step]["oracle/queries"] == spent


@pytest.mark.inventory(72)
def test_the_ensembles_labels_follow_its_rewards(bench: Bench, run: Path) -> None:
    """The winner of a pair that the ensemble labels is the response that more probably wins, in the mean over
    the members of the checkpoint that sampled."""
    reference, step = straight.load(bench.folder / "reference"), 4
    tensors = Checkpoints(run / "checkpoints", every=1, keep_last=9).load_step(step)[1]
    p = {name.rpartition("/")[2]: value for name, value in tensors.items() if "/ensemble/weights/" in name}
    items = straight.recorded_steps(run)[step]
    believed = [item for item in items if item.question.oracle == ENSEMBLE]
    assert believed
    for item in believed:
        pair = (item.group.trajectories[pick] for pick in item.question.picks)
        first, second = (features_of(reference, row) for row in pair)
        margins = [members_reward(p, m, first) - members_reward(p, m, second) for m in range(3)]
        belief = float(torch.sigmoid(torch.stack(margins)).mean())
        assert item.question.notes["belief"] == pytest.approx(belief, abs=1e-4)
        assert belief > 0.5
        assert (item.label, item.answer.values) == (0, (1.0,))


def features_of(reference: torch.nn.Module, row: Trajectory) -> torch.Tensor:
    ids = torch.from_numpy(np.concatenate([segment.ids for segment in row.segments])).long()[None]
    begin = len(row.segments[0].ids)
    with torch.no_grad():
        states = reference(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
    return states[begin - 1 : len(states) - 1].mean(dim=0)


def members_reward(p: dict[str, torch.Tensor], m: int, x: torch.Tensor) -> torch.Tensor:
    x = torch.clamp(x @ p["weight1"][m] + p["bias1"][m, 0], min=0)
    x = torch.clamp(x @ p["weight2"][m] + p["bias2"][m, 0], min=0)
    return (x @ p["weight3"][m] + p["bias3"][m, 0])[0]


def start_of_the_ensemble(width: int) -> dict[str, torch.Tensor]:
    """Return the start weights: normal numbers within two standard deviations from the addressed generator,
    and biases of 0."""
    generator, start = Seeds(SEED).at("init", "ensemble"), {}
    for layer, (inputs, outputs) in enumerate(((width, 8), (8, 8), (8, 1)), start=1):
        values = generator.normal(size=(3, inputs, outputs))
        while (np.abs(values) > 2).any():
            values[np.abs(values) > 2] = generator.normal(size=int((np.abs(values) > 2).sum()))
        start[f"weight{layer}"] = torch.tensor(values / (2 * math.sqrt(inputs)), dtype=torch.float32)
        start[f"bias{layer}"] = torch.zeros(3, 1, outputs)
    return start


def taught(items: list[Item]) -> list[Item]:
    return [item for item in items if item.label is not None and item.question.oracle != ENSEMBLE]


@pytest.mark.inventory(75)
def test_the_ensemble_is_the_straight_line_version(bench: Bench, run: Path) -> None:
    reference = straight.load(bench.folder / "reference")
    start = start_of_the_ensemble(reference.config.hidden_size)
    p = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    adam = torch.optim.Adam(p.values(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=5e-5)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    ring, updates = [], 0
    for step, items in enumerate(straight.recorded_steps(run)):
        for item in taught(items):
            chosen, rejected = item.question.picks if item.label == 0 else item.question.picks[::-1]
            pair = tuple(features_of(reference, item.group.trajectories[pick]) for pick in (chosen, rejected))
            ring.append(pair)
        stored = list(ring[:12])
        for number, pair in enumerate(ring[12:], start=12):
            stored[number % 12] = pair
        generator = Seeds(SEED).at("prepare", "ensemble", step)
        size = min(6, len(stored))
        drawn = [generator.choice(len(stored), size, replace=False) for _ in range(2)]
        totals, norms = [], []
        for batch in drawn:
            loss = torch.tensor(0.0)
            for b in batch:
                for m in range(3):
                    margin = members_reward(p, m, stored[b][0]) - members_reward(p, m, stored[b][1])
                    loss = loss + torch.log(1 + torch.exp(-margin)) / (3 * size)
            distance = sum(((p[name] - start[name]) ** 2).sum() for name in p) / sum(
                value.numel() for value in p.values()
            )
            total = loss + 0.5 * 6 / len(ring) * distance
            adam.zero_grad()
            total.backward()
            totals.append(total.item())
            norms.append(straight.gradient_norm(list(p.values())))
            adam.step()
            updates += 1
        # Adam makes steps also of the rounding of a gradient that cancels: a bias is in both rewards of a
        # pair. Noise in the eighth digit of what is summed moves a loss by 1e-5 of it, and a norm by 0.4 %.
        assert rows[step]["loss/ensemble_total"] == pytest.approx(sum(totals) / 2, rel=1e-4)
        assert rows[step]["optim/ensemble_grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-2)
    assert updates == 2 * STEPS
    assert len(ring) > 12
    loaded = Checkpoints(run / "checkpoints", every=1, keep_last=1).load()
    assert loaded is not None
    for name, value in p.items():  # rounding moves weights of tiny gradients; a step of Adam is up to 1e-2
        torch.testing.assert_close(
            loaded[1][f"learner/ensemble/weights/{name}"], value.detach(), rtol=1e-4, atol=1e-3
        )


def die_in_the_ensembles_update() -> None:
    from oat.algorithms.ensemble import EnsembleLearning

    kill_at(EnsembleLearning, "losses", 5)


def die_after_the_intents() -> None:
    from oat.ledger.outstanding import Outstanding

    kill_at(Outstanding, "submit", 4)


@pytest.mark.slow(instead="tests/faults/test_inner_kills.py::test_killed_inside_an_update", seconds=5.9)
@pytest.mark.parametrize("arm", [die_in_the_ensembles_update, die_after_the_intents])
@pytest.mark.parametrize("flags", [(), ("--compute.serialise", "true")], ids=["plain", "wire"])
def test_killed_and_continued(
    config: Path, run: Path, tmp_path: Path, arm: Callable[[], None], flags: tuple[str, ...]
) -> None:
    assert_a_kill_changes_nothing(config, run, tmp_path, arm, *flags)
