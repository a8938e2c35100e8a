"""Evaluation: equal questions with equal random numbers, the values that count, the price, and no effect on
training."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, forked, kill_at, named, oat, write_jsonl

from oat.commands.digest import digest_run
from oat.metrics import repeatable

REWARDS = '''
from pathlib import Path

PAID = Path(__file__).with_name("paid.txt")


def counted(prompts, completions, **columns):
    """Every call is noted, so that a test can see what was paid for."""
    with PAID.open("a") as file:
        file.writelines(f"{prompt}\\n" for prompt in prompts)
    return [float(len(text)) for text in completions]


def choosy(prompts, completions, **columns):
    """No reward for prompts that begin with an odd digit."""
    values = [float(text.count("a")) for text in completions]
    return [None if int(prompt[0]) % 2 else value for prompt, value in zip(prompts, values)]


def longer(prompts, first, second, **columns):
    return [0.5 if len(a) == len(b) else 0.9 if len(a) > len(b) else None for a, b in zip(first, second)]


class Ties:
    """A tie for each prompt that begins with 0, whatever the value beside it; the first wins elsewhere."""

    answers, durable = "compare", False

    def __init__(self):
        self.open = {}

    def submit(self, questions):
        self.open |= {str(question.key): question for question in questions}
        return [str(question.key) for question in questions]

    def collect(self, tickets, seconds):
        from oat.types import Answer

        found = []
        for ticket in tickets:
            question = self.open.pop(ticket)
            tied = question.messages[0].content[0] == "0"
            value, mark = (0.0, "tie") if tied else (1.0, "ok")
            found.append((ticket, Answer(question.key, (value,), (mark,), 1)))
        return found
'''


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    return str(tmp_path / "rewards.py")


def train(config: Path, log: Path, before: Callable[[], None] = lambda: None) -> int:
    def action() -> int:
        before()
        return oat("train", config)

    code = forked(action, log)
    assert code in (0, -signal.SIGKILL), log.read_text()
    return code


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def responses(run_dir: Path, step: int) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run_dir / "evaluations" / f"step_{step:08d}.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]


def test_two_evaluations_differ_by_the_weights_alone(world: World, tmp_path: Path) -> None:
    """With a learning rate of 0 every evaluation repeats the first one, token for token. Evaluations are made
    before the first step, when due, and at the end."""
    config = world.config("grpo", tmp_path, {"learner.learning_rate": 0, "stop.max_steps": 5})
    train(config, tmp_path / "log")
    first = responses(tmp_path / "grpo", 0)
    assert len(first) == 4 * 2 + 4
    assert [record["mode"] for record in first] == ["sampled"] * 8 + ["greedy"] * 4
    assert len({record["output"] for record in first if record["mode"] == "sampled"}) > 4
    for step in (2, 4, 5):
        assert responses(tmp_path / "grpo", step) == first
    evaluated = [row["step"] for row in rows(tmp_path / "grpo") if "eval/sampled" in row]
    assert evaluated == [0, 2, 4, 5]
    assert {row["eval/sampled"] for row in rows(tmp_path / "grpo") if "eval/sampled" in row} == {
        sum(record["value"] for record in first[:8]) / 8,
    }


@pytest.mark.slow(
    instead="tests/evaluation/test_evaluate_box.py compares training with and without evaluations",
    seconds=0.7,
)
def test_training_does_not_notice_an_evaluation(world: World, tmp_path: Path) -> None:
    digests, states = [], []
    for name, section in {"without": None, "with": world.tree("grpo", tmp_path)["evaluation"]}.items():
        folder = tmp_path / name
        folder.mkdir()
        train(world.config("grpo", folder, {"evaluation": section, "stop.max_steps": 2}), tmp_path / "log")
        digests.append(digest_run(folder / "grpo"))
        state = json.loads((folder / "grpo" / "checkpoints" / "step_00000002" / "state.json").read_text())
        state["ledger"].pop("eval", None)
        states.append(
            {part: value for part, value in state.items() if part not in ("stop", "evaluation", "metrics")}
        )
    assert [digests[0][part] == digests[1][part] for part in ("weights", "optimiser")] == [True] * 2
    assert states[0] == states[1]
    without, with_ = (
        [
            {name: value for name, value in repeatable(row).items() if not name.startswith("eval/")}
            for row in rows(tmp_path / name / "grpo")
        ]
        for name in ("without", "with")
    )
    assert with_ == without


def test_fewer_prompts_get_the_same_responses(world: World, tmp_path: Path) -> None:
    changes = {"stop.max_steps": 1, "engine": {"name": "torch", "deterministic": True}}
    train(world.config("grpo", tmp_path, changes), tmp_path / "log")
    (tmp_path / "few").mkdir()
    train(
        world.config(
            "grpo", tmp_path / "few", {**changes, "evaluation.max_prompts": 2, "evaluation.greedy": False}
        ),
        tmp_path / "log",
    )
    assert responses(tmp_path / "few" / "grpo", 0) == responses(tmp_path / "grpo", 0)[:4]


def test_what_has_no_value_does_not_count(world: World, tmp_path: Path, rewards: str) -> None:
    config = world.config("grpo", tmp_path, {"oracle.name": f"{rewards}:choosy", "stop.max_steps": 1})
    train(config, tmp_path / "log")
    found = responses(tmp_path / "grpo", 1)
    assert {record["mark"] for record in found} == {"ok", "abstain"}
    for mode in ("sampled", "greedy"):
        values = [record["value"] for record in found if record["mode"] == mode and record["mark"] == "ok"]
        assert all(int(record["prompt"][0]) % 2 == 0 for record in found if record["mark"] == "ok")
        assert rows(tmp_path / "grpo")[1][f"eval/{mode}"] == pytest.approx(sum(values) / len(values))
    odd = write_jsonl(tmp_path / "odd.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    (tmp_path / "odd").mkdir()
    config = world.config(
        "grpo",
        tmp_path / "odd",
        {"oracle.name": f"{rewards}:choosy", "stop.max_steps": 1, "evaluation.path": str(odd)},
    )
    train(config, tmp_path / "log")
    assert not any(name.startswith("eval/") for row in rows(tmp_path / "odd" / "grpo") for name in row)


def test_a_comparing_oracle_gives_the_win_rate_against_references(
    world: World, tmp_path: Path, rewards: str
) -> None:
    """The win rate is against references of two letters. The oracle says 0.9 for a longer response and 0.5
    for an equal one. It abstains for a shorter one."""
    train(
        world.config("dpo", tmp_path, {"oracle.name": f"{rewards}:longer", "stop.max_steps": 1}),
        tmp_path / "log",
    )
    found = responses(tmp_path / "dpo", 1)
    assert len(found) == 4 * 2 + 4
    assert {record["reference"] for record in found} == {"ab"}
    for record in found:
        size = len(record["output"])
        assert (record["mark"], record["value"]) == (
            ("abstain", None) if size < 2 else ("ok", 0.5 if size == 2 else 0.9)
        )
    for mode in ("sampled", "greedy"):
        values = [record["value"] for record in found if record["mode"] == mode and record["mark"] == "ok"]
        assert rows(tmp_path / "dpo")[1][f"eval/{mode}"] == pytest.approx(sum(values) / len(values))


def test_a_tie_counts_one_half_of_a_win(world: World, tmp_path: Path, rewards: str) -> None:
    train(
        world.config("dpo", tmp_path, {"oracle.name": f"{rewards}:Ties", "stop.max_steps": 1}),
        tmp_path / "log",
    )
    assert rows(tmp_path / "dpo")[1]["eval/sampled"] == pytest.approx((0.5 + 1 + 1 + 1) / 4)


def test_a_win_rate_needs_references(
    world: World, tmp_path: Path, rewards: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config(
        "dpo", tmp_path, {"oracle.name": f"{rewards}:longer", "prompts.reference_key": None}
    )
    assert oat("train", config) == 2
    assert "set prompts.reference_key" in capsys.readouterr().err


@pytest.mark.sample("answers*-1-12", seconds=2.3)
@pytest.mark.parametrize(
    ("place", "call", "twice"),
    [
        ("oat.ledger.outstanding:Outstanding.submit", 2, 0),  # asked, nothing answered yet
        ("answers are recorded", 1, 12),  # in flight: answered, not yet on disk
        ("an evaluation is written", 1, 0),  # everything on disk
        ("an evaluation is written", 2, 0),  # also of a later one
    ],
)
def test_a_kill_during_an_evaluation_pays_for_what_was_in_flight_only(
    world: World, tmp_path: Path, rewards: str, place: str, call: int, twice: int
) -> None:
    """A run with two evaluations and two steps is killed in an evaluation and continued. Only questions that
    were in flight are paid twice."""
    config = world.config(
        "grpo", tmp_path, {"oracle.name": f"{rewards}:counted", "oracle.repeats": 0, "stop.max_steps": 2}
    )

    def arm() -> None:
        kill_at(*named(place), call)

    assert train(config, tmp_path / "log", arm) == -signal.SIGKILL
    assert train(config, tmp_path / "log") == 0
    paid = (tmp_path / "paid.txt").read_text().splitlines()
    held_out = [prompt for prompt in paid if prompt.endswith("+9=")]
    assert len(held_out) == 2 * 4 * 3 + twice
    assert len(paid) - len(held_out) == 2 * 4 * 3


def test_a_run_and_a_configuration_can_be_evaluated_alone(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`oat eval` of a run or of its configuration prints the numbers that the run itself reported, and writes
    nothing into the run."""
    config = world.config("dpo", tmp_path)
    train(config, tmp_path / "log")
    before = digest_run(tmp_path / "dpo")
    start, end = rows(tmp_path / "dpo")[0], rows(tmp_path / "dpo")[-1]
    for target, row in ((config, start), (tmp_path / "dpo", end)):
        assert oat("eval", target) == 0
        expected = {name: value for name, value in row.items() if name == "step" or name.startswith("eval/")}
        assert json.loads(capsys.readouterr().out) == expected
        assert {"eval/sampled", "eval/greedy"} < expected.keys()
    assert digest_run(tmp_path / "dpo") == before
    assert oat("eval", tmp_path / "dpo", "--evaluation.greedy", "false", "--evaluation.samples", "1") == 0
    assert json.loads(capsys.readouterr().out).keys() == {"step", "eval/sampled", "eval/sampled_length"}


