"""Rewards of the steps of a response: from the oracle over the ledger to an objective that credits tokens."""

import json
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import straight
import torch
from bench import HERE, Bench, assert_a_kill_changes_nothing
from fixtures import forked, kill_at, named, oat, write_jsonl
from stepwise import of_parts

from oat.commands.digest import digest_run
from oat.ledger.audit import contradictions
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.models.loading import load_tokenizer
from oat.rundir.reading import load_run
from oat.types import Item

STEPS, PROMPTS, SAMPLES = 4, 4, 4
MIXTURE = {
    "name": "mixture",
    "sources": [
        {"name": f"{HERE}/stepwise.py:parts", "label": "parts", "normalise": "batch"},
        {"name": f"{HERE}/rewards.py:graded", "label": "graded", "weight": 0.5},
    ],
}
ORACLES = {
    "characters": {"name": f"{HERE}/stepwise.py:parts"},
    "tokens": {"name": f"{HERE}/stepwise.py:Tokens"},
    "mixture": MIXTURE,
    "turns": {"name": "environment"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stepwise")


@pytest.fixture(scope="module", params=list(ORACLES))
def config(bench: Bench, folder: Path, request: pytest.FixtureRequest) -> Path:
    return bench.config(
        folder / f"{request.param}.yaml",
        model={"path": str(bench.folder / "model")},
        algorithm={"name": f"{HERE}/stepwise.py:ToGo", "prompts": PROMPTS, "samples": SAMPLES},
        oracle=ORACLES[request.param],
        sampling={
            "max_new_tokens": 5,
            "temperature": 0.9,
            **({"environment": f"{HERE}/guessing.py:Guessing"} if request.param == "turns" else {}),
        },
        learner={"learning_rate": 3e-3, "micro_batch_size": 5},
        checkpoint={"every": 2},
        stop={"max_steps": STEPS},
    )


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    assert oat("train", config) == 0
    return config.with_suffix("")


def items(run: Path) -> list[Item]:
    return [item for step in straight.recorded_steps(run) for item in step]


@pytest.mark.sample("turns", "mixture", seconds=0.8)
def test_the_ledger_has_the_steps_and_the_trajectories_say_where_they_end(
    bench: Bench, config: Path, run: Path
) -> None:
    tokenizer = load_tokenizer(str(bench.folder / "model"))
    if config.stem == "turns":
        assert {len(item.answer.steps) for item in items(run)} == {0}
        return
    kinds = set()
    for item in items(run):
        answer = item.answer
        for place, (row, text) in enumerate(
            zip(item.group.trajectories, item.question.candidates, strict=True)
        ):
            steps = answer.steps[place] if answer.steps else ()
            kinds.add((bool(steps), answer.marks[place]))
            if steps:
                assert answer.values[place] == math.fsum(reward for _, reward in steps)
            ends = row.segments[-1].text_ends
            if config.stem == "tokens":
                assert (answer.step_unit, ends) == ("tokens", None)
                continue
            kept = [[i for i in row.completion[: t + 1] if i > 2] for t in range(len(row.completion))]
            assert ends is not None
            assert ends.tolist() == [len(tokenizer.decode(ids)) for ids in kept]
            if config.stem == "characters" and answer.marks[place] == "ok":
                said = of_parts(text)
                assert steps == (tuple(said) if isinstance(said, list) else ())
    assert (True, "ok") in kinds
    if config.stem != "tokens":
        assert {(False, "abstain"), (False, "ok")} & kinds
    store = Store(run / "ledger.sqlite")
    assert contradictions(store) == []
    store.close()


def test_a_mixture_keeps_what_its_sources_said(config: Path, run: Path) -> None:
    if config.stem != "mixture":
        assert {tuple(item.answer.sources) for item in items(run)} == {()}
        return
    from rewards import graded

    for item in items(run):
        assert list(item.answer.sources) == ["parts", "graded"]
        assert list(item.answer.sources["graded"]) == graded([], item.question.candidates)
        said = [of_parts(text) for text in item.question.candidates]
        sums = [math.fsum(r for _, r in one) if isinstance(one, list) else one for one in said]
        assert list(item.answer.sources["parts"]) == pytest.approx(sums, abs=1e-12)


def test_every_step_is_the_straight_line_version(bench: Bench, run: Path) -> None:
    """The gradient of each step is that of rewards to go, computed here from the recorded answers."""
    policy, start = (straight.load(bench.folder / "model") for _ in range(2))
    optimiser = straight.Optimiser(list(policy.parameters()), rate=3e-3, decay=0.0, max_norm=1.0)
    num_tokens = len(load_tokenizer(str(bench.folder / "model")))
    curve: list[dict[str, float] | None] = []
    for own in straight.recorded_steps(run):
        batch = straight.pad([row for item in own for row in item.group.trajectories])
        advantages, valid = torch.zeros(batch.mask.shape), torch.zeros(len(batch.rows))
        number = 0
        for item in own:
            answer = item.answer
            fine = [value for value, mark in zip(answer.values, answer.marks, strict=True) if mark == "ok"]
            base = sum(fine) / len(fine) if fine else 0.0
            for place, row in enumerate(item.group.trajectories):
                valid[number] = answer.marks[place] == "ok"
                places = np.flatnonzero(row.trained[1:])  # the columns that predict the trained tokens
                for k, column in enumerate(places):
                    due = [reward for index, reward in credited(item, place) if index >= k]
                    advantages[number, column] = sum(due) - base
                number += 1
        logits = straight.logits_of(policy, batch)[:, :, :num_tokens] / 0.9
        logps = straight.picked(straight.log_softmax(logits), batch)
        mask = batch.mask * valid[:, None]
        loss = -(advantages * logps * mask).sum() / mask.sum()
        loss.backward()
        curve.append({"loss/total": loss.item(), "optim/grad_norm": optimiser.step()})
    straight.assert_same_curve(run, curve)
    straight.assert_same_weights(run, policy, start)


def credited(item: Item, place: int) -> list[tuple[int, float]]:
    """Return pairs of an index among the trained tokens and the reward that arrives there. A character of a
    response is one token; a token that ends the response has no character."""
    row, answer = item.group.trajectories[place], item.answer
    steps = answer.steps[place] if answer.steps else ()
    responses = [segment for segment in row.segments if segment.author == "model"]
    if responses[0].reward is not None:
        lasts = np.cumsum([len(each.ids) for each in responses]) - 1
        return [(int(last), float(each.reward or 0)) for last, each in zip(lasts, responses, strict=True)]
    if not steps:
        return [(len(row.completion) - 1, answer.values[place])]
    if answer.step_unit == "tokens":
        return [(end - 1, reward) for end, reward in steps]
    is_character = np.array([i > 2 for i in row.completion])
    return [(int(np.flatnonzero(is_character)[end - 1]), reward) for end, reward in steps]


@pytest.mark.parametrize("config", ["mixture"], indirect=True)
def test_the_mean_of_each_source_is_in_every_row(run: Path, tmp_path: Path, config: Path) -> None:
    """The metric follows from recorded answers, so a run that goes on after a kill has it too."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row, own in zip(rows[1:], straight.recorded_steps(run), strict=True):
        for label in ("parts", "graded"):
            scores = [s for item in own for s in item.answer.sources[label] if s is not None]
            assert row[f"oracle/source/{label}"] == pytest.approx(sum(scores) / len(scores), abs=1e-9)
    arm: Callable[[], None] = lambda: kill_at(Ledger, "take_feedback", 3, after=True)  # noqa: E731
    assert_a_kill_changes_nothing(config, run, tmp_path, arm)
    again = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    named = [{name: value for name, value in row.items() if "source" in name} for row in (*rows, *again)]
    assert named[: len(rows)] == named[len(rows) :]


@pytest.mark.slow(instead="tests/faults/test_kill.py", seconds=3.3)
@pytest.mark.parametrize("config", ["characters"], indirect=True)
@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(lambda: kill_at(Ledger, "ask", 3, after=True), id="asked"),
        pytest.param(lambda: kill_at(Store, "add_answers", 3), id="before answers are recorded"),
        pytest.param(lambda: kill_at(Ledger, "take_feedback", 3, after=True), id="taken"),
    ],
)
def test_a_kill_changes_nothing(config: Path, run: Path, tmp_path: Path, arm: Callable[[], None]) -> None:
    assert_a_kill_changes_nothing(config, run, tmp_path, arm)


@pytest.mark.slow(
    instead="tests/golden and tests/faults/test_state.py, over the wire; tests/faults/test_kill.py",
    seconds=0.8,
)
@pytest.mark.parametrize("config", ["mixture"], indirect=True)
def test_killed_while_it_learns_and_over_the_wire(config: Path, run: Path, tmp_path: Path) -> None:
    def die() -> None:

        kill_at(*named("an optimiser step"), 3)

    assert_a_kill_changes_nothing(config, run, tmp_path, die, "--compute.serialise", "true")


@pytest.mark.parametrize("config", ["tokens"], indirect=True)
def test_a_replay_asks_nobody(
    config: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "replay"
    other.mkdir()
    for name in ("config.yaml", "ledger.sqlite"):
        shutil.copy(run / name, other)
    shutil.copytree(run / "ledger.trajectories", other / "ledger.trajectories")
    monkeypatch.setattr(Ledger, "ask", lambda *_: pytest.fail("a replay asks nobody"))
    assert oat("train", config, "--run_dir", other) == 0
    assert digest_run(other) == digest_run(run)
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS + 1


@pytest.mark.parametrize("config", ["mixture"], indirect=True)
def test_the_files_that_people_read_have_them(run: Path, tmp_path: Path) -> None:
    found = items(run)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [row["step_unit"] for row in samples if "steps" in row] != []
    for row in samples:
        steps = [list(map(list, own)) for own in row.get("steps", [])]
        match = next(item for item in found if list(item.answer.values) == row["values"])
        assert steps == [list(map(list, own)) for own in match.answer.steps]
        assert row["sources"] == {name: list(scores) for name, scores in match.answer.sources.items()}
    table = load_run(run).questions
    assert [text for text in table["steps"] if text] != []
    assert [list(sources) for sources in table["sources"]] == [["parts", "graded"]] * len(found)
    out = tmp_path / "scored.jsonl"
    assert oat("ledger", run, "--export", out, "--layout", "scored") == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == sum(item.answer.marks.count("ok") for item in found)
    for row in rows:
        assert row["sources"].keys() == {"parts", "graded"}
        if "steps" in row:
            assert row["score"] == math.fsum(step["reward"] for step in row["steps"])
            assert row["steps"][-1]["end"] <= len(row["completion"])
    assert any("steps" in row for row in rows)


def test_recorded_responses_say_where_their_text_ends(bench: Bench, tmp_path: Path) -> None:
    """An offline run learns from steps of recorded responses, and a kill changes nothing."""
    records = [{"prompt": f"{a}+1=", "one": f"{a}+a", "two": f"b+{a}+{a}a"} for a in range(1, 7)]
    write_jsonl(tmp_path / "responses.jsonl", records)
    config = bench.config(
        tmp_path / "offline.yaml",
        model={"path": str(bench.folder / "model")},
        prompts={"path": str(tmp_path / "responses.jsonl"), "responses": ["one", "two"]},
        algorithm={"name": f"{HERE}/stepwise.py:ToGo", "prompts": 3, "samples": 2},
        oracle=ORACLES["characters"],
        learner={"learning_rate": 3e-3},
        stop={"max_steps": 3},
    )
    assert oat("train", config) == 0
    for item in items(config.with_suffix("")):
        for row, text, steps in zip(
            item.group.trajectories, item.question.candidates, item.answer.steps, strict=True
        ):
            ends = row.segments[-1].text_ends
            assert ends is not None
            assert ends.tolist() == [*range(1, len(text) + 1), len(text)], "the last token ends the turn"
            assert list(steps) == of_parts(text)
    (tmp_path / "killed").mkdir()
    arm: Callable[[], None] = lambda: kill_at(Ledger, "take_feedback", 2)  # noqa: E731
    assert_a_kill_changes_nothing(config, config.with_suffix(""), tmp_path / "killed", arm)


def test_a_reward_that_begins_to_give_steps_between_two_lives(bench: Bench, tmp_path: Path) -> None:
    """A round that was sampled before has no ends of its text. Its reward arrives at the last token."""
    code = (HERE / "stepwise.py").read_text(encoding="utf-8")
    reward = tmp_path / "reward.py"
    reward.write_text(code.replace("parts.gives_steps", "parts.gave").replace("of_parts(t", "worth(t"))
    config = bench.config(
        tmp_path / "run.yaml",
        model={"path": str(bench.folder / "model")},
        algorithm={"name": f"{HERE}/stepwise.py:ToGo", "prompts": PROMPTS, "samples": SAMPLES},
        oracle={"name": f"{reward}:parts"},
        learner={"learning_rate": 3e-3},
        stop={"max_steps": 3},
    )

    def die() -> int:
        kill_at(Store, "add_answers", 4)
        return oat("train", config)

    assert forked(die, tmp_path / "log") == -signal.SIGKILL
    reward.write_text(code)
    assert oat("train", config, "--accept-changed", "reward") == 0
    steps = straight.recorded_steps(config.with_suffix(""))
    has_steps = [any(item.answer.steps for item in own) for own in steps]
    ends = [own[0].group.trajectories[0].segments[-1].text_ends is not None for own in steps]
    assert (has_steps, ends) == ([False, True, True], [False, False, True])
