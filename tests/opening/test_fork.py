"""Forks: a new run that begins from a checkpoint of another run, with settings that may not change within a
run."""

import json
import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from fixtures import World, checked, forked, kill_at, logged, named, oat

from oat.assemble.fingerprints import recorded
from oat.commands.digest import digest_run
from oat.ledger.audit import contradictions
from oat.ledger.store import Store
from oat.reports.accounts import accounts
from oat.rundir.checkpoints import Checkpoints
from oat.rundir.provenance import begins_after


@pytest.fixture(scope="module")
def parent(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of six steps with checkpoints of steps 4 and 6."""
    folder = tmp_path_factory.mktemp("parent")
    assert oat("train", world.config("grpo", folder, {"stop.max_steps": 6})) == 0
    return folder


def fork(parent: Path, run_dir: Path, step: str, *flags: object) -> int:
    return oat(
        "train", parent / "grpo.yaml", "--run_dir", run_dir, "--from", f"{parent / 'grpo'}{step}", *flags
    )


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_fork_that_changes_nothing_is_the_run_itself(parent: Path, tmp_path: Path) -> None:
    """A fork of step 4 asks the questions of the last two steps again, since its ledger ends at step 4. It
    has the digest and the advantages of its origin and changes nothing in it."""
    before = {
        file: file.read_bytes()
        for file in (parent / "grpo").rglob("*")
        if file.is_file() and "sqlite" not in file.name
    }
    assert fork(parent, tmp_path / "fork", "@4") == 0
    assert digest_run(tmp_path / "fork") == digest_run(parent / "grpo")
    used = [(run / "advantages.jsonl").read_text() for run in (parent / "grpo", tmp_path / "fork")]
    assert used[0] == used[1]
    assert used[0].count("\n") == 6
    assert {file: file.read_bytes() for file in before} == before


def test_a_fork_goes_its_own_way_from_there_on(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fork has another learning rate and twice the prompts. The same command continues it."""
    flags = ("--learner.learning_rate", "0.1", "--algorithm.prompts", "8", "--stop.max_steps", "8")
    assert fork(parent, tmp_path / "fork", "", *flags) == 0
    old, new = rows(parent / "grpo"), rows(tmp_path / "fork")
    assert [row["step"] for row in new] == [*range(9)]
    assert new[:7] == old
    assert new[7]["optim/learning_rate"] == pytest.approx(0.1)
    store = Store(tmp_path / "fork" / "ledger.sqlite")
    assert [store.asked("train", step, 0) for step in range(9)] == [0, 4, 8, 12, 16, 20, 24, 32, 40]
    assert contradictions(store) == []
    store.close()
    capsys.readouterr()
    assert fork(parent, tmp_path / "fork", "", *flags) == 0
    assert "finished, all 8 steps are done" in capsys.readouterr().out
    assert oat("train", parent / "grpo.yaml", "--run_dir", tmp_path / "fork", *flags) == 0


@pytest.mark.sample("*Store.cut", seconds=1.6)
@pytest.mark.parametrize(
    "place", ["oat.opening.open_run:copy_state", "oat.opening.fork:Store.cut", "oat.opening.open_run:build"]
)
def test_a_fork_whose_making_was_cut_off_is_made_anew(parent: Path, tmp_path: Path, place: str) -> None:
    log = tmp_path / "log"
    assert forked(lambda: kill_at(*named(place), 1) or fork(parent, tmp_path / "fork", "@4"), log) < 0
    assert forked(lambda: fork(parent, tmp_path / "fork", "@4"), log) == 0, log.read_text()
    assert digest_run(tmp_path / "fork") == digest_run(parent / "grpo")


@pytest.mark.parametrize(
    ("step", "flags", "words"),
    [
        ("@5", (), "there is no such checkpoint; .* has 4, 6 .checkpoint.keep_last says how many"),
        (
            "@4",
            ("--algorithm.name", "dr_grpo"),
            'cannot change these.*\n  algorithm.name: "grpo" -> "dr_grpo"',
        ),
        ("@4", ("--compute.threads", "2"), "compute.threads: 1 -> 2"),
        ("@4", ("--learner.sync_every", "2"), "learner.sync_every: 1 -> 2"),
        ("@4", ("--oracle.repeats", "2"), "oracle.repeats: 1 -> 2"),
        ("/elsewhere", (), "holds no run; give RUN@STEP"),
    ],
)
def test_what_cannot_be_forked(
    parent: Path,
    tmp_path: Path,
    step: str,
    flags: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = ("--from", f"{parent / 'grpo'}{step}", "--run_dir", tmp_path / "fork")
    messages = []
    for command in ("check", "train"):
        assert oat(command, parent / "grpo.yaml", *source, *flags) == 2
        messages.append(capsys.readouterr().err.removeprefix(f"oat {command}: "))
        assert not (tmp_path / "fork").exists()
    assert messages[0] == messages[1]
    assert re.search(words, messages[0])


def test_a_fork_is_checked_before_it_is_begun(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`oat check` of a fork allows fields that may change, refuses a damaged checkpoint, and changes no
    file."""
    shutil.copytree(parent / "grpo", tmp_path / "run")
    before = sorted((file, file.stat().st_mtime_ns) for file in tmp_path.rglob("*"))
    flags = (
        "--from",
        f"{tmp_path / 'run'}@4",
        "--run_dir",
        tmp_path / "fork",
        "--learner.learning_rate",
        "0.1",
        "--stop.max_steps",
        "8",
    )
    said, notes = checked(capsys, parent / "grpo.yaml", *flags)
    assert said["run directory"] == str(tmp_path / "fork")
    assert f"the run begins as a fork of {tmp_path / 'run'} after step 4" in notes
    assert sorted((file, file.stat().st_mtime_ns) for file in tmp_path.rglob("*")) == before
    tensors = tmp_path / "run" / "checkpoints" / "step_00000004" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    messages = []
    for command in ("check", "train"):
        assert oat(command, parent / "grpo.yaml", *flags) == 1
        messages.append(capsys.readouterr().err.removeprefix(f"oat {command}: "))
    assert messages[0] == messages[1]
    assert "tensors.safetensors has" in messages[0]


@pytest.mark.slow(instead="test_a_fork_that_changes_nothing_is_the_run_itself", seconds=2.5)
def test_the_plan_of_a_fork_counts_from_where_it_begins(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan of `oat check` counts from the fork's first step, or from the newest checkpoint of a run that
    continues. The run then does what the plan says."""
    flags = ("--run_dir", tmp_path / "fork", "--stop.max_steps", "9", "--oracle.max_outstanding", "0")
    begins = ("--from", f"{parent / 'grpo'}@4")
    spent = int(rows(parent / "grpo")[4]["oracle/queries"])
    file = parent / "grpo.yaml"
    said, _ = checked(capsys, file, *flags, *begins)
    assert (said["steps done"], said["steps left"], said["queries spent"]) == (4, 5, spent)
    names = ("prompts", "responses", "optimiser steps", "evaluations")
    assert [said[f"{name} left"] for name in names] == [20, 60, 5, 3]
    assert said["queries left, most"] == 60
    said, _ = checked(capsys, file, *flags, *begins, "--stop.max_queries", str(spent + 7))
    assert said["queries left, most"] == 7
    said, _ = checked(capsys, file, *flags[:2], *begins, "--stop", f"{{max_queries: {spent + 25}}}")
    assert (said["queries of the run, limit"], said["steps left, least"]) == (spent + 25, 3)

    assert oat("train", parent / "grpo.yaml", *flags, *begins) == 0
    mine = rows(tmp_path / "fork")[5:]
    assert [row["step"] for row in mine] == [5, 6, 7, 8, 9]
    assert mine[-1]["oracle/queries"] - spent <= 60
    assert sum("time/evaluate_s" in row for row in mine) == 3
    spent = int(mine[-1]["oracle/queries"])
    queries = ("--stop.max_queries", str(spent))
    for further in ((), ("--stop.max_steps", "7"), ("--stop.max_steps", "20", *queries)):
        said, notes = checked(capsys, file, *flags, *further)
        assert (said["steps done"], said["steps left"], said["queries spent"]) == (9, 0, spent)
        assert any(note.endswith("nothing is left to do") for note in notes)


def test_what_a_fork_says_of_itself_may_be_damaged(parent: Path, tmp_path: Path) -> None:
    """If the file fork.json of a fork is damaged, the fork counts its steps from 0."""
    shutil.copytree(parent / "grpo", tmp_path / "run")
    (tmp_path / "run" / "environment.json").unlink()
    for text in ("[" * 100_000, "[]", "{"):
        (tmp_path / "run" / "fork.json").write_text(text)
        assert begins_after(tmp_path / "run") == 0
        assert recorded(tmp_path / "run") is None


def test_a_directory_that_has_something_else_is_left_alone(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(parent / "grpo", tmp_path / "other")
    assert fork(parent, tmp_path / "other", "@4") == 2
    assert "is not empty; give a fork a --run_dir of its own" in capsys.readouterr().err


def test_the_refusal_to_continue_names_the_way_to_fork(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oat("train", parent / "grpo.yaml", "--learner.learning_rate", "0.1") == 2
    assert (
        f'(fork it with --from {parent / "grpo"}@6, from Python source="{parent / "grpo"}@6"; or from '
        "step 4), or undo:\n"
        "  learner.learning_rate: 0.003 -> 0.1"
    ) in capsys.readouterr().err
    assert oat("train", parent / "grpo.yaml", "--compute.threads", "2") == 2
    assert "(begin a run of its own), or undo:" in capsys.readouterr().err


def test_a_fork_knows_how_good_its_first_checkpoint_is(parent: Path, tmp_path: Path) -> None:
    """A fork begins with the checkpoint that has the highest value of the metric, and keeps it as the
    best."""
    ranked = (
        "--checkpoint.keep_best",
        "1",
        "--checkpoint.keep_last",
        "1",
        "--checkpoint.best_metric",
        "optim/learning_rate",
    )
    assert (
        fork(
            parent,
            tmp_path / "fork",
            "@4",
            *ranked,
            "--learner.learning_rate",
            "0.001",
            "--stop.max_steps",
            "8",
        )
        == 0
    )
    checkpoints = Checkpoints(
        tmp_path / "fork" / "checkpoints", every=1, keep_last=1, best_metric="optim/learning_rate"
    )
    assert (checkpoints.steps, checkpoints.best()) == ([4, 8], 4)
    assert {"step": 4, **checkpoints.row(4)} == rows(parent / "grpo")[4]


def test_what_other_judges_said_ranks_no_checkpoint_of_a_fork(parent: Path, tmp_path: Path) -> None:
    assert (
        fork(parent, tmp_path / "fork", "@4", "--evaluation.samples", "3", "--checkpoint.keep_last", "9") == 0
    )
    checkpoints = Checkpoints(tmp_path / "fork" / "checkpoints", every=1, keep_last=1)
    assert (checkpoints.steps, checkpoints.best()) == ([4, 6], 6)
    assert {"step": 4, **checkpoints.row(4)} == {
        name: value for name, value in rows(parent / "grpo")[4].items() if not name.startswith("eval/")
    }


@pytest.mark.slow(instead="test_what_other_judges_said_ranks_no_checkpoint_of_a_fork", seconds=2.1)
def test_a_fork_with_another_judge_does_not_wait_for_the_one_before(
    world: World, tmp_path: Path, judges: str
) -> None:
    """The origin has an evaluation whose questions have no answers, since it was killed in it, made longer,
    and killed again. A fork with another judge does not ask these questions. A fork with the same judge asks
    them again."""
    common = {
        "checkpoint.every": 1,
        "checkpoint.background": False,
        "oracle.repeats": 0,
        "evaluation.oracle": f"{judges}:has_a",
    }
    config, log = world.config("grpo", tmp_path, common), tmp_path / "log"
    shorter, longer = ("--stop.max_steps", "3"), ("--stop.max_steps", "6")
    assert (
        forked(
            lambda: kill_at(*named("an evaluation asks"), 3, after=True) or oat("train", config, *shorter),
            log,
        )
        < 0
    )
    assert (
        forked(
            lambda: kill_at(*named("oat.learner.learner:Learner.update"), 2) or oat("train", config, *longer),
            log,
        )
        < 0
    )
    with closing(Store(tmp_path / "grpo" / "ledger.sqlite")) as store:
        assert {
            row.question.key.step for row in store.unanswered() if row.question.key.purpose == "eval"
        } == {3}
    for name, changes in {"other": {"evaluation.oracle": f"{judges}:letters"}, "same": {}}.items():
        (tmp_path / name).mkdir()
        other = world.config("grpo", tmp_path / name, {**common, **changes})
        assert oat("train", other, "--from", f"{tmp_path / 'grpo'}@3", *longer) == 0
        found = rows(tmp_path / name / "grpo")
        assert not any("eval/failed" in row for row in found)
        assert [row["step"] for row in found if "eval/sampled" in row] == [0, 2, 4, 6]
        with closing(Store(tmp_path / name / "grpo" / "ledger.sqlite")) as store:
            assert [account.pending for account in accounts(store)] == [0] * len(accounts(store))
            assert sum(account.failed for account in accounts(store)) == (8 if name == "other" else 0)
            assert sum(account.again for account in accounts(store)) == (0 if name == "other" else 8)
            assert contradictions(store) == []


def test_a_fork_that_is_made_needs_its_origin_no_more(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished fork does not need its origin. A fork that was killed while it was made needs it."""
    log, last = tmp_path / "log", ("--stop.max_steps", "6")
    config = world.config("grpo", tmp_path)
    assert oat("train", config) == 0
    command = ("train", config, "--from", f"{tmp_path / 'grpo'}@4", *last)
    assert oat("train", config, "--run_dir", tmp_path / "unbroken", *last) == 0
    assert (
        forked(
            lambda: (
                kill_at(*named("oat.learner.learner:Learner.update"), 2)
                or oat(*command, "--run_dir", tmp_path / "made")
            ),
            log,
        )
        < 0
    )
    assert (
        forked(
            lambda: (
                kill_at(*named("oat.opening.open_run:build"), 1)
                or oat(*command, "--run_dir", tmp_path / "half")
            ),
            log,
        )
        < 0
    )
    shutil.rmtree(tmp_path / "grpo")
    assert logged(log, *command, "--run_dir", tmp_path / "made") == 0, log.read_text()
    assert digest_run(tmp_path / "made") == digest_run(tmp_path / "unbroken")
    capsys.readouterr()
    assert oat(*command, "--run_dir", tmp_path / "half") == 2
    assert "grpo holds no run; give RUN@STEP" in capsys.readouterr().err


def test_a_roll_back_of_a_fork_leads_to_a_checkpoint_of_its_own(parent: Path, tmp_path: Path) -> None:
    rule = (
        "--alarms.spread.action",
        "roll_back",
        "--alarms.spread.patience",
        "1",
        "--alarms.spread.above",
        "0.0",
        "--stop.max_steps",
        "8",
    )
    assert fork(parent, tmp_path / "fork", "@4", *rule) in (0, 3)
    states = [
        json.loads(file.read_text()) for file in (tmp_path / "fork" / "checkpoints").glob("step_*/state.json")
    ]
    steps = {state["step"] for state in states}
    assert {state["alarms"]["back"] for state in states} <= {None, *steps}
    assert min(steps) >= 4
    assert any(row.get("alarms/rolled_back") for row in rows(tmp_path / "fork"))


def test_a_run_does_not_go_on_with_other_data(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is refused if its data file has one more line. Every epoch would have another order, and some
    prompts would come twice."""
    data = tmp_path / "train.jsonl"
    lines = (world.folder / "train.jsonl").read_text()
    data.write_text(lines)
    config = world.config("grpo", tmp_path, {"prompts.path": str(data), "stop.max_steps": 2})
    assert oat("train", config) == 0
    data.write_text(lines + lines.splitlines()[0] + "\n")
    assert oat("train", config, "--stop.max_steps", 4) == 2
    assert f"{data}: expected the prompts that the run began with, got others" in capsys.readouterr().err
    data.write_text(lines)
    assert oat("train", config, "--stop.max_steps", 4) == 0
