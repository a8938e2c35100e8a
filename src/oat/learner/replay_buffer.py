"""The replay buffer: the older feedback that a step learns from beside its own.

The buffer is a view of the ledger and has no state of its own. A step learns from its own questions and from
older ones, which earlier steps took since the buffer was last cleared. The setting `questions` limits the
total number. If there are more, the oldest are left out. So recorded feedback and settings alone decide what
a step learns from, even after a kill, a replay, a fork or a roll back. `prepare` computes again everything
that depends on weights, such as log-probabilities under the reference.

Older trajectories are read and decoded again at every step. `oldest_needed` returns the first step whose
trajectories are still needed. The size counts questions, not pairs with a winner, so it does not depend on
answers.

A learning rate suits one size of mini-batch. So while the buffer fills, a pass gets more mini-batches, not
larger ones. The learner limits the number of optimiser steps (`learner.max_updates`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from oat.algorithms.base import Objective
from oat.config.settings import BufferConfig
from oat.types import Batch, Feedback, Item


class Takes(Protocol):
    """The part of the ledger that the buffer reads."""

    def taken(self, step: int) -> Sequence[Item]:
        """Return the items that a step of training took."""

    def num_taken(self, step: int) -> int:
        """Return the number of items that a step of training took."""


class Buffer:
    """The replay buffer of a run.

    Args:
        takes: the ledger.
        config: the limits of the buffer; None: every step learns from its own feedback alone.
        questions: number of questions in a step's plan.
    """

    def __init__(self, takes: Takes, config: BufferConfig | None, questions: int):
        self.takes = takes
        self.config = config
        self.questions = questions

    def fill(self, feedback: Feedback) -> Feedback:
        """Return a step's feedback with the field `older` filled: the older items that the step learns from
        too. Without a buffer, return the feedback unchanged."""
        if self.config is None:
            return feedback
        older: list[Item] = []
        room = self.config.questions - len(feedback.items)
        first = _cleared(self.config, feedback.step)
        step = feedback.step
        while room > len(older) and step > first:
            step -= 1
            older = [*self.takes.taken(step), *older]
        return replace(feedback, older=tuple(older[len(older) - room :] if len(older) > room else older))

    def split(self, objective: Objective, batch: Batch, feedback: Feedback) -> Batch:
        """Return an objective's batch, cut into mini-batches for this feedback. If the feedback has older
        items and the objective learns from them, the batch gets more mini-batches, not larger ones
        (`minibatches`)."""
        if not feedback.older or not objective.reuses:
            return batch
        return replace(
            batch, minibatches=minibatches(batch.minibatches, len(feedback.learned), self.questions)
        )

    def metrics(self, feedback: Feedback) -> dict[str, float]:
        """Return the number of questions that a step learns from, and their mean age in steps since they were
        asked. Without a buffer, return an empty dict."""
        if self.config is None:
            return {}
        ages = [feedback.step - item.question.key.step for item in feedback.learned]
        return {"buffer/questions": float(len(ages)), "buffer/age": sum(ages) / max(1, len(ages))}

    def oldest_needed(self, step: int) -> int:
        """Return the oldest step from whose feedback the run may still learn, in step `step` or later."""
        return oldest_needed(self.config, step, self.takes.num_taken)


def oldest_needed(config: BufferConfig | None, step: int, num_taken: Callable[[int], int]) -> int:
    """Return the oldest step from whose feedback a run may still learn, in step `step` or later.

    Args:
        config: as in `Buffer`.
        num_taken: a function that returns the number of items that a step of training took.
    """
    if config is None:
        return step
    found = 0
    first = _cleared(config, step)
    reached = step
    while found < config.questions and reached > first:
        reached -= 1
        found += num_taken(reached)
    return reached


def _cleared(config: BufferConfig, step: int) -> int:
    """Return the first step after the buffer was last cleared."""
    return step - step % config.clear_every if config.clear_every else 0


def minibatches(of_a_step: int, questions: int, questions_of_a_step: int) -> int:
    """Return the number of mini-batches in a pass over `questions` questions. The number grows with
    `questions`, so that no mini-batch gets larger than in a pass over a step's own questions.

    Args:
        of_a_step: number of mini-batches in a pass over a step's own questions.
        questions_of_a_step: number of a step's own questions.
    """
    return math.ceil(of_a_step * questions / questions_of_a_step)


def optimiser_steps(
    steps: int, *, questions: int, epochs: int, of_a_step: int, config: BufferConfig | None, most: int | None
) -> int:
    """Return the total number of optimiser steps planned for the first `steps` steps of the loop. The plan
    assumes that every step takes all of its questions, and that no mini-batch is empty.

    Args:
        questions: number of questions that a step takes.
        epochs: number of passes over the questions that a step learns from.
        of_a_step: number of mini-batches in a pass over a step's own questions.
        most: largest number of optimiser steps in a step (`learner.max_updates`); None: no limit.
    """
    limit = math.inf if most is None else most

    def at(n: int) -> int:
        """Return the number of optimiser steps in the n-th step of the loop since the buffer was cleared. n
        is counted from 1."""
        held = questions if config is None else min(config.questions, n * questions)
        return int(min(limit, epochs * minibatches(of_a_step, held, questions)))

    def since_cleared(count: int) -> int:
        growing = min(count, 1 if config is None else math.ceil(config.questions / questions))
        return sum(at(n) for n in range(1, growing + 1)) + (count - growing) * at(max(1, growing))

    cycle = config.clear_every if config and config.clear_every else max(1, steps)
    cycles, rest = divmod(steps, cycle)
    return cycles * since_cleared(cycle) + since_cleared(rest)
