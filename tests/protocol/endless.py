"""Environments that never end. To prompts of one kind they say nothing, and to the others so much that the
context is full after a few turns."""

import asyncio

from oat.environments.base import Turn
from oat.types import Message


class Endless:
    def reset(self, prompt, generator):
        return {"says": "" if prompt.messages[0].content.startswith("1") else "+" * 11, "turn": 0}

    def step(self, state, response):
        reward = response.count("a") - 0.05 * len(response)
        return Turn({**state, "turn": state["turn"] + 1}, Message("user", state["says"]), reward)


class Together(Endless):
    """Answers all episodes of a batch in one call."""

    def step_all(self, states, responses):
        return [self.step(*each) for each in zip(states, responses, strict=True)]


class Waiting(Endless):
    """Answers at its own pace."""

    async def step(self, state, response):
        await asyncio.sleep(0.001 * (state["turn"] % 2))
        return super().step(state, response)
