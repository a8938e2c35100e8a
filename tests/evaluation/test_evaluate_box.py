"""The evaluation as a box: its own oracle, budget, slot and times. A failure in it does not change
training."""

import json
import signal
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from evaluations import evaluated, killed_and_continued, played, records, rows
from fixtures import World, forked, kill_at, logged, named, oat

from oat.assemble.run import build
from oat.commands.digest import digest_run
from oat.config.load import load_config
from oat.evaluation.trigger import Trigger
from oat.ledger.audit import contradictions
from oat.ledger.store import Store
from oat.loop import Run, evaluation_metrics, train
from oat.metrics import repeatable
from oat.reports.accounts import accounts
from oat.resolve.resolve import resolve


def run_of(config: Path, *flags: object) -> Run:
    settings, origins = load_config(config, [str(flag) for flag in flags])
    return build(resolve(settings, origins))


def training_of(run_dir: Path) -> list[tuple[Any, ...]]:
    """Return every training question with its answer and the step that took it."""
    sql = """SELECT q.step, q.round, q.occurrence, q.kind, q.oracle, q.prompt, q.candidates,
        a.vals, a.marks, a.label, a.queries, t.step, t.position
        FROM questions q LEFT JOIN answers a ON a.question = q.id LEFT JOIN taken t ON t.question = q.id
        WHERE q.purpose = 'train' ORDER BY 1, 2, 3"""
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as db:
        return db.execute(sql).fetchall()


def test_an_oracle_of_its_own_with_options(world: World, tmp_path: Path, judges: str) -> None:
    """One class is used twice with different options: training learns from one oracle, and evaluations ask
    the other. The ledger tells them apart."""
    name = f"{judges}:Constant"
    changes = {
        "oracle": {"name": name, "value": 0.9},
        "evaluation.oracle": {"name": name, "value": 0.3},
        "stop.max_steps": 1,
    }
    assert oat("train", world.config("grpo", tmp_path, changes)) == 0
    row = rows(tmp_path / "grpo")[1]
    assert (row["reward/mean"], row["eval/sampled"], row["eval/greedy"]) == pytest.approx((0.9, 0.3, 0.3))
    with closing(Store(tmp_path / "grpo" / "ledger.sqlite")) as store:
        assert {(account.purpose, account.oracle) for account in accounts(store)} == {
            ("train", name),
            ("eval", f"{name}/eval"),
        }


def test_the_name_alone_of_the_oracle_of_training_is_that_oracle(
    world: World, tmp_path: Path, judges: str
) -> None:
    name = f"{judges}:Constant"
    changes = {
        "oracle": {"name": name, "value": 0.9},
        "evaluation.oracle": name,
        "evaluation.gold": name,
        "stop.max_steps": 1,
    }
    config = world.config("grpo", tmp_path, changes)
    assert oat("train", config) == 0
    row = rows(tmp_path / "grpo")[1]
    assert (row["eval/sampled"], row["eval/gold_sampled"]) == pytest.approx((0.9, 0.9))
    stored = yaml.safe_load((tmp_path / "grpo" / "config.yaml").read_text())["evaluation"]
    assert (stored["oracle"], stored["gold"]) == (
        {"name": name, "value": 0.9},
        {"name": name, "max_queries": None, "max_tokens": None, "max_cost": None, "value": 0.9},
    )
    assert oat("train", config) == 0, "the same configuration continues it"


MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "an option of the oracle": (
        {"oracle": {"name": "JUDGES:Constant", "valeu": 1}},
        ["`evaluation.oracle.valeu` of ", "did you mean `value`?"],
    ),
    "an option of the second oracle": (
        {"gold": {"name": "JUDGES:Constant", "max_querys": 1}},
        ["`evaluation.gold.max_querys`", "`max_queries`"],
    ),
    "an option of a function": (
        {"oracle": {"name": "JUDGES:has_a", "value": 1}},
        ["`evaluation.oracle.value` of "],
    ),
    "no oracle": ({"gold": {}}, ["`evaluation.gold.name` is missing"]),
    "recorded answers": (
        {"gold": "recorded"},
        ["evaluation.gold is 'recorded'", "name an oracle that can score them"],
    ),
    "an environment that is not there": (
        {"oracle": "environment"},
        ["evaluation.oracle is 'environment'", "sampling.environment"],
    ),
    "a slot": ({"slot": "critic"}, ["evaluation.slot", "'critic'"]),
    "k above the samples": ({"pass_at": [1, 3]}, ["evaluation.pass_at is (1, 3)", "evaluation.samples is 2"]),
    "a majority above the samples": (
        {"majority_at": [3], "answers": "last_number"},
        ["evaluation.majority_at is (3,)", "evaluation.samples is 2"],
    ),
    "k of nothing": ({"pass_at": [0]}, ["evaluation.pass_at", ">= 1"]),
    "a majority of what": ({"majority_at": [2]}, ["evaluation.majority_at", "set evaluation.answers"]),
    "answers that nobody reads": ({"answers": "last_number"}, ["nothing reads evaluation.answers"]),
    "success that nobody reads": ({"success": 0.5}, ["nothing reads evaluation.success"]),
    "no such answers": (
        {"majority_at": [2], "answers": "last_numbr"},
        ["'last_numbr'", "did you mean `last_number`?"],
    ),
    "answers that are no function": ({"majority_at": [2], "answers": "JUDGES:JUDGES"}, ["has no JUDGES"]),
    "an empty budget": ({"max_queries": 0}, ["evaluation.max_queries", ">= 1"]),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_message(
    world: World,
    tmp_path: Path,
    judges: str,
    capsys: pytest.CaptureFixture[str],
    mistake: tuple[dict[str, Any], list[str]],
) -> None:
    section, words = json.loads(json.dumps(mistake[0]).replace("JUDGES:", f"{judges}:")), mistake[1]
    config = world.config("dpo", tmp_path, {f"evaluation.{name}": value for name, value in section.items()})
    assert oat("train", config) == 2
    error = capsys.readouterr().err
    assert [word for word in words if word not in error] == [], error
    assert not (tmp_path / "dpo").exists()


def test_a_part_of_an_evaluation_has_no_mean(world: World, tmp_path: Path, judges: str) -> None:
    """The price rises between the check of the budget and the question, so only a part of the evaluation is
    paid. No mean is reported, and the evaluation counts as skipped."""
    changes = {
        "evaluation.oracle": {"name": f"{judges}:Dear", "rises": 12},
        "evaluation.max_queries": 60,
        "stop.max_steps": 2,
    }
    assert oat("train", world.config("grpo", tmp_path, changes)) == 0
    assert [row for row in rows(tmp_path / "grpo") if "eval/sampled" in row] == []
    assert evaluated(tmp_path / "grpo", "eval/skipped") == {0: 1.0, 2: 1.0}
    assert not (tmp_path / "grpo" / "evaluations").exists()
    with closing(Store(tmp_path / "grpo" / "ledger.sqlite")) as store:
        assert any(account.unpaid for account in accounts(store))
        assert store.spent("eval").queries <= 60


@pytest.mark.slow(instead="test_an_evaluation_that_failed_fails_in_a_replay_too", seconds=1.6)
def test_a_replay_skips_what_was_skipped(world: World, tmp_path: Path, judges: str) -> None:
    """A run is killed after its last evaluation and continues from its start. It skips the same evaluations
    as before, although the answers are already on record."""
    changes = {
        "evaluation.oracle": {"name": f"{judges}:Dear"},
        "evaluation.max_queries": 30,
        "checkpoint.every": 10,
        "learner.learning_rate": 0.03,
    }
    config = world.config("grpo", tmp_path, changes)
    assert oat("train", config, "--run_dir", tmp_path / "unbroken") == 0
    assert evaluated(tmp_path / "unbroken", "eval/skipped").keys() == {2, 4}
    killed_and_continued(config, tmp_path / "killed", "a checkpoint is published", 1)
    assert digest_run(tmp_path / "killed") == digest_run(tmp_path / "unbroken")


