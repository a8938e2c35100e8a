"""The tables of docs/comparison.md, made from the CSV."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

from comparison.algorithms import RECORDED
from comparison.plan import SEARCH_SEED, SIZES, Size, final_jobs, search_jobs, shown_rate
from comparison.records import Record, Records, accuracies, read_records

REACH = 0.8
"""The accuracy of sampled responses whose queries and seconds the table lists."""
NONE_YET = "There are no figures yet: `make compare` measures them."
ALONE = 1.1
"""If the clock shows more than this many times the processor's time, other programs ran beside the run."""


def write_page(csvs: Path, page: Path) -> tuple[Size, dict[str, list[Record]]] | None:
    """Write the tables between the comments that mark their places.

    Args:
        csvs: the folder of full.csv and short.csv.
    Returns:
        The size of the comparison that the page shows, and the runs that are compared, by contestant. None if
        there is no CSV with such runs.
    """
    shown = shown_runs(csvs)
    text = page.read_text(encoding="utf-8")
    for name, made in tables(csvs).items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        assert -1 < text.find(begin) < text.find(end), f"{page.name} has no place for {name}"
        text = re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{made}\n{end}", text, flags=re.DOTALL)  # noqa: B023
    page.write_text(text, encoding="utf-8")
    return shown


def shown_runs(csvs: Path) -> tuple[Size, dict[str, list[Record]]] | None:
    """Return the size of the comparison that the page shows, and its runs by contestant: of full.csv, or of
    short.csv if the other does not exist. None: there is no run yet."""
    for size in SIZES.values():
        runs = finals(size, read_records(csvs / f"{size.name}.csv"))
        if runs:
            return size, runs
    return None


def finals(size: Size, records: Records) -> dict[str, list[Record]]:
    """Return the runs that are compared, by contestant. Rows of settings that are no longer compared do not
    count."""
    runs = {
        name: [records[job.key] for job in jobs if job.key in records]
        for name, jobs in final_jobs(size, accuracies(records)).items()
    }
    return {name: own for name, own in runs.items() if own}


def tables(csvs: Path) -> dict[str, str]:
    """Return the texts of the page that are made from the CSV, by the name of their place."""
    shown = shown_runs(csvs)
    if shown is None:
        return {"picture": "", "made": NONE_YET, "results": NONE_YET, "search": NONE_YET}
    size, runs = shown
    records = read_records(csvs / f"{size.name}.csv")
    return {
        "picture": "![accuracy against queries and against seconds](images/comparison.png)",
        "made": "\n".join(textwrap.fill(line, 110, subsequent_indent="  ") for line in made(size, runs)),
        "results": "\n".join(results(runs)),
        "search": "\n".join([*search(size, records), *_paragraph(alike(size, records))]),
    }


