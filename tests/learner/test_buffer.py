"""The replay buffer: the older feedback of a step depends on recorded takes and settings only."""

import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import World, checked, forked, kill_at, named, oat
from pairs import item

from oat.commands.digest import digest_run
from oat.config.settings import BufferConfig
from oat.learner.replay_buffer import Buffer, minibatches, optimiser_steps
from oat.ledger.reader import Reader
from oat.types import Feedback, Item


@dataclass
class Takes:
    """The items that steps took, by step, and a list of the steps that were read."""

    items: list[tuple[Item, ...]]
    read: list[int] = field(default_factory=list)

    def taken(self, step: int) -> Sequence[Item]:
        self.read.append(step)
        return self.items[step]

    def num_taken(self, step: int) -> int:
        return len(self.items[step])


def takes_of(*sizes: int) -> Takes:
    """Return takes of these sizes, with questions numbered over all takes."""
    ends = np.cumsum(sizes)
    return Takes(
        [
            tuple(item(number, ("ab", "c")) for number in range(end - size, end))
            for size, end in zip(sizes, ends, strict=True)
        ]
    )


def held(takes: Takes, step: int, questions: int, clear_every: int | None = None) -> list[int]:
    """Return the numbers of the questions that a step learns from."""
    buffer = Buffer(takes, BufferConfig(questions, clear_every), 2)
    learned = buffer.fill(Feedback(step, takes.items[step], 0)).learned
    return [each.question.key.occurrence for each in learned]


