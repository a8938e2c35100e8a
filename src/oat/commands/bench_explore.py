"""`oat bench explore`: compare rules of exploration in the laboratory (`oat.laboratory`)."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from oat.errors import ConfigError
from oat.explore.rules import RULES
from oat.files import appearing, seen
from oat.laboratory.agents import AGENTS
from oat.laboratory.report import (
    BASELINE,
    cases_of,
    plot,
    refuse_foreign,
    run_cases,
    table,
    with_rates,
    write,
)
from oat.laboratory.worlds import WORLDS


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
    folder = seen(out)
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
