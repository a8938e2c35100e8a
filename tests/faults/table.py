"""Run the tests of the fault table's rows, keep their results, and write the table into docs/faults.md.

    python tests/faults/table.py [--ray | --slow] [ROW ...]

With rows, run the tests of these rows. Without rows, run the tests of every row that has not passed with the
present commit of the sources: those with `--ray` that start Ray clusters, those with `--slow` that take hours
on a slow machine, else the others. A second call thus continues a call that was cut off. The tests of a slow
row are run one by one, and the second call continues within the row.

The result of a row is in `.faults/ROW.json` as soon as its tests end. The exit code is 1 if a row failed. A
row without a test counts as failed. A test names its row with `@pytest.mark.fault("R1")` and reports its
figures through the fixture `figure`.

Figures of several tests are joined. Figures `a of b` with equal words are summed up. Of figures `at most x`
with equal words the largest is kept.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "faults.md"
RESULTS = ROOT / ".faults"
SOURCES = ("src", "tests", "pyproject.toml", "constraints.txt")
ROWS = {
    "R1": (
        "`kill -9` at named moments and at random times, then the same command: the run ends bitwise equal "
        "to the unbroken one"
    ),
    "R2": (
        "two runs with the same configuration and seed are bitwise equal; sampled tokens follow the exact "
        "law; a flipped bit in the weights stops the run"
    ),
    "R3": "a checkpoint contains all of a run's state",
    "R4": (
        "SIGTERM and Ctrl-C end a run after it has saved its state; no way to end a run leaves a process, "
        "a port or a temporary directory"
    ),
    "R5": "the size of a forward pass changes rounding only",
    "R7": "a save that is killed is either complete or absent",
    "R8": (
        "a damaged checkpoint is detected, and the last good one before it is used; a ledger that lacks "
        "answers from which its run has learned is refused"
    ),
    "R9": "what was saved survives a full disk",
    "R10": "a directory that cannot be written, or is in use, is refused before the first step",
    "R11": "no pickle is opened, and no data is executed",
    "R12": ("if an oracle's server fails or is away, no question is lost, and none is counted twice"),
    "R13": (
        "64 threads that ask at once spend a budget of 10,000 queries exactly; a budget in tokens or money "
        "is never exceeded, is spent to within the price of one question, and buys the same answers in a "
        "killed run"
    ),
    "R14": (
        "a judge's reply without a verdict is no label: the setting `invalid` decides what becomes of it, "
        "and it is counted"
    ),
    "R15": (
        "weights that are cut off, lost or damaged on their way leave the old version answering; a response "
        "of another version than the one asked for is found before anything is learned from it; if an actor "
        "is killed at any moment, no rollout is lost or learned twice"
    ),
    "R15-ray": "R15 on a Ray cluster, where a whole node may be lost too",
    "R17": (
        "fast actors and a stalled learner: what waits between them is bounded, and memory grows by less "
        "than 5 %"
    ),
    "R17-ray": "R17 on a Ray cluster, whose store does not fill, and whose raylet grows by less than 10 MB",
    "R18": (
        "a failure in each component at each phase is mended, or ends the run with one message, within 10 s; "
        "every wait ends at its deadline, with the name of who hangs"
    ),
    "R18-ray": (
        "R18 on a Ray cluster, also if the cluster itself fails; whatever ends the run, nothing of the "
        "cluster is left"
    ),
    "R19": "a malformed record gives one clear error, or is skipped and counted",
    "R20": "a number that is not finite changes no weight",
    "R21": "batches at the edges (empty, one row, equal rewards, ...) give a finite loss or a clear error",
    "R22": "the laws of every loss hold; a flipped sign is noticed",
    "R23": "10,000 steps: memory, open files and threads do not grow",
    "R24": "hostile text is graded in bounded time, and none of it is executed",
    "R25": (
        "if a reward function in a worker hangs, crashes or fills the memory, it fails for one response, "
        "and the next response finds a worker"
    ),
    "R26": (
        "hostile text from data, models and services is escaped wherever people see it, and is never used "
        "as a file name"
    ),
    "R27": (
        "a reward server without a token listens on the loopback only; with a token, every route answers "
        "401 to a request without it"
    ),
    "R28": "a malformed request gets a status of 4xx, and the server continues",
    "R29": "a planted token or key appears in no message, log, metric, checkpoint or traceback",
    "R30": (
        "a Ray cluster that a run starts listens on the loopback interface only, and answers only those who "
        "have its token; the token is in no file"
    ),
    "R32": (
        "`kill -9` inside a step that asks further rounds in place of useless questions, then the same "
        "command: the run ends bitwise equal to the unbroken one"
    ),
    "R33": (
        "`kill -9` inside an update of several optimiser steps that may end early, then the same command: "
        "the run ends bitwise equal to the unbroken one"
    ),
    "R34": (
        "`kill -9` inside an episode of several turns, then the same command: the run ends bitwise equal to "
        "the unbroken one, and so do runs whose environment answers in batches or late"
    ),
    "R35": (
        "`kill -9` in a run of an explorer, with an ensemble, its labels, refreshed features, APL, XPO or a "
        "frozen policy, then the same command: the run ends bitwise equal to the unbroken one"
    ),
    "R36": (
        "`kill -9` of any process of a run in several processes of one machine, at any time: the run goes "
        "on, or the same command continues it; it ends bitwise equal to a run in one process, and nothing is "
        "left"
    ),
    "R36-slow": "R36 with 50 kills",
}
ON_RAY = ("R15-ray", "R17-ray", "R18-ray", "R30")
"""The rows that start Ray clusters (`make faults-ray`)."""
SLOW = ("R36-slow",)
"""The rows without a bound of time (`make faults-slow`)."""


def files_of(row: str) -> list[str]:
    """Return the test files in which a marker names the row."""
    found = []
    for file in sorted(ROOT.glob("tests/**/test_*.py")):
        named = re.findall(r"mark\.fault\(([^)]*)\)", file.read_text(encoding="utf-8"))
        if any(f'"{row}"' in rows for rows in named):
            found.append(str(file.relative_to(ROOT)))
    return found


def run_slow(row: str) -> dict[str, Any]:
    """Run those tests of a row, one by one, that have not passed with the present commit, and return the
    row's result."""
    folder, parts = RESULTS / row, list[dict[str, Any]]()
    folder.mkdir(exist_ok=True)
    options = ["-o", "addopts=", "-q", "--collect-only", "--fault", row]  # a second -q lists files only
    command = [sys.executable, "-m", "pytest", *options, *files_of(row)]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for number, test in enumerate(line for line in listed.splitlines() if "::" in line):
        file, current = folder / f"{number}.json", commit()
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if current is None or (found.get("commit"), found.get("passed")) != (current, True):
            print(f"{row}: {test}", flush=True)
            found = run(row, 0, [test])
            keep(found, file)
        parts.append(found)
    names = dict.fromkeys(name for part in parts for name in part["tests"])
    commits = {part["commit"] for part in parts}
    return {
        "row": row,
        "passed": bool(parts) and all(part["passed"] for part in parts),
        "tests": {name: sum(part["tests"].get(name, 0) for part in parts) for name in names},
        "figures": joined(figure for part in parts for figure in part["figures"]),
        "seconds": sum(part["seconds"] for part in parts),
        "commit": commits.pop() if len(commits) == 1 else None,
        "machine": machine(),
    }