def test_the_newest_questions_stay_in_the_order_they_came() -> None:
    takes = takes_of(2, 2, 2, 2)
    assert [held(takes, step, 5) for step in range(4)] == [
        [0, 1],
        [0, 1, 2, 3],
        [1, 2, 3, 4, 5],
        [3, 4, 5, 6, 7],
    ]
    assert [held(takes, step, 2) for step in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_it_is_cleared_every_so_many_steps() -> None:
    takes = takes_of(2, 2, 2, 2, 2)
    assert [held(takes, step, 99, 2) for step in range(5)] == [
        [0, 1],
        [0, 1, 2, 3],
        [4, 5],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert held(takes, 4, 99, 1) == [8, 9]


def test_steps_that_took_little_leave_room() -> None:
    assert held(takes_of(2, 0, 1, 2), 3, 4) == [1, 2, 3, 4]
    assert held(takes_of(2, 0, 0), 2, 4) == [0, 1]


def test_no_later_step_reads_what_is_given_up() -> None:
    """For any sizes of takes, no step from `begin` on reads a take before `oldest_needed(begin)`. So these
    takes may be dropped."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        takes = takes_of(*generator.integers(0, 4, 12))
        config = BufferConfig(
            int(generator.integers(3, 9)), int(generator.integers(1, 6)) if generator.random() < 0.5 else None
        )
        buffer = Buffer(takes, config, 3)
        for begin in range(12):
            oldest, takes.read = buffer.oldest_needed(begin), []
            for step in range(begin, 12):
                buffer.fill(Feedback(step, takes.items[step], 0))
            assert oldest <= min([begin, *takes.read])


def test_mini_batches_and_steps_by_hand() -> None:
    assert [minibatches(2, questions, 4) for questions in (4, 5, 8, 9)] == [2, 3, 4, 5]
    common: dict[str, Any] = {"questions": 4, "epochs": 2, "of_a_step": 1}
    assert optimiser_steps(5, **common, config=None, most=None) == 10
    assert optimiser_steps(5, **common, config=None, most=1) == 5
    assert optimiser_steps(5, **common, config=BufferConfig(12), most=None) == 2 + 4 + 6 + 6 + 6
    assert optimiser_steps(5, **common, config=BufferConfig(12), most=3) == 2 + 3 + 3 + 3 + 3
    assert optimiser_steps(5, **common, config=BufferConfig(12, 2), most=None) == 2 + 4 + 2 + 4 + 2
    assert optimiser_steps(0, **common, config=BufferConfig(12), most=None) == 0
    assert optimiser_steps(10**12, **common, config=BufferConfig(12), most=None) == 6 * 10**12 - 6


BUFFER = {
    "learner.buffer": {"questions": 10},
    "algorithm.epochs": 2,
    "stop.max_steps": 6,
    "evaluation": None,
    "engine": {"name": "torch", "threads": 1},
}


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of six steps of four pairs, with a buffer of ten and a cosine schedule. Trajectories are
    dropped after their last use."""
    config = world.config("dpo", tmp_path_factory.mktemp("buffer"), {**BUFFER, "learner.schedule": "cosine"})
    assert oat("train", config) == 0
    return config.with_suffix("")


def test_a_run_learns_again_from_the_newest_questions(run: Path) -> None:
    rows = rows_of(run)[1:]
    assert [row["buffer/questions"] for row in rows] == [4, 8, 10, 10, 10, 10]
    assert [row["buffer/age"] for row in rows] == pytest.approx([0, 0.5, (2 * 2 + 4) / 10, 0.8, 0.8, 0.8])
    steps = [2 * passes for passes in (1, 2, 3, 3, 3, 3)]
    assert rows[-1]["optim/steps"] == sum(steps)
    assert rows[-1]["rows/trained"] <= 20
    assert rows[-1]["response/tokens"] == pytest.approx(8 * rows[-1]["response/length"]), (
        "of the newest take alone"
    )


def test_a_schedule_ends_with_the_steps_that_there_are(run: Path) -> None:
    from oat.config.load import load_config

    config = load_config(run / "config.yaml")[0]
    assert config.learner.schedule_steps == rows_of(run)[-1]["optim/steps"] == 30


HALF = """
from dataclasses import dataclass, replace

from oat.explore.base import Explorer
from oat.types import Question


class Half(Explorer):
    needs = frozenset()

    @dataclass(frozen=True)
    class Config:
        pass

    def __init__(self, config, kind):
        pass

    def widen(self, plan):
        return replace(plan, questions=plan.questions // 2)

    def choose(self, groups, keys, scores, generator):
        return [Question.about(group, key, "compare", (0, 1), "") for group, key in [*zip(groups, keys)][::2]]
"""


def test_a_schedule_counts_the_questions_that_an_explorer_leaves(world: World, tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(HALF, encoding="utf-8")
    explorer = {"explorer.name": f"{tmp_path / 'half.py'}:Half", "learner.schedule": "linear"}
    config = world.config("dpo", tmp_path, {**BUFFER, **explorer})
    assert oat("train", config) == 0
    rows = rows_of(tmp_path / "dpo")[1:]
    assert [row["buffer/questions"] for row in rows] == [2, 4, 6, 8, 10, 10]
    steps = rows[-1]["optim/steps"]
    assert rows[-1]["optim/learning_rate"] == pytest.approx(0.003 * (0.1 + 0.9 / steps))


@pytest.mark.slow(instead="tests/faults/test_state.py walks over a run with a buffer", seconds=3.8)
@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("an optimiser step", 15),
        ("oat.ledger.store:Store.drop_groups", 2),
        ("oat.ledger.ledger:Ledger.taken", 7),
    ],
)
def test_a_killed_run_is_the_unbroken_one(run: Path, tmp_path: Path, place: str, call: int) -> None:

    def die() -> int:
        kill_at(*named(place), call)
        return oat("train", run / "config.yaml", "--run_dir", tmp_path / "run")

    assert forked(die, tmp_path / "log") == -9
    assert (
        forked(lambda: oat("train", run / "config.yaml", "--run_dir", tmp_path / "run"), tmp_path / "log")
        == 0
    )
    assert digest_run(tmp_path / "run") == digest_run(run)


def test_a_fork_that_changes_nothing_and_a_longer_run_are_the_run(
    world: World, run: Path, tmp_path: Path
) -> None:
    """A fork and a run that was made longer equal the unbroken run: the takes that a later step reads are
    kept. The other takes are dropped."""
    config = run / "config.yaml"
    assert oat("train", config, "--run_dir", tmp_path / "fork", "--from", f"{run}@4") == 0
    assert digest_run(tmp_path / "fork")["weights"] == digest_run(run)["weights"]
    shutil.copytree(run, tmp_path / "longer")
    longer = (
        "--run_dir",
        tmp_path / "longer",
        "--stop.max_steps",
        "9",
        "--learner.schedule_steps",
        "30",
        "--checkpoint.background",
        "false",
    )
    assert oat("train", config, *longer) == 0
    assert [row["buffer/questions"] for row in rows_of(tmp_path / "longer")[7:]] == [10, 10, 10]
    with closing(Reader(tmp_path / "longer" / "ledger.sqlite")) as store:
        kept = [
            step
            for (step,) in store.db.execute(
                "SELECT step FROM rounds WHERE kept = 1 AND purpose = 'train' ORDER BY step"
            )
        ]
    assert kept == [4, 5, 6, 7, 8], (
        "checkpoints of 8 and 9 are kept; step 8 may read the takes of 5 to 7, and its row asks for one more"
    )


@pytest.mark.slow(
    instead="tests/faults/test_state.py walks over a buffer; tests/golden over the wire", seconds=0.8
)
def test_values_on_a_wire_give_the_same_run(run: Path, tmp_path: Path) -> None:
    assert (
        oat("train", run / "config.yaml", "--run_dir", tmp_path / "run", "--compute.serialise", "true") == 0
    )
    assert digest_run(tmp_path / "run")["weights"] == digest_run(run)["weights"]


def test_a_replay_of_its_ledger_is_the_run(world: World, run: Path, tmp_path: Path) -> None:
    """A run with a replay buffer is replayed from its ledger from the start, without asking the oracle. It
    equals the first run."""
    config, other = run / "config.yaml", tmp_path / "run"
    assert oat("train", config, "--run_dir", other, "--tracking.keep_trajectories", "true") == 0
    expected = digest_run(other)
    assert expected["weights"] == digest_run(run)["weights"]
    shutil.rmtree(other / "checkpoints")
    from oat.oracles.callables import CallableOracle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallableOracle, "submit", lambda *_: pytest.fail("a replay asks nobody"))
        assert oat("train", config, "--run_dir", other, "--tracking.keep_trajectories", "true") == 0
    assert digest_run(other) == expected


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (
            {"name": "grpo", "samples": 2},
            (
                "grpo divides by the probability of sampling, and would learn from what older weights "
                "sampled; remove it"
            ),
        ),
        ({"name": "xpo"}, "xpo sets samples of reference against those of the policy as it is; remove it"),
        (
            {"name": "sft", "threshold": 0.5, "duplicates": "run"},
            "nothing is learned twice, and a buffer would bring nothing; remove one of them",
        ),
        (
            {"name": "dpo"},
            "a step takes 4 questions, of which some would never be learned; raise it to as many or more",
        ),
    ],
)
def test_who_may_not_learn_again(
    world: World, tmp_path: Path, algorithm: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Algorithms that cannot learn from older feedback refuse a buffer. `oat check` and `oat train` give the
    same error."""
    questions = 3 if algorithm["name"] == "dpo" else 8
    config = world.config(
        "dpo",
        tmp_path,
        {**BUFFER, "algorithm": {"prompts": 4, **algorithm}, "learner.buffer": {"questions": questions}},
    )
    for command in ("check", "train"):
        assert oat(command, config) == 2
        error = capsys.readouterr().err
        assert f"{config}:" in error
        assert words in error


def test_one_that_does_not_say_so_is_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from oat.algorithms.direct import DPO\n\n\nclass Own(DPO):\n    reuses = False\n", encoding="utf-8"
    )
    config = world.config("dpo", tmp_path, {**BUFFER, "algorithm": {"name": f"{own}:Own", "prompts": 4}})
    assert oat("check", config) == 2
    assert (
        "does not say that it is sound on what older weights sampled (`reuses` of oat/algorithms/base.py)"
        in capsys.readouterr().err
    )


@pytest.mark.sample("grpo", seconds=0.3)
@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_a_step_has_so_many_updates_and_no_more(world: World, tmp_path: Path, algorithm: str) -> None:
    """`learner.max_updates` limits a step's optimiser steps over all its passes, with and without a
    buffer."""
    buffer = {"learner.buffer": {"questions": 10}} if algorithm == "dpo" else {}
    changes = {
        "algorithm.epochs": 2,
        "algorithm.minibatches": 2,
        "learner.max_updates": 3,
        "evaluation": None,
        **buffer,
    }
    config = world.config(algorithm, tmp_path, {**changes, "learner.schedule": "linear"})
    assert oat("train", config) == 0
    assert [row["optim/steps"] for row in rows_of(config.with_suffix(""))[1:]] == [3, 6, 9, 12]
    assert "schedule_steps: 12" in (tmp_path / algorithm / "config.yaml").read_text()


def test_a_check_says_what_steps_learn_from(
    run: Path, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config("dpo", tmp_path, BUFFER)
    buffered, steps = "questions in the buffer, most", "optimiser steps with a full buffer, most"
    said, _ = checked(capsys, config)
    assert (said[buffered], said[steps]) == (10, 6)
    assert (said["prompts left"], said["optimiser steps left"]) == (24, 30)
    flags = ("--learner.buffer.clear_every", "2", "--learner.max_updates", "3")
    said, _ = checked(capsys, config, *flags)
    assert (said[buffered], said[steps], said["optimiser steps left"]) == (8, 3, 15)
    assert said["steps until the buffer is cleared"] == 2


@pytest.mark.slow(instead="tests/forecast/test_memory.py::test_parts_by_hand", seconds=2.3)
def test_memory_counts_the_passes_over_a_buffer(world: World, tmp_path: Path) -> None:
    """The estimate of memory includes that `prepare` computes the reference for the complete buffer in one
    pass, if a pass may be so large."""
    from oat.config.load import load_config
    from oat.forecast.estimate import Lengths, estimate
    from oat.resolve.resolve import resolve

    config = world.config("dpo", tmp_path, {"evaluation": None, "learner.micro_batch_size": 4096})
    small = estimate(resolve(*load_config(config)), Lengths(4))
    large = estimate(resolve(*load_config(config, ["--learner.buffer.questions", "4000"])), Lengths(4))
    assert large.phases["prepare"] > 10 * small.phases["prepare"]
    assert large.phases["forward and backward"] == small.phases["forward and backward"]
