"""Episodes of two model turns with an environment between them. GRPO trains the model's tokens, and no token
of the environment."""

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import straight
import torch
from bench import HERE, Bench, assert_a_kill_changes_nothing
from fixtures import kill_at, oat, write_jsonl

from oat.models.loading import load_tokenizer
from oat.seeds import Seeds
from oat.types import Segment, Trajectory

CLIP = 0.2
STEPS = 4
SAMPLES = 4
SEED = 3
STOP = (1, 2)
"""The ids that end a response: the tokenizer's end-of-text, and that of the model's configuration."""


@pytest.fixture(scope="module")
def config(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench.config(
        tmp_path_factory.mktemp("episode") / "episode.yaml",
        seed=SEED,
        model={"path": str(bench.folder / "model")},
        sampling={"max_new_tokens": 4, "temperature": 0.9, "environment": f"{HERE / 'guessing.py'}:Guessing"},
        algorithm={"name": "grpo", "prompts": 4, "samples": SAMPLES, "reduction": "token"},
        oracle={"name": "environment"},
        learner={"learning_rate": 3e-3, "micro_batch_size": 5},
        evaluation={"path": str(bench.folder / "train.jsonl"), "every": 2, "max_prompts": 4},
        checkpoint={"every": 2},
        stop={"max_steps": STEPS},
    )


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    assert oat("train", config) == 0
    return config.with_suffix("")


def turn_reward(text: str, digit: int) -> float:
    """Return the reward that `guessing.py` gives to one response."""
    return text.count("a") + 0.3 * text.count(str(digit)) - 0.05 * len(text)


def test_episodes_have_two_turns_and_their_own_reward(bench: Bench, run: Path) -> None:
    tokenizer = load_tokenizer(str(bench.folder / "model"))
    turns = set()
    for step, items in enumerate(straight.recorded_steps(run)):
        for item in items:
            for sample, (row, value) in enumerate(
                zip(item.group.trajectories, item.answer.values, strict=True)
            ):
                authors = [segment.author for segment in row.segments]
                turns.add(len(authors))
                assert authors in (["context", "model"], ["context", "model", "context", "model"])
                digit = (
                    Seeds(SEED)
                    .at("environment", "train", step, 0, "sampler", item.question.key.occurrence, sample)
                    .integers(10)
                )
                if len(authors) == 4:
                    assert len(row.segments[2].ids) == 3
                    assert row.segments[2].mask is None
                responses = [segment for segment in row.segments if segment.author == "model"]
                kept = [[i for i in each.ids if i not in STOP] for each in responses]
                texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in kept]
                assert [each.reward for each in responses] == [turn_reward(text, digit) for text in texts]
                assert [s.reward for s in row.segments if s.author == "context"] == [None] * len(responses)
                assert row.reward == value == straight.added(turn_reward(text, digit) for text in texts)
                assert 0 <= digit < 10
                assert item.answer.queries == 0
    assert turns == {4} or turns == {2, 4}


def expected_turns(tokenizer: Any, episode: Trajectory) -> list[dict[str, Any]] | None:
    """Return the turns of an episode as the run's files have them. The run has no template."""

    def text(turn: Segment) -> str:
        if turn.author == "context":
            return tokenizer.decode(turn.ids)
        return tokenizer.decode([i for i in turn.ids if i not in STOP], skip_special_tokens=True)

    turns = [
        {"author": turn.author, "text": text(turn), "reward": turn.reward} for turn in episode.segments[1:]
    ]
    return turns if len(turns) > 1 else None


