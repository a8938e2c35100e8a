"""Preference data in the form of HuggingFaceH4/ultrafeedback_binarized: complete conversations under `chosen`
and `rejected`, beside a `prompt` of text."""

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, oat, write_jsonl

from oat.data.formats import Layout
from oat.data.prompts import PromptSet, Source
from oat.errors import DataError
from oat.types import Message


def said(*texts: str, first: str = "user") -> list[dict[str, str]]:
    """Return messages of alternating roles."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"content": text, "role": roles[number % 2]} for number, text in enumerate(texts)]


def record(prompt: str, chosen: list[dict[str, str]], rejected: list[dict[str, str]]) -> dict[str, Any]:
    """Return a record with the columns of that data set, in its order."""
    scores = {"score_chosen": 8.5, "score_rejected": 4.0}
    return {
        "prompt": prompt,
        "prompt_id": "f" * 64,
        "chosen": chosen,
        "rejected": rejected,
        "messages": chosen,
        **scores,
    }


def read(*records: dict[str, Any], **options: Any) -> PromptSet:
    return PromptSet(Source(list(records)), Layout(responses=("chosen", "rejected"), **options))


def test_two_messages_each() -> None:
    (prompt,) = read(record("1+1", said("1+1", "2"), said("1+1", "3")))
    assert prompt.messages == (Message("user", "1+1"),)
    assert (prompt.columns["chosen"], prompt.columns["rejected"]) == (
        said("2", first="assistant"),
        said("3", first="assistant"),
    )
    assert prompt.is_chat
    assert (prompt.columns["prompt_id"], prompt.columns["score_chosen"]) == ("f" * 64, 8.5)


def test_a_longer_history_is_the_prompt() -> None:
    """Two conversations share all turns but the last one. The shared turns are the prompt, and only the last
    turn is learned. The text under `prompt` is the beginning of the history, or a summary."""
    history = said("1+1", "2", "and +1?")
    (prompt,) = read(
        record("1+1", [*history, *said("3", first="assistant")], [*history, *said("4", first="assistant")])
    )
    assert prompt.messages == (Message("user", "1+1"), Message("assistant", "2"), Message("user", "and +1?"))
    assert (prompt.columns["chosen"], prompt.columns["rejected"]) == (
        said("3", first="assistant"),
        said("4", first="assistant"),
    )


def test_a_system_message_and_another_text_under_prompt() -> None:
    """The conversations have a system message and another text than the column `prompt`. The prompt is taken
    from the conversations."""
    system = {"role": "system", "content": "Be brief."}
    (prompt,) = read(record("one and one", [system, *said("1+1", "2")], [system, *said("1+1", "3")]))
    assert prompt.messages == (Message("system", "Be brief."), Message("user", "1+1"))


def test_without_a_prompt_and_under_other_names() -> None:
    plain = {"good": said("1+1", "2"), "bad": said("1+1", "3"), "question": "1+1"}
    layout = Layout(prompt_key="question", responses=("good", "bad"))
    (named,) = PromptSet(Source([plain]), layout)
    (bare,) = PromptSet(
        Source([{name: value for name, value in plain.items() if name != "question"}]),
        Layout(responses=("good", "bad")),
    )
    assert named.messages == bare.messages == (Message("user", "1+1"),)
    assert named.columns["bad"] == bare.columns["bad"] == said("3", first="assistant")


def test_one_response_of_the_two() -> None:
    """As demonstrations, only the chosen response is used. It follows the text under `prompt`."""
    (prompt,) = PromptSet(
        Source([record("1+1", said("1+1", "2"), said("1+1", "3"))]), Layout(responses=("chosen",))
    )
    assert (prompt.messages, prompt.columns["chosen"]) == (
        (Message("user", "1+1"),),
        said("2", first="assistant"),
    )


def test_an_empty_response_ends_at_once() -> None:
    (prompt,) = read(record("1+1", said("1+1", "2"), said("1+1", "")))
    assert prompt.columns["rejected"] == said("", first="assistant")


def test_conversations_about_different_things() -> None:
    with pytest.raises(
        DataError,
        match=r"1: fields 'chosen' and 'rejected': expected conversations that begin with a common prompt",
    ):
        read(record("1+1", said("1+1", "2"), said("2+2", "4")))


def test_a_run_learns_from_it(world: World, tmp_path: Path) -> None:
    """An offline run on the data needs only the path. An empty response counts with one token."""
    records = [record(f"{a}+b", said(f"{a}+b", "ab"), said(f"{a}+b", "")) for a in range(4)]
    path = write_jsonl(tmp_path / "uf.jsonl", records)
    changes = {
        "prompts": {"path": str(path)},
        "oracle.name": "recorded",
        "evaluation": None,
        "algorithm": {"name": "dpo", "prompts": 4},
    }
    config = world.config("dpo", tmp_path, {**changes, "stop.max_steps": 2})
    assert oat("train", config) == 0
    row = json.loads((tmp_path / "dpo" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (row["rows/trained"], row["pairs/empty_frac"], row["response/length"]) == (8, 0, 2)
