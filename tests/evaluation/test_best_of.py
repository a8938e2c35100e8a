"""Best of n: an evaluation measures the sampled response that the explorer's ensemble finds best."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluations import evaluated, records, rows
from fixtures import World, make_group, oat
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.commands.digest import digest_run
from oat.evaluation import evaluation
from oat.evaluation.modes import best_of
from oat.types import Group

SAMPLES = 6
EXPLORER: dict[str, Any] = {
    "name": "ensemble",
    "samples": 4,
    "ensemble": {"members": 3, "hidden": 8, "batch": 8, "steps": 5, "learning_rate": 3e-2},
}
HOT = {"best_of": SAMPLES, "best_of_temperature": 2.0}


def changes_of(world: World, **options: Any) -> dict[str, Any]:
    """Return the changes that make a run evaluate the best of several responses."""
    section = {"path": str(world.folder / "held_out.jsonl"), "every": 2, "samples": 2, **HOT, **options}
    return {"explorer": EXPLORER, "evaluation": section}


class Seen:
    """Calls the real function, and keeps what it was given and what it returned, by call."""

    def __init__(self) -> None:
        self.given: list[tuple[Sequence[Group], Sequence[np.ndarray]]] = []
        self.chosen: list[list[Group]] = []

    def __call__(self, groups: Sequence[Group], rewards: Sequence[np.ndarray]) -> list[Group]:
        self.given.append((groups, rewards))
        self.chosen.append(best_of(groups, rewards))
        return self.chosen[-1]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    kept = Seen()
    monkeypatch.setattr(evaluation, "best_of", kept)
    return kept


def of_mode(run_dir: Path, step: int, mode: str) -> list[dict[str, Any]]:
    return [record for record in records(run_dir, step) if record["mode"] == mode]


@pytest.mark.inventory(74)
def test_the_response_with_the_highest_mean_reward_is_chosen() -> None:
    """Neither the highest reward of one member nor the order of responses decides."""
    groups = [make_group(3, "a", "b", "c"), make_group(8, "d", "e")]
    rewards = [
        np.array([[9.0, 4.0, 1.0], [-9.0, 3.0, 1.0]]),
        np.array([[1.0, 2.0], [0.0, 0.5]]),
    ]
    found = best_of(groups, rewards)
    assert [[row.text for row in group.trajectories] for group in found] == [["b"], ["e"]]
    assert [group.prompt for group in found] == [group.prompt for group in groups]
    assert [len(group.trajectories) for group in groups] == [3, 2], "the groups stay as they were"


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    members=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_the_choice_is_that_of_a_slow_version(sizes: list[int], members: int, seed: int) -> None:
    """Among equal means the first response is chosen. Rewards are small whole numbers, so some are equal."""
    generator = np.random.default_rng(seed)
    groups = [make_group(number, *"abcde"[:size]) for number, size in enumerate(sizes)]
    rewards = [generator.integers(-1, 2, size=(members, size)).astype(np.float32) for size in sizes]
    for group, rewards_MG, found in zip(groups, rewards, best_of(groups, rewards), strict=True):
        sums = [sum(row[place] for row in rewards_MG.tolist()) for place in range(len(group.trajectories))]
        assert found.trajectories == (group.trajectories[sums.index(max(sums))],)


def test_the_best_of_each_equal_part_is_chosen() -> None:
    groups = [make_group(3, *"abcdef"), make_group(8, *"ghijkl")]
    rewards = [
        np.array([[5.0, 1.0, 3.0, 0.0, 2.0, 1.0], [-5.0, 0.0, 3.0, 0.0, 2.0, 4.0]]),
        np.array([[1.0, 1.0, 0.0, 9.0, 8.0, 7.0]] * 2),
    ]
    assert [[row.text for row in group.trajectories] for group in best_of(groups, rewards, 2)] == [
        ["c", "f"],
        ["g", "j"],
    ]
    assert [group.trajectories for group in best_of(groups, rewards, 6)] == [
        group.trajectories for group in groups
    ]


@pytest.mark.sample("reference", seconds=0.4)
@pytest.mark.parametrize("backbone", ["reference", "policy"])
def test_a_run_reports_the_value_of_a_sampled_response(
    world: World, tmp_path: Path, seen: Seen, backbone: str
) -> None:
    """Each evaluation asks about one of the responses to each prompt, that of the highest mean reward. Its
    value is reported beside those of the other modes."""
    changes = changes_of(world)
    changes["explorer"] = {**EXPLORER, "features": {"backbone": backbone}}
    assert oat("train", world.config("dpo", tmp_path, changes)) == 0
    run_dir = tmp_path / "dpo"
    best = evaluated(run_dir, "eval/best")
    assert list(best) == list(evaluated(run_dir, "eval/sampled")) == [0, 2, 4]
    assert len(seen.given) == len(best)
    differs = 0
    for step, (groups, rewards) in zip(best, seen.given, strict=True):
        found = of_mode(run_dir, step, "best")
        assert len(found) == len(groups) == 4
        assert len(of_mode(run_dir, step, "sampled")) == 8, "the other modes have their own responses"
        for record, group, rewards_MG in zip(found, groups, rewards, strict=True):
            assert rewards_MG.shape == (3, SAMPLES)
            means = [float(rewards_MG[:, place].mean()) for place in range(SAMPLES)]
            assert record["output"] == group.trajectories[int(np.argmax(means))].text
            assert record["prompt"] == group.prompt.messages[0].content
            differs += len({row.text for row in group.trajectories}) > 2
        assert best[step] == pytest.approx(sum(record["value"] for record in found) / len(found))
    assert differs >= 8, "there was something to choose"


def test_the_newest_ensemble_chooses(world: World, tmp_path: Path, seen: Seen) -> None:
    """With a policy that stays, each evaluation samples the same responses, and the ensemble has learned in
    between. `oat eval` chooses as the run's last evaluation did."""
    changes = {**changes_of(world), "algorithm": {"name": "frozen", "prompts": 8, "samples": 2}}
    assert oat("train", world.config("run", tmp_path, changes)) == 0
    first, middle, last = seen.given
    texts = [
        [[row.text for row in group.trajectories] for group in groups] for groups, _ in (first, middle, last)
    ]
    assert texts[0] == texts[1] == texts[2]
    assert not np.allclose(np.stack(first[1]), np.stack(middle[1]))
    assert not np.allclose(np.stack(middle[1]), np.stack(last[1]))
    assert oat("eval", tmp_path / "run") == 0
    np.testing.assert_array_equal(np.stack(seen.given[3][1]), np.stack(last[1]))


