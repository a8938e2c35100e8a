"""Oracles of the protocol tests: functions of the text."""

from oat.types import Answer, Price


def coarse(prompts, completions, **columns):
    """Score 0 or 1, so that many pairs tie."""
    return [float("a" in text) for text in completions]


def graded(prompts, completions, **columns):
    """Score on many levels, and give no score to a response that ends in a plus."""
    return [None if text.endswith("+") else (sum(map(ord, text)) % 11) / 5 - 1 for text in completions]


def flat(prompts, completions, **columns):
    """Score every response the same, so that no group teaches anything."""
    return [1.0] * len(completions)


def of_first(prompts, completions, **columns):
    """Score the part of the text before the first digit 3."""
    return [(sum(map(ord, text.partition("3")[0])) % 11) / 5 - 1 for text in completions]


def rarely_endless(prompts, completions, **columns):
    """Score as `graded` does, but give a score that is infinite in float32 to few responses."""
    return [
        1e300 if sum(map(ord, text)) % 23 == 0 else score
        for text, score in zip(completions, graded(prompts, completions), strict=True)
    ]


class Dear:
    """Score as `coarse` does. A response may cost 1.0 and costs 0.5."""

    answers = "score"
    durable = False

    def __init__(self):
        self.asked = {}

    def price(self, question):
        return Price(question.size, 0, float(question.size))

    def submit(self, questions):
        self.asked.update({str(question.key): question for question in questions})
        return [str(question.key) for question in questions]

    def collect(self, tickets, seconds):
        return [(ticket, self.answer(self.asked.pop(ticket))) for ticket in tickets]

    def answer(self, question):
        values = tuple(coarse([], question.candidates))
        return Answer(question.key, values, ("ok",) * len(values), len(values), 0.5 * len(values))
