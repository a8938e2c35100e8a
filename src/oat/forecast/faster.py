"""Settings with which a step may be faster on this machine, tried in turns on the same prompts and responses.

They change how a step is computed, not what: the results differ in rounding only.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import dropwhile

import torch

from oat.algorithms.base import prepared
from oat.hardware.threads import on_threads
from oat.learner.learner import Learner
from oat.loop import Run
from oat.resolve.resolved import Resolved
from oat.rollout.actor import Actor
from oat.types import Feedback

_ROUNDS = 3
_ENOUGH_S = 15.0
"""No round of a setting begins once its rounds have taken this many seconds."""
_SIZES = (1, 2, 4)
"""Numbers of passes of an optimiser step that are tried."""
_GAIN = 0.95
"""A value is suggested only if its work then takes at most this fraction of the time."""


@dataclass(frozen=True, eq=False)
class Trial:
    """Tries settings on the prompts and responses of one step.

    Attributes:
        resolved: the configuration of the run.
        actor: None if responses are recorded.
        feedback: of the step.
        fits: returns whether the run fits into memory with other settings.
    """

    resolved: Resolved
    run: Run
    learner: Learner
    actor: Actor | None
    feedback: Feedback
    fits: Callable[[Resolved], bool]

    def faster(
        self, sampling: float, learning: float, rest: float, counts: Sequence[int]
    ) -> dict[str, float]:
        """Return the settings with which a step is faster. The value of each is how many times as fast the
        step is with it and with those before it.

        Args:
            sampling, learning, rest: the seconds of the parts of a step.
            counts: the numbers of threads to try.
        """
        whole, found = sampling + learning + rest, dict[str, float]()
        tokens, share = self._fastest(self._learn, self._passes(), None, self._in_passes)
        learning *= share
        if tokens is not None:
            is_given = ("learner", "micro_batch_size") in self.resolved.origins
            without = "learner.micro_batch_size: null, " if is_given else ""
            found[f"{without}learner.micro_batch_tokens: {tokens}"] = whole / (sampling + learning + rest)
        if self.resolved.config.compute.profile == "gpu":
            return found
        own = torch.get_num_threads()
        with self._in_passes(tokens):
            threads, share = self._fastest(self._learn, counts, own, on_threads)
        learning *= share
        if share < 1:
            found[f"compute.threads: {threads}"] = whole / (sampling + learning + rest)
        if self.actor is None:
            return found
        engine = self.actor.engine
        before = engine.threads or own
        count, share = self._fastest(self._sample, counts, before, self._decoding)
        if share < 1 or (threads != own and count != threads):
            found[f"engine.threads: {count}"] = whole / (share * sampling + learning + rest)
        return found

    def _fastest(
        self,
        work: Callable[[], object],
        values: Sequence[int],
        own: int | None,
        using: Callable[[int | None], AbstractContextManager[None]],
    ) -> tuple[int | None, float]:
        """Return the value of a setting with which the work takes least time, and this time as a fraction of
        that with the run's own value. Each round does the work once with every value."""
        best = dict[int | None, float]()
        begin = time.perf_counter()
        for _ in range(_ROUNDS):
            for value in dict.fromkeys([own, *values]):
                with using(value):
                    start = time.perf_counter()
                    work()
                    took = time.perf_counter() - start
                best[value] = min(took, best.get(value, took))
            if time.perf_counter() - begin > _ENOUGH_S:
                break
        value = min(best, key=best.__getitem__)
        share = best[value] / best[own]
        return (value, share) if share <= _GAIN else (own, 1.0)

    def _learn(self) -> None:
        """Do what the loop does to learn from the step."""
        run = self.run
        for objective in run.objectives:
            generator = run.seeds.at("prepare", objective.name, self.feedback.step)
            batch = prepared(objective, self.feedback, self.learner.forward, generator)
            self.learner.update(objective, run.buffer.split(objective, batch, self.feedback))

    def _sample(self) -> None:
        assert self.actor is not None, "recorded responses are not sampled"
        prompts = [item.group.prompt for item in self.feedback.items]
        self.actor.sample(prompts, self.run.plans(0).samples, ("train", self.feedback.step, 0))

    def _passes(self) -> list[int]:
        """Return the numbers of tokens of a pass that are tried: powers of two with which an optimiser step
        takes about 1, 2 or 4 passes, if they fit into memory."""
        rows = [len(row.ids) for item in self.feedback.items for row in item.group.trajectories]
        step = sum(rows) / max(1, self.resolved.step.minibatches)
        found = {max(1 << math.ceil(math.log2(step / passes)), max(rows)) for passes in _SIZES}
        larger = sorted(found, reverse=True)
        return list(dropwhile(lambda tokens: not self.fits(self._with_passes(tokens)), larger))

    def _with_passes(self, tokens: int) -> Resolved:
        config = self.resolved.config
        learner = replace(config.learner, micro_batch_tokens=tokens, micro_batch_size=None)
        return replace(self.resolved, config=replace(config, learner=learner))

    @contextmanager
    def _in_passes(self, tokens: int | None) -> Iterator[None]:
        """Within the body, learn in passes of this many tokens; None: in those of the run."""
        before = self.learner.micro_batch_size, self.learner.micro_batch_tokens
        if tokens is not None:
            self.learner.micro_batch_size, self.learner.micro_batch_tokens = None, tokens
        try:
            yield
        finally:
            self.learner.micro_batch_size, self.learner.micro_batch_tokens = before

    @contextmanager
    def _decoding(self, count: int | None) -> Iterator[None]:
        """Within the body, sample on this many threads."""
        assert self.actor is not None, "recorded responses are not sampled"
        engine = self.actor.engine
        before, engine.threads = engine.threads, count
        try:
            yield
        finally:
            engine.threads = before
