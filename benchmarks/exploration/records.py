"""The records of the comparison: a row for each evaluation of a run, in a CSV file."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from exploration.arms import Job

FIELDS = (
    "arm",
    "rate",
    "seed",
    "purpose",
    "step",
    "pairs",
    "reward",
    "win_rate",
    "best",
    "machine",
    "commit",
)
Key = tuple[str, str, int, str]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation of a run found.

    Attributes:
        pairs: compared pairs that the run had paid so far.
        reward: mean score of sampled responses, by the hidden reward model.
        win_rate: share of sampled responses with a higher score than the start's response to the same prompt
            with the same random numbers; an equal score counts one half.
        best: mean score of the best of several responses by the arm's ensemble; None: not measured.
    """

    step: int
    pairs: int
    reward: float
    win_rate: float
    best: float | None


def read(file: Path) -> dict[Key, list[Evaluation]]:
    """Read the runs in a CSV file; none if there is no file."""
    found: dict[Key, list[Evaluation]] = {}
    if not file.exists():
        return found
    with file.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            key = row["arm"], row["rate"], int(row["seed"]), row["purpose"]
            best = float(row["best"]) if row["best"] else None
            numbers = float(row["reward"]), float(row["win_rate"]), best
            found.setdefault(key, []).append(Evaluation(int(row["step"]), int(row["pairs"]), *numbers))
    return found


def append(file: Path, job: Job, evaluations: Iterable[Evaluation], machine: str, commit: str) -> None:
    """Append a run to a CSV file, in one write."""
    is_new = not file.exists()
    lines = [",".join(FIELDS)] if is_new else []
    for each in evaluations:
        best = "" if each.best is None else f"{each.best:.5f}"
        numbers = (each.step, each.pairs, f"{each.reward:.5f}", f"{each.win_rate:.5f}", best)
        lines.append(",".join(map(str, (*job.key, *numbers, machine.replace(",", ""), commit))))
    with file.open("a", encoding="utf-8") as stream:
        stream.write("\n".join(lines) + "\n")