def correlation(groups: Sequence[Group], rewards: Sequence[np.ndarray]) -> float:
    """Return the correlation of the mean rewards with the oracle's scores, over all responses."""
    scores = [
        row.text.count("a") + 0.1 * row.text.count("b") for group in groups for row in group.trajectories
    ]
    return float(np.corrcoef(np.concatenate([each.mean(axis=0) for each in rewards]), scores)[0, 1])


def test_an_ensemble_that_has_learned_finds_good_responses(world: World, tmp_path: Path, seen: Seen) -> None:
    """The policy stays. In the end the ensemble ranks its responses far better than by chance."""
    changes = {
        **changes_of(world, every=9),
        "algorithm": {"name": "frozen", "prompts": 8, "samples": 2},
        "stop.max_steps": 9,
        "seed": 3,
    }
    assert oat("train", world.config("run", tmp_path, changes)) == 0
    first, last = (correlation(*given) for given in (seen.given[0], seen.given[-1]))
    assert first < 0.2
    assert last > 0.5


def test_without_a_temperature_all_responses_are_the_greedy_one(world: World, tmp_path: Path) -> None:
    changes = {**changes_of(world, best_of_temperature=0.0, samples=0), "stop.max_steps": 1}
    assert oat("train", world.config("dpo", tmp_path, changes)) == 0
    run_dir = tmp_path / "dpo"
    assert evaluated(run_dir, "eval/best") == evaluated(run_dir, "eval/greedy")
    outputs = [[record["output"] for record in of_mode(run_dir, 0, mode)] for mode in ("best", "greedy")]
    assert outputs[0] == outputs[1]
    assert evaluated(run_dir, "eval/sampled") == {}