def run(row: str, workers: int, tests: Sequence[str] = ()) -> dict[str, Any]:
    """Run the tests of a row, and return the row's result.

    Args:
        tests: the tests to run; empty: all.
    """
    files = tests or files_of(row)
    sources = commit()
    begin = time.perf_counter()
    counts, figures = dict.fromkeys(("passed", "failed", "skipped"), 0), list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            str(workers),
            "--fault",
            row,
            f"--junitxml={report}",
            *files,
        ]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode if files else 5
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            tags = {child.tag for child in case}
            counts[
                "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
            ] += 1
            figures += [
                place.get("value", "") for place in case.iter("property") if place.get("name") == "figure"
            ]
    return {
        "row": row,
        "passed": code == 0 and counts["passed"] > 0,
        "tests": counts,
        "figures": joined(figures),
        "seconds": time.perf_counter() - begin,
        "commit": sources if commit() == sources else None,
        "machine": machine(),
    }


def joined(figures: Iterable[str]) -> list[str]:
    """Join figures with equal words: sum up "a of b", keep the maximum of "at most x", and list every other
    figure once."""
    sums: dict[str, tuple[int, int]] = {}
    most: dict[str, tuple[float, str]] = {}
    others: dict[str, None] = {}
    for figure in figures:
        if found := re.fullmatch(r"([\d,]+) of ([\d,]+) (.*)", figure):
            part = int(found[1].replace(",", ""))
            whole = int(found[2].replace(",", ""))
            words = found[3]
            before = sums.get(words, (0, 0))
            sums[words] = (before[0] + part, before[1] + whole)
        elif found := re.fullmatch(r"at most ([-+.\de]+)(.*)", figure):
            most[found[2]] = max(most.get(found[2], (float(found[1]), found[1])), (float(found[1]), found[1]))
        else:
            others[figure] = None
    summed = [f"{part:,} of {whole:,} {words}" for words, (part, whole) in sums.items()]
    return [*summed, *(f"at most {text}{words}" for words, (_, text) in most.items()), *others]


