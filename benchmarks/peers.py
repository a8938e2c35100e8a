"""The sides of a benchmark: processes, each in its own Python environment, that are measured in turns."""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

SIDES = Path(__file__).parent / "sides"


THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
"""Number of threads of every side."""


class Side:
    """One side of a benchmark: a process that answers each line of its input with a line.

    Args:
        python: path of the interpreter in the side's environment.
        script: name of a file in `sides/`.
    """

    def __init__(self, python: str, script: str):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(THREADS),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        # it goes with the process
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, str(SIDES / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        code = self.process.wait()
        self._log.seek(0)
        said = self._log.read()[-2000:]
        raise RuntimeError(f"{self.process.args} ended with {code} when asked {verb}:\n{said}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def best_of(values: Sequence[int], rate_of: Callable[[int], float]) -> tuple[int, dict[int, float]]:
    """Return the best of some batch sizes, and the rate of each size that was tried.

    The sizes are tried in order, until one is a fifth slower than the best before it. The result is the first
    size with a rate of at least 0.95 of the highest, because a larger batch needs more memory.
    """
    rates: dict[int, float] = {}
    for value in values:
        rates[value] = rate_of(value)
        if rates[value] < 0.8 * max(rates.values()):
            break
    return next(value for value, found in rates.items() if found >= 0.95 * max(rates.values())), rates


def in_turns(
    sides: Mapping[str, tuple[Side, Mapping[str, Any]]], repetitions: int
) -> dict[str, list[dict[str, Any]]]:
    """Ask every side once in each repetition, one side after another. Return the list of answers of each
    side, by name."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for repetition in range(repetitions):
        for name, (side, command) in sides.items():
            answers[name].append(side.ask(**command, seed=repetition + 1))
    return answers


def rate(answers: Sequence[Mapping[str, Any]], what: str = "tokens") -> float:
    """Return the median rate of some answers, per second.

    Args:
        what: name of the counted quantity, such as "tokens" or "samples".
    """
    return median(answer[what] / answer["seconds"] for answer in answers)


def spread(
    answers: Mapping[str, Sequence[Mapping[str, Any]]], what: str = "tokens"
) -> dict[str, tuple[float, float]]:
    """Return the least and the greatest ratio, over the repetitions, of `oat`'s rate to the rate of each
    other side, by the side's name."""

    def ratios(side: str) -> list[float]:
        pairs = zip(answers["oat"], answers[side], strict=True)
        return [ours[what] / ours["seconds"] / (theirs[what] / theirs["seconds"]) for ours, theirs in pairs]

    return {side: (min(ratios(side)), max(ratios(side))) for side in answers if side != "oat"}


def medians(
    answers: Mapping[str, Sequence[Mapping[str, Any]]], counted: str, *others: str
) -> dict[str, dict[str, float]]:
    """Return the median of `counted` per second for each side, and the medians of the values named in
    `others`."""
    values = {
        name: {side: median(answer[name] for answer in given) for side, given in answers.items()}
        for name in others
    }
    return {
        f"{counted}_per_second": {side: rate(given, counted) for side, given in answers.items()},
        **values,
    }