@pytest.mark.slow(
    instead="tests/evaluation/test_evaluate_box.py compares training with and without evaluations",
    seconds=0.9,
)
def test_training_does_not_notice_it(world: World, tmp_path: Path) -> None:
    """Neither weights nor questions of training change, and over the wire the evaluation is the same."""
    rewards = {}
    for name in ("with", "without"):
        folder = tmp_path / name
        folder.mkdir()
        changes = {**changes_of(world), "stop.max_steps": 2}
        if name == "without":
            del changes["evaluation"]["best_of"], changes["evaluation"]["best_of_temperature"]
        assert oat("train", world.config("dpo", folder, changes)) == 0
        rewards[name] = [
            {key: value for key, value in row.items() if key.startswith(("loss/", "reward/", "ensemble/"))}
            for row in rows(folder / "dpo")
        ]
    assert rewards["with"] == rewards["without"]
    config = world.config("dpo", tmp_path, {**changes_of(world), "stop.max_steps": 2})
    assert oat("train", config, "--compute.serialise", "true") == 0
    assert digest_run(tmp_path / "dpo") == digest_run(tmp_path / "with" / "dpo")


def test_checkpoints_may_be_ranked_by_it(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranked = {"checkpoint": {"every": 2, "keep_best": 1, "best_metric": "eval/best"}}
    changes = {**changes_of(world), **ranked}
    assert oat("check", world.config("dpo", tmp_path, changes)) == 0
    changes = {**changes_of(world, best_of=None), **ranked}
    del changes["evaluation"]["best_of_temperature"]
    capsys.readouterr()
    assert oat("check", world.config("dpo", tmp_path, changes)) == 2
    assert "checkpoint.best_metric" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"explorer": None}, "evaluation.best_of"),
        ({"explorer": {"name": "apl", "samples": 4}}, "evaluation.best_of"),
        ({"evaluation.best_of": None}, "evaluation.best_of_temperature"),
        ({"evaluation.best_of": 0}, "evaluation.best_of"),
        ({"evaluation.best_of_temperature": -1.0}, "evaluation.best_of_temperature"),
    ],
    ids=["no explorer", "an explorer without an ensemble", "a temperature of nothing", "none", "below zero"],
)
def test_without_an_ensemble_it_is_refused(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    changes: dict[str, Any],
    field: str,
) -> None:
    """Before anything is asked. The message names the setting."""
    forbidden = {"oracle.name": f"{world.folder / 'reward.py'}:forbidden"}
    config = world.config("dpo", tmp_path, {**changes_of(world), **forbidden, **changes})
    assert oat(command, config) == 2
    assert field in capsys.readouterr().err
    assert not (tmp_path / "dpo").exists()


def test_it_alone_is_an_evaluation(world: World, tmp_path: Path) -> None:
    """With neither sampled nor greedy responses, one response to each prompt is asked about."""
    changes = {**changes_of(world, samples=0, greedy=False), "stop.max_steps": 1}
    assert oat("train", world.config("dpo", tmp_path, changes)) == 0
    assert [record["mode"] for record in records(tmp_path / "dpo", 1)] == ["best"] * 4
    last = json.loads((tmp_path / "dpo" / "metrics.jsonl").read_text().splitlines()[-1])
    assert "eval/best" in last
    assert {"eval/sampled", "eval/greedy"}.isdisjoint(last)
