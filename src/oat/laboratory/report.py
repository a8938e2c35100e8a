"""`oat bench explore`: run trials of the laboratory, and write their curves (CSV and PNG) and a table.

The table says how many queries a rule needs to bring the regret down to `THRESHOLD`, relative to `passive`.
The threshold must be reached in two rounds in a row. A trial that never reaches it counts with the queries of
a trial without clashes (censored). The number is the median over seeds of the rule, divided by that of
`passive`, with a 95 % bootstrap interval: seeds are drawn with replacement, the same ones for both.

Trials that the CSV file has already are not run again. Those of a user's rule whose file has changed since
are removed first (`rules.json` beside it has the checksums).
"""

import csv
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oat.errors import ActorError, ConfigError, DataError, did_you_mean
from oat.explore.find_rule import checksum_of_rule, find_rule
from oat.explore.rules import RULES
from oat.explore.settings import ModelLabelsConfig
from oat.files import absolute, appearing
from oat.laboratory.agents import AGENTS
from oat.laboratory.trial import PROMPTS, RATES, Curve, learn_policy, learn_rewards
from oat.laboratory.worlds import WORLDS
from oat.plugins.isolated_workers import Outcome, Workers

ROUNDS = 60
FIRST_SEED, TUNING_SEED, TUNING_SEEDS = 2000, 0, 4
"""Seeds of figures count from `FIRST_SEED`. Those with which anything is tuned count from `TUNING_SEED`."""
THRESHOLD = 0.2
BASELINE = "passive"
_LONGEST_S, _LARGEST_GB = 1e5, 1e5
"""Limits of the process of a trial, which none reaches."""
_RESAMPLES = 2000
_FIELDS = ("world", "agent", "rule", "share", "rate", "seed", "clashes", "queries", "regrets")
_TRIALS = ("curves.csv", "tuning.csv")
_BESIDE = ("rules.json", "table.md", "regret.png")
"""The files of a folder of trials: `_TRIALS` begin with `_FIELDS`, and `_BESIDE` are made of them."""


_HEAD = ",".join(_FIELDS) + "\n"


@dataclass(frozen=True)
class Case:
    """One trial.

    Attributes:
        share: None: the agent learns rewards (`learn_rewards`). A number: a policy learns too
            (`learn_policy`), and the agent labels a pair of this share of the prompts.
        rate: the policy's learning rate; None without a policy.
    """

    world: str
    agent: str
    rule: str
    seed: int
    share: float | None = None
    rate: float | None = None

    @property
    def arm(self) -> str:
        """Name of the rule, with its model labels."""
        return self.rule + (f" + labels {self.share:g}" if self.share else "")

    def run(self) -> Curve:
        rule = find_rule(self.rule, {})
        if self.share is None or self.rate is None:
            return learn_rewards(self.world, self.agent, rule, self.seed, ROUNDS)
        labels = ModelLabelsConfig(self.share) if self.share else None
        return learn_policy(self.world, self.agent, rule, self.seed, ROUNDS, labels, self.rate)


def bench_explore(
    out: Path,
    *,
    rules: Sequence[str] | None = None,
    worlds: Sequence[str] | None = None,
    agents: Sequence[str] | None = None,
    seeds: int = 20,
    shares: Sequence[float] = (),
    jobs: int = 1,
) -> str:
    """Run trials of the laboratory, and write `curves.csv`, `table.md` and, if matplotlib is installed,
    `regret.png` into a directory. Trials that `curves.csv` has already are not run again. Return what the
    command prints.

    Args:
        rules, worlds, agents: names; None: all. A rule may be a user's, as `path/to/file.py:function`. The
            baseline `passive` is always among the rules.
        seeds: number of seeds.
        shares: with any, a policy learns too; the agent labels a pair of this share of the prompts itself.
        jobs: number of processes.

    Raises:
        ConfigError: there is no such rule, world or agent, a number is out of range, or the directory has
            files that this command would replace and did not write.
        DataError: `curves.csv` is none that this command wrote.
    """
    if seeds < 1 or jobs < 1 or not all(0 <= share <= 1 for share in shares):
        raise ConfigError("--seeds and --jobs are at least 1, and a share of --policy is from 0 to 1")
    torch.set_num_threads(1)
    names = [BASELINE, *(name for name in rules or RULES if name != BASELINE)]
    folder = absolute(out)
    file = folder / "curves.csv"
    refuse_foreign(folder)
    wanted_shares = list(dict.fromkeys([0.0, *shares])) if shares else []
    cases = cases_of(list(worlds or WORLDS), list(agents or AGENTS), names, seeds, wanted_shares)
    if shares:
        cases = with_rates(cases, folder / "tuning.csv", jobs)
    found = run_cases(cases, file, jobs)
    shown = table(found)
    write(folder / "table.md", shown)
    drawn = "no picture, since matplotlib is missing (pip install 'oat-align[plot]')"
    if find_spec("matplotlib") is not None:
        with appearing(folder / "regret.png", "--out", is_ours=lambda _: True) as picture:
            plot(found, picture)
        drawn = str(out / "regret.png")
    return (
        f"{shown}\nqueries to a regret of 0.2, relative to {BASELINE}: median over {seeds} seeds, with 95 % "
        f"intervals\ncurves: {out / 'curves.csv'}; {drawn}"
    )


