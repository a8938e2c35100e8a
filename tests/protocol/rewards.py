"""Oracles of the protocol tests: functions of the text."""


def coarse(prompts, completions, **columns):
    """Two levels only, so that many pairs tie."""
    return [float("a" in text) for text in completions]


def graded(prompts, completions, **columns):
    """Many levels; no score for responses that end in a plus."""
    return [None if text.endswith("+") else (sum(map(ord, text)) % 11) / 5 - 1 for text in completions]
