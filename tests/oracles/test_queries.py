"""Reward functions in the unchanged form of LightRFT and OpenRLHF."""

from pathlib import Path
from typing import Any

import pytest
from fixtures import World, oat, write_jsonl

from oat.errors import ConfigError, OracleError
from oat.oracles.callables import QueryReward
from oat.oracles.make import build_oracle
from oat.types import Key, Message, Question

pytestmark = pytest.mark.inventory(53)
CODE = """
import torch


def reward_func(queries, prompts):
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts))
    return torch.tensor([float(len(query) - len(prompt)) for query, prompt in zip(queries, prompts)])


def reward_labels(queries, prompts, labels):
    responses = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    return [torch.tensor([1.0 if label in text else -1.0]) for text, label in zip(responses, labels)]


def reward_dict(queries, prompts, labels, **kwargs):
    rewards = torch.tensor([float(query.endswith(label)) for query, label in zip(queries, labels)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"mean": rewards.mean()}}


def reward_short(queries, prompts):
    return torch.zeros(len(queries) + 1)


def reward_other(queries, prompts, labels, level):
    return [float(own) for own in level]
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("code") / "reward_models.py"
    path.write_text(CODE, encoding="utf-8")
    return str(path)


def values(
    oracle: Any, *texts: str, messages: tuple[Message, ...] = (Message("user", "2+2="),), **given: Any
) -> tuple[float, ...]:
    question = Question(Key("train", 0, 0, 0), "score", messages, texts, tuple(range(len(texts))), **given)
    ((_, answer),) = oracle.collect(oracle.submit([question]), 5.0)
    return tuple(answer.values)


def test_queries_are_prompts_with_their_responses(code: str) -> None:
    oracle = build_oracle(f"{code}:reward_func", {})
    assert isinstance(oracle, QueryReward)
    assert values(oracle, "4", "four") == (1.0, 4.0)
    assert values(oracle, "4", "four", messages=(Message("system", "add"), Message("user", "2+2="))) == (
        1.0,
        4.0,
    )
    assert oracle.cacheable


@pytest.mark.parametrize(
    "given",
    [
        {"reference": "4"},
        {"columns": {"label": "4"}},
        {"columns": {"labels": "4", "label": "5"}},
        {"columns": {"label": "4"}, "reference": "5"},
    ],
)
def test_labels(code: str, given: dict[str, Any]) -> None:
    assert values(build_oracle(f"{code}:reward_labels", {}), "4", "5", **given) == (1.0, -1.0)
    assert values(build_oracle(f"{code}:reward_dict", {}), "4", "5", **given) == (1.0, 0.0)


def test_what_they_need_is_checked(code: str) -> None:
    oracle: Any = build_oracle(f"{code}:reward_labels", {})
    oracle.check_columns(["label"], False)
    oracle.check_columns([], True)
    with pytest.raises(ConfigError, match="its parameter `labels` is neither a column"):
        oracle.check_columns(["answer"], False)
    with pytest.raises(OracleError, match="returned 3 values for 2 entries"):
        values(build_oracle(f"{code}:reward_short", {}), "a", "b")
    assert values(build_oracle(f"{code}:reward_other", {}), "a", columns={"level": 3}) == (3.0,)


@pytest.mark.parametrize("place", ["here", "isolated"])
def test_a_run(code: str, world: World, tmp_path: Path, place: str) -> None:
    """A run uses such a function unchanged, in this process and in a worker."""
    records = [{"prompt": f"{n}+1=", "label": "a"} for n in range(8)]
    name = f"{code}:reward_labels"
    oracle = (
        {"name": name}
        if place == "here"
        else {"name": "isolated", "function": name, "timeout_s": 60, "memory_gb": 16}
    )
    changes = {
        "prompts": {"path": str(write_jsonl(tmp_path / "data.jsonl", records))},
        "oracle": oracle,
        "evaluation": None,
        "stop.max_steps": 2,
    }
    assert oat("train", world.config("grpo", tmp_path, changes)) == 0
