"""The last line of a run that learned nothing says so, with the likely cause. So does a warning after the
first steps, or after the first one if the cause is known by then. A run that learned has neither."""

import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, damage_metrics, forked, kill_at, oat, write_jsonl
from flat_steps import flat_steps
from openai_server import judging

from oat import Trainer
from oat.algorithms.base import Objective
from oat.config.load import load_config
from oat.learner.learner import Learner
from oat.reports.outcome import CUT, SPREAD, faults_of_first_step, likely_cause
from oat.resolve.about import RunSummary, about
from oat.resolve.resolve import resolve

REWARDS = """
def constant(prompts, completions, **columns):
    return [0.5] * len(completions)


def none(prompts, completions, **columns):
    return [None] * len(completions)


def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]
"""
NO_STEP = "no optimiser step was made"
NOTHING = "oat train: the run learned nothing: "
AT_FIRST = "step 1: the rewards of every group were equal (their mean is 0"


def trained(config: Path, capsys: pytest.CaptureFixture[str], *flags: object) -> tuple[str, list[str]]:
    """Train, and return the last line of the output and the warnings about the first steps: that the run has
    learned nothing yet, or that rewards were equal."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert oat("train", config, *flags) == 0
    return capsys.readouterr().out.splitlines()[-1], [
        str(each.message)
        for each in caught
        if "has learned nothing yet" in str(each.message) or AT_FIRST in str(each.message)
    ]


def rewarded(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    return {
        "oracle.name": f"{folder / 'rewards.py'}:{name}",
        "evaluation": None,
        "stop.max_steps": 3,
        **changes,
    }


EQUAL = "the rewards of every group were equal in every step (all of them 0.5); "
CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "equal rewards": ("grpo", "constant", {}, EQUAL),
    "equal rewards beside a tie to the reference": ("grpo", "constant", {"algorithm.kl_coef": 0.1}, EQUAL),
    "equal rewards of pairs": ("dpo", "constant", {}, f"{NO_STEP}: {EQUAL}"),
    "no rewards": (
        "grpo",
        "none",
        {},
        (
            "no optimiser step was made; of the questions, {oracle} left 100% without a value: it abstained: "
            "its function"
        ),
    ),
    "an unreached threshold": (
        "sft",
        "length",
        {"algorithm.threshold": 99.0},
        "no optimiser step was made: no response reached algorithm.threshold, 99.0",
    ),
    "a learning rate of 0": (
        "grpo",
        "length",
        {"learner.learning_rate": 0.0},
        "the learning rate was 0 in every step (learner.learning_rate is 0)",
    ),
}


@pytest.mark.sample("equal rewards of pairs", seconds=2.2)
@pytest.mark.parametrize(("algorithm", "reward", "changes", "cause"), CASES.values(), ids=CASES.keys())
def test_nothing_learned(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    algorithm: str,
    reward: str,
    changes: dict[str, Any],
    cause: str,
) -> None:
    """A run that learned nothing says so after its first steps and in its last line. A repeated command on
    the finished run prints the last line again."""
    changes = rewarded(tmp_path, reward, **changes)
    cause = cause.format(oracle=changes["oracle.name"])
    config = world.config(algorithm, tmp_path, changes)
    last, early = trained(config, capsys)
    assert last.startswith(NOTHING + cause)
    assert last.endswith(f"It ended, since all 3 steps are done; the run lies in {tmp_path / algorithm}")
    assert len(early) == 1
    at_first = EQUAL in cause
    assert early[0].startswith(
        f"{AT_FIRST}.5), " if at_first else f"after 2 steps: the run has learned nothing yet: {cause}"
    )
    assert trained(config, capsys, "--tracking.shown", "[]") == (last, [])


def test_a_run_that_ends_with_its_first_step_names_the_cause_once(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config("grpo", tmp_path, rewarded(tmp_path, "constant", **{"stop.max_steps": 1}))
    last, early = trained(config, capsys)
    assert last.startswith(f"{NOTHING}the rewards of every group were equal in every step (their mean 0.5); ")
    assert early == []


MASKED = {"algorithm.rewards": {"truncated": "mask"}}
TIES = {"answers/tied_frac": 1.0, "rows/trained": 0.0, "oracle/queries": 8.0}
CONSTANT = "or the reward is a constant"
FLAT = {SPREAD: 1.0, "reward/mean": 0.0}
FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, float], list[str]]] = {
    "few cut": ("grpo", {}, {CUT: 0.49, SPREAD: 0.9}, []),
    "half cut": ("grpo", {}, {CUT: 0.5, SPREAD: 0.5}, ["50% of the responses were cut"]),
    "half masked": ("grpo", MASKED, {CUT: 0.5}, ["(algorithm.rewards.truncated is mask)"]),
    "all cut": ("grpo", {}, {CUT: 1.0}, ["render.template: tokenizer"]),
    "all cut in a chat": ("grpo", {"render.template": "chatml"}, {CUT: 1.0}, ["oat check --show-tokens"]),
    "all cut and equal": (
        "dpo",
        {},
        {CUT: 1.0, **TIES, **FLAT},
        ["every response", f"was finished, {CONSTANT}"],
    ),
    "hopeless": (
        "grpo",
        {},
        FLAT,
        [f"no response does the task (take easier prompts, or give partial credit), {CONSTANT}"],
    ),
    "solved": (
        "grpo",
        {},
        {**FLAT, "reward/mean": 1.0},
        [f"every response does the task (take harder prompts), {CONSTANT}"],
    ),
    "constant": ("grpo", {}, {**FLAT, "reward/mean": 0.5}, [CONSTANT]),
    "penalties": (
        "grpo",
        {"algorithm.rewards": {"missing_end_penalty": 0.5}},
        {**FLAT, "reward/mean": 1.0, CUT: 0.2},
        [],
    ),
    "sources": ("grpo", {"algorithm.rewards": {"sources": "group"}}, {**FLAT, "reward/mean": 1.0}, []),
    "hardly answered": ("grpo", {}, {**FLAT, "answers/missing_frac": 0.6}, []),
    "equal where groups are not compared": ("kto", {"algorithm.samples": 2}, FLAT, []),
    "ties of a judge": ("dpo", {}, TIES, ["all pairs were ties"]),
    "ties that nobody was asked about": ("dpo", {}, {**TIES, "oracle/queries": 0.0}, []),
    "ties that are learned from": ("dpo", {}, {**TIES, **FLAT, "rows/trained": 8.0}, []),
}


def made(world: World, folder: Path, algorithm: str, changes: dict[str, Any]) -> tuple[Objective, RunSummary]:
    resolved = resolve(*load_config(world.config(algorithm, folder, changes)))
    return resolved.objective, about(resolved.config)


@pytest.mark.parametrize(("algorithm", "changes", "row", "words"), FAULTS.values(), ids=FAULTS.keys())
def test_what_the_first_step_shows(
    world: World,
    tmp_path: Path,
    algorithm: str,
    changes: dict[str, Any],
    row: dict[str, float],
    words: list[str],
) -> None:
    found = [line for _, line in faults_of_first_step(1, row, *made(world, tmp_path, algorithm, changes))]
    assert len(found) == len(words)
    assert all(part in line for part, line in zip(words, found, strict=True)), found


def test_a_run_whose_responses_were_all_cut_says_so(world: World, tmp_path: Path) -> None:
    cuts = "cut at the length limit (sampling.max_new_tokens is 4)"
    masked, kept = (made(world, tmp_path, "grpo", changes) for changes in (MASKED, {}))
    rows = [{CUT: 1.0, "answers/missing_frac": 0.0, **FLAT}] * 2
    learned = [{**row, "optim/grad_norm": 0.0} for row in rows]
    lost = f"every response was {cuts}, and nothing is learned from such responses"
    assert str(likely_cause(rows, *masked)).startswith(f"{NO_STEP}: {lost} (algorithm.rewards.truncated is m")
    equal = "the rewards of every group were equal in every step (all of them 0); "
    assert str(likely_cause(learned, *kept)).startswith(f"{equal}every response was {cuts}; raise")
    constant = str(likely_cause([{**row, "reward/mean": 1.0} for row in learned], *kept))
    assert constant.index("the reward is a constant") < constant.index("every response was")
    rows[1] = {**rows[1], CUT: 0.9}
    assert str(likely_cause(rows, *masked)).startswith(
        f"{NO_STEP}: {equal}95% of the responses were {cuts}, "
    )


def offline(folder: Path, rejected: str) -> dict[str, Any]:
    records = [{"prompt": f"{a}+1=", "chosen": "a", "rejected": rejected} for a in range(8)]
    data = write_jsonl(folder / "pairs.jsonl", records)
    return {
        "prompts": {"path": str(data)},
        "oracle": {"name": "recorded"},
        "evaluation": None,
        "stop.max_steps": 3,
    }


LEARNING: dict[str, tuple[str, dict[str, Any]]] = {
    "scores": ("grpo", {}),
    "demonstrations that all pass": ("sft", {"algorithm.threshold": 0.0}),
    "desirable responses only": ("kto", {"algorithm.samples": 2, "algorithm.threshold": -1.0}),
    "a reward model beside a frozen policy": ("reward_model", {"algorithm.samples": 2}),
    "a warm-up": ("grpo", {"learner.warmup_steps": 2}),
}


@pytest.mark.sample("scores", "a warm-up", seconds=0.6)
@pytest.mark.parametrize(("algorithm", "changes"), LEARNING.values(), ids=LEARNING.keys())
def test_something_learned(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str, changes: dict[str, Any]
) -> None:
    last, early = trained(
        world.config(algorithm, tmp_path, {"evaluation": None, "stop.max_steps": 3, **changes}), capsys
    )
    assert last.startswith("oat train: finished, all 3 steps are done")
    assert early == []


def test_recorded_pairs(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rejected, is_learned in (("learned", "b", True), ("equal", "a", False)):
        (tmp_path / name).mkdir()
        changes = {**offline(tmp_path / name, rejected), "algorithm": {"name": "dpo", "prompts": 4}}
        last, early = trained(world.config("dpo", tmp_path / name, changes), capsys)
        assert last.startswith(
            "oat train: finished" if is_learned else f"{NOTHING}{NO_STEP}: pairs were ties: "
        )
        assert len(early) == (not is_learned)


def test_a_judge_without_verdicts(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with judging(lambda shown: "Hmm.") as (_, _, url):
        oracle = {
            "name": "judge",
            "model": "m",
            "url": url,
            "orders": "one",
            "invalid": "skip",
            "timeout_s": 5.0,
        }
        changes = {"oracle": oracle, "evaluation": None, "stop.max_steps": 2}
        last, _ = trained(world.config("dpo", tmp_path, changes), capsys)
    assert last.startswith(
        f"{NOTHING}{NO_STEP}; of the questions, judge left 100% without a value: it abstained: its "
        "replies have no"
    )


@pytest.mark.parametrize(("always", "place"), [("0", "first"), ("1", "last")])
def test_a_judge_that_goes_by_the_place(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], always: str, place: str
) -> None:
    with judging(lambda shown: always) as (_, _, url):
        oracle = {
            "name": "judge",
            "model": "m",
            "url": url,
            "timeout_s": 5.0,
            "price_in": 1000.0,
            "price_out": 1000.0,
        }
        changes = {"oracle": oracle, "evaluation": None, "stop.max_steps": 2}
        last, _ = trained(world.config("dpo", tmp_path, changes), capsys)
    assert last.startswith(
        f"{NOTHING}{NO_STEP}: pairs were ties: the judge finds the response that it is shown {place} better"
    )
    assert "two orders contradict each other" in last


def test_a_run_without_a_step(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last, _ = trained(world.config("dpo", tmp_path, {"stop": {"max_hours": 1e-9}}), capsys)
    assert last.startswith(f"{NOTHING}it made no step. It ended, since it ran for 0.00 hours")


@pytest.mark.sample("2-learned1", seconds=4.4)
@pytest.mark.parametrize("learned", [(), (1,), (3,)])
@pytest.mark.parametrize("killed", [2, 4])
def test_of_all_lives(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], learned: tuple[int, ...], killed: int
) -> None:
    """A run that was killed ends with the last line of the unbroken run. It warns after its first step if
    this step is done after the kill."""
    changes = flat_steps(tmp_path, {0, 1, 2, 3} - {*learned})
    changes |= {
        "stop.max_steps": 4,
        "checkpoint": {"every": 2, "background": False},
        "evaluation": None,
        "alarms.spread.action": "off",
    }
    config = world.config("grpo", tmp_path, changes)
    assert (
        forked(lambda: kill_at(Learner, "update", killed) or oat("train", config), tmp_path / "log")
        == -signal.SIGKILL
    )
    last, early = trained(config, capsys)
    assert last.startswith("oat train: finished" if learned else f"{NOTHING}the rewards of every group")
    assert len(early) == (killed == 2)


def test_a_fork_is_of_its_own_steps(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = world.config("grpo", tmp_path, {"evaluation": None, "stop.max_steps": 2})
    assert trained(first, capsys)[0].startswith("oat train: finished")
    flags = ["--run_dir", tmp_path / "fork", "--learner.learning_rate", 0, "--stop.max_steps", 6]
    flags += ["--tracking.shown", "[]"]
    last, early = trained(first, capsys, "--from", tmp_path / "grpo", *flags)
    assert last.startswith(f"{NOTHING}the learning rate was 0 in every step")
    assert [text[:14] for text in early] == ["after 4 steps:"]


@pytest.mark.sample("behind it", seconds=1.2)
@pytest.mark.parametrize(
    "flags",
    [[], ["--stop.max_steps", 1], ["--stop.max_steps", 9, "--stop.max_queries", 12]],
    ids=["at its end", "behind it", "nothing to spend"],
)
def test_a_fork_with_nothing_left_to_do_learned_as_much_as_it_should(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[object]
) -> None:
    first = world.config("grpo", tmp_path, {"evaluation": None, "stop.max_steps": 2})
    assert oat("train", first) == 0
    capsys.readouterr()
    for _ in range(2):
        assert oat("train", first, "--from", tmp_path / "grpo", "--run_dir", tmp_path / "fork", *flags) == 0
        printed = capsys.readouterr().out
        assert "it had ended before, and nothing was left to do" in printed
        assert "oat train: finished, " in printed
        assert "learned nothing" not in printed


def test_where_rows_are_missing_nobody_knows(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config("grpo", tmp_path, rewarded(tmp_path, "constant"))
    assert trained(config, capsys)[0].startswith(NOTHING)
    damage_metrics(tmp_path / "grpo", {3: None})
    lines = oat("train", config), capsys.readouterr().out.splitlines()
    assert not any("learned nothing" in line for line in lines[1])


def test_from_python(world: World, tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "model": str(world.folder / "model"),
        "prompts": str(world.folder / "train.jsonl"),
        "quiet": True,
    }
    common |= {
        "sampling": {"max_new_tokens": 4},
        "algorithm": {"name": "grpo", "prompts": 4, "samples": 3},
        "compute": {"threads": 1},
    }

    def constant(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    with pytest.warns(
        UserWarning,
        match="step 1: the rewards of every group were equal",
    ):
        found = Trainer(oracle=constant, run_dir=tmp_path / "a", stop={"max_steps": 3}, **common).train()
    assert "the rewards of every group were equal" in str(found.learned_nothing)
    assert (
        Trainer(oracle=world.oracle, run_dir=tmp_path / "b", stop={"max_steps": 2}, **common)
        .train()
        .learned_nothing
        is None
    )
