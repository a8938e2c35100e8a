"""`FakeEngine` instead of a real engine: the actor works as usual, and a user's environment is played without
a model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import CHARACTERS, build_tokenizer

from oat.environments.base import Turn
from oat.environments.batched import BatchedEnvironment
from oat.plugins.loading import load_symbol
from oat.rollout.actor import Actor
from oat.runtime.local import over_wire
from oat.seeds import Seeds
from oat.testing import FakeEngine
from oat.text.renderer import Renderer
from oat.types import Message, Prompt, Request, Sampling

END = 0


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def actor(engine: FakeEngine, environment: object = None) -> Actor:
    return Actor(
        Renderer(build_tokenizer(), template=None),
        over_wire(engine),
        Sampling(4),
        Seeds(0),
        environment=None if environment is None else BatchedEnvironment(environment, 5.0),
    )


def prompt(text: str, occurrence: int = 0) -> Prompt:
    return Prompt(1, occurrence, (Message("user", text),))


def test_responses_come_last_first_each_with_its_index() -> None:
    engine = FakeEngine([[*ids("ab"), END], ids("abcdef"), []], num_tokens=40, stop_ids=[END])
    requests = [Request(np.array(ids("a"), dtype=np.int32), Sampling(4), key) for key in range(4)]
    made = list(engine.generate(requests, "sampler"))
    assert [completion.index for completion in made] == [3, 2, 1, 0]
    assert [completion.ids.tolist() for completion in reversed(made)] == [
        [*ids("ab"), END],
        ids("abcd"),
        [],
        [*ids("ab"), END],
    ]
    assert [completion.finish_reason for completion in reversed(made)] == ["stop", "length", "length", "stop"]
    assert made[3].raw_logps.tolist() == pytest.approx([-np.log(40)] * 3)
    assert engine.requests == requests


def test_it_holds_what_it_was_given_and_says_so() -> None:
    engine, weight = FakeEngine([[END]]), torch.arange(3.0)
    engine.load("sampler", 7, {"weight": weight})
    weight += 1
    assert engine.tensors("sampler")["weight"].tolist() == [0, 1, 2]
    assert (engine.version("sampler"), engine.version("policy")) == (7, 0)
    (completion,) = engine.generate([Request(np.zeros(1, dtype=np.int32), Sampling(4), 0)], "sampler")
    assert completion.version == 7
    engine.release("sampler", [3, 4])
    engine.release("sampler", [5])
    assert engine.released == {"sampler": [3, 4, 5]}


def test_the_actor_samples_and_scores_with_it() -> None:
    engine = FakeEngine(lambda so_far: [*so_far[:1].tolist(), END], num_tokens=40, stop_ids=[END])
    sampled = actor(engine)
    groups = sampled.sample([prompt("ab"), prompt("cd", 1)], {"sampler": 2}, ("train", 0, 0))
    assert [[trajectory.text for trajectory in group.trajectories] for group in groups] == [
        ["a", "a"],
        ["c", "c"],
    ]
    scores = sampled.score(groups, ["sampler", "reference"])
    assert all(
        values.tolist() == pytest.approx([-2 * np.log(40)] * 2) for name in scores for values in scores[name]
    )


def test_an_environment_is_played_without_a_model() -> None:
    class Echo:
        def reset(self, prompt: Prompt, generator: np.random.Generator) -> dict:
            return {"turns": 0}

        def step(self, state: dict, response: str) -> Turn:
            ends = state["turns"] == 2
            return Turn(
                {"turns": state["turns"] + 1},
                None if ends else Message("user", response),
                reward=len(response),
            )

    engine = FakeEngine([ids("ab"), ids("abc"), [*ids("a"), END]], stop_ids=[END])
    (group,) = actor(engine, Echo()).sample([prompt("z")], {"sampler": 1}, ("train", 0, 0))
    (trajectory,) = group.trajectories
    assert (trajectory.reward, trajectory.text, trajectory.finish_reason) == (6.0, "a", "stop")
    assert trajectory.ids.tolist() == [*ids("zabababcabca"), END]
    assert trajectory.trained.tolist() == [c == "1" for c in "0110011100011"]


@pytest.mark.parametrize(
    ("guesses", "reward", "read"),
    [("2", 1.0, ""), ("13", 1.0, "+"), ("32", 0.0, "-"), ("11", 0.0, "+"), (".2", 0.0, "?")],
)
def test_the_environment_of_the_examples(guesses: str, reward: float, read: str) -> None:
    """The secret number is 2 in the case of a right first guess, then 3, then 1."""
    environment = load_symbol(f"{Path(__file__).parents[2] / 'examples' / '05_environment.py'}:HigherLower")()
    secret = {"2": 2, "13": 3, "32": 1, "11": 3, ".2": 1}[guesses]
    state, said = (
        environment.reset(
            Prompt(1, 0, (Message("user", "g"),), columns={"secret": secret}), np.random.default_rng(0)
        ),
        "",
    )
    for number, guess in enumerate(guesses, 1):
        turn = environment.step(state, guess)
        state, said = turn.state, said + (turn.message.content if turn.message else "")
        assert (turn.message is None) == (number == len(guesses))
    assert (turn.reward, said) == (reward, read)
