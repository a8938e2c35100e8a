"""Unchanged parts of TRL runs: reward functions, signatures, and data formats."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import NO_TRL, World, make_model, oat, write_jsonl

from oat.ledger.intents import Intent
from oat.ledger.reader import Reader
from oat.oracles.make import build_oracle
from oat.types import Answer, Key, Message, Question

ROOT = Path(__file__).parents[2]
DEMO = ROOT.parent / "shared" / "real" / "dpo_en_demo.json"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant'[0] }}={% endif %}"
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return settings of a model with room for conversations, and of a template."""
    folder = tmp_path_factory.mktemp("chat")
    make_model(folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    (folder / "model" / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 50_000}), encoding="utf-8"
    )
    (folder / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return {"model.path": str(folder / "model"), "render.template": str(folder / "template.jinja")}


def answered(run: Path) -> list[tuple[Intent, Answer]]:
    with closing(Reader(run / "ledger.sqlite")) as store:
        return [(asked, store.answer(asked)[0]) for asked in store.answered()]


OURS = '''
import asyncio

async def reward_async(prompts, completions, **kwargs):
    """As in TRL's guide: an asynchronous function."""
    await asyncio.sleep(0.01)
    return [float(len(completion)) for completion in completions]

def reward_some(prompts, completions, task, **kwargs):
    """As in TRL's guide: None where the task is another one."""
    return [None if t != "maths" else float("1" in completion) for completion, t in zip(completions, task)]

def reward_columns(completions, completion_ids, solution, **kwargs):
    """As in TRL's guide: a column of the data by name, and the tokens."""
    assert {"prompts", "task"} <= set(kwargs)
    rows = zip(completions, completion_ids, solution)
    return [len(ids) + float(len(text) <= len(ids)) + 10 * float(right) for text, ids, right in rows]
'''


@pytest.mark.inventory(53)
@pytest.mark.parametrize("name", ["reward_async", "reward_some", "reward_columns"])
def test_functions_after_the_documented_signature(world: World, tmp_path: Path, name: str) -> None:
    (tmp_path / "ours.py").write_text(OURS, encoding="utf-8")
    records = [{"prompt": f"{n}+1=", "solution": n, "task": "maths" if n % 2 else "other"} for n in range(8)]
    path = write_jsonl(tmp_path / "data.jsonl", records)
    changes = {
        "prompts": {"path": str(path), "epochs": 1},
        "oracle.name": f"{tmp_path / 'ours.py'}:{name}",
        "evaluation": None,
        "stop.max_steps": 2,
    }
    assert oat("train", world.config("grpo", tmp_path, changes)) == 0
    found = answered(tmp_path / "grpo")
    assert len(found) == 8
    for asked, answer in found:
        texts, columns = asked.question.candidates, asked.question.columns
        if name == "reward_async":
            assert answer.values == tuple(float(len(text)) for text in texts)
        elif name == "reward_some":
            assert answer.marks == (("ok",) if columns["task"] == "maths" else ("abstain",)) * 3
        else:
            sizes = [value - 10 * columns["solution"] - 1 for value in answer.values]
            assert all(len(text) <= size <= 4 for text, size in zip(texts, sizes, strict=True))


SETTINGS: dict[str, tuple[dict[str, Any], list[float | None]]] = {
    "accuracy_reward": ({}, [1.0, 0.0, None]),
    "reasoning_accuracy_reward": ({}, [1.0, 0.0, 0.0]),
    "think_format_reward": ({}, [1.0, 0.0, 0.0]),
    "get_cosine_scaled_reward": ({"max_len": 8}, [0.75, -0.75, None]),
    "get_repetition_penalty_reward": ({"ngram_size": 2, "max_penalty": -1.0}, [0.0, -2 / 3, 0.0]),
    "get_soft_overlong_punishment": ({"max_completion_len": 5, "soft_punish_cache": 2}, [-0.5, -0.5, -0.5]),
}
"""By function: its settings, and its scores of three completions of four tokens."""
TEXTS = ("<think>\nhm\n</think>\n" + r"\boxed{\frac{1}{3}}", r"</think> \boxed{\frac{1}{2}}", "no")
SOLUTIONS = (r"\frac{1}{3}", r"\frac{1}{3}", "")
IDS = ([1, 2, 3, 4], [5, 5, 5, 5], [1, 2, 3, 3])


@pytest.fixture
def rewards() -> Iterator[Any]:
    """Yield `trl.rewards`, from this environment or from the one that `make bench` makes for TRL."""
    places = [str(place) for place in ROOT.glob(".venv-peers/trl/lib/python*/site-packages")]
    sys.path += places
    try:
        yield importlib.import_module("trl.rewards")
    except ImportError:
        pytest.skip(NO_TRL)
    finally:
        for place in places:
            sys.path.remove(place)


def test_every_function_that_trl_has_is_tried(rewards: Any) -> None:
    assert {name for names in rewards._import_structure.values() for name in names} == set(SETTINGS)


@pytest.mark.inventory(53)
@pytest.mark.parametrize("name", SETTINGS)
def test_functions_of_trl(
    rewards: Any, world: World, chat: dict[str, str], tmp_path: Path, name: str
) -> None:
    if "accuracy" in name or "cosine" in name:
        pytest.importorskip("math_verify", reason=f"{NO_TRL} with math_verify")
    options, expected = SETTINGS[name]
    made = f"reward = {name}(**{options!r})" if name.startswith("get_") else f"reward = {name}"
    (tmp_path / "mine.py").write_text(f"from trl.rewards import {name}\n\n{made}\n", encoding="utf-8")
    oracle = build_oracle(f"{tmp_path / 'mine.py'}:reward", {})
    messages = (Message("user", "what is it?"),)
    questions = [
        Question(
            Key("train", 0, 0, n),
            "score",
            messages,
            (text,),
            (0,),
            None,
            {"solution": right},
            is_chat=True,
            ids=(np.array(ids, dtype=np.int32),),
        )
        for n, (text, right, ids) in enumerate(zip(TEXTS, SOLUTIONS, IDS, strict=True))
    ]
    answers = dict(oracle.collect(oracle.submit(questions), 60.0))
    given = [answers[str(question.key)] for question in questions]
    assert [None if a.marks[0] == "abstain" else a.values[0] for a in given] == pytest.approx(expected)

    records = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "solution": str(n + 1)} for n in range(8)]
    changes = {
        "prompts": {"path": str(write_jsonl(tmp_path / "data.jsonl", records))},
        "oracle.name": f"{tmp_path / 'mine.py'}:reward",
    }
    assert (
        oat(
            "train",
            world.config("grpo", tmp_path, {**changes, **chat, "evaluation": None, "stop.max_steps": 1}),
        )
        == 0
    )
    assert all(set(answer.marks) == {"ok"} for _, answer in answered(tmp_path / "grpo"))


