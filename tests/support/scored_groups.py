"""Groups of made-up responses with given scores."""

from fixtures import make_group, make_questions

from oat.types import Answer, Feedback, Item, Mark

TEXTS = ("a", "abcd", "ab")
"""Responses of 1, 4 and 2 tokens."""


def feedback(*scores: tuple[float, ...], missing: Mark | None = None) -> Feedback:
    """Return feedback with one group per tuple of scores. `missing` is the mark of the last score."""
    items = []
    for number, values in enumerate(scores):
        group = make_group(number, *TEXTS[: len(values)])
        (question,) = make_questions([group], "score", 0, oracle="o")
        marks: list[Mark] = ["ok"] * len(values)
        if missing is not None and number + 1 == len(scores):
            marks[-1] = missing
        items.append(Item(group, question, Answer(question.key, values, tuple(marks), len(values)), None))
    return Feedback(0, tuple(items), sum(map(len, scores)))
