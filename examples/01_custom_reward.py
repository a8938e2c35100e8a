"""A reward of your own: a function in a file.

A configuration names the function by its place: `oracle: {name: "examples/01_custom_reward.py:reward"}`.
CONFIG below is a configuration that lacks only the model, the prompts and the run directory.

`python examples/01_custom_reward.py` trains a tiny random model with this reward, by `oat train`, in seconds.
Flags override the configuration: `python examples/01_custom_reward.py --stop.max_steps 5`.
"""

import sys
from collections.abc import Sequence

CONFIG = f"""
sampling:
  max_new_tokens: 4
oracle:
  name: "{__file__}:reward"
algorithm:
  name: grpo
  prompts: 8
  samples: 16
learner:
  learning_rate: 1e-2
stop:
  max_steps: 40
"""
PROMPTS = [{"prompt": f"{letter}=", "wanted": letter.upper()} for letter in "abcdefg"] + [
    {"prompt": "h=", "wanted": None}
]
"""Records of a data file. The reward gets every column except the prompt under the column's name."""


def reward(
    prompts: Sequence[str],
    completions: Sequence[str],
    wanted: Sequence[str | None],
    **columns: Sequence[object],
) -> list[float | None]:
    """Return one number per completion, in the order of the completions; higher is better. None means "no
    reward": the completion is left out. TRL's reward functions have this signature and work here unchanged.

    All arguments are lists with one entry per completion. For example, a prompt with 16 completions appears
    16 times in `prompts`, and its columns appear 16 times too. A column that is not an argument arrives in
    `**columns`.

    A completion is any text that a model may write, such as an empty, endless or hostile text. Limit slow
    computations, and never `eval` a completion. A function that waits for a server may be `async def`.
    """
    return [
        None if text is None else agreement(said, text)
        for said, text in zip(completions, wanted, strict=True)
    ]


def agreement(said: str, text: str) -> float:
    """Return the number of positions at which two texts agree, divided by the length of the longer text."""
    return sum(a == b for a, b in zip(said, text, strict=False)) / max(len(said), len(text), 1)


def main(*flags: str) -> None:
    from oat.testing import check_oracle, tiny_run

    # finds faults of a reward before a run does; put this line into a test of your own
    check_oracle(reward, columns={"wanted": "A"})
    rows = tiny_run(CONFIG, PROMPTS, characters="ABCDEFG", flags=flags)
    print(
        f"\nmean reward: {rows[1]['reward/mean']:.2f} in the first step, {rows[-1]['reward/mean']:.2f} in "
        "the last"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
