"""Answers that come late, in another order, or never, also after a kill, and in a replay in which no oracle
is asked."""

import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import straight
import torch
from bench import HERE, Bench
from fixtures import forked, kill_at, named, oat
from late_oracle import call

from oat.commands.digest import digest_run
from oat.ledger.store import Store
from oat.metrics import repeatable

STEPS = 6
PROMPTS = 4
AHEAD = 6
LOST = 5
BETA = 0.3
DEADLINE_S = 4.0


@contextmanager
def server() -> Iterator[int]:
    """Start the oracle's process, and yield its port. The process ends with the context, or with this
    process."""
    command = [sys.executable, "-S", str(HERE / "late_oracle.py"), str(LOST)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@dataclass(frozen=True)
class Records:
    """The content of a ledger. Questions are named by their address and listed in the order of asking.

    Attributes:
        takes: the questions of each step.
        answers: values and marks, by question.
    """

    asked: list[str]
    answers: dict[str, tuple[str, str]]
    takes: list[list[str]]

    @classmethod
    def of(cls, run_dir: Path) -> "Records":
        store = Store(run_dir / "ledger.sqlite")
        key = "q.purpose || '/' || q.step || '/' || q.round || '/' || q.occurrence || '/' || q.number"
        asked = [
            name
            for (name,) in store.db.execute(
                f"SELECT {key} FROM questions q ORDER BY q.step, q.round, q.position"
            )
        ]
        answers = store.db.execute(
            f"SELECT {key}, a.vals, a.marks FROM answers a JOIN questions q ON q.id = a.question"
        ).fetchall()
        takes: list[list[str]] = []
        while store.has_take("train", len(takes)):
            takes.append([str(row.question.key) for row in store.taken("train", len(takes))])
        store.close()
        assert len(answers) == len({name for name, *_ in answers}), "a question has two answers"
        return cls(asked, {name: (values, marks) for name, values, marks in answers}, takes)

    @property
    def in_flight(self) -> set[str]:
        return set(self.asked) - set(self.answers)


def config_of(bench: Bench, folder: Path, oracle: str, **options: object) -> Path:
    return bench.config(
        folder / "late.yaml",
        algorithm={"name": "dpo", "prompts": PROMPTS, "beta": BETA},
        oracle={
            "name": oracle,
            "max_outstanding": AHEAD,
            "labels": "bernoulli",
            "deadline_s": DEADLINE_S,
            **options,
        },
        learner={"learning_rate": 3e-3, "micro_batch_size": 4},
        checkpoint={"every": 2},
        stop={"max_steps": STEPS},
    )


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def keep(run_dir: Path, copy: Path) -> Path:
    """Make a run directory with only the configuration and the ledger of another run."""
    copy.mkdir()
    for name in ("config.yaml", "ledger.sqlite"):
        shutil.copy(run_dir / name, copy)
    shutil.copytree(run_dir / "ledger.trajectories", copy / "ledger.trajectories")
    return copy


def die_before_an_update() -> None:
    from oat.learner.learner import Learner

    kill_at(Learner, "update", 4)


def die_with_answers_in_hand() -> None:

    kill_at(*named("answers are recorded"), 5)


@pytest.mark.sample("DurableLateOracle-*", seconds=3.5)
@pytest.mark.parametrize(
    ("oracle", "arm"), [("LateOracle", die_before_an_update), ("DurableLateOracle", die_with_answers_in_hand)]
)
def test_late_permuted_and_lost_answers_over_a_kill(
    bench: Bench, tmp_path: Path, oracle: str, arm: Callable[[], None]
) -> None:
    """The run is killed with answers in flight, and continued. Each step waits for a limited time and takes
    the answers that have come."""
    run_dir, is_durable = tmp_path / "late", oracle.startswith("Durable")
    with server() as port:
        config = config_of(bench, tmp_path, f"{HERE / 'late_oracle.py'}:{oracle}", port=port, max_wait_s=60.0)

        def die() -> int:
            arm()
            return oat("train", config)

        assert forked(die, tmp_path / "log") == -signal.SIGKILL, (tmp_path / "log").read_text()
        before = Records.of(run_dir)
        keep(run_dir, tmp_path / "killed")
        assert oat("train", config) == 0
        submissions = Counter(call(port, {}))
    after = Records.of(run_dir)
    (lost,) = (name for name in after.asked if name.split("/")[3] == str(LOST))
    trained = [name for take in after.takes for name in take]

    assert 2 <= len(before.takes) < STEPS
    assert after.takes[: len(before.takes)] == before.takes, "a take of the killed run was not kept"
    assert {name: after.answers[name] for name in before.answers} == before.answers, (
        "an answer of the killed run was not kept"
    )
    assert len(trained) == len(set(trained)) == STEPS * PROMPTS
    assert set(trained) == set(after.asked) == set(after.answers)
    assert trained != [name for name in after.asked if name in trained], "no answer was late"

    asked_twice = {name for name, count in submissions.items() if count > 1}
    assert lost in before.in_flight
    assert len(before.in_flight) > 1
    assert asked_twice == (set() if is_durable else before.in_flight)
    assert max(submissions.values()) <= 2
    rows = metrics_of(run_dir)
    assert rows[-1]["oracle/reasked"] == len(asked_twice)

    assert json.loads(after.answers[lost][1]) == ["failed"]
    assert [name for name, (_, marks) in after.answers.items() if "failed" in marks] == [lost]
    assert [
        step for step, row in enumerate(rows[1:]) for _ in range(round(row["answers/failed_frac"] * PROMPTS))
    ] == [trained.index(lost) // PROMPTS]

    assert_straight(bench, run_dir)
    for name, flags in (("replay", ()), ("wire", ("--compute.serialise", "true"))):
        copy = keep(run_dir, tmp_path / name)
        assert oat("train", config, "--run_dir", copy, *flags) == 0
        assert digest_run(copy) == digest_run(run_dir)
    assert oat("train", config, "--run_dir", tmp_path / "killed", "--stop.max_steps", len(before.takes)) == 0
    assert [repeatable(row) for row in metrics_of(tmp_path / "killed")] == [
        repeatable(row) for row in rows[: len(before.takes) + 1]
    ]


def assert_straight(bench: Bench, run_dir: Path) -> None:
    """Check every step of DPO on the recorded pairs, without the pairs that have no winner."""
    policy, reference, start = (
        straight.load(bench.folder / name) for name in ("model", "reference", "model")
    )
    optimiser = straight.Optimiser(list(policy.parameters()), rate=3e-3, decay=0.0, max_norm=1.0)
    curve: list[dict[str, float] | None] = []
    for items in straight.recorded_steps(run_dir):
        decided = [item for item in items if item.label is not None]
        places = [item.question.picks if item.label == 0 else item.question.picks[::-1] for item in decided]
        batch = straight.pad(
            [
                item.group.trajectories[pick]
                for item, pair in zip(decided, places, strict=True)
                for pick in pair
            ]
        )
        with torch.no_grad():
            reference_N = straight.picked(
                straight.log_softmax(straight.logits_of(reference, batch)), batch
            ).sum(1)
        policy_N = straight.picked(straight.log_softmax(straight.logits_of(policy, batch)), batch).sum(1)
        apart_N = policy_N - reference_N
        loss = torch.log(1 + torch.exp(-BETA * (apart_N[0::2] - apart_N[1::2]))).mean()
        loss.backward()
        curve.append({"loss/total": loss.item(), "optim/grad_norm": optimiser.step()})
    straight.assert_same_curve(run_dir, curve)
    straight.assert_same_weights(run_dir, policy, start)


def test_steps_that_wait_for_each_answer_take_them_in_order(bench: Bench, tmp_path: Path) -> None:
    """A killed and an unbroken run with the same server have equal rows, so equal weights. The question
    without an answer exceeds its deadline in both."""
    digests = []
    with server() as port:
        config = config_of(
            bench, tmp_path, f"{HERE / 'late_oracle.py'}:LateOracle", port=port, deadline_s=3.0
        )
        assert (
            forked(lambda: die_before_an_update() or oat("train", config), tmp_path / "log")
            == -signal.SIGKILL
        )
        for run_dir in (tmp_path / "late", tmp_path / "unbroken"):
            assert oat("train", config, "--run_dir", run_dir) == 0
            digests.append(digest_run(run_dir))
            records = Records.of(run_dir)
            assert [name for take in records.takes for name in take] == [
                name for name in records.asked if name in records.answers
            ]
    assert digests[0] == digests[1]


@pytest.mark.slow(instead="test_steps_that_wait_for_each_answer_take_them_in_order", seconds=2.0)
def test_a_run_made_longer_is_still_a_replay_of_its_ledger(bench: Bench, tmp_path: Path) -> None:
    """A run of three steps was made longer, and its ledger is replayed. The third step was once the last and
    asked no question ahead; the replay must not ask one there either."""
    config, run_dir = config_of(bench, tmp_path, f"{HERE / 'rewards.py'}:graded"), tmp_path / "late"
    for steps in ("3", "5"):
        assert oat("train", config, "--stop.max_steps", steps) == 0
    copy = keep(run_dir, tmp_path / "replay")
    assert oat("train", config, "--run_dir", copy, "--stop.max_steps", "5") == 0
    assert digest_run(copy) == digest_run(run_dir)
