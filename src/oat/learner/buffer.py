"""The buffer: what a step learns from beside its own take.

It is a view of the ledger and has no state: the newest `questions` that the steps so far took, in the order
they took them, none from before it was last cleared. So what a step learns from is a function of the recorded
takes and the settings, and a run that is killed, replayed, forked or rolled back learns from the same. What
an older take weighs now (log-probabilities under the reference, baselines) is computed anew in `prepare`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from oat.algorithms.base import Objective
from oat.config.settings import BufferConfig
from oat.types import Batch, Feedback, Item


class Takes(Protocol):
    """The part of the ledger that is read."""

    def taken(self, step: int) -> Sequence[Item]:
        """What a step of training took."""

    def num_taken(self, step: int) -> int:
        """How many questions that were."""


class Buffer:
    """Hands out what steps learn from.

    Args:
        takes: the ledger.
        config: its limits; None: every step learns from its own take alone.
        questions: of a step, by its plan.
    """

    def __init__(self, takes: Takes, config: BufferConfig | None, questions: int):
        self.takes = takes
        self.config = config
        self.questions = questions

    def fill(self, feedback: Feedback) -> Feedback:
        """A step's take with those before it that the buffer still has."""
        if self.config is None:
            return feedback
        older: list[Item] = []
        room = self.config.questions - len(feedback.items)
        first = self._cleared(feedback.step)
        step = feedback.step
        while room > len(older) and step > first:
            step -= 1
            older = [*self.takes.taken(step), *older]
        return replace(feedback, older=tuple(older[len(older) - room :] if len(older) > room else older))

    def share_out(self, objective: Objective, batch: Batch, feedback: Feedback) -> Batch:
        """An objective's batch of a filled buffer, with so many mini-batches a pass that none is larger than
        it would be without older takes."""
        if not feedback.older or not objective.reuses:
            return batch
        return replace(
            batch, minibatches=minibatches(batch.minibatches, len(feedback.learned), self.questions)
        )

    def metrics(self, feedback: Feedback) -> dict[str, float]:
        """Of a filled buffer: its questions, and the mean of the steps since they were asked."""
        if self.config is None:
            return {}
        ages = [feedback.step - item.question.key.step for item in feedback.learned]
        return {"buffer/questions": float(len(ages)), "buffer/age": sum(ages) / max(1, len(ages))}

    def reach(self, step: int) -> int:
        """The first step whose take is read by this step, or by a later one."""
        if self.config is None:
            return step
        found = 0
        first = self._cleared(step)
        reached = step
        while found < self.config.questions and reached > first:
            reached -= 1
            found += self.takes.num_taken(reached)
        return reached

    def _cleared(self, step: int) -> int:
        """The first step since it was last cleared."""
        assert self.config is not None
        return step - step % self.config.clear_every if self.config.clear_every else 0


def minibatches(of_a_step: int, questions: int, questions_of_a_step: int) -> int:
    """Optimiser steps of a pass over so many questions, none larger than those of a step's own."""
    return math.ceil(of_a_step * questions / questions_of_a_step)


def optimiser_steps(
    steps: int, *, questions: int, epochs: int, of_a_step: int, config: BufferConfig | None, most: int | None
) -> int:
    """Of the first so many steps together, as planned: every step takes its questions, and no share of them
    is empty.

    Args:
        questions: of a step.
        of_a_step: mini-batches of a pass over them.
        most: of a step (`learner.max_updates`).
    """
    limit = math.inf if most is None else most

    def at(taken: int) -> int:
        """Of a step, the so-manieth since the buffer was cleared."""
        held = questions if config is None else min(config.questions, taken * questions)
        return int(min(limit, epochs * minibatches(of_a_step, held, questions)))

    def since_cleared(count: int) -> int:
        growing = min(count, 1 if config is None else math.ceil(config.questions / questions))
        return sum(at(taken) for taken in range(1, growing + 1)) + (count - growing) * at(max(1, growing))

    cycle = config.clear_every if config and config.clear_every else max(1, steps)
    cycles, rest = divmod(steps, cycle)
    return cycles * since_cleared(cycle) + since_cleared(rest)
