"""An oracle of your own that rewards steps: a verifier of each line of arithmetic.

A prompt has two sums, such as `1+2;0+1=`, and the model writes their results, one a line. The oracle
verifies a response line by line. Each line gets its own reward, at the place where the line ends. With
`credit: steps`, REINFORCE++ praises one line of a response and blames another; with `credit: response`, it
would learn from the sum over the lines. `python examples/06_step_rewards.py` trains a tiny random model in
seconds.
"""

import re
import sys
from collections.abc import Sequence
from itertools import pairwise

from oat.oracles.slicing import slice_steps

CONFIG = f"""
sampling:
  max_new_tokens: 4
oracle:
  name: "{__file__}:lines"
algorithm:
  name: reinforce_pp
  credit: steps
  prompts: 6
  samples: 16
learner:
  learning_rate: 5e-3
stop:
  max_steps: 50
"""
PROMPTS = ["0+1;1+1=", "1+1;2+1=", "2+1;1+0=", "1+2;0+1=", "1+0;2+1=", "0+2;0+1="]


def lines(
    prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[object]
) -> list[list[tuple[int, float]]]:
    """Return the rewards of the lines of each completion: pairs of the line's end and its reward.

    An end is a number of characters of the completion. Ends ascend, and the last is at most the completion's
    length. The value of a completion is the sum of its rewards. For a completion without steps, return a
    number, or None for "no reward".
    """
    return [verified(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]


lines.gives_steps = "characters"  # of what the ends count; a run reads this before it asks


def verified(prompt: str, text: str) -> list[tuple[int, float]]:
    """Return the end and the reward of each line. A line without a sum in the prompt costs 0.2."""
    sums = re.findall(r"(\d)\+(\d)", prompt)
    results = [str(int(first) + int(second)) for first, second in sums]
    found = []
    for number, (start, end) in enumerate(pairwise(slice_steps(text))):
        line = text[start:end].strip("\n")
        found.append((end, worth(line, results[number]) if number < len(results) else -0.2))
    return found


def worth(line: str, result: str) -> float:
    """Return 1 for the right result, 0.2 for another digit, and 0 for anything else."""
    return 1.0 if line == result else 0.2 * (len(line) == 1 and line in "0123456789")


def main(*flags: str) -> None:
    from oat.testing import check_oracle, tiny_run

    check_oracle(lines)
    rows = tiny_run(CONFIG, PROMPTS, characters="123\n", flags=flags)
    print(
        f"\nmean reward: {rows[1]['reward/mean']:.2f} in the first step, {rows[-1]['reward/mean']:.2f} in "
        "the last"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
