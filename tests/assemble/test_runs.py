"""Whole runs of `oat train`, compared with the values that follow from the data, the ledger and plain
arithmetic."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import World, make_model, oat, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from oat.answering.learned import policy_weights
from oat.ledger.intents import Intent
from oat.ledger.store import Store
from oat.types import UNASKED, Answer

Row = dict[str, float]


def metrics(run_dir: Path) -> list[Row]:
    rows: list[Row] = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return rows


def taken(store: Store, purpose: str, step: int) -> list[tuple[Intent, Answer]]:
    """Return the questions that a step learned from, with their answers."""
    return [(asked, store.answer(asked)[0]) for asked in store.taken(purpose, step)]


@dataclass(frozen=True)
class Task:
    """A task that a random model solves now and then.

    Attributes:
        tokens: the tokens that the model can write.
        score: the same rule, rewritten for texts of these tokens.
    """

    tokens: Sequence[str]
    record: Callable[[int, int], dict[str, Any]]
    score: Callable[[str, int, int], float]


def last_number_is_the_sum(text: str, a: int, b: int) -> float:
    found = re.findall(r"\d+", text)
    return float(bool(found) and int(found[-1]) == a + b)


def is_the_sum_of_both(text: str, a: int, b: int) -> float:
    found = re.match(r".*<answer>(.*?)</answer>", text)
    if found is None:
        return 0.0
    used = re.fullmatch(r"\+*(\d+)\++(\d+)", found[1])
    return 1.0 if used and sorted(map(int, used.groups())) == sorted((a, b)) else 0.1


TASKS = {
    "gsm8k": Task(
        "123456+=", lambda a, b: {"prompt": f"{a}+{b}=", "answer": str(a + b)}, last_number_is_the_sum
    ),
    "countdown": Task(
        [*"123+=", "<answer>1", "<answer>2", "<answer>3", "+1</answer>", "+2</answer>", "+3</answer>"],
        lambda a, b: {"prompt": f"{a}+{b}=", "target": a + b, "nums": [a, b]},
        is_the_sum_of_both,
    ),
}


@pytest.mark.sample("gsm8k", seconds=0.7)
@pytest.mark.inventory(125)
@pytest.mark.parametrize("name", TASKS)
def test_dpo_by_a_rule_from_start_to_export(name: str, world: World, tmp_path: Path) -> None:
    """Three steps of DPO learn from the preferences of a rule oracle. All files of the run and its export are
    complete."""
    task = TASKS[name]
    make_model(tmp_path / "model", tokens=task.tokens)
    records = [task.record(a, b) for a in range(1, 4) for b in range(1, 4)]
    changes = {
        "model.path": str(tmp_path / "model"),
        "prompts": {
            "path": str(write_jsonl(tmp_path / "train.jsonl", records)),
            "reference_key": "answer" if "answer" in records[0] else None,
        },
        "sampling.max_new_tokens": 2,
        "oracle": {"name": name, "repeats": 0},
        "algorithm.prompts": 64,
        "evaluation.path": str(tmp_path / "train.jsonl"),
        "stop.max_steps": 3,
    }
    assert oat("train", world.config("dpo", tmp_path, changes)) == 0

    rows = metrics(tmp_path / "dpo")
    store = Store(tmp_path / "dpo" / "ledger.sqlite")
    queries = 0
    assert len(rows) == 4
    seen = set()
    for step, row in enumerate(rows[1:]):
        items, decided = taken(store, "train", step), 0
        assert len(items) == 64
        for asked, answer in items:
            a, b = (int(number) for number in asked.question.messages[0].content.rstrip("=").split("+"))
            first, second = (task.score(text, a, b) for text in asked.question.candidates)
            seen |= {first, second}
            decided += first != second
            queries += 2 * (len(set(asked.question.candidates)) == 2)
            assert answer.values[0] == pytest.approx(1 / (1 + math.exp(second - first)))
        assert row["rows/trained"] == 2 * decided > 0
        assert row["answers/tied_frac"] == 1 - decided / 64
        assert row["oracle/queries"] == queries
        assert math.isfinite(row["loss/total"])
    assert seen == ({0.0, 1.0} if name == "gsm8k" else {0.0, 0.1, 1.0})
    assert [step for step, row in enumerate(rows) if {"eval/sampled", "eval/greedy"} <= row.keys()] == [
        0,
        2,
        3,
    ]
    store.close()

    assert oat("export", tmp_path / "dpo", tmp_path / "exported") == 0
    step, weights, *_ = policy_weights(tmp_path / "dpo")
    start, exported = (
        AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        for folder in ("model", "exported")
    )
    assert step == 3
    assert all(torch.equal(parameter, weights[key]) for key, parameter in exported.named_parameters())
    assert any(not torch.equal(parameter, weights[key]) for key, parameter in start.named_parameters())
    ids = AutoTokenizer.from_pretrained(tmp_path / "exported")("1+2=", return_tensors="pt")["input_ids"]
    assert exported.generate(ids, max_new_tokens=3).shape[1] > ids.shape[1]


STRICT = '''
from pathlib import Path

LOG = Path(__file__).with_name("scored")


def answer_to(prompt):
    a, b = prompt.rstrip("=").split("+")
    return 7 * int(a) + int(b)


def reward(prompts, completions, reference, answer, place, **columns):
    """Refuses a completion whose prompt it did not come with; notes how many it has scored."""
    for prompt, right, number, tens in zip(prompts, reference, answer, place, strict=True):
        expected = answer_to(prompt)
        found = f"{prompt} came with {right}, {number} and {tens}"
        assert (right, number, tens) == (str(expected), expected, {"tens": expected // 10}), found
    with LOG.open("a") as log:
        log.write(f"{len(completions)}\\n")
    return [text.count("a") + 0.1 * text.count("b") + 0.01 * len(text) for text in completions]
'''


def record(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a}+{b}=", "answer": 7 * a + b, "place": {"tens": (7 * a + b) // 10}}


@pytest.mark.sample("grpo", "dpo, asked ahead", seconds=1.0)
@pytest.mark.inventory(91)
@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("grpo", {}),
        ("dpo", {}),
        ("dpo", {"oracle.max_outstanding": 3}),
        ("sft", {"compute.serialise": True, "algorithm.threshold": 0.0}),
    ],
    ids=["grpo", "dpo", "dpo, asked ahead", "sft, over the wire"],
)
def test_every_completion_comes_with_its_columns_and_is_counted(
    algorithm: str, changes: dict[str, Any], world: World, tmp_path: Path
) -> None:
    """In four steps of four prompts, the reward function checks its arguments and counts its calls. Its count
    equals the ledger's, and the ledger's equals that of the metrics."""
    write_jsonl(tmp_path / "train.jsonl", [record(a, b) for a in range(5) for b in range(2)])
    write_jsonl(tmp_path / "held_out.jsonl", [record(a, 9) for a in range(3)])
    (tmp_path / "strict.py").write_text(STRICT, encoding="utf-8")
    config = world.config(
        algorithm,
        tmp_path,
        {
            "prompts.path": str(tmp_path / "train.jsonl"),
            "evaluation.path": str(tmp_path / "held_out.jsonl"),
            "oracle.name": f"{tmp_path / 'strict.py'}:reward",
            "oracle.repeats": 0,
            "tracking.keep_trajectories": True,
            **changes,
        },
    )
    samples = 2 if algorithm == "dpo" else 3
    num_groups = [8, 4, 4, 0] if "oracle.max_outstanding" in changes else [4, 4, 4, 4]
    assert oat("train", config) == 0

    rows = metrics(tmp_path / algorithm)
    store = Store(tmp_path / algorithm / "ledger.sqlite")
    queries = 0
    for step, row in enumerate(rows[1:]):
        groups = [
            group
            for round in range(2)
            if store.has_round("train", step, round)
            for group in store.groups("train", step, round)
        ]
        assert [len(group.trajectories) for group in groups] == [samples] * num_groups[step]
        items = taken(store, "train", step)
        assert len(items) == 4
        for asked, answer in items:
            a, b = (int(number) for number in asked.question.messages[0].content.rstrip("=").split("+"))
            assert (asked.question.reference, asked.question.columns) == (
                str(7 * a + b),
                {k: v for k, v in record(a, b).items() if k != "prompt"},
            )
            assert answer.queries == (0 if asked.question.oracle == UNASKED else samples)
            queries += answer.queries
        assert row["oracle/queries"] == store.take_price("train", step).queries
        assert row["oracle/queries"] == queries
    assert [step for step in range(6) if store.has_take("train", step)] == [0, 1, 2, 3]
    assert queries == 4 * 4 * samples if algorithm != "dpo" else 0 < queries <= 4 * 4 * samples
    assert store.spent("train").queries == queries == rows[-1]["oracle/queries"]
    assert store.spent("eval").queries == 3 * 3 * (2 + 1), (
        "after 0, 2 and 4 steps: three prompts, two samples and one greedy response"
    )
    assert (
        sum(map(int, (tmp_path / "scored").read_text().split()))
        == store.spent("train").queries + store.spent("eval").queries
    )
    store.close()


LINEAR = {
    "to the end of the run": ({}, [0.91, 0.73, 0.55, 0.37, 0.19]),
    "with warm-up": (
        {"learner.warmup_steps": 4},
        [0.5, 1.0, 0.1 + 0.9 * 5 / 6, 0.1 + 0.9 * 3 / 6, 0.1 + 0.9 * 1 / 6],
    ),
    "over two passes a step": (
        {"algorithm.epochs": 2},
        [0.1 + 0.9 * left / 20 for left in (17, 13, 9, 5, 1)],
    ),
    "over before the run": (
        {"learner.schedule_steps": 7},
        [0.1 + 0.9 * 6 / 7, 0.1 + 0.9 * 4 / 7, 0.1 + 0.9 * 2 / 7, 0.1, 0.1],
    ),
}


@pytest.mark.sample("over two passes a step", seconds=1.2)
@pytest.mark.inventory(109)
@pytest.mark.parametrize("name", LINEAR)
def test_the_learning_rate_of_a_run_falls_to_a_tenth(name: str, world: World, tmp_path: Path) -> None:
    """The learning rates in the rows follow a linear schedule down to a tenth. Five steps make two optimiser
    steps per pass. A row holds the rate of its last optimiser step, so the last row is one optimiser step
    before the schedule's end."""
    changes, expected = LINEAR[name]
    schedule = {
        "learner.schedule": "linear",
        "learner.learning_rate": 0.002,
        "algorithm.minibatches": 2,
        "stop.max_steps": 5,
        "evaluation": None,
    }
    assert oat("train", world.config("grpo", tmp_path, {**schedule, **changes})) == 0
    rows = metrics(tmp_path / "grpo")[1:]
    updates = 2 * changes.get("algorithm.epochs", 1)
    assert [row["optim/steps"] for row in rows] == [updates * step for step in range(1, 6)]
    assert [row["optim/learning_rate"] for row in rows] == pytest.approx(
        [0.002 * share for share in expected], rel=1e-9
    )


