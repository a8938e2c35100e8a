"""An environment of two turns. After the first response it names a digit and asks again. The letter `a` and
the digit earn rewards."""

import asyncio

from oat.environments.base import Turn
from oat.types import Message


class Guessing:
    def reset(self, prompt, generator):
        return {"turn": 0, "digit": int(generator.integers(10))}

    def step(self, state, response):
        reward = response.count("a") + 0.3 * response.count(str(state["digit"])) - 0.05 * len(response)
        if state["turn"] == 1 or not response:
            return Turn(state, None, reward)
        return Turn({**state, "turn": 1}, Message("user", f"+{state['digit']}="), reward)


class Together(Guessing):
    """Answers all episodes of a batch in one call."""

    def step_all(self, states, responses):
        return [self.step(*each) for each in zip(states, responses, strict=True)]


class Waiting(Guessing):
    """Answers at its own pace: the episodes of a batch wait for different times, and end in another order."""

    async def step(self, state, response):
        await asyncio.sleep(0.002 * (state["digit"] % 4))
        return super().step(state, response)
