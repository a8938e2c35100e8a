"""Slices a response into its steps, for oracles that reward steps (`Answer.steps`).

A step is usually a line. If a response ends in an answer behind a marker, as in GSM8K, the answer belongs to
the last step before it, which derives it. VinePPO (arXiv:2410.01679) slices in this way.

Departures from the predecessor, whose results are otherwise the same:

1. A text with several markers is split at the last one. There, it was an error.
2. An empty text has no step. There, it had one empty step.
3. Arguments that cannot be used are a `ConfigError`. There, they failed an assertion.
"""

from itertools import accumulate

from oat.errors import ConfigError, shown

GSM8K_ANSWER = "\n#### "
"""The marker of the answer in the responses of GSM8K."""


def slice_steps(text: str, delimiter: str = "\n", answer_prefix: str | None = None) -> list[int]:
    """Return the bounds of the steps of a text: step i is `text[bounds[i]:bounds[i + 1]]`. So the steps, one
    after another, are the text. `bounds[1:]` are the ends that `Answer.steps` wants.

    A step begins at each delimiter, which is its first part, with these exceptions:

    * Blank steps at the beginning (white space only) are joined with the first step that is not blank. Blank
      steps elsewhere stay steps.
    * If the text has the answer's prefix, the part from its last occurrence on is the answer. Everything from
      the last step before it that is not blank up to the end is one step.
    * A text without a step that is not blank is one step.

    Args:
        delimiter: the text between two steps.
        answer_prefix: the text with which the answer begins, such as `GSM8K_ANSWER`; None: there is no
            answer.

    Returns:
        Ascending places in the text, in characters. There is one more than there are steps. The first is 0,
        and the last is the length of the text.

    Raises:
        ConfigError: an argument is no text, or the delimiter or the prefix is empty.
    """
    for name, value in (("text", text), ("delimiter", delimiter), ("answer_prefix", answer_prefix)):
        may_lack = name == "answer_prefix" and value is None
        if not may_lack and (not isinstance(value, str) or (not value and name != "text")):
            raise ConfigError(
                f"`{name}` of slice_steps is {shown(value)}; give a text"
                + ("" if name == "text" else " of one or more characters")
            )
    answer = -1 if answer_prefix is None else text.rfind(answer_prefix)
    body = text if answer < 0 else text[:answer]
    parts = body.split(delimiter)
    solid = [number for number, part in enumerate(parts) if part.strip()]
    if not solid:
        return [0, len(text)] if text else [0]
    ends = [*accumulate(len(part) + len(delimiter) * (number > 0) for number, part in enumerate(parts))]
    last = solid[-1] if answer >= 0 else len(parts) - 1
    return [0, *ends[solid[0] : last], len(text)]
