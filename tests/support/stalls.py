"""A run whose learner stalls while its actors are fast: what waits between them, and what memory it takes."""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from apart_runs import ACTORS
from fixtures import oat

from oat.learner.learner import Learner
from oat.runtime.pool import ActorPool
from oat.runtime.transfer import buckets
from oat.runtime.worker_group import WorkerProcess

STEPS, EARLY, PROMPTS, AHEAD = 120, 40, 4, 8
STALL_S = 0.05
MOST_CALLS = 3
"""Two buckets that are on their way, and the call that is being sent."""
MOST_GROWTH = 0.05
STORE, STORE_BYTES = "the raylet", 10_000_000
"""The process that has the store in its memory, and the most bytes by which it may grow: few, beside those of
all weights that were sent."""
CHANGES: dict[str, Any] = {
    **ACTORS,
    "evaluation": None,
    "stop.max_steps": STEPS,
    "checkpoint.every": 1000,
    "oracle.max_outstanding": AHEAD,
}


class Watch:
    """Makes buckets small, stalls the learner of this process, and watches the run. For a forked child only.

    Args:
        sizes: function that returns the resident bytes of each process, by its name.
    """

    def __init__(self, sizes: Callable[[], Mapping[str, int]]):
        self.flying: Counter[str] = Counter()
        self.most_calls = self.most_ahead = self._sampled = self._updates = 0
        self.held: dict[int, dict[str, int]] = {}
        self._sizes = sizes
        self._patch()
        buckets.__defaults__ = (1500,)

    def _patch(self) -> None:
        ask, sample, update = WorkerProcess.ask, ActorPool.sample, Learner.update

        def asked(member: WorkerProcess, what: str, data: Any) -> Callable[[], Any]:
            reply = ask(member, what, data)
            self.flying[member.name] += 1
            self.most_calls = max(self.most_calls, self.flying[member.name])

            def replied() -> Any:
                try:
                    return reply()
                finally:
                    self.flying[member.name] -= 1

            return replied

        def sampled(pool: ActorPool, prompts: Any, *rest: Any) -> Any:
            self._sampled += len(prompts)
            self.most_ahead = max(self.most_ahead, self._sampled - PROMPTS * self._updates)
            return sample(pool, prompts, *rest)

        def stalled(learner: Learner, *rest: Any) -> Any:
            time.sleep(STALL_S)
            self._updates += 1
            if self._updates in (EARLY, STEPS):
                self.held[self._updates] = dict(self._sizes())
            return update(learner, *rest)

        WorkerProcess.ask, ActorPool.sample, Learner.update = asked, sampled, stalled  # type: ignore[method-assign, assignment]

    def write(self, file: Path) -> None:
        """Write what was seen."""
        file.write_text(
            json.dumps(
                {
                    "calls": self.most_calls,
                    "ahead": self.most_ahead,
                    "early": self.held[EARLY],
                    "late": self.held[STEPS],
                }
            )
        )


def resident(process: int | str) -> int:
    """Return the resident bytes of a process, shared memory included."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {process} has ended")


def stalled_run(config: Path, seen: Path, sizes: Callable[[], Mapping[str, int]]) -> int:
    """Make a run whose learner stalls, and write what was seen. For a forked child only."""
    watch = Watch(sizes)
    if (code := oat("train", config)) == 0:
        watch.write(seen)
    return code


def is_bounded(seen: Path, figure: Callable[[str], None]) -> None:
    """Check what was seen."""
    found = json.loads(seen.read_text())
    figure(f"at most {found['calls']} calls on their way to an actor")
    figure(f"at most {found['ahead']} prompts sampled and not learned from, of {PROMPTS + AHEAD} allowed")
    assert 1 <= found["calls"] <= MOST_CALLS
    assert PROMPTS < found["ahead"] <= PROMPTS + AHEAD
    assert len(found["early"]) > 2
    for name, early in found["early"].items():
        growth = found["late"][name] / early - 1
        kind = name.rstrip("0123456789 ")
        figure(f"at most {100 * growth:.1f} % growth of memory from step {EARLY} to {STEPS}: {kind}")
        most = STORE_BYTES / early if name == STORE else MOST_GROWTH
        assert growth < most, (name, early, found["late"][name])
