"""An environment of your own: it answers the model, turn by turn, and rewards the whole episode.

The model guesses a digit from 1 to 3. The environment says whether the secret digit is higher or lower, and
the second guess is the last. An episode is one trajectory: the model's messages are learned, the
environment's are only read. `python examples/05_environment.py` trains a tiny random model by GRPO in
seconds: it learns to begin in the middle, and to follow the hints.
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
  environment: "{__file__}:HigherLower"
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
GUESSES = 2


class HigherLower:
    """A game of guessing a digit.

    An environment is a function of its arguments: an episode remembers only what is in its state, so it can
    be played again after a kill. A response without a digit is a bad response and no error: it is worth
    nothing, and the episode goes on.
    """

    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Mapping[str, Any]:
        """Return the state before the first response. `prompt.columns` has the columns of the record; random
        choices use the generator."""
        return {"secret": prompt.columns["secret"], "turn": 1}

    def step(self, state: Mapping[str, Any], response: str) -> Turn:
        """Return the next state, the message that the model reads next (None ends the episode), and a reward;
        the rewards of all turns are added."""
        guess = int(response) if response in {"1", "2", "3"} else None
        if guess == state["secret"]:
            return Turn(state, None, reward=1.0)
        if state["turn"] == GUESSES:
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
