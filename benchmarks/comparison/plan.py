"""The runs of the comparison: which settings are tried, with which seeds, and as which configurations.

Every contestant, an algorithm or a run that asks nobody, has the same search: `LEARNING_RATES` times the two
values of its knob, at half the budget, with `SEARCH_SEED`. The settings with the highest accuracy of sampled
responses in the last evaluation win, and are run with the other seeds and the whole budget.

As in the quickstart, the seed decides the data, the start model and the run. So with equal seeds all
contestants begin with the same weights and have the same prompts.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from comparison.algorithms import Line, Options, contestants, family
from oat.plugins.registry import ALGORITHMS
from oat.quickstart.task import FORGETS, MAX_NEW_TOKENS

STEP = 256
"""Number of responses in a step, and so of queries in a step that asks about all of them."""
MINIBATCH = 128
"""Number of responses that are asked about and then learned in an optimiser step. (Of the responses in pairs
about half are asked about at the start: the oracle is not asked about two equal responses.)"""
LEARNING_RATES = (3e-5, 1e-4, 3e-4)
SEARCH_SEED = 0
MOST_STEPS = 5
"""A run ends when the budget is spent, or after this number of times the steps in which a run spends its
budget that asks about every response."""


@dataclass(frozen=True)
class Size:
    """The extent of a comparison.

    Attributes:
        seeds: seeds of the runs that are compared.
        queries: their budget. The search has half of it.
        every: least number of queries between two evaluations.
        only: names of the algorithms that are compared; None: all.
    """

    name: str
    seeds: tuple[int, ...]
    queries: int
    every: int = 512
    only: tuple[str, ...] | None = None

    @property
    def contestants(self) -> dict[str, Line]:
        return contestants(self.only)


FULL = Size("full", (1, 2, 3), 5120)
SHORT = Size(
    "short",
    (1, 2),
    2560,
    only=("dpo", "simpo", "kto", "grpo", "rloo", "reinforce_pp", "ppo", "gspo"),
)
SIZES = {size.name: size for size in (FULL, SHORT)}


def shown_rate(rate: float) -> str:
    """Return a learning rate as text, such as 3e-5."""
    return f"{rate:.0e}".replace("e-0", "e-")


@dataclass(frozen=True)
class Setting:
    """One of the six settings of a contestant that the search tries."""

    learning_rate: float
    knob: Options

    def __str__(self) -> str:
        return ", ".join(
            [
                f"learning_rate {shown_rate(self.learning_rate)}",
                *(f"{name} {value}" for name, value in self.knob.items()),
            ]
        )


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        purpose: `search` or `final`.
        queries: the budget of oracle queries. A run that asks nobody learns from as many recorded responses.
        every: least number of queries between two evaluations; None: only the start and the end are
            evaluated.
    """

    name: str
    setting: Setting
    purpose: str
    seed: int
    queries: int
    every: int | None

    @property
    def digest(self) -> str:
        """The first digits of a hash of everything that decides the run, except the code: the configuration
        without paths, and what decides the task. It tells runs of other settings apart."""
        tree = {**self.tree(Path(), Path()), "task": [FORGETS, MAX_NEW_TOKENS]}
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Name, settings, seed and digest: a run with this key is made once."""
        return self.name, str(self.setting), self.seed, self.digest

    def tree(self, start: Path, run_dir: Path) -> dict[str, Any]:
        """Return the configuration of the run, as plain data.

        Args:
            start: the folder of the data and the start model of this seed.
        """
        line = contestants()[self.name]
        algorithm = line.algorithm or self.name
        steps = self.queries // STEP
        asks = family(self.name) != "nobody"
        evaluation = (
            {"every": 1, "every_queries": self.every} if asks and self.every else {"every": steps + 1}
        )
        return {
            "run_dir": str(run_dir),
            "seed": self.seed,
            "model": {"path": str(start / "start")},
            "prompts": {
                "reference_key": "answer",
                **line.prompts,
                "path": str(start / line.prompts.get("path", "train.jsonl")),
            },
            "sampling": {"max_new_tokens": MAX_NEW_TOKENS},
            "engine": {"name": "torch", "max_rows": 512},
            "oracle": {"name": "exact_match", "repeats": 0} if asks else {"name": "recorded"},
            "algorithm": {"name": algorithm, **_shape(algorithm, line), **line.fixed, **self.setting.knob},
            "learner": {
                "learning_rate": self.setting.learning_rate,
                "warmup_steps": 5,
                "micro_batch_size": 512,
                **line.learner,
            },
            "evaluation": {"path": str(start / "heldout.jsonl"), "oracle": "exact_match", **evaluation},
            "checkpoint": {"every": MOST_STEPS * steps + 1},
            "compute": {"threads": 1},
            "stop": (
                {"max_queries": self.queries, "max_steps": MOST_STEPS * steps}
                if asks
                else {"max_steps": steps}
            ),
        }


def _shape(algorithm: str, line: Line) -> Options:
    """Return the numbers of prompts, samples and mini-batches of a step, for `STEP` responses in a step."""
    if family(algorithm) == "pairs":
        # a pair of equal responses is not asked about, so a step is one mini-batch of about MINIBATCH
        return {"prompts": STEP // 2, "samples": 2, "minibatches": 1}
    samples = 1 if line.prompts else line.fixed.get("samples", ALGORITHMS[algorithm].Config().samples)
    return {"prompts": STEP // samples, "samples": samples, "minibatches": STEP // MINIBATCH}


def settings(line: Line) -> Iterator[Setting]:
    """Yield the six settings that the search tries."""
    for learning_rate, knob in product(LEARNING_RATES, line.knob):
        yield Setting(learning_rate, knob)


def search_jobs(size: Size) -> dict[str, list[Job]]:
    """Return the runs of the search, by contestant."""
    return {
        name: [
            Job(name, setting, "search", SEARCH_SEED, size.queries // 2, None) for setting in settings(line)
        ]
        for name, line in size.contestants.items()
    }


def final_jobs(size: Size, found: Mapping[tuple[str, str, int, str], float | None]) -> dict[str, list[Job]]:
    """Return the runs that are compared, by contestant: those with the best settings of the search.

    Args:
        found: by key of a run, the accuracy of sampled responses in its last evaluation; None if the run
            failed. Contestants with an unfinished search are left out.
    """
    jobs = {}
    for name, tried in search_jobs(size).items():
        if all(job.key in found for job in tried):
            best = best_setting(tried, [found[job.key] for job in tried])
            jobs[name] = [Job(name, best, "final", seed, size.queries, size.every) for seed in size.seeds]
    return jobs


def best_setting(tried: Sequence[Job], accuracies: Sequence[float | None]) -> Setting:
    """Return the settings with the highest accuracy, of equal ones the first. A failed run (None) ranks
    last."""
    ranks = [-1.0 if accuracy is None else accuracy for accuracy in accuracies]
    return tried[ranks.index(max(ranks))].setting