def made(size: Size, runs: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    """Yield lines that say how the figures were made."""
    every = [run for own in runs.values() for run in own]
    machines, commits = (
        "; ".join(sorted({getattr(run, name) for run in every})) for name in ("machine", "commit")
    )
    command = "make compare" if size.name == "full" else "make compare SHORT=1"
    beside = sum(run.last.seconds > ALONE * run.last.cpu_seconds for run in every)
    yield f"* Command: `{command}`. Budget: {size.queries:,} queries; in the search {size.queries // 2:,}."
    if size.name == "short":
        yield "* These are the figures of the short comparison; those of `make compare` are still to be made."
    yield f"* Algorithms that ask: {len([name for name in runs if name not in RECORDED])}."
    yield f"* Seeds: {', '.join(map(str, size.seeds))}; of the search: {SEARCH_SEED}."
    yield f"* Machine: {machines}; two runs at a time, each with one thread."
    yield f"* Code: {commits}."
    yield (
        f"* Other programs ran beside {beside} of {len(every)} runs: there the clock shows more than {ALONE} "
        "times the seconds of the processor."
    )


def results(runs: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    """Yield the lines of the table of results: first the algorithms that ask, those that need the fewest
    queries first; then the start; then the runs that ask nobody."""
    yield (
        f"| algorithm | settings | queries to {REACH} | queries | sampled, at the end | greedy, at the end | "
        "seconds: processor | clock |"
    )
    yield "| --- " * 8 + "|"
    asking = sorted((name for name in runs if name not in RECORDED), key=lambda name: rank(runs[name]))
    for name in asking:
        yield _line(name, runs[name])
    starts = list({run.seed: run for own in runs.values() for run in own}.values())
    sampled, greedy = (
        _span([getattr(run.evaluations[0], kind) for run in starts]) for kind in ("sampled", "greedy")
    )
    yield f"| the start |  |  | 0 | {sampled} | {greedy} |  |  |"
    for name in runs:
        if name in RECORDED:
            yield _line(name, runs[name])


def rank(runs: Sequence[Record]) -> tuple[float, ...]:
    """Return the sort key of an algorithm: the number of runs that never reach `REACH`, the mean queries of
    the others, and the mean accuracy at the end, of which more is better."""
    reached = [queries for run in runs if (queries := queries_to(run, REACH)) is not None]
    return (
        len(runs) - len(reached),
        mean(reached) if reached else 0.0,
        -mean(run.last.sampled for run in runs),
    )


def _line(name: str, runs: Sequence[Record]) -> str:
    failed = [run for run in runs if not run.is_done]
    shown = f"`{name}`" + (
        f" ({len(failed)} of {len(runs)} runs failed: {failed[0].outcome})" if failed else ""
    )
    asks = name not in RECORDED
    cells = [
        shown,
        "; ".join(sorted({run.settings for run in runs})),
        _reach(runs) if asks else "",
        f"{mean(run.last.queries for run in runs):,.0f}" if asks else "0",
        _span([run.last.sampled for run in runs]),
        _span([run.last.greedy for run in runs]),
        f"{mean(run.last.cpu_seconds for run in runs):.0f}",
        f"{mean(run.last.seconds for run in runs):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _reach(runs: Sequence[Record]) -> str:
    found = [queries for run in runs if (queries := queries_to(run, REACH)) is not None]
    if not found:
        return "never"
    most = f" ({min(found):,.0f} to {max(found):,.0f})" if len(found) > 1 else ""
    return f"{mean(found):,.0f}{most}" + (
        f" in {len(found)} of {len(runs)}" if len(found) < len(runs) else ""
    )


def queries_to(run: Record, accuracy: float) -> float | None:
    """Return the number of queries after which sampled responses first have this accuracy; None if they never
    have it in an evaluation. Between two evaluations the curve is straight."""
    before = None
    for each in run.evaluations:
        if each.sampled >= accuracy:
            if before is None:
                return float(each.queries)
            share = (accuracy - before.sampled) / (each.sampled - before.sampled)
            return before.queries + share * (each.queries - before.queries)
        before = each
    return None


def _span(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def search(size: Size, records: Records) -> Iterator[str]:
    """Yield the lines of the table of the search: the accuracy of each of the six settings."""
    jobs = search_jobs(size)
    rates = dict.fromkeys(job.setting.learning_rate for tried in jobs.values() for job in tried)
    columns = [f"{shown_rate(rate)}, {value}" for rate in rates for value in ("first", "second")]
    yield f"| algorithm | first and second value | {' | '.join(columns)} |"
    yield "| --- " * (2 + len(columns)) + "|"
    for name, tried in jobs.items():
        found = [records[job.key] for job in tried if job.key in records]
        if len(found) == len(tried):
            knobs = "; ".join(dict.fromkeys(_knob(job.setting.knob) for job in tried))
            yield f"| `{name}` | {knobs} | {' | '.join(map(_accuracy, found))} |"


def alike(size: Size, records: Records) -> str:
    """Return a sentence about the learning rates at which both values of an algorithm's setting came to the
    same in the search; "" if there are none."""
    counts = {}
    for name, tried in search_jobs(size).items():
        found = [records[job.key] for job in tried if job.key in records]
        if len(found) == len(tried):
            pairs = zip(found[::2], found[1::2], strict=True)
            counts[name] = [
                first.is_done and second.is_done and _curve(first) == _curve(second)
                for first, second in pairs
            ]
    parts = [f"`{name}` at {sum(are)} of {len(are)}" for name, are in counts.items() if any(are)]
    if not parts:
        return ""
    whole = " and ".join(f"`{name}`" for name, are in counts.items() if all(are))
    return (
        "At some learning rates the runs with both values of the setting were the same, in the steps, "
        f"queries and accuracies of every evaluation: {'; '.join(parts)}."
        + (f" So the search of {whole} had three settings and not six." if whole else "")
    )


def _curve(run: Record) -> list[tuple[int, int, float, float]]:
    """Return the steps, queries and accuracies of each evaluation of a run."""
    return [(each.step, each.queries, each.sampled, each.greedy) for each in run.evaluations]


def _accuracy(run: Record) -> str:
    return f"{run.last.sampled:.3f}" if run.is_done else "failed"


def _paragraph(text: str) -> list[str]:
    return ["", textwrap.fill(text, 110)] if text else []


def _knob(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())
