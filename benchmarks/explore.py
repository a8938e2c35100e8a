"""Compares ways to spend an oracle's answers with a language model. docs/exploration.md explains the
comparison and shows its results.

    python benchmarks/explore.py [--short] [--model DIR] [--minutes N]
        makes the runs that the CSV lacks, two at a time with one thread each. When none is missing, it
        writes the tables and pictures of the page. After a kill, the same command goes on.
    python benchmarks/explore.py [--short] [--model DIR] --tables
        makes no run; also writes the tables of the laboratory and of the priors into the page
    python benchmarks/explore.py [--model DIR] --features
        writes what `oat features` says about the task into NAME_features.txt, beside the CSV

The CSV is benchmarks/exploration/sums.csv, or with --model NAME.csv, where NAME is the name of the model's
folder; with --short, its name ends with _short. Its rows are never measured again: to repeat a run, delete
its rows. The start model, the hidden reward model and the run directories are in `.exploration/`, and can be
made again.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import redirect_stdout
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from exploration import priors
from exploration.arms import SIZES, Job, Size
from exploration.page import plot, table, tuned_rate
from exploration.records import Evaluation, append, read
from exploration.task import prepare
from provenance import ROOT, commit, machine

from oat.laboratory.agents import AGENTS
from oat.laboratory.report import read_curves
from oat.laboratory.report import table as laboratory

AT_A_TIME = 2
LABORATORIES = ("laboratory", "policy")
"""The folders of the laboratory's figures, without and with a policy that learns."""
TARGETS = ("independent", "redundant")
"""The laboratory's worlds with a target."""
WORK = ROOT / ".exploration"
CSVS = ROOT / "benchmarks" / "exploration"
PAGE = ROOT / "docs" / "exploration.md"
IMAGES = ROOT / "docs" / "images"


def perform(job: Job, task: Mapping[str, Any], run_dir: str) -> list[Evaluation]:
    """Make a run from its beginning, and return its evaluations. The run directory is removed."""
    import torch

    from oat import Trainer
    from oat.errors import AlarmError, NonFiniteError

    torch.set_num_threads(1)
    shutil.rmtree(run_dir, ignore_errors=True)
    rows: list[Mapping[str, float]] = []
    try:
        Trainer(**job.tree(task, run_dir), callbacks=[lambda _, row: rows.append(row)], quiet=True).train()
    except (NonFiniteError, AlarmError) as error:
        print(f"{job.key}: {error}", file=sys.stderr)
    found = []
    first = _values(Path(run_dir), 0)
    for row in rows:
        if "eval/sampled" not in row:
            continue
        values = _values(Path(run_dir), int(row["step"]))
        wins = [0.5 + 0.5 * ((value > first[key]) - (value < first[key])) for key, value in values.items()]
        found.append(
            Evaluation(
                int(row["step"]),
                int(row.get("oracle/pairs", 0)),
                row["eval/sampled"],
                sum(wins) / len(wins),
                row.get("eval/best"),
            )
        )
    shutil.rmtree(run_dir, ignore_errors=True)
    return found


def _values(run_dir: Path, step: int) -> dict[tuple[str, int], float]:
    """Return the scores of the sampled responses of an evaluation, by prompt and number of the sample."""
    file = run_dir / "evaluations" / f"step_{step:08d}.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {
        (json.dumps(line["prompt"]), line["sample"]): line["value"]
        for line in lines
        if line["mode"] == "sampled" and line["value"] is not None
    }


def jobs_of(size: Size, file: Path) -> list[Job]:
    """Return the runs that are missing and can be made now: the searches, and the final runs of arms whose
    search is complete."""
    runs = read(file)
    jobs = []
    for arm in size.arms:
        rate = tuned_rate(runs, arm, size)
        wanted = (
            [Job(arm, each, seed, "tuning", size.name) for each in size.rates for seed in size.tuning_seeds]
            if rate is None
            else [Job(arm, rate, seed, "final", size.name) for seed in size.seeds]
        )
        jobs += [job for job in wanted if job.key not in runs]
    return jobs


def run_all(size: Size, file: Path, task: Mapping[str, Any], minutes: float) -> None:
    """Make all missing runs, `AT_A_TIME` at a time, and append each to the CSV as it ends. Begin no run after
    so many minutes."""
    end = time.monotonic() + 60 * minutes
    running: dict[Future[list[Evaluation]], Job] = {}
    with ProcessPoolExecutor(AT_A_TIME, mp_context=get_context("spawn")) as pool:
        while True:
            begun = {job.key for job in running.values()}
            for job in jobs_of(size, file):
                if len(running) >= AT_A_TIME or time.monotonic() > end:
                    break
                if job.key not in begun:
                    run_dir = str(WORK / "runs" / "_".join(map(str, job.key)).replace(" ", ""))
                    running[pool.submit(perform, job, task, run_dir)] = job
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                job = running.pop(future)
                append(file, job, future.result(), machine(), commit())
                print(f"{time.strftime('%H:%M:%S')} {' '.join(map(str, job.key))}", flush=True)


def laboratory_table(folder: str) -> str:
    """Return the laboratory's table of the worlds that have a target.

    Args:
        folder: name of the folder with the curves.
    """
    found = read_curves(CSVS / folder / "curves.csv")
    places = [(world, agent) for world in TARGETS for agent in AGENTS]
    return laboratory(
        {
            case: curve
            for place in places
            for case, curve in found.items()
            if (case.world, case.agent) == place
        }
    )


def judge_features(size: Size, task: Mapping[str, Any]) -> str:
    """Return what `oat features` prints about the task."""
    from oat.cli import main as oat

    config = WORK / "features.yaml"
    job = Job("sea", size.rates[0], size.tuning_seeds[0], "tuning", size.name)
    config.write_text(json.dumps(job.tree(task, str(WORK / "runs" / "features"))), encoding="utf-8")
    with redirect_stdout(StringIO()) as printed:
        if oat(["features", str(config), "--prompts", "256"]):
            sys.exit("oat features failed")
    return printed.getvalue()


def write_page(page: Path, name: str, text: str) -> None:
    """Put a table between its two marks in the page."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(before + begin + text + end + after, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--model", help="a story model; by default the quickstart's start")
    parser.add_argument("--minutes", type=float, default=240.0, help="begin no run after these minutes")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--features", action="store_true")
    options = parser.parse_args(arguments)
    ending = "_short" if options.short else ""
    size = SIZES[("stories" if options.model else "sums") + ending]
    name = (Path(options.model).name if options.model else "sums") + ending
    file = CSVS / f"{name}.csv"
    folder = WORK / f"task_{name.removesuffix('_short')}"
    if options.features:
        shown = judge_features(size, prepare(folder, options.model))
        (CSVS / f"{name}_features.txt").write_text(shown, encoding="utf-8")
        print(shown)
        return
    if not options.tables:
        run_all(size, file, prepare(folder, options.model), options.minutes)
    else:
        for folder in LABORATORIES:
            write_page(PAGE, folder, laboratory_table(folder))
        write_page(PAGE, "priors", priors.summary(priors.read(CSVS / "priors" / "trials.csv")))
    shown = table(file, size)
    print(shown)
    if missing := len(jobs_of(size, file)):
        print(f"at least {missing} runs are missing, so the page stays as it is; run the same command again")
        return
    if f"<!-- {name} -->" in PAGE.read_text(encoding="utf-8"):
        write_page(PAGE, name, shown)
        plot(file, size, IMAGES / f"exploration_{name}.png")


if __name__ == "__main__":
    main()
