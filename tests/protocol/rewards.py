"""Oracles of the protocol tests: functions of the text."""


def coarse(prompts, completions, **columns):
    """Score 0 or 1, so that many pairs tie."""
    return [float("a" in text) for text in completions]


def graded(prompts, completions, **columns):
    """Score on many levels, and give no score to a response that ends in a plus."""
    return [None if text.endswith("+") else (sum(map(ord, text)) % 11) / 5 - 1 for text in completions]
