"""Episodes that outgrow the model's context end there, cut like single responses, and the run goes on."""

import json
import re
import shutil
from pathlib import Path

import pytest
import straight
from bench import HERE, Bench, assert_a_kill_changes_nothing
from fixtures import kill_at, oat

from oat.environments.batched import BatchedEnvironment
from oat.errors import OatWarning
from oat.rundir.rows import read_metrics

CONTEXT, LONGEST, MESSAGE = 32, 6, 11
"""Largest number of tokens of an episode, of a response, and the number of those of a message."""


@pytest.fixture(scope="module")
def config(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    model = shutil.copytree(bench.folder / "model", folder / "model")
    stored = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**stored, "max_position_embeddings": CONTEXT}))
    return bench.config(
        folder / "full.yaml",
        model={"path": str(model)},
        sampling={"max_new_tokens": LONGEST, "environment": f"{HERE / 'endless.py'}:Endless"},
        algorithm={"name": "grpo", "prompts": 4, "samples": 2, "credit": "turns"},
        oracle={"name": "environment"},
        learner={"learning_rate": 3e-3},
        evaluation={"path": str(bench.folder / "train.jsonl"), "every": 1, "max_prompts": 1, "greedy": False},
        stop={"max_steps": 1},
    )


@pytest.fixture(scope="module")
def full(config: Path) -> tuple[Path, str]:
    """The run, and what it said."""
    with pytest.warns(OatWarning, match="goes on in an episode") as warned:
        assert oat("train", config) == 0
    return config.with_suffix(""), "\n".join(str(each.message) for each in warned)


def test_an_episode_ends_where_its_context_has_no_room_for_the_message(full: tuple[Path, str]) -> None:
    run, said = full
    lengths = set()
    for items in straight.recorded_steps(run):
        for item in items:
            message = 0 if item.group.prompt.messages[0].content.startswith("1") else MESSAGE
            for row, value in zip(item.group.trajectories, item.answer.values, strict=True):
                responses = [segment for segment in row.segments if segment.author == "model"]
                assert row.finish_reason == "length"
                assert [len(s.ids) for s in row.segments[2::2]] == [message] * (len(responses) - 1)
                assert all(1 <= len(each.ids) <= LONGEST for each in responses)
                assert CONTEXT - message <= len(row.ids) <= CONTEXT
                assert row.reward == value == straight.added(each.reward or 0.0 for each in responses)
                lengths.add((message, len(responses)))
    assert {message for message, _ in lengths} == {0, MESSAGE}
    assert min(turns for _, turns in lengths) > 1
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["response/truncated_frac"] for row in rows[1:]] == [1.0]
    assert [row["step"] for row in rows if "eval/sampled" in row] == [0, 1]
    assert said.count("the environment Endless goes on in an episode from record") == 1
    assert f"the model's context holds {CONTEXT}, and a response needs at least one" in said


@pytest.mark.slow(
    instead="tests/protocol/test_episode.py::test_killed_within_an_episode_and_over_the_wire", seconds=2.9
)
@pytest.mark.parametrize("name", ["Together", "Waiting"])
@pytest.mark.filterwarnings("ignore:the environment:UserWarning")
def test_killed_and_continued_it_ends_at_the_same_token(
    config: Path, full: tuple[Path, str], tmp_path: Path, name: str
) -> None:
    assert_a_kill_changes_nothing(
        config,
        full[0],
        tmp_path,
        lambda: kill_at(BatchedEnvironment, "step", 9),
        *("--compute.serialise", "true", "--sampling.environment", f"{HERE / 'endless.py'}:{name}"),
    )


def test_a_cache_that_cannot_hold_a_whole_episode_is_refused(
    config: Path, full: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--engine.cache_gb", "7e-6")
    for command in ("check", "train"):
        assert oat(command, config, "--run_dir", tmp_path / "new", *small) == 2
        found = re.search(
            r"engine.cache_gb: an episode with the environment may fill the model's context, and keys and "
            rf"values of {CONTEXT} tokens take (\S+) GB, and the cache holds 6\S+; set it to \1 or more",
            capsys.readouterr().err,
        )
        assert found
    assert oat("check", config, "--run_dir", tmp_path / "new", "--engine.cache_gb", found[1]) == 0


def test_a_run_that_was_begun_with_a_small_cache_goes_on(
    config: Path, full: tuple[Path, str], tmp_path: Path
) -> None:
    """An earlier version did not refuse it, and its episodes may be short."""
    run = tmp_path / "begun"
    shutil.copytree(full[0], run)
    stored = run / "config.yaml"
    stored.write_text(stored.read_text().replace("cache_gb: 4.0", "cache_gb: 7.0e-06"))
    assert oat("check", config, "--run_dir", run, "--engine.cache_gb", "7e-6") == 0
    assert oat("check", config, "--run_dir", tmp_path / "fork", "--from", f"{run}@1") == 0
