"""Sides of a benchmark as processes, each in its own environment, asked in turns."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

SIDES = Path(__file__).parent / "sides"


class Side:
    """One side: a process that answers a line with a line.

    Args:
        python: interpreter of the environment it runs in.
        script: file in `sides/`.
    """

    def __init__(self, python: str, script: str, threads: int = 2):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [python, str(SIDES / script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.process.args} ended with {self.process.wait()} when asked {verb}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def in_turns(sides: Mapping[str, tuple[Side, Mapping[str, Any]]], repetitions: int) -> dict[str, list[dict[str, Any]]]:
    """Ask every side once in each repetition, one after the other; their answers by name."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for repetition in range(repetitions):
        for name, (side, command) in sides.items():
            answers[name].append(side.ask(**command, seed=repetition + 1))
    return answers


def rate(answers: Sequence[Mapping[str, Any]]) -> float:
    """Median tokens a second."""
    return median(answer["tokens"] / answer["seconds"] for answer in answers)
