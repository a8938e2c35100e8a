"""A reward function that would be risky in the run's own process: its pattern takes exponential time on some responses."""

import re


def reward(prompts, completions, **columns):
    """1.0 for a response of words that end in a full stop."""
    return [float(re.fullmatch(r"(\w+\s?)+\.", text.strip()) is not None) for text in completions]