ORACLE = """
class Constant:
    answers, durable = "score", False

    def __init__(self, value=0.0, delay=0.0):
        self.value = value

    def submit(self, questions):
        return []

    def collect(self, tickets, seconds):
        return []
"""


@pytest.mark.parametrize(
    ("option", "nearest"), [("dealy", "delay"), ("deadlines", "deadline_s"), ("lables", "labels")]
)
def test_a_misspelt_option_of_an_oracle(
    option: str, nearest: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error about a misspelt option names file, line, and the most similar option among the oracle's own
    and those that every oracle has."""
    (tmp_path / "mine.py").write_text(ORACLE, encoding="utf-8")
    name = f"{tmp_path / 'mine.py'}:Constant"
    config = world.config("dpo", tmp_path, {"oracle": {"name": name, "value": 1.0, option: 2.0}})
    line = config.read_text(encoding="utf-8").splitlines().index(f"  {option}: 2.0") + 1
    assert oat("train", config) == 2
    words = (
        f"oat train: {config}:{line}: nothing reads the field `oracle.{option}` of {name}; did you mean "
        f"`{nearest}`?\n"
    )
    assert capsys.readouterr().err == words
    assert not (tmp_path / "dpo").exists()


def test_an_exported_chat_model_keeps_its_template_and_its_ends(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With an exported chat model, other libraries render a conversation to the ids that the run sampled
    from. They stop at the end tokens of the tokenizer, of the template and of the model."""
    turns = ["<|im_start|>", "<|im_end|>"]
    make_model(tmp_path / "model", tokens=["\n", *"abcdefghijklmnopqrstuvwxyz0123456789+=", *turns])
    plain = AutoTokenizer.from_pretrained(tmp_path / "model")
    plain.add_special_tokens({"additional_special_tokens": turns})
    plain.save_pretrained(tmp_path / "model")
    GenerationConfig(eos_token_id=plain.convert_tokens_to_ids("=")).save_pretrained(tmp_path / "model")
    changes = {
        "model.path": str(tmp_path / "model"),
        "render": {"template": "chatml", "system": "add"},
        "stop.max_steps": 1,
        "evaluation": None,
    }
    config = world.config("grpo", tmp_path, changes)
    assert oat("check", config) == 0
    assert "render.system: only the policy reads this message" in capfd.readouterr().out
    assert oat("train", config) == 0
    assert oat("export", tmp_path / "grpo", tmp_path / "exported") == 0

    store = Store(tmp_path / "grpo" / "ledger.sqlite")
    group = store.groups("train", 0, 0)[0]
    store.close()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    messages = [
        {"role": "system", "content": "add"},
        {"role": "user", "content": group.prompt.messages[0].content},
    ]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == (
        f"<|im_start|>system\nadd<|im_end|>\n<|im_start|>user\n{messages[1]['content']}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer(rendered)["input_ids"] == group.trajectories[0].segments[0].ids.tolist()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert sorted(model.generation_config.eos_token_id) == sorted(
        tokenizer.convert_tokens_to_ids(["<eos>", "<|im_end|>", "="])
    )


@pytest.mark.slow(instead="tests/hardware/test_threads.py", seconds=1.4)
def test_the_engines_threads_are_measured_once_and_kept(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's number of threads is measured once. A later measurement with another result does not
    change it, and another number in a flag is refused."""
    config = world.config("dpo", tmp_path, {"stop.max_steps": 2, "compute.threads": None})
    for steps, found in ((2, 3), (3, 5)):
        monkeypatch.setattr("oat.engines.torch.fastest", lambda work, counts, found=found: work() and found)
        assert oat("train", config, "--stop.max_steps", str(steps)) == 0
        assert (
            "  threads: 3"
            in (tmp_path / "dpo" / "config.yaml").read_text(encoding="utf-8").split("engine:")[1]
        )
    assert oat("train", config, "--stop.max_steps", "4", "--engine.threads", "1") == 2
