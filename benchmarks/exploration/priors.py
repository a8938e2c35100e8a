"""Compares forms and strengths of the ensemble's prior (`explorer.ensemble.prior_form`, `prior`) in the
laboratory. docs/exploration.md shows the result.

    python benchmarks/exploration/priors.py [--jobs 2] [--seeds 20] [--out benchmarks/exploration/priors]

A trial is one of `oat bench explore` with the agent `ensemble`, whose prior is one of `PRIORS`. The trials
are appended to `trials.csv`, and those that it has are not run again. When none is missing, `table.md` is
written.

* Queries, and the ratio: as in the laboratory (`oat.laboratory.report`), relative to no prior with the same
  rule.
* Regret at the end: mean of the last `LAST` rounds of a trial, in the mean over seeds. Its change is that
  from no prior with the same rule and seed, with a 95 % bootstrap interval over seeds.
* Disagreement at the end: on the held-out prompts, the variance over members of the difference of two
  candidates' rewards, in the mean over pairs; median over seeds.
* Relative disagreement: the same, divided by the mean square of the difference of the members' mean rewards.
"""

import argparse
import csv
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from oat.explore.find_rule import find_rule
from oat.explore.uncertainty import logits_variance
from oat.laboratory.agents import ENSEMBLE, Learned
from oat.laboratory.report import ROUNDS, Case, Ratio, ratios
from oat.laboratory.trial import HELD_OUT, Curve, learn_rewards
from oat.laboratory.worlds import SIZE, make_world
from oat.seeds import Seeds

WORLDS = ("independent", "redundant", "mlp")
RULES = ("passive", "bai_ts", "eets")
NONE = "none"
PRIORS = {
    NONE: {"prior": 0.0},
    "mean 0.5": {"prior_form": "mean", "prior": 0.5},
    "mean 5000": {"prior_form": "mean", "prior": 5000.0},
    "map 0.1": {"prior_form": "map", "prior": 0.1},
    "map 1": {"prior_form": "map", "prior": 1.0},
}
"""Changes of the laboratory's ensemble. `mean 0.5` is the default of a run, and `mean 5000` is 10,000 times
as strong. The laboratory's layers have equally many inputs, so the two forms differ by a factor only: `map 1`
is `mean 1072`."""
FIRST_SEED, SEEDS = 7000, 20
"""Those of `oat bench explore` begin at 0 (tuning) and at 2000 (figures)."""
LAST = 5
_RESAMPLES = 2000
_FIELDS = ("world", "rule", "prior", "seed", "variance", "margin", "clashes", "queries", "regrets")


@dataclass(frozen=True)
class Trial:
    world: str
    rule: str
    prior: str
    seed: int

    def run(self) -> "Result":
        torch.set_num_threads(1)
        agents: list[Learned] = []

        def make(dim: int, generator: np.random.Generator, prior_std: float) -> Learned:
            agents.append(Learned(dim, generator, replace(ENSEMBLE, **PRIORS[self.prior])))
            return agents[-1]

        curve = learn_rewards(self.world, make, find_rule(self.rule, {}), self.seed, ROUNDS)
        return Result(curve, *_disagreement(self.world, agents[0], self.seed))


@dataclass(frozen=True)
class Result:
    """What a trial found.

    Attributes:
        variance, margin: at the end, in the mean over pairs of held-out candidates: the variance over members
            of the difference of two rewards, and the square of the difference of the mean rewards.
    """

    curve: Curve
    variance: float
    margin: float


def _disagreement(world: str, agent: Learned, seed: int) -> tuple[float, float]:
    """Return `Result.variance` and `Result.margin`, on the trial's held-out prompts."""
    seeds = Seeds(seed)
    draw = make_world(world, seeds.at("world", world))
    rewards_MBG = agent.rewards(draw(seeds.at("held out", world), HELD_OUT, SIZE).features_BGD)
    mean_BG = rewards_MBG.mean(axis=0).astype(float)
    is_pair_GG = ~np.eye(mean_BG.shape[1], dtype=bool)
    square_BGG = (mean_BG[:, :, None] - mean_BG[:, None, :]) ** 2
    return float(logits_variance(rewards_MBG)[:, is_pair_GG].mean()), float(square_BGG[:, is_pair_GG].mean())