def commit() -> str | None:
    """Return the last commit that changed the sources; None if the sources have uncommitted changes, or if
    there is no such commit."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments, "--", *SOURCES], capture_output=True, text=True, check=False
        ).stdout.strip()

    return None if git("status", "--porcelain") else git("log", "-1", "--format=%h") or None


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    processor = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return f"{processor}, {os.cpu_count()} cores"


def results() -> dict[str, dict[str, Any]]:
    """Return the stored results, by row."""
    files = {row: RESULTS / f"{row}.json" for row in ROWS}
    return {row: json.loads(file.read_text(encoding="utf-8")) for row, file in files.items() if file.exists()}


def keep(result: dict[str, Any], file: Path) -> None:
    """Write a result, so that a kill leaves the file before or after."""
    new = file.with_name(f".new-{file.name}")
    new.write_text(json.dumps(result, indent=1, ensure_ascii=False), encoding="utf-8")
    new.replace(file)


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the table of all rows, followed by a line that names the machine and the commit."""
    lines = [
        "| row | what is shown | figures | tests | seconds | passed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row, what in ROWS.items():
        if row not in found:
            lines.append(f"| {row} | {what} |  |  |  | not run |")
            continue
        result = found[row]
        tests = ", ".join(f"{count} {name}" for name, count in result["tests"].items() if count) or "none"
        verdict = "yes" if result["passed"] else "**no**"
        lines.append(
            f"| {row} | {what} | {'; '.join(result['figures'])} | {tests} | {result['seconds']:.0f} | "
            f"{verdict} |"
        )
    minutes = sum(result["seconds"] for result in found.values()) / 60
    sources = ", ".join(sorted({result["commit"] or "changed files" for result in found.values()}))
    machines = "; ".join(sorted({result["machine"] for result in found.values()}))
    return "\n".join([*lines, "", f"*{machines}; {minutes:.0f} minutes in all; sources: {sources}.*"])


def write(text: str) -> None:
    """Replace the page's table, between the comments that mark its beginning and its end."""
    page = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- faults -->", "<!-- end of faults -->"
    assert -1 < page.find(begin) < page.find(end), f"{PAGE.name} has no place for the table"
    PAGE.write_text(
        re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{text}\n{end}", page, flags=re.DOTALL),
        encoding="utf-8",
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", default=[], choices=[*ROWS, []], metavar="ROW")
    parser.add_argument("--workers", type=int, default=2, help="processes that share out the tests of a row")
    parser.add_argument("--ray", action="store_true", help="run the rows that start Ray clusters")
    parser.add_argument("--slow", action="store_true", help="run the rows without a bound of time")
    options = parser.parse_args(arguments)
    RESULTS.mkdir(exist_ok=True)
    found, current = results(), commit()
    wanted = [row for row in ROWS if (row in ON_RAY, row in SLOW) == (options.ray, options.slow)]
    for row in options.rows or wanted:
        if (
            not options.rows
            and current is not None
            and row in found
            and found[row]["passed"]
            and found[row]["commit"] == current
        ):
            print(f"{row}: has a result of {current}", flush=True)
            continue
        print(f"{row}: {ROWS[row]}", flush=True)
        result = found[row] = run_slow(row) if row in SLOW else run(row, options.workers)
        keep(result, RESULTS / f"{row}.json")
    text = table(found)
    write(text)
    print(f"\n{text}\n\nwritten to {PAGE.relative_to(ROOT)}")
    return 0 if all(result["passed"] for result in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
