"""Dynamic sampling: a step asks further rounds in place of questions that teach its algorithm nothing."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from bench import HERE, Bench, assert_a_kill_changes_nothing
from fixtures import checked, forked, kill_at, logged, oat

from oat.commands.digest import digest_run
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.types import UNASKED, Item

STEPS, PROMPTS, FURTHER = 4, 4, 8


def config_of(bench: Bench, file: Path, **sections: object) -> Path:
    return bench.config(
        file,
        **{
            "model": {"path": str(bench.folder / "model")},
            "algorithm": {"name": "grpo", "prompts": PROMPTS, "samples": 2},
            "oracle": {"name": f"{HERE}/rewards.py:coarse"},
            "sampling": {"max_new_tokens": 5, "refill_rounds": FURTHER},
            "learner": {"learning_rate": 3e-3, "micro_batch_size": 4},
            "checkpoint": {"every": 2},
            "stop": {"max_steps": STEPS},
            **sections,
        },
    )


@pytest.fixture(scope="module")
def config(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return config_of(bench, tmp_path_factory.mktemp("refill") / "refill.yaml")


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    assert oat("train", config) == 0
    return config.with_suffix("")


def teaches(values: tuple[float, ...]) -> bool:
    return len(set(values)) > 1


def recorded(run: Path, step: int) -> tuple[list[list[Item]], list[Item], list[Item]]:
    """Return what a step asked, round by round; the items that it learned from; and those thrown away."""
    store = Store(run / "ledger.sqlite")
    kept, thrown = (
        [
            Item(store.groups("train", step, i.question.key.round)[i.member], i.question, answer, label)
            for i, answer, label in store.answers(intents)
        ]
        for intents in (store.taken("train", step), store.thrown_away(step))
    )
    store.close()
    everything = sorted([*kept, *thrown], key=lambda item: item.question.key)
    rounds = [
        [item for item in everything if item.question.key.round == number]
        for number in range(1 + everything[-1].question.key.round)
    ]
    return rounds, kept, thrown


def test_a_step_asks_until_enough_groups_teach(run: Path) -> None:
    """Each further round has as many prompts as are still missing, and the step learns from usable groups
    only."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    queries = 0
    for step, row in enumerate(rows):
        rounds, kept, thrown = recorded(run, step)
        missing = PROMPTS
        for asked in rounds:
            assert len(asked) == missing > 0
            missing -= sum(teaches(item.answer.values) for item in asked)
        assert missing == 0
        assert all(teaches(item.answer.values) for item in kept)
        assert not any(teaches(item.answer.values) for item in thrown)
        everything = len(kept) + len(thrown)
        queries += 2 * everything
        assert (len(kept), row["rows/trained"], row["oracle/queries"]) == (PROMPTS, 2 * PROMPTS, queries)
        assert row["refill/rounds"] == len(rounds)
        assert row["refill/thrown_away"] == len(thrown)
        assert row["refill/unusable_frac"] == pytest.approx(len(thrown) / everything)
        assert row["reward/zero_spread_frac"] == pytest.approx(len(thrown) / everything)
    assert sum(row["refill/rounds"] for row in rows) > STEPS


def test_check_knows_what_a_step_may_cost(
    config: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(config.read_text().replace(str(run), str(tmp_path / "new")), encoding="utf-8")
    said, _ = checked(capsys, file)
    most = ("rounds", "prompts", "responses", "questions", "queries")
    assert [said[f"{name} a step, most"] for name in most] == [9, 36, 72, 36, 72]
    assert [said[f"prompts left, {end}"] for end in ("least", "most")] == [16, 144]
    assert [said[f"responses left, {end}"] for end in ("least", "most")] == [32, 288]
    assert (said["steps left"], said["queries left, most"], said["optimiser steps left"]) == (4, 288, 4)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 32 < rows[-1]["oracle/queries"] <= 288
    assert checked(capsys, config)[0]["steps left"] == 0


def in_ask(call: int) -> Callable[[], None]:
    return lambda: kill_at(Ledger, "ask", call)


@pytest.mark.slow(instead="tests/faults/test_waves_killed.py::test_killed_once", seconds=10.6)
@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(lambda: kill_at(Ledger, "ask", 2), id="before the second round"),
        pytest.param(lambda: kill_at(Ledger, "ask", 2, after=True), id="after the second round"),
        pytest.param(lambda: kill_at(Ledger, "answered", 3), id="before answers are counted"),
        pytest.param(lambda: kill_at(Ledger, "answered", 3, after=True), id="after answers are counted"),
        pytest.param(lambda: kill_at(Store, "add_take", 2), id="before a take"),
        pytest.param(lambda: kill_at(Ledger, "take_feedback", 2, after=True), id="after a take"),
        pytest.param(lambda: kill_at(Ledger, "take_feedback", 4, after=True), id="after the last take"),
    ],
)
def test_a_kill_changes_nothing(config: Path, run: Path, tmp_path: Path, arm: Callable[[], None]) -> None:
    assert_a_kill_changes_nothing(config, run, tmp_path, arm)


