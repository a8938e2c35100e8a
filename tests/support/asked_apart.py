"""Oracles that a run names by this file. They work in any number of processes, and note in a folder what they
are asked."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oat import wire
from oat.errors import OracleError, OutageError, warn
from oat.oracles.base import Mean, Oracle
from oat.types import Answer, Key, Kind, Question


def hinted(prompts: Sequence[str], completions: Sequence[str], hint: Sequence[str | None]) -> list[float]:
    return [text.count(letter or "b") for text, letter in zip(completions, hint, strict=True)]


def worth(question: Question) -> tuple[float, ...]:
    return tuple(text.count("a") + 0.1 * text.count("b") for text in question.candidates)


def scored(question: Question) -> Answer:
    values = worth(question)
    return Answer(question.key, values, ("ok",) * len(values), queries=len(values), by="noting")


class Noting(Oracle):
    """Scores like the world's reward function. Each process writes the keys of the questions that it gets,
    and its number, into a file of its own."""

    answers: Kind = "score"
    version = "1"

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.questions: dict[str, Question] = {}

    def note(self, what: str) -> None:
        with (self.folder / f"{os.getpid()}.txt").open("a", encoding="utf-8") as file:
            file.write(f"{what}\n")

    def submit(self, questions: Sequence[Question]) -> list[str]:
        for question in questions:
            self.note(str(question.key))
        self.questions.update({str(question.key): question for question in questions})
        return [str(question.key) for question in questions]

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        return [(ticket, scored(self.questions.pop(ticket))) for ticket in tickets]

    def close(self) -> None:
        self.note("closed")


class Measuring(Noting):
    """Has metrics: the number of questions so far, and the mean number of candidates."""

    def __init__(self, folder: str):
        super().__init__(folder)
        self.sizes: list[int] = []

    def submit(self, questions: Sequence[Question]) -> list[str]:
        self.sizes += [question.size for question in questions]
        return super().submit(questions)

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "oracle/retries": len(self.sizes),
            "oracle/latency_s": Mean(sum(self.sizes), len(self.sizes)),
        }


class Breaking(Noting):
    """At the questions of a step and purpose, does what `how` says, once in the life of the folder or, with
    `always`, each time."""

    def __init__(self, folder: str, how: str, step: int = 2, purpose: str = "train", always: bool = False):
        super().__init__(folder)
        self.how, self.step, self.purpose, self.always = how, step, purpose, always

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        answers = super().collect(tickets, seconds)
        due = [
            number
            for number, (_, answer) in enumerate(answers)
            if (answer.key.step, answer.key.purpose) == (self.step, self.purpose)
        ]
        done = self.folder / "broken"
        if not due or (done.exists() and not self.always):
            return answers
        done.touch()
        warn("this oracle breaks now")
        break_it: Callable[[], list[tuple[str, Answer]]] = getattr(self, f"_{self.how}")
        return break_it() if self.how != "nan" else self._nan(answers, due[-1])

    def _outage(self) -> list[tuple[str, Answer]]:
        raise OutageError("the service has been away for too long; run the same command again")

    def _error(self) -> list[tuple[str, Answer]]:
        raise ValueError("no number")

    def _nan(self, answers: list[tuple[str, Answer]], place: int) -> list[tuple[str, Answer]]:
        ticket, answer = answers[place]
        values = (float("nan"), *answer.values[1:])
        answers[place] = ticket, Answer(answer.key, values, answer.marks, queries=len(values), by="noting")
        return answers


class Keeping(Noting):
    """A durable oracle, which keeps its questions in files: a ticket is the number of a file. The answer to
    each third question comes `late_s` after the question."""

    durable = True

    def __init__(self, folder: str, late_s: float = 0.3):
        super().__init__(folder)
        self.late_s = late_s

    def submit(self, questions: Sequence[Question]) -> list[str]:
        tickets = []
        for question in questions:
            self.note(str(question.key))
            tickets.append(str(len(list(self.folder.glob("*.json")))))
            kept = [str(question.key), list(worth(question)), time.time()]
            (self.folder / f"{tickets[-1]}.json").write_text(json.dumps(kept), encoding="utf-8")
        return tickets

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        answers = []
        for ticket in tickets:
            key, values, since = json.loads((self.folder / f"{ticket}.json").read_text(encoding="utf-8"))
            if int(ticket) % 3 == 0 and time.time() < since + self.late_s:
                continue
            purpose, *numbers = key.split("/")
            marks = ("ok",) * len(values)
            address = Key(purpose, *map(int, numbers))
            answers.append((ticket, Answer(address, tuple(values), marks, queries=len(values), by="noting")))
        return answers


class GatedBox:
    """A client's box with one oracle. It answers a question whose first candidate is "slow" when the file
    `gate` is in the folder that the plan names."""

    def __init__(self, plan: bytes):
        self.gate = Path(wire.decode(plan)) / "gate"
        self.questions: dict[str, Question] = {}

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        return getattr(self, name)(*arguments)

    def submit(self, role: str, encoded: Sequence[bytes]) -> list[str]:
        questions = {str(question.key): question for question in map(wire.decode, encoded)}
        self.questions |= questions
        return list(questions)

    def collect(
        self, role: str, purpose: str, tickets: Sequence[str], seconds: float
    ) -> tuple[list[Any], dict[str, Any]]:
        if purpose == "eval":
            raise OracleError("own says nothing of evaluations")
        asked = {ticket: self.questions.pop(ticket) for ticket in tickets}
        while not self.gate.exists() and any(each.candidates[0] == "slow" for each in asked.values()):
            time.sleep(0.01)
        return [(ticket, scored(question)) for ticket, question in asked.items()], {}

    def close(self) -> None:
        pass


class Babbling(Noting):
    """Answers all questions that it has, whatever it is asked for. Afterwards it answers them again, and also
    questions that nobody asked, with what is no answer."""

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Any]]:
        answers = [(ticket, scored(question)) for ticket, question in self.questions.items()]
        return [*answers, *((ticket, object()) for ticket in (*self.questions, "old", "nobody"))]


class SilentBox:
    """A client's box with one oracle. It never answers a question whose first candidate is "never", and fails
    for them when the file `gate` is in the folder that the plan names. It notes all calls."""

    def __init__(self, plan: bytes):
        self.oracle = Noting(wire.decode(plan))
        self.gate = self.oracle.folder / "gate"

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        return getattr(self, name)(*arguments)

    def submit(self, role: str, encoded: Sequence[bytes]) -> list[str]:
        questions = {str(question.key): question for question in map(wire.decode, encoded)}
        self.oracle.questions |= questions
        for key in questions:
            self.oracle.note(f"submit {key}")
        while any("slow" in each.candidates[0] for each in questions.values()) and not self.gate.exists():
            time.sleep(0.01)
        return list(questions)

    def collect(
        self, role: str, purpose: str, tickets: Sequence[str], seconds: float
    ) -> tuple[list[Any], dict[str, Any]]:
        for ticket in tickets:
            self.oracle.note(f"collect {ticket}")
        asked = {ticket: self.oracle.questions[ticket] for ticket in tickets}
        silent = [ticket for ticket, question in asked.items() if question.candidates[0] == "never"]
        if silent and self.gate.exists():
            raise OracleError(f"own breaks for {purpose}")
        time.sleep(0.05 if silent else 0.0)
        return [(ticket, scored(asked[ticket])) for ticket in tickets if ticket not in silent], {}

    def drop(self, role: str, tickets: Sequence[str]) -> None:
        for ticket in tickets:
            self.oracle.note(f"drop {ticket}")

    def close(self) -> None:
        pass
