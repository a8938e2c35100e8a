"""The rule `exact_match`. It is also an example of a reward function."""

from collections.abc import Sequence
from typing import Any


def exact_match(
    prompts: Sequence[Any], completions: Sequence[Any], reference: Sequence[str | None], **columns: Any
) -> list[float | None]:
    """Return 1.0 for a completion that equals its reference, otherwise 0.0. Blanks at the ends are ignored.
    If there is no reference, there is no reward (None).

    The signature is that of TRL's reward functions: lists of the same length, with one entry for each
    completion, and every column of the data by name.

    Args:
        completions: texts; for conversations, lists that hold one assistant message.
        reference: the reference answer of each completion's prompt.
    """
    texts = [
        completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions
    ]
    return [
        None if answer is None else float(text.strip() == answer.strip())
        for text, answer in zip(texts, reference, strict=True)
    ]
