"""A run warns or ends if the code of its rewards has changed since it began. These are real runs whose code
is changed before they are continued."""

import csv
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, forked, kill_at, named, write_jsonl
from inputs import HELPER, REWARD, make, rows, run, told

from oat.assemble.fingerprints import inputs_of_oracles, versions_of
from oat.models.identity import hash_of
from oat.oracles.make import build_oracle
from oat.plugins import loading as plugins

GAME = """from oat.environments.base import Turn


class Twice:
    def reset(self, prompt, generator):
        return {}

    def step(self, state, response):
        return Turn(state, None, float(response.count("a")))
"""


def pay_more(folder: Path) -> None:
    (folder / "reward.py").write_text(REWARD.replace("worth(text) for", "100 + worth(text) for"))


def test_a_changed_reward_goes_on_only_when_that_is_accepted(copy: Path) -> None:
    pay_more(copy)
    for name in ("train", "check"):
        code, said = run(copy, name, "run.yaml", "--stop.max_steps", 4)
        assert (code, "oracle.name is 'reward.py:reward'" in said, "\n  reward.py: its text\n" in said) == (
            2,
            True,
            True,
        ), said
        assert "--accept-changed reward" in said
    code, said = run(copy, "train", "run.yaml", "--accept-changed", "rewards")
    assert (code, "what may change and be accepted is reward, not 'rewards'" in said) == (2, True), said
    assert run(copy, "check", "run.yaml", "--stop.max_steps", 4, "--accept-changed", "reward")[0] == 0
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 4, "--accept-changed", "reward")
    assert (code, said.count("oat: warning"), "rows from here on have oracle/changes" in said) == (
        0,
        1,
        True,
    ), said
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 5)
    assert (code, "warning" in said) == (0, False), said
    found = rows(copy / "run")
    assert [row.get("oracle/changes") for row in found] == [None, None, None, 1, 1, 1]
    assert max(row["reward/mean"] for row in found[1:3]) < 50 < min(row["reward/mean"] for row in found[3:])
    assert ["inputs" in entry for entry in told(copy / "run")] == [True, True, False]


@pytest.mark.slow(instead="test_a_changed_reward_goes_on_only_when_that_is_accepted", seconds=2.1)
def test_what_a_kill_leaves_of_an_accepted_change(copy: Path, begun: Path) -> None:
    """An accepted change is recorded with the first question after it. After a kill no command has to accept
    it again, and the rows equal those of the run without a kill."""
    from oat.commands.digest import digest_run

    unbroken = Path(shutil.copytree(begun, copy.parent / "unbroken"))
    for folder in (copy, unbroken):
        pay_more(folder)
    flags = ("train", "run.yaml", "--stop.max_steps", 4)
    assert run(unbroken, *flags, "--accept-changed", "reward")[0] == 0
    code, said = run(
        copy,
        *flags,
        "--accept-changed",
        "reward",
        before=lambda: kill_at(*named("answers are recorded"), 1, after=True),
    )
    assert code == -signal.SIGKILL, said
    assert run(copy, *flags)[0] == 0
    assert digest_run(copy / "run") == digest_run(unbroken / "run")
    assert [row.get("oracle/changes") for row in rows(copy / "run")] == [None, None, None, 1, 1]


@pytest.mark.slow(
    instead="test_a_changed_reward_goes_on_only_when_that_is_accepted; tests/opening/test_fork.py",
    seconds=4.7,
)
def test_a_fork_has_the_reward_of_its_time(copy: Path) -> None:
    pay_more(copy)
    assert (
        run(
            copy,
            "train",
            "run.yaml",
            "--stop.max_steps",
            4,
            "--accept-changed",
            "reward",
            "--checkpoint.keep_last",
            9,
        )[0]
        == 0
    )
    fork = ("train", "run.yaml", "--stop.max_steps", 4, "--learner.learning_rate", 0.1)
    for step, needs in ((2, True), (3, False)):
        begin = (*fork, "--run_dir", f"fork{step}", "--from", f"run@{step}")
        code, said = run(copy, *begin)
        assert code == (2 if needs else 0), said
        assert run(copy, "check", *begin[1:])[0] == code
        assert run(copy, *begin, "--accept-changed", "reward")[0] == 0
        assert [row.get("oracle/changes") for row in rows(copy / f"fork{step}")] == [None, None, None, 1, 1]
    (copy / "reward.py").write_text(REWARD)
    assert run(copy, *fork, "--run_dir", "old", "--from", "run@2")[0] == 0, (
        "it is what the run asked up to there"
    )
    assert not any("oracle/changes" in row for row in rows(copy / "old"))


