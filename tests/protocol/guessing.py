"""An environment of two turns. After the first response it names a digit and asks again. The letter `a` and
the digit earn rewards."""

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
