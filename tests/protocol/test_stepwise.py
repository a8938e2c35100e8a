"""Rewards of the steps of a response: from the oracle over the ledger to an objective that credits tokens."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import straight
import torch
from bench import HERE, Bench, assert_a_kill_changes_nothing
from fixtures import kill_at, oat
from stepwise import of_parts

from oat.commands.export import digest_run
from oat.ledger.audit import contradictions
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.models.loading import load_tokenizer
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
        sampling={"max_new_tokens": 5, "temperature": 0.9},
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


def test_the_ledger_has_the_steps_and_the_trajectories_say_where_they_end(
    bench: Bench, config: Path, run: Path
) -> None:
    tokenizer = load_tokenizer(str(bench.folder / "model"))
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
                first = len(row.segments[0].ids) - 1  # the column that predicts the first response token
                for t in range(len(row.completion)):
                    due = [r for end, r in credited(item, place) if end > t]
                    advantages[number, first + t] = sum(due) - base
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
    """Return pairs of a number of tokens and the reward that arrives at the last of them. A character of a
    response is one token; a token that ends the response has no character."""
    row, answer = item.group.trajectories[place], item.answer
    steps = answer.steps[place] if answer.steps else ()
    if not steps:
        return [(len(row.completion), answer.values[place])]
    if answer.step_unit == "tokens":
        return list(steps)
    is_character = np.array([i > 2 for i in row.completion])
    return [(int(np.flatnonzero(is_character)[end - 1]) + 1, reward) for end, reward in steps]


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


@pytest.mark.parametrize("config", ["mixture"], indirect=True)
def test_killed_while_it_learns_and_over_the_wire(config: Path, run: Path, tmp_path: Path) -> None:
    def die() -> None:
        from oat.learner.learner import Learner

        kill_at(Learner, "_step", 3)

    assert_a_kill_changes_nothing(config, run, tmp_path, die, "--compute.serialise", "true")


@pytest.mark.parametrize("config", ["tokens"], indirect=True)
def test_a_replay_asks_nobody(
    config: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "replay"
    other.mkdir()
    for name in ("config.yaml", "ledger.sqlite"):
        shutil.copy(run / name, other)
    monkeypatch.setattr(Ledger, "ask", lambda *_: pytest.fail("a replay asks nobody"))
    assert oat("train", config, "--run_dir", other) == 0
    assert digest_run(other) == digest_run(run)
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS + 1