@pytest.mark.slow(instead="test_a_changed_reward_goes_on_only_when_that_is_accepted", seconds=1.2)
def test_a_reward_that_never_answered_may_be_mended(world: World, tmp_path: Path) -> None:
    folder = make(world, tmp_path, "grpo", {"evaluation": None})
    (folder / "reward.py").write_text(
        "def reward(prompts, completions, **columns):\n    raise ValueError('not yet')\n"
    )
    assert run(folder, "train", "run.yaml")[0] == 1
    pay_more(folder)
    code, said = run(folder, "train", "run.yaml")
    assert (code, "changed since this run last asked it" in said) == (0, False), said
    assert not any("oracle/changes" in row for row in rows(folder / "run"))


DECLARED = """
from oat.oracles.local import LocalOracle


class Declared(LocalOracle):
    version = "{version}"

    def __init__(self):
        super().__init__("declared")

    def values(self, questions):
        return [[float(len(text)) for text in question.candidates] for question in questions]
"""


@pytest.mark.slow(instead="test_a_changed_reward_goes_on_only_when_that_is_accepted", seconds=2.2)
def test_a_declared_version_is_a_warning(world: World, tmp_path: Path) -> None:
    folder = make(world, tmp_path, "grpo", {"oracle.name": "declared.py:Declared"})
    (folder / "declared.py").write_text(DECLARED.format(version="1"))
    assert run(folder, "train", "run.yaml")[0] == 0
    (folder / "declared.py").write_text(DECLARED.format(version="1") + "\n# as before\n")
    code, said = run(folder, "check", "run.yaml")
    assert (code, said.count("code of yours has changed since this run last used it")) == (0, 1), said
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3)
    assert (
        code,
        said.count("oat: warning"),
        "code of yours has changed since this run last used it" in said,
    ) == (0, 1, True), said
    (folder / "declared.py").write_text(DECLARED.format(version="2"))
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 4)
    assert (code, "oracle declared.py:Declared has changed since this run last asked it" in said) == (
        0,
        True,
    ), said
    assert [row.get("oracle/changes") for row in rows(folder / "run")] == [None, None, None, None, 1]


@pytest.mark.slow(instead="test_a_changed_reward_goes_on_only_when_that_is_accepted", seconds=2.0)
def test_own_code_and_held_out_data_are_warned_of(copy: Path) -> None:
    """A continued run warns if a module of the user's or the held-out data have changed. The reward imports
    the module only at its first answer."""
    assert {"reward.py", "helper.py"} <= told(copy / "run")[0]["inputs"]["modules"].keys()
    (copy / "helper.py").write_text(HELPER + "\n# changed\n")
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 3)
    assert (
        code,
        said.count("oat: warning"),
        "code of yours has changed since this run last used it" in said,
        ": helper.py" in said,
    ) == (
        0,
        1,
        True,
        True,
    )
    write_jsonl(copy / "held_out.jsonl", [{"prompt": "1+1=", "answer": "b"}])
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 4)
    assert (
        code,
        said.count("oat: warning"),
        "the held-out prompts (evaluation.path) are not those" in said,
    ) == (0, 1, True), said
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 5)
    assert (code, "warning" in said) == (0, False), said


def test_an_evaluation_says_that_it_is_another(copy: Path) -> None:
    pay_more(copy)
    write_jsonl(copy / "held_out.jsonl", [{"prompt": "1+1=", "answer": "b"}])
    code, said = run(copy, "eval", "run")
    assert (code, said.count("oat: warning")) == (0, 3), said
    assert "evaluation.oracle reward.py:reward has changed since run asked it" in said
    assert "the held-out prompts (evaluation.path) are not those" in said
    code, said = run(copy, "eval", "run", "--evaluation.path", "train.jsonl")
    assert "held-out prompts" not in said, "who names others knows it"