@pytest.mark.slow(instead="tests/faults/test_state.py evaluates the reference", seconds=2.5)
def test_any_slot(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An evaluation uses the weights of the chosen slot. The sampler is synced after the third step, so after
    two steps it answers as at the start. The reference always does, and the policy never. `oat eval` finds
    each slot's last weights in the checkpoint."""
    found = {}
    for slot in ("policy", "sampler", "reference"):
        changes = {
            "learner.sync_every": 3,
            "learner.learning_rate": 0.03,
            "evaluation.slot": slot,
            "evaluation.samples": 8,
        }
        (tmp_path / slot).mkdir()
        assert oat("train", world.config("grpo", tmp_path / slot, changes)) == 0
        outputs = [
            [record["output"] for record in records(tmp_path / slot / "grpo", step)] for step in (0, 2, 4)
        ]
        found[slot] = [outputs[0] == outputs[1], outputs[1] == outputs[2], outputs[0] == outputs[2]]
        last = rows(tmp_path / slot / "grpo")[-1]
        capsys.readouterr()
        assert oat("eval", tmp_path / slot / "grpo") == 0
        assert json.loads(capsys.readouterr().out) == {
            name: value for name, value in last.items() if name == "step" or name.startswith("eval/")
        }
    assert found == {"policy": [False] * 3, "sampler": [True, False, False], "reference": [True] * 3}
    weights = {slot: digest_run(tmp_path / slot / "grpo")["weights"] for slot in found}
    assert len(set(weights.values())) == 1


def tensors_of(run: Run) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of the learner and of the engine's slots, without the slot `policy`, into
    which an evaluation loads the newest weights."""
    engine: Any = run.weights.holders["sampler"].holder  # type: ignore[attr-defined]
    learner: Any = run.learner
    held = {
        f"learner/{model}/{name}": tensor
        for model in learner.models
        for name, tensor in learner.named_tensors(model)
    }
    for slot, lm in engine._slots.items():
        if slot != "policy":
            held |= {f"{slot}/{name}": tensor for name, tensor in lm.tensors().items()}
    return {name: tensor.detach().clone() for name, tensor in held.items()}


@pytest.mark.sample("kept2-answers", seconds=4.1)
@pytest.mark.inventory(97)
@pytest.mark.parametrize("fails", ["", "submit", "collect", "answers"])
@pytest.mark.parametrize(
    "kept",
    [
        {},
        {"learner.sync_every": 3},
        {"learner.sync_every": 3, "engine": {"name": "torch", "dtype": "bfloat16"}},
    ],
)
def test_an_evaluation_leaves_every_weight_as_it_was(
    world: World, tmp_path: Path, judges: str, kept: dict[str, Any], fails: str
) -> None:
    """An evaluation succeeds, or fails when it asks, waits or counts. The learner's weights, and the
    sampler's and reference's in the engine, stay bitwise the same."""
    own = {"name": f"{judges}:Constant", "fails": fails if fails in ("submit", "collect") else ""}
    section = {
        "evaluation.oracle": own,
        "evaluation.majority_at": [2],
        "evaluation.answers": f"{judges}:{'broken' if fails == 'answers' else 'first_letter'}",
    }
    run = run_of(world.config("dpo", tmp_path, {**kept, **section, "stop.max_steps": 2}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(run, lambda step, values: None)
        engine: Any = run.weights.holders["sampler"].holder  # type: ignore[attr-defined]
        before, version = tensors_of(run), engine.version("sampler")
        assert run.evaluation is not None
        metrics = evaluation_metrics(run, run.evaluation, 3)
    after = tensors_of(run)
    assert ("eval/failed" in metrics.values, "eval/sampled" in metrics.values) == (bool(fails), not fails)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert {name.split("/")[0] for name in before} == {
        "learner",
        "sampler",
        *([] if "engine" in kept else ["reference"]),
    }
    if kept:
        assert engine.version("sampler") == version == 0
    run.ledger.close()


@pytest.mark.sample("grpo", seconds=3.0)
@pytest.mark.inventory(97)
@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_training_is_the_same_with_a_working_a_failing_and_no_evaluation(
    world: World, tmp_path: Path, judges: str, algorithm: str
) -> None:
    found = {}
    sections: dict[str, Any] = {
        "none": None,
        **{
            fails: {"name": f"{judges}:Constant", "fails": fails}
            for fails in ("", "submit", "collect", "exit", "half")
        },
    }
    for name, own in sections.items():
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        changes = (
            {"evaluation": None}
            if own is None
            else {"evaluation.oracle": own, "evaluation.gold": {**own, "max_queries": 1000}}
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert oat("train", world.config(algorithm, folder, changes)) == 0
        digest = digest_run(folder / algorithm)
        found[name] = (digest["weights"], digest["optimiser"], training_of(folder / algorithm))
    assert all(one == found["none"] for one in found.values())
    assert len(found["none"][2]) == 16
    assert evaluated(tmp_path / "with collect" / algorithm, "eval/failed") == {0: 1.0, 2: 1.0, 4: 1.0}


@pytest.mark.sample("oracle-submit", seconds=3.8)
@pytest.mark.parametrize("fails", ["submit", "collect", "half"])
@pytest.mark.parametrize("judge", ["oracle", "gold"])
def test_an_evaluation_that_failed_fails_in_a_replay_too(
    world: World, tmp_path: Path, judges: str, judge: str, fails: str
) -> None:
    """An evaluation failed. The run is killed after a later one and continues from before the failed one. The
    oracle works by then, but rows and files stay the same. No question stays open, holds money back, or is
    asked again."""
    own = {"name": f"{judges}:Constant", "fails": fails, "healed": str(tmp_path / "healed")}
    log = tmp_path / "log"
    run_dir = tmp_path / "grpo"
    config = world.config("grpo", tmp_path, {f"evaluation.{judge}": own, "checkpoint.every": 10})
    assert (
        forked(
            lambda: kill_at(*named("oat.tracking.files:Tracking.row"), 5, after=True) or oat("train", config),
            log,
        )
        == -signal.SIGKILL
    )
    written = [repeatable(row) for row in rows(run_dir)]
    files = {file.name: file.read_bytes() for file in (run_dir / "evaluations").glob("*")}
    assert written[2]["eval/failed" if judge == "oracle" else "eval/gold_failed"] == 1.0
    assert ("step_00000002.jsonl" in files) == (judge == "gold")

    (tmp_path / "healed").touch()
    assert logged(log, "train", config) == 0, log.read_text()
    assert [repeatable(row) for row in rows(run_dir)] == written
    assert {file.name: file.read_bytes() for file in (run_dir / "evaluations").glob("*")} == files
    with closing(Store(run_dir / "ledger.sqlite")) as store:
        assert [
            (account.purpose, account.pending, account.again)
            for account in accounts(store)
            if account.pending or account.again
        ] == []
        assert store.committed(purpose := {"oracle": "eval", "gold": "gold"}[judge]) == store.spent(purpose)
        assert contradictions(store) == []


@pytest.mark.sample("environment", seconds=3.3)
@pytest.mark.inventory(97)
@pytest.mark.parametrize("what", ["environment", "price", "price of the second", "file"])
def test_what_is_the_users_fails_an_evaluation_and_not_the_run(
    world: World, tmp_path: Path, judges: str, what: str, recwarn: pytest.WarningsRecorder
) -> None:
    """User code fails an evaluation, and the run goes on: an environment raises on held-out prompts, an
    oracle cannot give a price, or a file of records cannot be written."""
    unpriced = {"name": f"{judges}:Unpriced", "max_queries": 100}
    changes: dict[str, Any] = {
        "environment": played(judges, "Refusing"),
        "price": {"evaluation.oracle": {"name": f"{judges}:Unpriced"}, "evaluation.max_queries": 100},
        "price of the second": {"evaluation.gold": unpriced},
        "file": {},
    }[what]
    without = {"evaluation": None, **(played(judges, "Game") if what == "environment" else {})}
    (tmp_path / "without").mkdir()
    assert oat("train", world.config("grpo", tmp_path / "without", without)) == 0
    config, run_dir = world.config("grpo", tmp_path, changes), tmp_path / "grpo"
    assert oat("train", config, "--stop.max_steps", "1") == 0
    if what == "file":
        (run_dir / "evaluations" / ".new-step_00000002.jsonl").mkdir()  # where the file is to be made
    assert oat("train", config) == 0
    expected = {
        "environment": (
            "failed",
            {0, 1, 2, 4},
            "the environment Refusing raised KeyError: 'target' (line ... of judges.py), ... from record 1",
        ),
        "price": (
            "failed",
            {0, 1, 2, 4},
            (
                f"`price` of oracle {judges}:Unpriced raised ZeroDivisionError: no tokens counted "
                "(line ... of judges.py), asked about eval/0/0"
            ),
        ),
        "price of the second": (
            "gold_failed",
            {0, 1, 2, 4},
            f"`price` of oracle {judges}:Unpriced raised ZeroDivisionError: no tokens counted",
        ),
        "file": (
            "failed",
            {2},
            (
                f"{run_dir / 'evaluations' / 'step_00000002.jsonl'}: the records cannot be written (Is a "
                "directory"
            ),
        ),
    }
    metric, steps, words = expected[what]
    assert evaluated(run_dir, f"eval/{metric}").keys() == steps
    assert [said for said in recwarn if all(part in str(said.message) for part in words.split("..."))]
    assert evaluated(run_dir).keys() == (set() if metric == "failed" else {0, 1, 2, 4}) | (
        {0, 1, 4} if what == "file" else set()
    )
    for part in ("weights", "optimiser"):
        assert digest_run(run_dir)[part] == digest_run(tmp_path / "without" / "grpo")[part]


@pytest.mark.parametrize(
    ("environment", "words"),
    [("Refusing", "raised KeyError: 'target'"), ("Endless", "is wrong: step returned None")],
)
def test_an_environment_that_fails_in_training_ends_the_run(
    world: World,
    tmp_path: Path,
    judges: str,
    capsys: pytest.CaptureFixture[str],
    environment: str,
    words: str,
) -> None:
    changes = {
        **played(judges, environment),
        "prompts.path": str(world.folder / "held_out.jsonl"),
        "evaluation": None,
    }
    assert oat("train", world.config("grpo", tmp_path, changes)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"oat train: the environment {environment} {words}")
    assert "in an episode from record" in error


@pytest.mark.slow(instead="test_a_killed_run_makes_the_same_evaluations", seconds=2.0)
@pytest.mark.parametrize(("after", "failed"), [(False, {}), (True, {2: 1.0})])
def test_a_kill_while_an_evaluation_fails(
    world: World, tmp_path: Path, judges: str, after: bool, failed: dict[int, float]
) -> None:
    """A run is killed while an evaluation fails. If its failure is not yet recorded, the evaluation is made
    again; otherwise it counts as failed. In both cases no question stays open."""
    own = {"name": f"{judges}:Constant", "fails": "half", "healed": str(tmp_path / "healed")}
    config, log = world.config("grpo", tmp_path, {"evaluation.oracle": own}), tmp_path / "log"
    assert (
        forked(
            lambda: (
                kill_at(*named("oat.ledger.ledger:Ledger.give_up"), 1, after=after) or oat("train", config)
            ),
            log,
        )
        == -signal.SIGKILL
    )
    (tmp_path / "healed").touch()
    assert logged(log, "train", config) == 0, log.read_text()
    assert evaluated(tmp_path / "grpo", "eval/failed") == failed
    assert evaluated(tmp_path / "grpo").keys() == {0, 2, 4} - failed.keys()
    with closing(Store(tmp_path / "grpo" / "ledger.sqlite")) as store:
        assert [account.pending for account in accounts(store)] == [0, 0]
        assert contradictions(store) == []


def test_oat_eval_says_that_it_failed(
    world: World, tmp_path: Path, judges: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config(
        "dpo", tmp_path, {"evaluation.oracle": {"name": f"{judges}:Constant", "fails": "collect"}}
    )
    with pytest.warns(UserWarning, match="down"):
        assert oat("eval", config) == 1
    assert json.loads(capsys.readouterr().out) == {"step": 0, "eval/failed": 1.0}


@pytest.mark.slow(
    instead="tests/evaluation/test_evaluate.py::test_a_kill_during_an_evaluation_pays_for_what_was_in_flight_only",
    seconds=7.0,
)
@pytest.mark.inventory(101)
@pytest.mark.parametrize(
    ("place", "call", "by"),
    [
        # due since step 2, and waiting at the checkpoint after it
        ("oat.learner.learner:Learner.update", 3, signal.SIGKILL),
        ("an evaluation samples", 3, signal.SIGKILL),
        ("an evaluation samples", 3, signal.SIGTERM),
        ("oat.learner.learner:Learner.update", 5, signal.SIGTERM),
    ],
)
def test_a_killed_run_makes_the_same_evaluations(
    world: World, tmp_path: Path, place: str, call: int, by: int
) -> None:
    config = world.config("grpo", tmp_path, {"evaluation.every_queries": 30, "stop.max_steps": 7})
    assert oat("train", config, "--run_dir", tmp_path / "unbroken") == 0
    assert list(evaluated(tmp_path / "unbroken")) == [0, 3, 6, 7]
    killed_and_continued(config, tmp_path / "killed", place, call, by=by)
    assert digest_run(tmp_path / "killed") == digest_run(tmp_path / "unbroken")


def test_hours_count_over_restarts() -> None:
    trigger = Trigger(2, every_hours=1.0)
    assert not trigger.due(2, 0)
    trigger.load_state({"step": 0, "queries": 0, "seconds": [0.0, 3599.0]})
    assert not trigger.due(2, 0)
    trigger.load_state({**trigger.state, "seconds": [0.0, 3600.0]})
    assert not trigger.due(1, 0)
    assert trigger.due(3, 0), "it has waited since step 2"
    trigger.begin(3, 40)
    assert not trigger.due(4, 99)
    (last, now), state = trigger.state["seconds"], trigger.state
    assert 3600 <= last <= now < 3700
    assert (state["step"], state["queries"]) == (3, 40)
    again = Trigger(2, every_queries=10)
    again.load_state(state)
    assert [again.due(4, queries) for queries in (49, 50)] == [False, True]
