"""Compares the algorithms: which one learns what from how many answers. docs/comparison.md explains the
comparison and shows its results.

    python benchmarks/compare.py [--short]
        makes the runs that the CSV lacks, two at a time with one thread each, and writes the CSV, prints
        the results, and writes the tables and the picture of the page. After a kill, the same command goes
        on.
    python benchmarks/compare.py --tables
        makes no run

The CSV is benchmarks/comparison/full.csv; with --short it is short.csv beside it. Its rows are never measured
again: to repeat a run, delete its rows. The page shows full.csv, or short.csv if there is no full.csv.

`.comparison/` has the start models, the picture of the last comparison of each size, and the records of
finished runs until they are in the CSV. A group of runs is made in a process of its own: the searches of one
contestant, and later its final runs. The processes write their output to `.comparison/NAME.log`. The clock is
right only if no other program runs meanwhile, so the program warns if the machine is busy.
"""

import argparse
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from comparison.one_run import perform, prepare_start
from comparison.page import finals, results, write_page
from comparison.picture import draw
from comparison.plan import SIZES, Job, Setting, Size, final_jobs, search_jobs
from comparison.records import Evaluation, Key, Record, accuracies, read_records, write_records
from provenance import ROOT

from oat.errors import ConfigError, OatError
from oat.files import write_atomically
from oat.quickstart.processes import interrupted_by_sigterm, run_all

AT_A_TIME = 2
BUSY = 0.5
"""Load average above which other programs are said to be running."""


@dataclass(frozen=True)
class Places:
    """The files of a comparison.

    Attributes:
        csvs: the folder of full.csv and short.csv.
        work: the folder of what can be made again: start models, run directories, logs.
        page: the page with the tables.
        images: the folder of the picture.
    """

    csvs: Path = ROOT / "benchmarks" / "comparison"
    work: Path = ROOT / ".comparison"
    page: Path = ROOT / "docs" / "comparison.md"
    images: Path = ROOT / "docs" / "images"

    def start(self, seed: int) -> Path:
        return self.work / f"start_{seed}"

    def records(self, size: Size) -> Path:
        """The folder of the records of finished runs that are not in the CSV yet."""
        return self.work / f"records_{size.name}"


@dataclass(frozen=True)
class Task:
    """What one process does.

    Attributes:
        records: folder in which it leaves the records of its runs.
        seed: the seed whose start is made; None: no start.
        jobs: runs, made one after another.
        parent: id of the process that made the process of the task; None: the task has no process of its own.
    """

    records: Path
    seed: int | None = None
    jobs: tuple[Job, ...] = ()
    parent: int | None = None


Perform = Callable[[Mapping[str, Task], Places, Callable[[str], None]], None]
"""Does tasks, by name, and calls its last argument with the name of each task that is done."""


def do(task: Task, places: Places) -> None:
    """Do a task in this process. The record of each run is on disk as soon as the run is finished."""
    if task.seed is not None:
        prepare_start(places.start(task.seed), task.seed)
    for job in task.jobs:
        name = f"{job.name}_{job.purpose}_{job.seed}_{job.digest}"
        record = perform(
            job, places.start(job.seed), places.work / "runs" / f"{name}_{os.getpid()}", task.parent
        )
        task.records.mkdir(parents=True, exist_ok=True)
        write_atomically(task.records / f"{name}.json", json.dumps(asdict(record)))
        print(f"{job.name}, {job.setting}, seed {job.seed}: {record.outcome}, {record.last}", flush=True)


def in_processes(tasks: Mapping[str, Task], places: Places, report: Callable[[str], None]) -> None:
    """Do tasks in processes of their own, two at a time. See `Perform`.

    Raises:
        ChildError: a process failed.
    """
    commands = {}
    for name, task in tasks.items():
        request = places.work / f"{name}.json"
        told = {"work": places.work, **asdict(replace(task, parent=os.getpid()))}
        write_atomically(request, json.dumps(told, default=str))
        commands[name] = [sys.executable, __file__, "--do", str(request)]

    def note(name: str, seconds: float | None) -> None:
        if seconds is not None:
            report(name)

    with interrupted_by_sigterm():
        run_all(commands, places.work, at_a_time=AT_A_TIME, report=note)