def test_a_reward_file_of_a_run_begun_before_is_held_against_its_ledger(copy: Path) -> None:
    (copy / "run" / "environment.json").unlink()
    pay_more(copy)
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, "reward.py: its text" in said) == (2, True), said


def test_what_stands_there_names_no_place(copy: Path) -> None:
    text = json.dumps([entry["inputs"] for entry in told(copy / "run") if "inputs" in entry])
    assert str(copy) not in text
    assert str(Path.home()) not in text


TRAINER = """
import oat
from {module} import reward

def train(steps, **options):
    prompts = [{{"prompt": f"{{n}}+1="}} for n in range(6)]
    settings = {{"algorithm": {{"name": "grpo", "prompts": 2, "samples": 2}}, "compute": {{"threads": 1}}}}
    settings |= {{"sampling": {{"max_new_tokens": 3}}, "stop": {{"max_steps": steps}}, "run_dir": "python"}}
    settings |= {{"model": "model", "oracle": reward, "prompts": prompts}}
    trainer = oat.Trainer(quiet=True, **settings, **options)
    trainer.train()
    return trainer.metrics
"""


@pytest.mark.slow(
    instead="test_a_changed_reward_goes_on_only_when_that_is_accepted, by the command line", seconds=1.9
)
def test_from_python_likewise(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "first.py").write_text(
        "def reward(prompts, completions, **columns):\n    return [float(len(text)) for text in "
        "completions]\n"
    )
    (copy / "second.py").write_text(
        "def reward(prompts, completions, **columns):\n    return [50.0 + len(text) for text in "
        "completions]\n"
    )
    for module in ("first", "second"):
        (copy / f"with_{module}.py").write_text(TRAINER.format(module=module))

    def lived(module: str, steps: int, **options: Any) -> str:
        def action() -> int:
            import importlib
            import sys

            from oat.errors import OatError

            os.chdir(copy)
            sys.path.insert(0, str(copy))
            try:
                print(json.dumps(importlib.import_module(f"with_{module}").train(steps, **options)[-1]))
            except OatError as error:
                print(error)
                return error.exit_code
            return 0

        (copy / "log").unlink(missing_ok=True)
        return f"{forked(action, copy / 'log')} {(copy / 'log').read_text()}"

    assert lived("first", 1).startswith("0")
    refused = lived("second", 2)
    assert refused.startswith("2")
    assert "python:reward: its text" in refused
    assert "accept_changed=['reward'] from Python" in refused
    assert '"oracle/changes": 1.0' in lived("second", 2, accept_changed=["reward"])
    assert '"oracle/changes": 1.0' in lived("second", 3)


@pytest.mark.slow(instead="test_a_changed_reward_goes_on_only_when_that_is_accepted", seconds=1.4)
def test_a_change_is_shown_wherever_the_curve_is(copy: Path) -> None:
    pay_more(copy)
    _, said = run(copy, "train", "run.yaml", "--stop.max_steps", 4, "--accept-changed", "reward")
    assert [line.count("oracle/changes 1") for line in said.splitlines() if line.startswith("step ")] == [
        1,
        1,
    ], said
    code, said = run(copy, "ledger", "run")
    assert (
        code,
        "reward.py:reward and reward.py:reward/preferences had changed before step 3 took its answers"
        in said,
    ) == (0, True), said
    assert run(copy, "plot", "run", "--metric", "reward/mean", "--out", "plot.png")[0] == 0
    with (copy / "plot.csv").open(newline="") as file:
        assert [(row["steps"], row["oracle/changes"]) for row in csv.DictReader(file)] == [
            ("1", "0"),
            ("2", "0"),
            ("3", "1"),
            ("4", "1"),
        ]
    assert run(copy, "export", "run", "out")[0] == 0
    assert "oracle/changes" in (copy / "out" / "README.md").read_text()


