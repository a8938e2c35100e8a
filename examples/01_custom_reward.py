"""A reward of your own: a function in a file, and no other code.

A configuration names it by its place, `oracle: {name: "examples/01_custom_reward.py:reward"}`. CONFIG below
is a whole configuration without the model, the prompts and the run's directory. `python
examples/01_custom_reward.py` trains a tiny random model with it, by `oat train`, in seconds. Flags override
the configuration: `python examples/01_custom_reward.py --stop.max_steps 5`.
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
"""Records of a data file. Every column besides the prompt reaches the reward under its own name."""


def reward(
    prompts: Sequence[str],
    completions: Sequence[str],
    wanted: Sequence[str | None],
    **columns: Sequence[object],
) -> list[float | None]:
    """Return one number a completion, in their order; higher is better. The signature is that of TRL's reward
    functions, which work here unchanged.

    All arguments are lists of one length, with an entry for each completion: a prompt that was answered 16
    times stands there 16 times, and so do its columns. Name those you need; `**columns` takes the rest. None
    means "no reward": that completion is left out, which is not the same as 0.

    Completions are text from a model and may be anything: empty, endless, hostile. Limit what takes long, and
    never `eval` them. A function that waits for something (a server, a judge) may be `async def`.
    """
    return [
        None if text is None else agreement(said, text)
        for said, text in zip(completions, wanted, strict=True)
    ]


def agreement(said: str, text: str) -> float:
    """Return the share of positions at which two texts agree, out of those of the longer text."""
    return sum(a == b for a, b in zip(said, text, strict=False)) / max(len(said), len(text), 1)


def main(*flags: str) -> None:
    from oat.testing import check_oracle, tiny_run

    # reports what is wrong with a reward before a run does; put this line into a test of yours
    check_oracle(reward, columns={"wanted": "A"})
    rows = tiny_run(CONFIG, PROMPTS, characters="ABCDEFG", flags=flags)
    print(
        f"\nmean reward: {rows[1]['reward/mean']:.2f} in the first step, {rows[-1]['reward/mean']:.2f} in "
        "the last"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