def test_what_cannot_be_evaluated(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = world.config("dpo", tmp_path, {"evaluation": None})
    assert oat("eval", config) == 2
    assert "--evaluation.path" in capsys.readouterr().err
    assert oat("eval", tmp_path) == 2
    assert "config.yaml" in capsys.readouterr().err
    assert (
        oat(
            "eval",
            config,
            "--evaluation.path",
            world.folder / "held_out.jsonl",
            "--evaluation.max_prompt",
            "1",
        )
        == 2
    )
    assert "`max_prompts`" in capsys.readouterr().err


def test_a_failing_evaluation_leaves_training_alone(world: World, tmp_path: Path) -> None:
    """The oracle of the evaluation raises. The run warns, counts the failure, and has the final weights of a
    run without evaluation."""
    (tmp_path / "broken.py").write_text(
        "def reward(prompts, completions, **columns):\n    raise RuntimeError('down')\n", encoding="utf-8"
    )
    config = world.config("dpo", tmp_path)
    with pytest.warns(UserWarning, match="down"):
        assert oat("train", config, "--evaluation.oracle", f"{tmp_path / 'broken.py'}:reward") == 0
    assert oat("train", config, "--run_dir", tmp_path / "without", "--evaluation", "null") == 0
    rows = [json.loads(line) for line in (tmp_path / "dpo" / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("eval/failed") for row in rows] == [1.0, None, 1.0, None, 1.0]
    assert digest_run(tmp_path / "dpo")["weights"] == digest_run(tmp_path / "without")["weights"]