def cases_of(
    worlds: Sequence[str],
    agents: Sequence[str],
    rules: Sequence[str],
    seeds: int,
    shares: Sequence[float] = (),
) -> list[Case]:
    """Return the trials of all combinations. With `shares`, a policy learns in all of them; its learning rate
    is not set yet.

    Raises:
        ConfigError: there is no such world, agent or rule.
    """
    for kind, names, known in (("world", worlds, WORLDS), ("agent", agents, AGENTS)):
        for name in names:
            if name not in known:
                raise ConfigError(f"there is no {kind} {name!r}; {did_you_mean(name, known)}")
    for name in rules:
        find_rule(name, {})
    return [
        Case(world, agent, rule, FIRST_SEED + seed, share)
        for world in worlds
        for agent in agents
        for rule in rules
        for share in (shares or (None,))
        for seed in range(seeds)
    ]


def run_cases(cases: Sequence[Case], file: Path, jobs: int) -> dict[Case, Curve]:
    """Run the trials that a CSV file lacks, append them to it, and return all of these trials. Trials of
    users' rules that have changed are removed from it before.

    Args:
        jobs: number of processes.

    Raises:
        DataError: the file is none that this function wrote.
    """
    if file.exists():
        if not _has_trials(file):
            raise _no_trials(file)
        _cut_unfinished_line(file)
    else:
        write(file, _HEAD)  # first, since it marks the folder
    _remove_changed({case.rule for case in cases if ":" in case.rule}, file)
    known = read_curves(file)
    missing = [case for case in dict.fromkeys(cases) if case not in known]
    with file.open("a", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        for case, curve in _each(missing, jobs):
            writer.writerow(_row(case, curve))
            stream.flush()
            known[case] = curve
    return {case: known[case] for case in cases}


def _remove_changed(names: Collection[str], file: Path) -> None:
    """Remove the trials of those of these users' rules from a CSV file whose code has another checksum than
    before, and keep the present checksums beside the file."""
    if not names:
        return
    codes = file.with_name("rules.json")
    known = json.loads(codes.read_text(encoding="utf-8")) if codes.exists() else {}
    present = {name: checksum_of_rule(name) for name in names}
    changed = {name for name in names if known.get(name, present[name]) != present[name]}
    if changed and file.exists():
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        rule = _FIELDS.index("rule")
        kept = [line for line, row in zip(lines, csv.reader(lines), strict=True) if row[rule] not in changed]
        write(file, "".join(kept))
    write(codes, json.dumps({**known, **present}, indent=1) + "\n")


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder with files that `oat bench explore` would replace and did not write.

    Raises:
        ConfigError: there are files of such names, and no trials that `run_cases` wrote.
        DataError: a file that has the name of trials has something else.
    """
    there = [name for name in (*_TRIALS, *_BESIDE) if os.path.lexists(folder / name)]
    trials = [folder / name for name in _TRIALS if name in there]
    if there and not trials:
        raise ConfigError(
            f"{folder}: has {', '.join(there)} and no {_TRIALS[0]} of `oat bench explore`, which would "
            "replace them; give another --out"
        )
    for file in trials:
        if not _has_trials(file):
            raise _no_trials(file)


def write(file: Path, text: str) -> None:
    """Write a file of a folder that `refuse_foreign` has passed, in one piece."""
    with appearing(file, "--out", is_ours=lambda _: True) as new:
        new.write_text(text, encoding="utf-8")


def _has_trials(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(_HEAD)) == _HEAD.encode()


def _no_trials(file: Path) -> DataError:
    return DataError(f"{file}: has no trials of the laboratory; move it away, or give another --out")


def _cut_unfinished_line(file: Path) -> None:
    """Remove a last line that has no end: its process was killed while it wrote."""
    written = file.read_bytes()
    os.truncate(file, written.rfind(b"\n") + 1)


def _each(cases: Sequence[Case], jobs: int) -> Iterator[tuple[Case, Curve]]:
    """Run trials, and yield them in the given order.

    Raises:
        OatError: a rule failed, or a process ended.
    """
    if jobs <= 1 or len(cases) <= 1:
        for case in cases:
            yield case, case.run()
        return
    workers = Workers(f"{__name__}:runner", count=jobs, timeout_s=_LONGEST_S, memory_gb=_LARGEST_GB)
    try:
        for number, case in enumerate(cases):
            workers.send(str(number), asdict(case))
        found: dict[str, Outcome] = {}
        for number, case in enumerate(cases):
            while str(number) not in found:
                found.update(workers.collect(_LONGEST_S))
            outcome = found.pop(str(number))
            if outcome.failure:
                raise ActorError(f"the process of a trial {outcome.failure} ({case}); run the command again")
            yield case, Curve(**outcome.value)
    finally:
        workers.close()


def runner() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the function with which a process runs trials."""
    return lambda case: asdict(Case(**case).run())


def with_rates(cases: Sequence[Case], file: Path, jobs: int) -> list[Case]:
    """Return the trials with a policy, each with the learning rate that is best for its arm, world and agent:
    the one with the smallest mean regret over the rounds of `TUNING_SEEDS` other seeds."""
    arms = {replace(case, seed=0): None for case in cases}
    seeds = range(TUNING_SEED, TUNING_SEED + TUNING_SEEDS)
    tried = [replace(arm, seed=seed, rate=rate) for arm in arms for rate in RATES for seed in seeds]
    found = run_cases(tried, file, jobs)

    def regret(arm: Case, rate: float) -> float:
        curves = [found[replace(arm, seed=seed, rate=rate)].regrets for seed in seeds]
        return float(np.mean(curves))

    best = {arm: min(RATES, key=lambda rate: regret(arm, rate)) for arm in arms}
    return [replace(case, rate=best[replace(case, seed=0)]) for case in cases]


def read_curves(file: Path) -> dict[Case, Curve]:
    """Read the trials in a CSV file.

    Raises:
        DataError: the file is none that `run_cases` wrote.
    """
    found = {}
    with file.open(encoding="utf-8", newline="") as stream:
        for number, row in enumerate(csv.DictReader(stream), start=2):
            try:
                case = Case(
                    row["world"],
                    row["agent"],
                    row["rule"],
                    int(row["seed"]),
                    float(row["share"]) if row["share"] else None,
                    float(row["rate"]) if row["rate"] else None,
                )
                found[case] = Curve(
                    [int(each) for each in row["queries"].split(" ")],
                    [float(each) for each in row["regrets"].split(" ")],
                    float(row["clashes"]),
                )
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise DataError(
                    f"{file}:{number}: is no trial of the laboratory ({error}); remove the line, or give "
                    "another --out"
                ) from error
    return found


def _row(case: Case, curve: Curve) -> list[Any]:
    share, rate = ("" if each is None else repr(float(each)) for each in (case.share, case.rate))
    queries = " ".join(map(str, curve.queries))
    regrets = " ".join(repr(float(regret)) for regret in curve.regrets)
    return [
        case.world,
        case.agent,
        case.rule,
        share,
        rate,
        case.seed,
        repr(float(curve.clashes)),
        queries,
        regrets,
    ]


def queries_to(curve: Curve, threshold: float) -> int:
    """Return the number of queries after which the regret is at most the threshold in two rounds in a row. If
    this never happens, return the budget: one query for each prompt of the trial, also for clashes."""
    at = _reached(curve, threshold)
    return curve.queries[at[0]] if len(at) else PROMPTS * len(curve.queries)


def _reached(curve: Curve, threshold: float) -> np.ndarray:
    """Return the rounds in which, and after which, the regret is at most the threshold."""
    below = np.array(curve.regrets) <= threshold
    return np.flatnonzero(below[:-1] & below[1:])


@dataclass(frozen=True)
class Ratio:
    """The queries of an arm, relative to those of the baseline.

    Attributes:
        queries: median over seeds of the arm's queries to the threshold.
        ratio, low, high: the ratio of medians, and its 95 % bootstrap interval.
        censored: number of seeds whose trial never reached the threshold.
    """

    queries: float
    ratio: float
    low: float
    high: float
    censored: int


def ratios(
    found: dict[Case, Curve],
    world: str,
    agent: str,
    threshold: float = THRESHOLD,
    baseline: str = BASELINE,
) -> dict[str, Ratio]:
    """Return the ratios of all arms in a world with an agent, by arm. The baseline must be among them."""
    by_arm: dict[str, dict[int, Curve]] = {}
    for case, curve in found.items():
        if (case.world, case.agent) == (world, agent):
            by_arm.setdefault(case.arm, {})[case.seed] = curve
    seeds = sorted(by_arm[baseline])
    needed = {
        arm: np.array([queries_to(curves[seed], threshold) for seed in seeds])
        for arm, curves in by_arm.items()
    }
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(seeds), size=(_RESAMPLES, len(seeds)))
    base = np.median(needed[baseline][drawn], axis=1)
    rows = {}
    for arm, queries in needed.items():
        low, high = np.quantile(np.median(queries[drawn], axis=1) / base, [0.025, 0.975])
        reached = [len(_reached(by_arm[arm][seed], threshold)) > 0 for seed in seeds]
        median = float(np.median(queries))
        ratio = median / float(np.median(needed[baseline]))
        rows[arm] = Ratio(median, ratio, float(low), float(high), reached.count(False))
    return rows


