"""The actor plays episodes: late ones end without a reward, and the engine's pages are given back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import World, oat
from tiny_models import build_tokenizer

from oat.environments.base import Turn
from oat.environments.batched import BatchedEnvironment
from oat.errors import EpisodeError
from oat.oracles.builtin import KnownOracle
from oat.rollout.actor import Actor
from oat.runtime.local import over_wire
from oat.seeds import Seeds
from oat.testing import FakeEngine
from oat.text.renderer import Renderer
from oat.types import Group, Key, Message, Prompt, Question, Sampling
from oat.wire import roundtrip

END = 0


class Counting:
    """Ends after as many responses as the prompt's text has letters. `late` and `wrong` name prompts that it
    answers late or not at all, from their second response on."""

    def __init__(self, late: str = "", wrong: str = ""):
        self.late, self.wrong = late, wrong

    async def reset(self, prompt: Prompt, generator: np.random.Generator) -> Any:
        if "reset" in self.late and prompt.messages[0].content == "b":
            await _never()
        return {"text": prompt.messages[0].content, "turn": 1}

    async def step(self, state: Any, response: str) -> Any:
        if state["turn"] == 2 and state["text"] == self.wrong:
            raise KeyError(response)
        if state["turn"] == 2 and state["text"] == self.late:
            await _never()
        is_last = state["turn"] == len(state["text"])
        message = None if is_last else Message("user", "?")
        return Turn({**state, "turn": state["turn"] + 1}, message, 1.0 + state["turn"])


async def _never() -> None:
    import asyncio

    await asyncio.sleep(60)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine([[5, END]], num_tokens=40, stop_ids=[END])


def play(engine: FakeEngine, texts: list[str], **options: Any) -> list[Group]:
    environment = BatchedEnvironment(Counting(**options), 0.3)
    renderer = Renderer(build_tokenizer(), template=None)
    actor = Actor(renderer, over_wire(engine), Sampling(4), Seeds(0), environment=environment)
    prompts = [Prompt(n + 1, n, (Message("user", text),)) for n, text in enumerate(texts)]
    try:
        return actor.sample(prompts, {"sampler": 2}, ("train", 0, 0))
    finally:
        environment.close()


def answers(groups: list[Group], kind: Any = "score") -> Iterator[tuple[Any, Any]]:
    oracle = KnownOracle("environment", kind)
    for number, group in enumerate(groups):
        question = roundtrip(Question.about(group, Key("train", 0, 0, number), kind, (0, 1)))
        ((_, answer),) = oracle.collect(oracle.submit([question]), 1)
        yield answer.values, answer.marks


def test_requests_keep_their_pages_and_release_them(engine: FakeEngine) -> None:
    groups = play(engine, ["abc", "a"])
    assert [[row.reward for row in group.trajectories] for group in groups] == [[9.0, 9.0], [2.0, 2.0]]
    assert [[s.reward for s in group.trajectories[0].segments] for group in groups] == [
        [None, 2.0, None, 3.0, None, 4.0],
        [None, 2.0],
    ]
    assert {request.keeps for request in engine.requests} == {True}
    assert [len(request.ids) for request in engine.requests] == [3, 3, 1, 1, 6, 6, 9, 9]
    keys = [request.key for request in engine.requests]
    assert keys[4:6] == keys[6:8] == keys[:2]
    assert engine.released == {"sampler": keys[:4]}


def test_without_an_environment_nothing_is_kept(engine: FakeEngine) -> None:
    actor = Actor(Renderer(build_tokenizer(), template=None), engine, Sampling(4), Seeds(0))
    actor.sample([Prompt(1, 0, (Message("user", "a"),))], {"sampler": 2}, ("train", 0, 0))
    assert {request.keeps for request in engine.requests} == {False}
    assert engine.released == {}


@pytest.mark.filterwarnings("ignore:the environment Counting did not answer")
def test_a_late_episode_ends_without_a_reward_and_the_others_go_on(engine: FakeEngine) -> None:
    groups = play(engine, ["aaa", "bbb"], late="bbb")
    assert [[row.reward for row in group.trajectories] for group in groups] == [[9.0, 9.0], [None, None]]
    assert [group.trajectories[0].finish_reason for group in groups] == ["stop", "aborted"]
    assert [len(group.trajectories[0].segments) for group in groups] == [6, 4]
    assert groups[1].trajectories[0].segments[1].reward == 2.0
    assert list(answers(groups)) == [((9.0, 9.0), ("ok", "ok")), ((0.0, 0.0), ("failed", "failed"))]


@pytest.mark.filterwarnings("ignore:the environment Counting did not answer")
def test_a_late_reset_ends_the_episode_after_its_first_response(engine: FakeEngine) -> None:
    groups = play(engine, ["b", "a"], late="reset")
    assert [len(group.trajectories[0].segments) for group in groups] == [2, 2]
    assert [group.trajectories[0].reward for group in groups] == [None, 2.0]
    assert [group.trajectories[0].finish_reason for group in groups] == ["aborted", "stop"]


def test_a_pair_with_a_late_episode_has_no_winner(engine: FakeEngine) -> None:
    (group,) = play(engine, ["a"])
    first, second = group.trajectories
    late = Group(group.prompt, (first, Sampling(4).trajectory("sampler", second.segments, "aborted", "")))
    assert list(answers([group, late], "compare")) == [((0.5,), ("tie",)), ((0.5,), ("failed",))]


def test_a_numpy_state_message_and_reward_leave_plain_values(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Numpy(Counting):
        async def step(self, state: Any, response: str) -> Any:
            turn = await super().step(state, response)
            message = turn.message and Message("user", np.str_(turn.message.content))
            return Turn({**turn.state, "seen": np.float32(1)}, message, np.float32(turn.reward))

    monkeypatch.setitem(globals(), "Counting", Numpy)
    (group,) = play(engine, ["aa"])
    assert [(row.reward, type(row.reward)) for row in group.trajectories] == [(5.0, float)] * 2
    assert [len(row.ids) for row in group.trajectories] == [7, 7]


def test_a_message_that_the_template_refuses_names_environment_and_record(
    engine: FakeEngine, tmp_path: Path
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )

    class Tool(Counting):
        async def step(self, state: Any, response: str) -> Any:
            return Turn(state, Message("tool", "?"), 0.0)

    environment = BatchedEnvironment(Tool(), 5.0)
    renderer = Renderer(build_tokenizer(), template=str(template))
    actor = Actor(renderer, engine, Sampling(4), Seeds(0), environment=environment)
    said = (
        r"the environment Tool returned a message that cannot be rendered \(.*no tools.*from record 7; repair"
    )
    with pytest.raises(EpisodeError, match=said):
        actor.sample([Prompt(7, 0, (Message("user", "a"),))], {"sampler": 1}, ("train", 0, 0))
    environment.close()


def test_an_error_gives_the_pages_back_too(engine: FakeEngine) -> None:
    with pytest.raises(EpisodeError, match=r"raised KeyError: .*, in an episode from record 2;"):
        play(engine, ["aa", "bb"], wrong="bb")
    assert engine.released == {"sampler": [request.key for request in engine.requests[:4]]}


def test_pairs_of_episodes_are_evaluated_by_their_rewards(world: World, tmp_path: Path) -> None:
    """A run that compares pairs by the rewards of their episodes needs no references for its evaluations:
    they report the mean reward."""
    guessing = Path(__file__).parents[1] / "protocol" / "guessing.py"
    changes = {
        "oracle.name": "environment",
        "sampling.environment": f"{guessing}:Guessing",
        "prompts.reference_key": None,
        "stop.max_steps": 2,
    }
    assert oat("train", world.config("dpo", tmp_path, changes)) == 0
    rows = [json.loads(line) for line in (tmp_path / "dpo" / "metrics.jsonl").open()]
    records = [json.loads(line) for line in (tmp_path / "dpo" / "evaluations" / "step_00000002.jsonl").open()]
    values = [record["value"] for record in records if record["mode"] == "sampled"]
    assert rows[2]["eval/sampled"] == pytest.approx(np.mean(values))
    assert {record["mark"] for record in records} == {"ok"}