def test_the_turns_of_an_episode_are_in_the_files_and_in_oat_samples(
    bench: Bench, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(str(bench.folder / "model"))
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    steps = list(straight.recorded_steps(run))
    items = [item for of_step in steps for item in of_step]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == len(items)
    for row, item in zip(rows, items, strict=True):
        turns = [expected_turns(tokenizer, episode) for episode in item.group.trajectories]
        assert row.get("turns") == (turns if any(turns) else None)
    assert any(row.get("turns") for row in rows)
    for number, of_step in enumerate(steps, 1):
        counts = [len(row.segments) // 2 for item in of_step for row in item.group.trajectories]
        assert metrics[number]["episode/turns"] == pytest.approx(np.mean(counts))
    assert "episode/turns" not in metrics[0]
    (records,) = (run / "evaluations").glob(f"*{STEPS}.jsonl")
    evaluated = [json.loads(line) for line in records.read_text().splitlines()]
    several = [record["turns"] for record in evaluated if "turns" in record]
    assert several
    for record in evaluated:
        for turns in [record["turns"]] if "turns" in record else []:
            assert [turn["author"] for turn in turns] == ["model", "context", "model"]
            assert turns[-1]["text"] == record["output"]
            rewards = [turn["reward"] for turn in turns if turn["reward"] is not None]
            assert straight.added(rewards) == record["value"]
    for flags, shown in (
        ((), [each for row in rows for each in row.get("turns", []) if each]),
        (["--eval"], several),
    ):
        assert oat("samples", run, *flags) == 0
        page = [line.strip() for line in capsys.readouterr().out.splitlines()]
        assert sum(line.startswith("environment: ") for line in page) >= len(shown)
        for first, message, last in shown:
            place = [line.partition("] ")[2].strip() for line in page].index(
                f"model [{first['reward']:.4g}]: {first['text']}".strip()
            )
            assert f"environment: {message['text']}" in page
            assert f"model [{last['reward']:.4g}]: {last['text']}".strip() in page[place:]


def test_without_samples_the_last_response_says_that_it_is_one_of_several(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So it is in groups that `samples.jsonl` has not, and in a run of an older version."""
    shutil.copytree(run, tmp_path / "older")
    (tmp_path / "older" / "samples.jsonl").unlink()
    records = tmp_path / "older" / "evaluations" / f"step_{STEPS:08d}.jsonl"
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    write_jsonl(records, [{name: row[name] for name in row if name != "turns"} for row in rows])
    assert oat("samples", tmp_path / "older") == 0
    page = capsys.readouterr().out
    assert "environment: " not in page
    assert ", last of 2 turns] " in page
    assert oat("samples", tmp_path / "older", "--eval", "--step", STEPS) == 0
    assert "environment: " not in capsys.readouterr().out
    assert oat("samples", run) == 0
    assert "last of" not in capsys.readouterr().out


def test_a_prompt_column_cannot_be_called_turns(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--run_dir", tmp_path / "run", "--prompts.prompt_key", "turns")
    assert oat("train", config, *flags) == 2
    assert "records of an evaluation have a field of that name" in capsys.readouterr().err


def test_every_step_is_the_straight_line_version(bench: Bench, run: Path) -> None:
    policy, start = (straight.load(bench.folder / "model") for _ in range(2))
    optimiser = straight.Optimiser(list(policy.parameters()), rate=3e-3, decay=0.0, max_norm=1.0)
    num_tokens = len(load_tokenizer(str(bench.folder / "model")))
    curve: list[dict[str, float] | None] = []
    for items in straight.recorded_steps(run):
        batch = straight.pad([row for item in items for row in item.group.trajectories])
        rewards = np.array([item.answer.values for item in items], dtype=np.float64)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (
            rewards.std(1, ddof=1, keepdims=True) + 1e-4
        )
        logits = straight.logits_of(policy, batch)[:, :, :num_tokens] / 0.9
        new, old = straight.picked(straight.log_softmax(logits), batch), batch.scattered("sampled_logps")
        ratio, advantage = torch.exp(new - old), torch.tensor(advantages.reshape(-1, 1), dtype=torch.float32)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        loss = -(surrogate * batch.mask).sum() / batch.mask.sum()
        loss.backward()
        curve.append({"loss/total": loss.item(), "optim/grad_norm": optimiser.step()})
    straight.assert_same_curve(run, curve)
    straight.assert_same_weights(run, policy, start)


PLACES = {
    "in the second turn of an environment": ("oat.environments.batched", "BatchedEnvironment", "step", 4),
    "after an answer of an environment": ("oat.text.renderer", "Renderer", "extend", 21),
    "in the second turn of an engine": ("oat.engines.torch", "TorchEngine", "generate", 6),
    "with the pages of a first turn": ("oat.engines.decoding", "Decoding", "_enter_again", 3),
    "when the pages are given back": ("oat.engines.torch", "TorchEngine", "release", 3),
    "when the weights learn from episodes": ("oat.learner.learner", "Learner", "_step", 3),
}
"""Where a run is killed: module, class, method, and number of the call."""


@pytest.mark.fault("R34")
@pytest.mark.sample("Waiting-with the*", seconds=7.2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["Guessing", "Together", "Waiting"])
def test_killed_within_an_episode_and_over_the_wire(
    config: Path, run: Path, tmp_path: Path, figure: Callable[[str], None], name: str, place: str
) -> None:
    """An environment that answers a batch in one call, and one that answers at its own pace, make the same
    run as a plain one."""

    def die() -> None:
        module, cls, method, call = PLACES[place]
        kill_at(getattr(importlib.import_module(module), cls), method, call)

    environment = f"{HERE / 'guessing.py'}:{name}"
    flags = ("--compute.serialise", "true", "--sampling.environment", environment)
    assert_a_kill_changes_nothing(config, run, tmp_path, die, *flags)
    figure("1 of 1 runs killed within an episode of several turns equal the unbroken one bitwise")
