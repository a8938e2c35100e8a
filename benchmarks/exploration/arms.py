"""The arms of the comparison, and its sizes. docs/exploration.md explains both.

Targets, registered before any figure was made: the best arm reaches the mean of tuned passive's last
evaluations (`LAST`) with at most half of passive's queries. Every arm's learning rate is tuned on
`TUNING_SEEDS`, with the whole budget; figures are of other seeds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LEARNING_RATES = (3e-5, 1e-4, 3e-4)
TUNING_SEEDS = (100,)
LAST = 3
"""Number of the last evaluations whose mean is an arm's end."""
PROMPTS, SAMPLES = 32, 20
LABELS = {"share": 0.3, "burn_in": 4}
BASELINE = "passive"


@dataclass(frozen=True)
class Arm:
    """One way to spend the answers.

    Attributes:
        algorithm, explorer: their sections.
        part: what the arm has in addition to passive, for the table.
    """

    algorithm: Mapping[str, Any]
    explorer: Mapping[str, Any]
    part: str


def _rule(name: str, part: str, labels: bool = False) -> Arm:
    explorer = {
        "name": "ensemble",
        "rule": name,
        "samples": SAMPLES,
        "features": {"backbone": "policy", "layer": "all"},
        **({"model_labels": LABELS} if labels else {}),
    }
    return Arm({"name": "dpo", "beta": 0.1}, explorer, part)


ARMS = {
    "passive": _rule("passive", "nothing: two random samples"),
    "passive + labels": _rule("passive", "model labels", labels=True),
    "mean_best_random": _rule("mean_best_random", "the best by the mean, against a random one"),
    "mean_best_worst": _rule("mean_best_worst", "the widest pair by the mean; explores nothing"),
    "uncertainty": _rule("uncertainty", "exploration alone"),
    "eets": _rule("eets", "double Thompson sampling"),
    "sea": _rule("bai_ts", "best-arm identification"),
    "sea + labels": _rule("bai_ts", "best-arm identification and model labels", labels=True),
    "apl": Arm(
        {"name": "dpo", "beta": 0.1},
        {"name": "apl", "oversample": 4, "samples": 8},
        "prompts of large entropy, the widest pair by the implicit reward",
    ),
    "xpo": Arm(
        {"name": "xpo", "beta": 0.1}, {"name": "none"}, "a bonus for what the reference would not say"
    ),
}


@dataclass(frozen=True)
class Size:
    """The extent of a comparison.

    Attributes:
        pairs: budget of compared pairs of a run.
        every: compared pairs between two evaluations.
    """

    name: str
    seeds: tuple[int, ...]
    pairs: int
    every: int
    arms: tuple[str, ...]


FULL = Size("full", (201, 202, 203, 204, 205), 1024, 128, tuple(ARMS))
SHORT = Size("short", (201, 202), 352, 64, ("passive", "mean_best_worst", "sea", "sea + labels"))
SIZES = {size.name: size for size in (FULL, SHORT)}


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
            task: the sections of the task (`exploration.task`).
        """
        arm, size = ARMS[self.arm], SIZES[self.size]
        has_ensemble = arm.explorer["name"] == "ensemble"
        best = {"best_of": SAMPLES} if self.arm == BASELINE else {}
        return {
            **task,
            "run_dir": run_dir,
            "seed": self.seed,
            "algorithm": {**arm.algorithm, "prompts": PROMPTS},
            "explorer": dict(arm.explorer),
            "learner": {"learning_rate": self.rate, "micro_batch_size": 64},
            "evaluation": {
                **task["evaluation"],
                "every": 1,
                "every_queries": 2 * size.every,
                "greedy": False,
                **(best if has_ensemble else {}),
            },
            "checkpoint": {"every": 1_000_000},
            "compute": {"threads": 1},
            "stop": {"max_queries": 2 * size.pairs},
        }
