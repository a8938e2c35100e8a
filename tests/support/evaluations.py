"""Helpers for tests of evaluations: oracles with chosen answers and failures, readers of runs, and runs that
are killed and continued."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures import kill_at, named, tried

JUDGES = '''
import sys
from dataclasses import replace
from pathlib import Path

from oat.environments.base import Turn
from oat.errors import OracleError
from oat.types import Answer, Price


class Constant:
    """Says one value of everything; `fails` is where it does not: in `submit`, in `collect`, or after it
    answered the first mode of evaluation 2. Where the file `healed` is there, it fails nowhere."""

    durable = False

    def __init__(self, value=0.5, fails="", answers="score", healed="/"):
        self.value, self.answers, self.open = value, answers, {}
        self.fails = "" if Path(healed).is_file() else fails

    def submit(self, questions):
        if self.fails == "submit":
            raise OracleError("no questions today")
        self.open |= {str(question.key): question for question in questions}
        return [str(question.key) for question in questions]

    def collect(self, tickets, seconds):
        if self.fails == "collect":
            raise RuntimeError("down")
        if self.fails == "exit":
            sys.exit("no key")
        ready = [ticket for ticket in tickets if ticket in self.open]
        if self.fails == "half" and all(ticket.split("/")[1] == "2" for ticket in ready):
            ready = [ticket for ticket in ready if ticket.split("/")[2] == "0"]
            if not ready:
                raise RuntimeError("down")
        return [(ticket, self._answer(self.open.pop(ticket))) for ticket in ready]

    def _answer(self, question):
        texts = question.candidates[: question.size]
        values = tuple(float(text.count("a")) if self.value is None else self.value for text in texts)
        return Answer(question.key, values, ("ok",) * question.size, question.size, by="constant")


class Unpriced(Constant):
    """Does not know what a question about a held-out prompt costs."""

    def price(self, question):
        if "+9=" in question.messages[0].content:
            raise ZeroDivisionError("no tokens counted")
        return Price(question.size)


class Dear(Constant):
    """Asks two judges about each response, or ten once it has said the price of `rises` responses."""

    def __init__(self, rises=0, **options):
        super().__init__(**options)
        self.rises, self.priced = rises, 0

    def price(self, question):
        self.priced += question.size
        return Price((10 if self.rises and self.priced > self.rises else 2) * question.size)

    def _answer(self, question):
        return replace(super()._answer(question), queries=(10 if self.rises else 2) * question.size)


class Metered(Constant):
    """Seven tokens and a quarter of a coin for each response, and no query more than others."""

    def price(self, question):
        return Price(question.size, 7 * question.size, 0.25 * question.size)

    def _answer(self, question):
        return replace(super()._answer(question), tokens=7 * question.size, cost=0.25 * question.size)


class Game:
    """Pays for letters, and may not begin with some prompts."""

    refused = ""

    def reset(self, prompt, generator):
        if self.refused and self.refused in prompt.messages[0].content:
            raise KeyError("target")
        return {}

    def step(self, state, response):
        return Turn(state, None, float(response.count("a")))


class Refusing(Game):
    refused = "+9="


class Endless(Game):
    def step(self, state, response):
        return None


def has_a(prompts, completions, **columns):
    return [float("a" in text) for text in completions]


def letters(prompts, completions, **columns):
    return [float(text.count("a")) for text in completions]


def fewer_letters(prompts, completions, **columns):
    return [-float(text.count("a")) for text in completions]


def longer(prompts, first, second, **columns):
    return [0.9 if len(a) > len(b) else 0.5 if len(a) == len(b) else 0.2 for a, b in zip(first, second)]


def first_letter(text):
    return text[0] if text else None


NUMBER = 1


def listed(text):
    return [text]


def broken(text):
    raise ValueError("no answer at all")
'''


@pytest.fixture
def judges(tmp_path: Path) -> str:
    (tmp_path / "judges.py").write_text(JUDGES, encoding="utf-8")
    return str(tmp_path / "judges.py")


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def evaluated(run_dir: Path, name: str = "eval/sampled") -> dict[int, float]:
    """Return a metric by step, for the rows that have it."""
    return {row["step"]: row[name] for row in rows(run_dir) if name in row}


def records(run_dir: Path, step: int) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run_dir / "evaluations" / f"step_{step:08d}.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]


def killed_and_continued(
    config: Path, run_dir: Path, place: str, call: int, *flags: str, by: int = signal.SIGKILL
) -> None:
    def go(before: Callable[[], None] | None = None) -> int:
        return tried(run_dir.parent / "log", "train", config, "--run_dir", run_dir, *flags, before=before)

    assert go(lambda: kill_at(*named(place), call, signals=(by,))) == (75 if by == signal.SIGTERM else -by), (
        run_dir.parent / "log"
    ).read_text()
    assert go() == 0, (run_dir.parent / "log").read_text()


def played(judges: str, environment: str) -> dict[str, Any]:
    return {"oracle.name": "environment", "sampling.environment": f"{judges}:{environment}"}
