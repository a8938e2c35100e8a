"""Evaluations of every kind of run: online, with the samples of training; iterative, with a sampler that lags
behind; offline."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import World, checked, forked, kill_at, named, oat, write_jsonl

from oat.commands.digest import digest_run
from oat.ledger.reader import Reader

SINGLE = {"engine": {"name": "torch", "threads": 1}}


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def records_of(run_dir: Path, step: int) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run_dir / "evaluations" / f"step_{step:08d}.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def online(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a DPO run with online evaluation: every response that a step learned from is compared with the
    reference."""
    changes = {
        **SINGLE,
        "evaluation.online": True,
        "evaluation.oracle": f"{world.folder / 'reward.py'}:first_is_longer",
    }
    config = world.config("dpo", tmp_path_factory.mktemp("online"), changes)
    assert oat("train", config) == 0
    return config.with_suffix("")


@pytest.mark.inventory(100)
def test_samples_of_training_are_held_against_the_references(online: Path) -> None:
    """The metric `eval/online` equals the mean computed by hand from the ledger: the oracle compares each
    response with the reference, which is one letter."""
    rows = rows_of(online)
    assert "eval/online" not in rows[0], "nothing was learned from yet"
    for step in (2, 4):
        with closing(Reader(online / "ledger.sqlite")) as store:
            taken = store.taken("train", step - 1)
            purposes = [
                purpose for (purpose,) in store.db.execute("SELECT DISTINCT purpose FROM rounds ORDER BY 1")
            ]
        texts = [text for asked in taken for text in asked.question.candidates]
        probabilities = [0.5 if text == "a" else 0.9 if len(text) > 1 else 0.2 for text in texts]
        assert rows[step]["eval/online"] == pytest.approx(np.mean(probabilities))
        assert rows[step]["eval/online_win_rate"] == pytest.approx(
            np.mean([0.5 if p == 0.5 else p > 0.5 for p in probabilities])
        )
        mine = [record for record in records_of(online, step) if record["mode"] == "online"]
        assert [record["output"] for record in mine] == texts
        assert {record["reference"] for record in mine} == {"a"}
        assert purposes == ["eval", "train"], "they are part of the evaluation, and of its budget"
    assert "eval/online" not in rows[1]


def test_training_is_the_same_without_it(world: World, online: Path, tmp_path: Path) -> None:
    changes = {**SINGLE, "evaluation.oracle": f"{world.folder / 'reward.py'}:first_is_longer"}
    assert oat("train", world.config("dpo", tmp_path, changes)) == 0
    assert digest_run(tmp_path / "dpo")["weights"] == digest_run(online)["weights"]


@pytest.mark.slow(
    instead="tests/evaluation/test_evaluate_box.py::test_a_killed_run_makes_the_same_evaluations", seconds=2.2
)
@pytest.mark.parametrize(
    ("place", "call"),
    [("an evaluation is written", 2), ("oat.ledger.store:Store.add_answers", 11)],
)
def test_a_killed_run_makes_the_same_evaluations(online: Path, tmp_path: Path, place: str, call: int) -> None:
    def die() -> int:
        kill_at(*named(place), call)
        return oat("train", online / "config.yaml", "--run_dir", tmp_path / "run")

    assert forked(die, tmp_path / "log") == -9
    assert (
        forked(lambda: oat("train", online / "config.yaml", "--run_dir", tmp_path / "run"), tmp_path / "log")
        == 0
    )
    assert digest_run(tmp_path / "run") == digest_run(online)