def run_trials(trials: Sequence[Trial], file: Path, jobs: int) -> dict[Trial, Result]:
    """Run the trials that a CSV file lacks, append each as it ends, and return all of these trials."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(",".join(_FIELDS) + "\n", encoding="utf-8")
    os.truncate(file, file.read_bytes().rfind(b"\n") + 1)  # without a line that a killed process left
    known = read(file)
    missing = [trial for trial in trials if trial not in known]
    os.environ["OMP_NUM_THREADS"] = "1"
    with (
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
        file.open("a", encoding="utf-8", newline="") as stream,
    ):
        writer = csv.writer(stream, lineterminator="\n")
        for trial, result in zip(missing, pool.map(Trial.run, missing, chunksize=1), strict=True):
            writer.writerow(_row(trial, result))
            stream.flush()
            known[trial] = result
    return {trial: known[trial] for trial in trials}


def read(file: Path) -> dict[Trial, Result]:
    found = {}
    with file.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            curve = Curve(
                [int(each) for each in row["queries"].split(" ")],
                [float(each) for each in row["regrets"].split(" ")],
                float(row["clashes"]),
            )
            trial = Trial(row["world"], row["rule"], row["prior"], int(row["seed"]))
            found[trial] = Result(curve, float(row["variance"]), float(row["margin"]))
    return found


def _row(trial: Trial, result: Result) -> list[str]:
    curve = result.curve
    numbers = [f"{number:.6g}" for number in (result.variance, result.margin, curve.clashes)]
    queries = " ".join(map(str, curve.queries))
    regrets = " ".join(f"{regret:.5f}" for regret in curve.regrets)
    return [trial.world, trial.rule, trial.prior, str(trial.seed), *numbers, queries, regrets]


def summary(found: Mapping[Trial, Result]) -> str:
    """Return the ratios and the regrets at the end as a table in Markdown: a row for each world and rule, a
    column for each prior."""
    lines = [f"| world | rule | {' | '.join(PRIORS)} |", "| --- | --- |" + " --- |" * len(PRIORS)]
    for world, rule in product(WORLDS, RULES):
        by_prior = _by_prior(found, world, rule)
        rows = _ratios(by_prior)
        cells = [f"{_ratio(rows[prior])}; {_ends(by_prior[prior]).mean():.3f}" for prior in PRIORS]
        lines.append(f"| `{world}` | `{rule}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def table(found: Mapping[Trial, Result]) -> str:
    """Return all results as a table in Markdown: a row for each world, rule and prior."""
    lines = [
        "| world | rule | prior | queries | ratio to no prior | regret at the end | its change "
        "| disagreement at the end | relative disagreement |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for world, rule in product(WORLDS, RULES):
        by_prior = _by_prior(found, world, rule)
        rows = _ratios(by_prior)
        for prior, results in by_prior.items():
            cells = [
                f"{rows[prior].queries:.0f}",
                _ratio(rows[prior]),
                f"{_ends(results).mean():.3f}",
                _interval(_ends(results) - _ends(by_prior[NONE])) if prior != NONE else "",
                f"{np.median([result.variance for result in results]):.2f}",
                f"{np.median([result.variance / result.margin for result in results]):.3f}",
            ]
            lines.append(f"| `{world}` | `{rule}` | {prior} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _by_prior(found: Mapping[Trial, Result], world: str, rule: str) -> dict[str, list[Result]]:
    """Return the results in a world with a rule, by prior, in the order of the seeds."""
    some = {trial: found[trial] for trial in found if (trial.world, trial.rule) == (world, rule)}
    ordered = sorted(some, key=lambda trial: trial.seed)
    return {prior: [some[trial] for trial in ordered if trial.prior == prior] for prior in PRIORS}


def _ratios(by_prior: Mapping[str, Sequence[Result]]) -> dict[str, Ratio]:
    """Return the queries of each prior relative to no prior, with the laboratory's function: a prior stands
    in the place of a rule."""
    curves = {
        Case("", "", prior, number): result.curve
        for prior, results in by_prior.items()
        for number, result in enumerate(results)
    }
    return ratios(curves, "", "", baseline=NONE)


def _ratio(ratio: Ratio) -> str:
    never = f", {ratio.censored} never" if ratio.censored else ""
    return f"{ratio.ratio:.2f} ({ratio.low:.2f}-{ratio.high:.2f}{never})"


def _ends(results: Sequence[Result]) -> np.ndarray:
    return np.array([np.mean(result.curve.regrets[-LAST:]) for result in results])


def _interval(values_S: np.ndarray) -> str:
    """Return the mean, with a 95 % bootstrap interval."""
    drawn = np.random.default_rng(0).integers(len(values_S), size=(_RESAMPLES, len(values_S)))
    low, high = np.quantile(values_S[drawn].mean(axis=1), [0.025, 0.975])
    return f"{values_S.mean():+.3f} ({low:+.3f} to {high:+.3f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "priors")
    options = parser.parse_args(arguments)
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    trials = [Trial(*each, seed) for seed in seeds for each in product(WORLDS, RULES, PRIORS)]
    found = run_trials(trials, options.out / "trials.csv", options.jobs)
    shown = f"{summary(found)}\n{table(found)}"
    (options.out / "table.md").write_text(shown, encoding="utf-8")
    print(shown)


if __name__ == "__main__":
    main()
