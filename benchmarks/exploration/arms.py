"""The arms of the comparison, and its sizes. docs/exploration.md explains both.

Targets, registered before any figure was made: the best arm reaches the mean of tuned passive's last
evaluations (`LAST`) with at most half of passive's queries. Every arm's learning rate is tuned on
`Size.tuning_seeds`, with the whole budget; figures are of other seeds. The rows in `first/` are of an earlier
design, with one tuning seed, three rates, `pooling: mean` for sums, and final seeds from 201 on.

After all figures of stories and a half of those of sums were seen, a control was added ("mean_best_random +
labels"), and each grid of rates was continued at both ends for stories and at the lower end for sums, since
some arms had the best rate of the grid at its end. The seeds stayed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LAST = 3
"""Number of the last evaluations whose mean is an arm's end."""
SAMPLES = 20
LABELS = {"share": 0.3, "burn_in": 4}
MANY_LABELS = {**LABELS, "share": 0.75}
BASELINE = "passive"
MOST_ROUNDS = 6
"""A run ends after so many times the steps that its pairs would need: a policy that has collapsed to
one response a prompt asks about none."""


@dataclass(frozen=True)
class Arm:
    """One way to spend the answers.

    Attributes:
        algorithm, explorer: their sections; the features are the task's.
        part: what the arm has in addition to passive, for the table.
    """

    algorithm: Mapping[str, Any]
    explorer: Mapping[str, Any]
    part: str


def _rule(name: str, part: str, labels: Mapping[str, Any] | None = None) -> Arm:
    explorer = {
        "name": "ensemble",
        "rule": name,
        "samples": SAMPLES,
        **({"model_labels": labels} if labels else {}),
    }
    return Arm({"name": "dpo", "beta": 0.1}, explorer, part)


ARMS = {
    "passive": _rule("passive", "nothing: two random samples"),
    "passive + labels": _rule("passive", "model labels", labels=LABELS),
    "mean_best_random": _rule("mean_best_random", "the best by the mean, against a random one"),
    "mean_best_random + labels": _rule(
        "mean_best_random", "the best by the mean, and model labels", labels=LABELS
    ),
    "mean_best_worst": _rule("mean_best_worst", "the widest pair by the mean; explores nothing"),
    "uncertainty": _rule("uncertainty", "exploration alone"),
    "eets": _rule("eets", "double Thompson sampling"),
    "sea": _rule("bai_ts", "best-arm identification"),
    "sea + labels": _rule("bai_ts", "best-arm identification and model labels", labels=LABELS),
    "passive + many labels": _rule("passive", "model labels, three to one", labels=MANY_LABELS),
    "sea + many labels": _rule(
        "bai_ts", "best-arm identification and model labels, three to one", labels=MANY_LABELS
    ),
    "apl": Arm(
        {"name": "dpo", "beta": 0.1},
        {"name": "apl", "oversample": 4, "samples": 8},
        "prompts of large entropy, the widest pair by the implicit reward",
    ),
    "xpo": Arm(
        {"name": "xpo", "beta": 0.1}, {"name": "none"}, "a bonus for what the reference would not say"
    ),
}


PARTS = (
    ("a wide pair", "mean_best_worst", "passive"),
    ("the best by the mean as first response", "mean_best_random", "passive"),
    ("exploration alone", "uncertainty", "passive"),
    ("exploration, beyond a wide pair", "sea", "mean_best_worst"),
    ("exploration, beyond the best by the mean", "sea", "mean_best_random"),
    ("model labels, for a random pair", "passive + labels", "passive"),
    ("model labels, for the best by the mean", "mean_best_random + labels", "mean_best_random"),
    ("model labels, with exploration", "sea + labels", "sea"),
    ("the best by the mean, with model labels", "mean_best_random + labels", "passive + labels"),
    (
        "exploration, beyond the best by the mean, with model labels",
        "sea + labels",
        "mean_best_random + labels",
    ),
    ("many model labels, for a random pair", "passive + many labels", "passive"),
    ("best-arm identification, with many model labels", "sea + many labels", "passive + many labels"),
)
"""The parts of a gain: a name, an arm that has the part, and an arm that lacks it."""


@dataclass(frozen=True)
class Size:
    """The extent of a comparison.

    Attributes:
        prompts: prompts of a step.
        rates: learning rates, of which each arm takes the best one on the tuning seeds.
        pairs: budget of compared pairs of a run.
        every: compared pairs between two evaluations.
    """

    name: str
    prompts: int
    rates: tuple[float, ...]
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    pairs: int
    every: int
    arms: tuple[str, ...]


_SUMS_SEEDS = (301, 302, 303, 304, 305)
_STORIES_SEEDS = (401, 402, 403, 404, 405)
_SOME_ARMS = ("passive", "mean_best_worst", "sea", "sea + labels")
_SUMS_RATES = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4)
_STORIES_RATES = (1.5e-4, 3e-4, 6e-4, 1.2e-3, 2.4e-3)
SIZES = {
    size.name: size
    for size in (
        Size("sums", 32, _SUMS_RATES, (100, 101, 102), _SUMS_SEEDS, 1024, 128, tuple(ARMS)),
        Size("sums_short", 32, _SUMS_RATES[2:], (100,), _SUMS_SEEDS[:2], 352, 64, _SOME_ARMS),
        Size("stories", 16, _STORIES_RATES, (100, 101), _STORIES_SEEDS, 256, 32, tuple(ARMS)),
        Size("stories_short", 16, _STORIES_RATES[2:4], (100,), _STORIES_SEEDS[:2], 96, 32, _SOME_ARMS),
    )
}


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        purpose: "tuning" or "final".
        seed: decides the run. The task and the start model are the same for all.
    """

    arm: str
    rate: float
    seed: int
    purpose: str
    size: str

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.arm, f"{self.rate:g}", self.seed, self.purpose

    def tree(self, task: Mapping[str, Any], run_dir: str) -> dict[str, Any]:
        """Return the configuration of the run, as plain data.

        Args:
            task: the sections of the task (`exploration.task.prepare`).
        """
        arm, size = ARMS[self.arm], SIZES[self.size]
        has_ensemble = arm.explorer["name"] == "ensemble"
        picks = self.arm == BASELINE and self.purpose == "final"
        temperature = task["sampling"].get("temperature", 1.0)
        return {
            **task,
            "run_dir": run_dir,
            "seed": self.seed,
            "algorithm": {**arm.algorithm, "prompts": size.prompts},
            "explorer": {**(task["explorer"] if has_ensemble else {}), **arm.explorer},
            "learner": {"learning_rate": self.rate, "micro_batch_size": 64},
            "evaluation": {
                **task["evaluation"],
                "every": 1,
                "every_queries": 2 * size.every,
                "greedy": False,
                **({"best_of": SAMPLES, "best_of_temperature": temperature} if picks else {}),
            },
            "checkpoint": {"every": 1_000_000},
            "compute": {"threads": 1},
            "stop": {"max_queries": 2 * size.pairs, "max_steps": MOST_ROUNDS * size.pairs // size.prompts},
        }