def test_a_scoring_and_a_second_oracle(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = f"{world.folder / 'reward.py'}:reward"
    changes = {
        "evaluation.online": True,
        "evaluation.gold": {"name": gold},
        "algorithm.samples": 3,
        "stop.max_steps": 2,
    }
    config = world.config("grpo", tmp_path, changes)
    said, _ = checked(capsys, config)
    assert (said["responses an evaluation"], said["responses of the step an evaluation"]) == (12, 12)
    assert oat("train", config) == 0
    row = rows_of(tmp_path / "grpo")[2]
    assert row["eval/online"] == row["eval/gold_online"] == pytest.approx(row["reward/mean"])


def test_recorded_responses_are_not_sampled(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl(
        tmp_path / "pairs.jsonl", [{"prompt": "1+1=", "answer": "a", "chosen": "a", "rejected": "b"}]
    )
    offline = {
        "prompts.path": str(data),
        "oracle.name": "recorded",
        "evaluation.oracle": world.oracle,
        "evaluation.online": True,
    }
    assert oat("check", world.config("dpo", tmp_path, offline)) == 2
    assert (
        "evaluation.online is True: training draws no responses where they are recorded; remove it"
        in capsys.readouterr().err
    )


def test_an_iterative_run_evaluates_its_newest_weights(world: World, tmp_path: Path) -> None:
    """The sampler lags three steps behind. The evaluation uses the policy, or the sampler if
    `evaluation.slot` says so, and changes neither."""
    changes = {
        **SINGLE,
        "learner.sync_every": 3,
        "evaluation.every": 1,
        "learner.learning_rate": 0.03,
        "stop.max_steps": 4,
    }
    runs = {}
    for slot in ("policy", "sampler"):
        config = world.config("dpo", tmp_path, {**changes, "evaluation.slot": slot})
        assert oat("train", config, "--run_dir", tmp_path / slot) == 0
        runs[slot] = rows_of(tmp_path / slot)
    assert [row.get("weights/version", 0) for row in runs["policy"]] == [0, 0, 0, 3, 3]
    assert digest_run(tmp_path / "policy")["weights"] == digest_run(tmp_path / "sampler")["weights"]
    texts = {
        slot: [[record["output"] for record in records_of(tmp_path / slot, step)] for step in range(5)]
        for slot in runs
    }
    assert (
        texts["sampler"][0]
        == texts["sampler"][1]
        == texts["sampler"][2]
        != texts["sampler"][3]
        == texts["sampler"][4]
    )
    assert texts["policy"][0] != texts["policy"][2], "the policy has moved where the sampler has not"
    greedy = {
        slot: [record["output"] for record in records_of(tmp_path / slot, 3) if record["mode"] == "greedy"]
        for slot in runs
    }
    assert greedy["policy"] == greedy["sampler"], "a sync makes them one"


@pytest.mark.sample("dpo", seconds=0.3)
@pytest.mark.inventory(116)
@pytest.mark.parametrize("algorithm", ["dpo", "sft"])
def test_an_offline_run_learns_and_starts_no_actor(
    world: World, tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oat.engines.torch import TorchEngine
    from oat.rollout.actor import Actor

    monkeypatch.setattr(TorchEngine, "generate", lambda *_: pytest.fail("nothing is sampled"))
    monkeypatch.setattr(Actor, "sample", lambda *_: pytest.fail("nobody acts"))
    rows = rows_of(trained(world, tmp_path, algorithm, {"evaluation": None}))
    losses = [row["loss/total"] for row in rows[1:]]
    assert losses[-1] < 0.8 * losses[0]
    assert {row["oracle/queries"] for row in rows[1:]} == {0}


@pytest.mark.inventory(117)
def test_an_offline_run_is_evaluated_online(world: World, tmp_path: Path) -> None:
    """A run trains on recorded responses. Its evaluation samples new ones, and writes its file."""
    run = trained(world, tmp_path, "dpo", {"evaluation.oracle": world.oracle, "evaluation.every": 5})
    assert sorted(path.name for path in (run / "evaluations").iterdir()) == [
        f"step_{step:08d}.jsonl" for step in (0, 5, 10)
    ]
    assert len(records_of(run, 10)) == 4 * (2 + 1)
    rows = rows_of(run)
    assert [step for step, row in enumerate(rows) if "eval/sampled" in row] == [0, 5, 10]
    assert rows[10]["eval/sampled"] > rows[0]["eval/sampled"], (
        "letters a are what is chosen, and what is rewarded"
    )


def trained(world: World, folder: Path, algorithm: str, changes: dict[str, Any]) -> Path:
    """Train ten steps on recorded pairs whose chosen response has only the letter a. Return the run
    directory."""
    data = [
        {"prompt": f"{a}+{b}=", "answer": "a", "chosen": "aaa", "rejected": f"{b}{a}"}
        for a in range(4)
        for b in range(4)
    ]
    path = write_jsonl(folder / "pairs.jsonl", data)
    responses = ["chosen", "rejected"] if algorithm == "dpo" else ["chosen"]
    prompts = {"path": str(path), "responses": responses, "reference_key": "answer"}
    common = {
        **SINGLE,
        "prompts": prompts,
        "oracle.name": "recorded",
        "learner.learning_rate": 0.01,
        "stop.max_steps": 10,
    }
    config = world.config(
        algorithm, folder, {**common, "algorithm": {"name": algorithm, "prompts": 8}, **changes}
    )
    assert oat("train", config) == 0
    return config.with_suffix("")
