"""An environment of your own: it answers the model turn by turn, and rewards the episode.

The model guesses a secret digit from 1 to 3. After a wrong guess, the environment says if the secret digit is
higher or lower. The second guess is the last. An episode is one trajectory: the model learns its own
messages, and only reads the environment's messages. `python examples/05_environment.py` trains a tiny random
model by GRPO in seconds. The model learns to guess 2 first and then to follow the hint.
"""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from oat.environments.base import Turn
from oat.types import Message, Prompt

CONFIG = f"""
sampling:
  max_new_tokens: 1
  environment:
    name: "{__file__}:HigherLower"
    guesses: 2            # an option of the class below
oracle:
  name: environment       # asks nobody: the reward is that of the episode
algorithm:
  name: grpo
  prompts: 6
  samples: 16
learner:
  learning_rate: 5e-3
alarms:
  truncated:
    action: "off"         # a response is one token here; elsewhere it is a bad sign if none ends
stop:
  max_steps: 40
"""


class HigherLower:
    """A game of guessing a digit.

    Args:
        guesses: number of guesses; an option of the configuration.

    The results of an environment's methods must depend only on their arguments: an episode keeps all its data
    in its state. Then a run can play the episode again after a kill. A response that is not a digit must not
    raise an error. Here it gets the reward 0, and the episode goes on.
    """

    def __init__(self, guesses: int = 2):
        self.guesses = guesses

    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Mapping[str, Any]:
        """Return the state before the first response. `prompt.columns` has the columns of the record. Random
        choices use `generator`."""
        return {"secret": prompt.columns["secret"], "turn": 1}

    def step(self, state: Mapping[str, Any], response: str) -> Turn:
        """Return the next state, the next message for the model, and a reward. The message None ends the
        episode. The reward of an episode is the sum over its turns."""
        guess = int(response) if response in {"1", "2", "3"} else None
        if guess == state["secret"]:
            return Turn(state, None, reward=1.0)
        if state["turn"] == self.guesses:
            return Turn(state, None, reward=0.0)
        hint = "?" if guess is None else "+" if guess < state["secret"] else "-"
        return Turn({**state, "turn": state["turn"] + 1}, Message("user", hint), reward=0.0)


PROMPTS = [{"prompt": "guess", "secret": secret} for secret in (1, 2, 3)]


def main(*flags: str) -> None:
    from oat.testing import tiny_run

    rows = tiny_run(CONFIG, PROMPTS, characters="123+-?", flags=flags)
    print(
        f"\nfound in two guesses: {rows[1]['reward/mean']:.0%} in the first step, "
        f"{rows[-1]['reward/mean']:.0%} in the last"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
