"""The rule `exact_match`. It is also an example of a reward function."""

from collections.abc import Sequence
from typing import Any

from oat.oracles.judge_replies import answer_in
from oat.oracles.rules.references import is_equal, reference_text
from oat.oracles.rules.texts import completion_texts


def exact_match(
    prompts: Sequence[Any], completions: Sequence[Any], reference: Sequence[Any], **columns: Any
) -> list[float | None]:
    """Return 1.0 for a completion that equals its reference, otherwise 0.0. Blanks at the ends are ignored.
    If the reference is a number (42, 42.0, or such a text), a completion that is a number is compared with it
    by value: "42", "42.0" and "+42" are equal. If there is no reference, there is no reward (None).

    The answer may stand behind thoughts that end, as with `</think>` (`answer_in`): some templates write
    empty thoughts, or a mark such as `<|channel|>final<|message|>`, before every answer that is learned.

    The signature is that of TRL's reward functions: lists of the same length, with one entry for each
    completion, and every column of the data by name.

    Args:
        completions: texts; for conversations, lists that hold one assistant message.
        reference: the reference answer of each completion's prompt. One that is neither a text nor a finite
            number counts as missing.
    """
    texts = completion_texts(completions)
    answers = map(reference_text, reference)
    return [
        None if answer is None else float(any(is_equal(each, answer) for each in _answers(text)))
        for text, answer in zip(texts, answers, strict=True)
    ]


def _answers(text: str) -> list[str]:
    """Return the text, and what follows its thoughts, if there is such a part."""
    return [text.strip(), *filter(None, [answer_in(text)])]