def test_a_reward_in_a_worker_and_what_it_imports_there(world: World, tmp_path: Path) -> None:
    folder = make(
        world,
        tmp_path,
        "grpo",
        {"oracle": {"name": "isolated", "function": "reward.py:reward"}, "evaluation": None},
    )
    (folder / "reward.py").write_text(
        REWARD.replace("    from helper import worth\n", "").replace(
            "\ndef reward", "\nfrom helper import worth\n\ndef reward"
        )
    )
    assert run(folder, "train", "run.yaml", "--stop.max_steps", 1)[0] == 0
    (folder / "helper.py").write_text(HELPER + "\n# changed\n")
    code, said = run(folder, "train", "run.yaml")
    assert (code, ": helper.py" in said) == (0, True), said
    pay_more(folder)
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, "reward.py: its text" in said) == (2, True), said


@pytest.mark.slow(instead="test_a_reward_in_a_worker_and_what_it_imports_there", seconds=1.6)
def test_what_a_worker_imports_only_when_it_is_asked(world: World, tmp_path: Path) -> None:
    folder = make(
        world,
        tmp_path,
        "grpo",
        {"oracle": {"name": "isolated", "function": "reward.py:reward"}, "evaluation": None},
    )
    assert run(folder, "train", "run.yaml", "--stop.max_steps", 1)[0] == 0
    (folder / "helper.py").write_text(HELPER.replace("0.1", "0.7"))
    code, said = run(folder, "train", "run.yaml")
    assert (code, ": helper.py" in said) == (0, True), said


@pytest.mark.slow(instead="the tests of a reward function in this file", seconds=1.6)
def test_the_file_of_an_environment_is_that_of_the_reward(world: World, tmp_path: Path) -> None:
    changes = {
        "oracle": {"name": "environment"},
        "sampling.environment": "game.py:Twice",
        "evaluation": None,
        "render.template": None,
    }
    folder = make(world, tmp_path, "grpo", changes)
    (folder / "game.py").write_text(GAME)
    assert run(folder, "train", "run.yaml", "--stop.max_steps", 2)[0] == 0
    (folder / "game.py").write_text(GAME.replace('"a"', '"b"'))
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, "game.py: its text" in said) == (2, True), said
    assert "the environment has changed" in said, said
    assert "since two environments are in one curve" in said, said
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3, "--accept-changed", "reward")
    assert (code, rows(folder / "run")[-1]["oracle/changes"]) == (0, 1), said


def test_a_lambda_is_what_it_does_and_not_the_line_it_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal lambdas count as the same reward, although one stands on a line with another value that may
    change."""
    one, other = (lambda prompts, completions: [len(text) for text in completions]), 100
    same, more = (
        (lambda prompts, completions: [len(text) for text in completions]),
        (lambda prompts, completions: [2 * len(text) for text in completions]),
    )
    found = []
    for function in (one, same, more):
        monkeypatch.setitem(plugins.given, "lambda_", function)
        found.append(build_oracle("python:lambda_", {}))
    assert len({oracle.version for oracle in found[:2]}) == 2, other
    assert found[0].made_of == found[1].made_of != found[2].made_of


SLOTTED = """class Mine:
    __slots__ = ()
    answers, durable = "score", False
    submit = collect = lambda *arguments: []
"""


@pytest.mark.parametrize("recorded", ["", "None"])
def test_a_run_whose_oracle_had_no_version_keeps_its_answers(tmp_path: Path, recorded: str) -> None:
    """Earlier versions could not store a version in an oracle with slots or with a property of that name. Its
    answers are used again until the oracle's file changes."""
    name = f"{tmp_path / 'mine.py'}:Mine"
    (tmp_path / "mine.py").write_text(SLOTTED)
    roles = {"oracle": (name, build_oracle(name, {}))}
    older = {"of": hash_of(name), "version": recorded, "made_of": {}}
    versions = versions_of({"oracles": {"oracle": older}}, roles)
    assert versions == {name: recorded}
    known = inputs_of_oracles(roles, versions)
    assert versions_of(known, roles) == versions
    (tmp_path / "mine.py").write_text(f"{SLOTTED}    cacheable = False\n")
    changed = {"oracle": (name, build_oracle(name, {}))}
    assert versions_of(known, changed)[name] not in ("", "None")