def compare(size: Size, places: Places, perform_tasks: Perform = in_processes) -> dict[Key, Record]:
    """Make the runs that the CSV lacks, and return the records of all runs of this size.

    Raises:
        ConfigError: another process is making a comparison.
        ChildError: a process failed.
    """
    places.work.mkdir(parents=True, exist_ok=True)
    with _alone(places.work):
        shutil.rmtree(places.work / "runs", ignore_errors=True)
        progress = Progress(places.csvs / f"{size.name}.csv", places.records(size))
        progress.take_in()
        searched = search_jobs(size)
        _make("search", searched, places, progress, perform_tasks)
        final = final_jobs(size, accuracies(progress.records))
        _make("final", final, places, progress, perform_tasks)
    wanted = [job.key for groups in (searched, final) for jobs in groups.values() for job in jobs]
    return {key: progress.records[key] for key in wanted}


def _make(
    stage: str,
    groups: Mapping[str, Sequence[Job]],
    places: Places,
    progress: "Progress",
    perform_tasks: Perform,
) -> None:
    """Make those runs of a stage that have no record yet, and before them the starts that they need."""
    left = {
        name: tuple(job for job in jobs if job.key not in progress.records) for name, jobs in groups.items()
    }
    seeds = sorted({job.seed for jobs in left.values() for job in jobs})
    progress.begin(stage, sum(map(len, left.values())))
    starts = {
        f"start_{seed}": Task(progress.folder, seed=seed)
        for seed in seeds
        if not (places.start(seed) / "pairs.jsonl").exists()
    }
    runs = {f"{stage}_{name}": Task(progress.folder, jobs=jobs) for name, jobs in left.items() if jobs}
    for tasks in (starts, runs):
        perform_tasks(tasks, places, progress.note)


class Progress:
    """The records so far, and what people are told of them.

    Args:
        csv: the file of the records.
        folder: the folder in which tasks leave the records of finished runs.
    """

    def __init__(self, csv: Path, folder: Path):
        self.csv = csv
        self.folder = folder
        self.records = read_records(csv)
        self._stage = ""
        self._left = self._planned = 0
        self._began = 0.0

    def begin(self, stage: str, runs: int) -> None:
        self._stage = stage
        self._left = self._planned = runs
        self._began = time.monotonic()
        print(f"compare: {stage}, {runs} runs to make", flush=True)
        busy = os.getloadavg()[0]
        if runs and busy > BUSY and stage == "search":
            print(
                f"compare: other programs are running (load average {busy:.1f}), so the seconds by the clock "
                "will be too long; end them, and delete the rows that were measured beside them",
                flush=True,
            )

    def note(self, name: str) -> None:
        """Take the records of a task that is done into the CSV, and print how much is left."""
        self._left -= self.take_in()
        spent = time.monotonic() - self._began
        made = self._planned - self._left
        ahead = f"; about {spent * self._left / made / 60:.0f} minutes more" if made and self._left else ""
        print(f"compare: {name} is done, {self._left} runs of this stage are left{ahead}", flush=True)

    def take_in(self) -> int:
        """Move the records of finished runs into the CSV. Return their number."""
        # a record that is being written has a name with a dot at its beginning
        files = sorted(self.folder.glob("[!.]*.json"))
        for file in files:
            made = json.loads(file.read_text(encoding="utf-8"))
            evaluations = tuple(Evaluation(**each) for each in made.pop("evaluations"))
            record = Record(**made, evaluations=evaluations)
            self.records[record.key] = record
        if files:
            write_records(self.csv, self.records.values())
            self.records = read_records(self.csv)  # rounded, so that what is printed agrees with the page
        for file in files:
            file.unlink()
        return len(files)


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """A context that only one process at a time can be in.

    Raises:
        ConfigError: another process is in it.
    """
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{work}: another comparison is running; wait for its end") from None
        yield


def _task_of(request: Path) -> tuple[Task, Places]:
    """Read what `in_processes` wrote."""
    read = json.loads(request.read_text(encoding="utf-8"))
    jobs = tuple(Job(**{**job, "setting": Setting(**job["setting"])}) for job in read["jobs"])
    return Task(Path(read["records"]), read["seed"], jobs, read["parent"]), Places(work=Path(read["work"]))


def main(argv: Sequence[str] | None = None, places: Places | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="eight algorithms, two seeds, half length")
    parser.add_argument("--tables", action="store_true", help="make no run")
    parser.add_argument("--do", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.do is not None:
        do(*_task_of(options.do))
        return 0
    places = places or Places()
    size = SIZES["short" if options.short else "full"]
    try:
        if not options.tables:
            runs = finals(size, compare(size, places))
            draw(size, runs, places.work / f"{size.name}.png")
            print("\n".join(results(runs)), flush=True)
        shown = write_page(places.csvs, places.page)
        if shown is not None:
            draw(*shown, places.images / "comparison.png")
    except OatError as error:
        print(f"compare: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("compare: ended; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