def examples() -> list[Any]:
    """Return the table of formats in docs/data.md: name, record, and the names of the recorded responses."""
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    table = page.split("| format | a record |")[1].split("\n\n")[0]
    found = []
    for row in table.splitlines()[2:]:
        name, records, _, responses = (cell.strip() for cell in row.strip("|").split(" | "))
        found += [
            pytest.param(name, json.loads(text), re.findall(r"`(\w+)`", responses))
            for text in re.findall(r"`(\{.*?\})`(?:<br>|$)", records)
        ]
    return found


@pytest.mark.sample(
    "prompt-only-record0-*",
    "prompt-completion-record3-*",
    "preference-record5-*",
    "unpaired preference-record1?-*",
    seconds=9.5,
)
@pytest.mark.inventory(106)
@pytest.mark.parametrize(("form", "record", "responses"), examples())
def test_every_format_runs_by_naming_the_path_alone(
    world: World,
    chat: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    form: str,
    record: dict[str, Any],
    responses: list[str],
) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [record] * 4)
    algorithm = {0: "grpo", 1: "sft", 2: "dpo"}[len(responses)]
    options = (
        {"name": algorithm, "prompts": 2}
        | ({"samples": 2} if not responses else {})
        | ({"threshold": 1} if "unpaired" in form else {})
    )
    changes = {
        "prompts": {"path": str(path)},
        "algorithm": options,
        **chat,
        "evaluation": None,
        "stop.max_steps": 2,
    }
    changes |= {"oracle.name": "recorded"} if responses else {}
    changes |= {"render.template": None} if "text" in record else {}
    assert oat("train", world.config(algorithm, tmp_path, changes)) == 0
    assert f"{path}: read as {form} (" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / algorithm / "metrics.jsonl").read_text().splitlines()]
    assert rows[1]["rows/trained"] > 0


@pytest.mark.slow(instead="test_every_format_runs_by_naming_the_path_alone", seconds=2.0)
def test_the_demonstration_of_sharegpt_preferences(
    world: World, chat: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not DEMO.exists():
        pytest.skip(f"{NO_TRL}: no demonstration data beside the project")
    changes = {
        "prompts": {"path": str(DEMO), "max_tokens": 400},
        "algorithm": {"name": "dpo", "prompts": 2},
        "oracle.name": "recorded",
        **chat,
    }
    assert (
        oat("train", world.config("dpo", tmp_path, {**changes, "evaluation": None, "stop.max_steps": 2})) == 0
    )
    assert f"{DEMO}: read as preference (conversations, chosen, rejected)" in capsys.readouterr().out