def table(found: dict[Case, Curve], threshold: float = THRESHOLD) -> str:
    """Return the ratios of all worlds and agents as a table in Markdown: a row for each arm, a column for
    each world and agent."""
    places = list(dict.fromkeys((case.world, case.agent) for case in found))
    arms = list(dict.fromkeys(case.arm for case in found))
    columns = {place: ratios(found, *place, threshold) for place in places}
    lines = [
        "| rule | " + " | ".join(f"{world}, {agent}" for world, agent in places) + " |",
        "| --- |" + " --- |" * len(places),
    ]
    for arm in arms:
        cells = [_cell(columns[place].get(arm)) for place in places]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    censored = f", {ratio.censored} never" if ratio.censored else ""
    return f"{ratio.ratio:.2f} ({ratio.low:.2f}-{ratio.high:.2f}{censored})"


def plot(found: dict[Case, Curve], file: Path) -> None:
    """Draw the regret against queries: a panel for each world and agent, a line for each arm (the median over
    seeds), and a band between the quartiles."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places = list(dict.fromkeys((case.world, case.agent) for case in found))
    arms = list(dict.fromkeys(case.arm for case in found))
    agents = list(dict.fromkeys(agent for _, agent in places))
    worlds = list(dict.fromkeys(world for world, _ in places))
    figure = Figure(figsize=(4.5 * len(agents), 3.2 * len(worlds)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(worlds), len(agents), squeeze=False)
    for (world, agent), axis in zip(
        ((world, agent) for world in worlds for agent in agents), axes.flat, strict=True
    ):
        for number, arm in enumerate(arms):
            curves = _curves(found, world, agent, arm)
            if not curves:
                continue
            x, low, middle, high = _band(curves)
            style = ("-", "--", ":")[number // 10 % 3]
            (line,) = axis.plot(x, middle, style, color=f"C{number % 10}", label=arm, linewidth=1.2)
            axis.fill_between(x, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axis.set(title=f"{world}, {agent}", xlabel="queries", ylabel="regret", yscale="log")
    axes.flat[0].legend(fontsize=6)
    figure.savefig(file, dpi=130)


def _curves(found: dict[Case, Curve], world: str, agent: str, arm: str) -> list[Curve]:
    return [
        curve for case, curve in found.items() if (case.world, case.agent, case.arm) == (world, agent, arm)
    ]


def _band(curves: Iterable[Curve]) -> tuple[np.ndarray, ...]:
    """Return queries, and the lower quartile, the median and the upper quartile of the regret there. Curves
    are straight between two rounds, and constant after their end."""
    curves = list(curves)
    x = np.linspace(curves[0].queries[0], max(curve.queries[-1] for curve in curves), ROUNDS)
    values = np.array([np.interp(x, curve.queries, curve.regrets) for curve in curves])
    return x, *np.quantile(values, [0.25, 0.5, 0.75], axis=0)
