"""A reward function that would be risky in the run's own process: its pattern takes exponential time on a
long word without a full stop."""

import re


def reward(prompts, completions, **columns):
    """1.0 for a response whose last word is of letters and ends in a full stop."""
    return [
        float(re.fullmatch(r"(\w|\w\w)+\.", text.rsplit(maxsplit=1)[-1] if text.strip() else "") is not None)
        for text in completions
    ]
