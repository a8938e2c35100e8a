"""The rewards of the steps of a response in a mixture, whose sources may give steps or one number.

    reward of a step = sum over the sources of weight * reward / std

A source's score without steps is about the response as a whole, so it is a reward at the response's end. The
same holds for the share -weight * mean / std of a source with steps whose scores are normalised. So the
rewards add up to the mixture's value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from oat.types import Answer, Steps


@dataclass(frozen=True)
class Term:
    """What one source adds to the value of one candidate.

    Attributes:
        mean, std: the numbers that normalise the source's score.
        answer: the source's answer.
        place: the candidate's index.
    """

    weight: float
    mean: float
    std: float
    answer: Answer
    place: int

    @property
    def value(self) -> float:
        """The weighted, normalised score."""
        return self.weight * ((self.answer.values[self.place] - self.mean) / self.std)

    @property
    def steps(self) -> Steps:
        """The weighted rewards of the source's steps; they add up to `value` without `shift`."""
        own = self.answer.steps[self.place] if self.answer.steps else ()
        return tuple((end, self.weight * (reward / self.std)) for end, reward in own)

    @property
    def shift(self) -> float:
        """What the normalisation by a mean adds to the value."""
        return -self.weight * (self.mean / self.std)


def summed_steps(terms: Sequence[Term], length: int) -> Steps:
    """Return the step rewards of one candidate.

    Args:
        terms: the sources that gave the candidate a score.
        length: number of the candidate's characters or tokens, whichever the steps count.
    """
    at: dict[int, list[float]] = {}
    for term in terms:
        for end, reward in term.steps or [(length, term.value)]:
            at.setdefault(end, []).append(reward)
        if term.steps and term.shift:
            at.setdefault(length, []).append(term.shift)
    return tuple((end, math.fsum(at[end])) for end in sorted(at))


def own_scores(answer: Answer) -> tuple[float | None, ...]:
    """Return a source's score of each candidate, as the source gave it; None where it gave none."""
    return tuple(
        value if mark == "ok" else None for value, mark in zip(answer.values, answer.marks, strict=True)
    )
