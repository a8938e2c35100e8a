"""Asks whether old features explain why no rule saves anything on sums (docs/exploration.md). The ensemble's
buffer keeps features of the time of sampling, and the policy has changed since then.

    python benchmarks/explore_ages.py

Arms are passive and SEA with their tuned learning rates, on the seeds of tuning. The features of the policy
stay as they were (`kept`), are computed again in every step (`refreshed`), or are those of the reference,
which does not change (`reference`). The runs are appended to `exploration/ages.csv`, and those that it has
are not run again. The table, also in `exploration/ages.md`, has the mean reward of samples at the end, and
that of the best of 20 by the ensemble, in the mean over seeds.
"""

from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from exploration.arms import LAST, SAMPLES, SIZES, Job
from exploration.page import tuned_rate
from exploration.records import Evaluation, append, read
from exploration.task import prepare
from explore import CSVS, WORK, perform
from provenance import commit, machine

SIZE, ARMS = SIZES["sums"], ("passive", "sea")
FEATURES: dict[str, dict[str, Any]] = {
    "kept": {},
    "refreshed": {"refresh_every": 1},
    "reference": {"backbone": "reference"},
}


class Variant(Job):
    """A run with other features. `purpose` is the name of the features."""

    def tree(self, task: Any, run_dir: str) -> dict[str, Any]:
        tree = super().tree(task, run_dir)
        explorer = tree["explorer"]
        features = {**explorer["features"], **FEATURES[self.purpose]}
        best = {"best_of": SAMPLES, "best_of_temperature": task["sampling"]["temperature"]}
        return {
            **tree,
            "explorer": {**explorer, "features": features},
            "evaluation": {**tree["evaluation"], **best},
        }


def make(job: Variant) -> list[Evaluation]:
    return perform(job, prepare(WORK / "task_sums", None), str(WORK / "runs" / "_".join(map(str, job.key))))


def table(file: Path, jobs: list[Variant]) -> str:
    runs = read(file)
    lines = ["| arm | features | reward at the end | best of 20 at the end |", "| --- | --- | --- | --- |"]
    for arm, name in product(ARMS, FEATURES):
        ends = [runs[job.key][-LAST:] for job in jobs if (job.arm, job.purpose) == (arm, name)]
        reward, best = (
            np.mean([getattr(each, field) for run in ends for each in run]) for field in ("reward", "best")
        )
        lines.append(f"| {arm} | {name} | {reward:.2f} | {best:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    file = CSVS / "ages.csv"
    tuned = read(CSVS / "sums.csv")
    jobs = [
        Variant(arm, tuned_rate(tuned, arm, SIZE) or 0.0, seed, name, SIZE.name)
        for arm, name, seed in product(ARMS, FEATURES, SIZE.tuning_seeds)
    ]
    missing = [job for job in jobs if job.key not in read(file)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for job, found in zip(missing, pool.map(make, missing), strict=True):
            append(file, job, found, machine(), commit())
    shown = table(file, jobs)
    (CSVS / "ages.md").write_text(shown, encoding="utf-8")
    print(shown)


if __name__ == "__main__":
    main()