@pytest.mark.slow(
    instead="tests/golden and tests/faults/test_state.py send runs through the wire encoding", seconds=0.8
)
def test_over_the_wire(config: Path, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "wire"
    assert oat("train", config, "--run_dir", other, "--compute.serialise", "true") == 0
    assert digest_run(other) == digest_run(run)


def test_a_replay_asks_nobody(
    config: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory with only the configuration and the ledger gives the same run, without an oracle."""
    other = tmp_path / "refill"
    other.mkdir()
    for name in ("config.yaml", "ledger.sqlite"):
        shutil.copy(run / name, other)
    shutil.copytree(run / "ledger.trajectories", other / "ledger.trajectories")
    monkeypatch.setattr(Ledger, "ask", lambda *_: pytest.fail("a replay asks nobody"))
    assert oat("train", config, "--run_dir", other) == 0
    assert digest_run(other) == digest_run(run)


def test_a_fork_goes_on_with_other_rounds(config: Path, run: Path, tmp_path: Path) -> None:
    """A fork may change the number of rounds. Its first steps are its parent's."""
    other = tmp_path / "fork"
    options = ("--from", f"{run}@2", "--sampling.refill_rounds", "1", "--stop.max_steps", "5")
    assert oat("train", config, "--run_dir", other, *options) == 0
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    assert all(row["refill/rounds"] <= 2 for row in rows[3:])
    assert rows[2]["refill/rounds"] > 2


def test_a_fork_without_rounds_asks_what_its_plan_has(config: Path, run: Path, tmp_path: Path) -> None:
    """What the parent's refilled steps asked is no advance that later steps could learn from."""
    other = tmp_path / "fork"
    options = ("--from", f"{run}@2", "--sampling.refill_rounds", "0", "--stop.max_steps", "5")
    assert oat("train", config, "--run_dir", other, *options) == 0
    for step in (2, 3, 4):
        (asked,), kept, thrown = recorded(other, step)
        assert (len(asked), len(kept), len(thrown)) == (PROMPTS, PROMPTS, 0)


RULE = """
from oat.algorithms.group import GRPO


class Mine(GRPO):
    def is_usable(self, item):
        return RULE
"""


def test_rounds_that_the_plan_itself_needs_are_no_refill(bench: Bench, tmp_path: Path) -> None:
    """A plan may have more questions than a round has prompts."""
    file = tmp_path / "mine.py"
    plan = "return True\n\n    def plan(self, step):\n        from oat.types import Plan\n"
    plan += "        return Plan(3, {'sampler': 2}, 8 if step else 0)"
    file.write_text(RULE.replace("return RULE", plan), encoding="utf-8")
    config = config_of(
        bench,
        tmp_path / "more.yaml",
        algorithm={"name": f"{file}:Mine", "prompts": PROMPTS, "samples": 2},
        sampling={"max_new_tokens": 5, "refill_rounds": 1},
        stop={"max_steps": 2},
    )
    assert logged(tmp_path / "log", "train", config) == 0, (tmp_path / "log").read_text()
    rounds, kept, _ = recorded(config.with_suffix(""), 1)
    assert (len(rounds), len(kept)) == (3, 8)


@pytest.mark.sample("None", seconds=0.6)
@pytest.mark.parametrize("said", ["None", "2", "'no'"])
def test_a_rule_that_is_no_bool_ends_the_run(bench: Bench, tmp_path: Path, said: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(RULE.replace("RULE", said), encoding="utf-8")
    algorithm = {"name": f"{file}:Mine", "prompts": PROMPTS, "samples": 2}
    config = config_of(bench, tmp_path / "wrong.yaml", algorithm=algorithm)
    log = tmp_path / "log"
    assert forked(lambda: oat("train", config), log) not in (0, -signal.SIGKILL)
    assert "`is_usable` of grpo returned" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_rule_that_becomes_looser_leaves_no_recorded_round_out(bench: Bench, tmp_path: Path) -> None:
    """Rounds that a killed process recorded are taken by the continued run, though its rule needs none."""
    file = tmp_path / "mine.py"
    file.write_text(RULE.replace("RULE", "super().is_usable(item)"), encoding="utf-8")
    config = config_of(
        bench,
        tmp_path / "rule.yaml",
        algorithm={"name": f"{file}:Mine", "prompts": PROMPTS, "samples": 2},
    )

    def die() -> int:
        kill_at(Ledger, "answered", 4)
        return oat("train", config)

    assert forked(die, tmp_path / "log") == -signal.SIGKILL
    file.write_text(RULE.replace("RULE", "True"), encoding="utf-8")
    assert logged(tmp_path / "log", "train", config) == 0
    run = config.with_suffix("")
    rounds, _, _ = recorded(run, 0)
    assert len(rounds) > 1
    everything = [item for step in range(STEPS) for asked in recorded(run, step)[0] for item in asked]
    occurrences = [item.question.key.occurrence for item in everything]
    assert occurrences == list(range(len(occurrences)))


def test_the_run_ends_with_the_first_step_that_it_cannot_fill(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `prompts.epochs`, prompts may be used up before the last planned step. That step learns from what
    there is, is evaluated and saved, and a continued run finds nothing left to do."""
    config = config_of(
        bench,
        tmp_path / "epochs.yaml",
        prompts={"path": str(bench.folder / "train.jsonl"), "epochs": 1},
        evaluation={"path": str(bench.folder / "train.jsonl"), "every": 100, "max_prompts": 2},
        stop={},
    )
    run = config.with_suffix("")
    said, _ = checked(capsys, config)
    assert [said[f"{name} left, most"] for name in ("steps", "queries", "optimiser steps")] == [6, 48, 6]
    assert (said["prompts left"], said["responses left"]) == (24, 48)
    assert oat("train", config) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = len(rows) - 1
    used_up = f"all prompts are used up (prompts.epochs) after step {steps}, and nothing is left to do"
    assert used_up in checked(capsys, config)[1]
    assert 1 < steps < 24 / PROMPTS
    asked = [recorded(run, step) for step in range(steps)]
    assert sum(len(kept) + len(thrown) for _, kept, thrown in asked) == 24
    assert [len(kept) for _, kept, _ in asked[:-1]] == [PROMPTS] * (steps - 1)
    assert len(asked[-1][1]) < PROMPTS
    assert "eval/greedy" in rows[-1]
    assert (run / "checkpoints" / f"step_{steps:08d}").exists()
    before = digest_run(run)
    capsys.readouterr()
    assert oat("train", config) == 0
    assert "its prompts are used up (prompts.epochs)" in capsys.readouterr().out
    assert digest_run(run) == before
    assert_a_kill_changes_nothing(config, run, tmp_path, lambda: kill_at(Ledger, "answered", 9))


def test_a_step_that_cannot_be_filled_ends_at_its_cap(
    bench: Bench,
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = config_of(
        bench,
        tmp_path / "flat.yaml",
        oracle={"name": f"{HERE}/rewards.py:flat"},
        sampling={"max_new_tokens": 5, "refill_rounds": 2},
        stop={"max_steps": 2},
    )
    assert oat("train", config) == 0
    rows = [json.loads(line) for line in (config.with_suffix("") / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        assert (row["refill/rounds"], row["refill/unusable_frac"], row["rows/trained"]) == (3, 1, 0)
        assert row["refill/thrown_away"] == 3 * PROMPTS
    said = [str(each.message) for each in recwarn if "teach nothing" in str(each.message)]
    assert len(said) == 1
    assert "step 1: 12 of 12 questions (100%) teach nothing, and no further round" in said[0]
    assert (
        "the run learned nothing: no optimiser step was made: the rewards of every group were equal in every "
        "step (all of them 1)" in capsys.readouterr().out
    )


def test_equal_responses_that_fill_no_step_are_named(
    bench: Bench, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    config = config_of(
        bench,
        tmp_path / "equal.yaml",
        model={"path": str(bench.folder / "model"), "reference": str(bench.folder / "reference")},
        algorithm={"name": "dpo", "prompts": PROMPTS},
        oracle={"name": f"{HERE}/rewards.py:graded"},
        sampling={"max_new_tokens": 2, "temperature": 0.02, "refill_rounds": 1},
        stop={"max_steps": 1},
    )
    assert oat("train", config) == 0
    ((kept, thrown),) = [recorded(config.with_suffix(""), 0)[1:]]
    unasked = sum(item.question.oracle == UNASKED for item in kept)
    learned = len(kept) - unasked
    asked = learned + len(thrown)
    assert learned < PROMPTS
    assert asked * unasked > 0
    (said,) = [str(each.message) for each in recwarn if "no further round" in str(each.message)]
    assert said.startswith(
        f"step 1: {len(thrown)} of {asked} questions ({len(thrown) / asked:.0%}) teach nothing and "
        f"{unasked} of {asked + unasked} were asked of no oracle (equal responses), and no further round"
    )
    assert f"the step learns from {learned} instead of {PROMPTS}" in said


@pytest.mark.sample("budget1", seconds=3.5)
@pytest.mark.parametrize("budget", [{"max_queries": 31}, {"max_cost": 30.5}])
def test_a_budget_ends_the_rounds_of_a_step(bench: Bench, tmp_path: Path, budget: dict[str, float]) -> None:
    """The run spends its budget, in queries or (in waves) in money, and no more. A kill changes nothing."""
    config = config_of(
        bench,
        tmp_path / "budget.yaml",
        oracle={"name": f"{HERE}/rewards.py:Dear"},
        sampling={"max_new_tokens": 5, "refill_rounds": 2},
        stop={"max_steps": 50, **budget},
    )
    assert oat("train", config) == 0
    run = config.with_suffix("")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    spent = rows[-1]["oracle/queries"] if "max_queries" in budget else rows[-1]["oracle/cost"]
    assert 28 <= spent <= 31
    assert_a_kill_changes_nothing(config, run, tmp_path, lambda: kill_at(Ledger, "answered", 4))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"oracle": {"name": f"{HERE}/rewards.py:coarse", "max_wait_s": 1, "max_answer_age": 0}},
            "remove oracle.max_wait_s",
        ),
        (
            {
                "algorithm": {"name": "kto", "prompts": 2},
                "oracle": {"name": f"{HERE}/rewards.py:coarse", "max_outstanding": 2},
            },
            "set oracle.max_outstanding to 0",
        ),
        ({"algorithm": {"name": "sft"}, "oracle": {"name": "recorded"}}, "reads no answers"),
        ({"stop": {"max_queries": 71}}, "one step can cost 72, with 36 questions in 9 rounds"),
        (
            {"oracle": {"name": f"{HERE}/rewards.py:Dear"}, "stop": {"max_cost": 71.5}},
            "stop.max_cost is 71.5, and one step can cost 72, with 36 questions in 9 rounds; raise it",
        ),
    ],
)
def test_settings_that_leave_no_room_are_refused(
    bench: Bench,
    tmp_path: Path,
    sections: dict[str, object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = config_of(bench, tmp_path / "mistake.yaml", **sections)
    assert oat("check", config) == 2
    assert message in capsys.readouterr().err


def test_questions_to_nobody_neither_fill_a_step_nor_are_thrown_away(bench: Bench, tmp_path: Path) -> None:
    config = config_of(
        bench,
        tmp_path / "pairs.yaml",
        model={"path": str(bench.folder / "model"), "reference": str(bench.folder / "reference")},
        algorithm={"name": "dpo", "prompts": PROMPTS},
        oracle={"name": f"{HERE}/rewards.py:graded"},
        sampling={"max_new_tokens": 1, "refill_rounds": FURTHER},
    )
    assert oat("train", config) == 0
    run, unasked = config.with_suffix(""), 0
    for step in range(STEPS):
        _, kept, thrown = recorded(run, step)
        asked = [item for item in kept if item.question.oracle != UNASKED]
        unasked += len(kept) - len(asked)
        assert len(asked) == PROMPTS
        assert all(item.label is not None for item in asked)
        assert all(item.label is None and item.question.oracle != UNASKED for item in thrown)
    assert unasked
