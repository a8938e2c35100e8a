"""The replay buffer: the older feedback that a step learns from beside its own.

It is a view of the ledger and has no state: the newest `questions` that the steps so far took, in the order
in which they took them, and none from before the buffer was last cleared. So what a step learns from is a
function of the recorded feedback and the settings, and a run that is killed, replayed, forked or rolled back
learns from the same. Everything that depends on weights (log-probabilities under the reference, baselines) is
computed anew in `prepare`.

The price is that older trajectories are read and decoded again at every step. In return checkpoints, kills,
replays and forks need to know nothing of the buffer, and retention is one number, the first step whose
feedback is still read (`reach`). The size counts questions, not pairs with a winner, so what fits does not
depend on answers. A mini-batch keeps its size when the buffer fills, and a pass has more mini-batches, since
a learning rate belongs to a size; the learner, which counts optimiser steps, applies `max_updates`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from oat.algorithms.base import Objective
from oat.config.settings import BufferConfig
from oat.types import Batch, Feedback, Item


class Takes(Protocol):
    """The part of the ledger that the buffer reads."""

    def taken(self, step: int) -> Sequence[Item]:
        """The items that a step of training took."""

    def num_taken(self, step: int) -> int:
        """The number of these items."""


class Buffer:
    """The replay buffer of a run.

    Args:
        takes: the ledger.
        config: its limits; None: every step learns from its own feedback alone.
        questions: of a step, by its plan.
    """

    def __init__(self, takes: Takes, config: BufferConfig | None, questions: int):
        self.takes = takes
        self.config = config
        self.questions = questions

    def fill(self, feedback: Feedback) -> Feedback:
        """A step's feedback, with the older items that the buffer still holds."""
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
        """An objective's batch of feedback with older items, cut into so many mini-batches that none is
        larger than it would be without them."""
        if not feedback.older or not objective.reuses:
            return batch
        return replace(
            batch, minibatches=minibatches(batch.minibatches, len(feedback.learned), self.questions)
        )

    def metrics(self, feedback: Feedback) -> dict[str, float]:
        """The number of questions that a step learns from, and the mean of the steps since they were
        asked."""
        if self.config is None:
            return {}
        ages = [feedback.step - item.question.key.step for item in feedback.learned]
        return {"buffer/questions": float(len(ages)), "buffer/age": sum(ages) / max(1, len(ages))}

    def reach(self, step: int) -> int:
        """The first step whose feedback this step, or a later one, learns from."""
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
        """The first step since the buffer was last cleared."""
        assert self.config is not None
        return step - step % self.config.clear_every if self.config.clear_every else 0


def minibatches(of_a_step: int, questions: int, questions_of_a_step: int) -> int:
    """The number of mini-batches of a pass over `questions`, none larger than those of a step's own."""
    return math.ceil(of_a_step * questions / questions_of_a_step)


def optimiser_steps(
    steps: int, *, questions: int, epochs: int, of_a_step: int, config: BufferConfig | None, most: int | None
) -> int:
    """The optimiser steps of the first `steps` steps together, as planned: every step takes its questions,
    and no mini-batch is empty.

    Args:
        questions: of a step.
        epochs: passes over what a step learns from.
        of_a_step: mini-batches of a pass over a step's own questions.
        most: optimiser steps of a step (`learner.max_updates`); None: no limit.
    """
    limit = math.inf if most is None else most

    def at(n: int) -> int:
        """Optimiser steps of the n-th step since the buffer was cleared, from 1."""
        held = questions if config is None else min(config.questions, n * questions)
        return int(min(limit, epochs * minibatches(of_a_step, held, questions)))

    def since_cleared(count: int) -> int:
        growing = min(count, 1 if config is None else math.ceil(config.questions / questions))
        return sum(at(n) for n in range(1, growing + 1)) + (count - growing) * at(max(1, growing))

    cycle = config.clear_every if config and config.clear_every else max(1, steps)
    cycles, rest = divmod(steps, cycle)
    return cycles * since_cleared(cycle) + since_cleared(rest)
