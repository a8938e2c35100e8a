"""The oracle `isolated`: a user's reward function in worker processes. If a call hangs, crashes or fills the
memory, one response or one pair has no value, and the run goes on.

Each call is about one response to be scored, or about one pair to be compared. So a hostile response cannot
spoil the calls about others. A function whose score of a response depends on the other responses of a group
cannot be isolated; one that does not say so gives a warning. Each worker asks a `CallableOracle` of its own;
the function is called as that class describes, with equal responses once.

The value of a call is marked "failed" if the call runs past `timeout_s`, exceeds `memory_gb`, recurses too
deeply, exits or crashes. Failed values are counted, and nothing is learned from them. Any other exception of
the function ends the run.
"""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from oat import wire
from oat.errors import ConfigError, warn
from oat.files import start
from oat.oracles.base import Oracle
from oat.oracles.callables import CallableOracle, check_needed
from oat.oracles.make import build_oracle
from oat.oracles.whole_groups import STATE
from oat.plugins import loading as plugins
from oat.plugins.isolated_workers import Outcome, Workers
from oat.types import Answer, Kind, Mark, Question, StepUnit


@dataclass
class _Open:
    """A question that was sent to the workers as one question for each of its items. An item is a candidate,
    or the pair of a comparison.

    Attributes:
        found: the answers about items so far, by the item's index; None for an item whose call failed.
    """

    question: Question
    since: float
    found: dict[int, Answer | None] = field(default_factory=dict)


class Isolated(Oracle):
    """An oracle that calls a user's function in workers.

    Args:
        function: `path/to/file.py:Name` or `package.module:Name` of a reward function or a comparison.
        timeout_s: seconds for the call about one response or pair.
        memory_gb: the memory that a worker may address, in GB (10^9 bytes). A function that imports torch
            needs several GB.
        workers: number of processes.

    Raises:
        ConfigError: the function cannot be loaded or is no function, or a number is not above 0.
    """

    def __init__(self, function: str, timeout_s: float = 5.0, memory_gb: float = 8.0, workers: int = 1):
        if not isinstance(function, str) or ":" not in function or function.startswith("python:"):
            raise ConfigError(
                f"`function` of the oracle isolated is {function!r}; name a function as "
                "path/to/file.py:Name or package.module:Name"
            )
        self.name = function
        self._workers = Workers(
            f"{__name__}:serve", [function], count=workers, timeout_s=timeout_s, memory_gb=memory_gb
        )
        about = self._workers.about
        self.answers: Kind = about["answers"]
        self.cacheable, self.version = bool(about["cacheable"]), str(about["version"])
        self.gives_steps: StepUnit | None = about["gives_steps"]
        self.made_of: dict[str, dict[str, Any]] = about["made_of"]
        plugins.elsewhere.update(about["own_files"])
        if about["may_read_group"]:
            warn(
                f"the oracle isolated shows {function} one response at a time, and equal ones once; if a "
                "score depends on the other responses of a group, name the function itself as oracle; if "
                f"not, set `{function.rpartition(':')[2]}.reads_group = False` in its file"
            )
        self._needed, self._given = about["needed"], [name for name in about["given"] if name != STATE]
        self._known: dict[str, None] = {}
        self._open: dict[str, _Open] = {}
        self._of: dict[str, tuple[str, int]] = {}

    def check_columns(self, columns: Collection[str], has_reference: bool) -> None:
        """Check that the data have the columns that the function needs, as `CallableOracle.check_columns`
        does."""
        found = {*columns, *(["reference"] if has_reference else [])}
        without = {"labels"} if not {"label", "labels", "reference"} & found else set()
        check_needed(self._needed, {*found, *self._given} - without)
        self._known |= dict.fromkeys(found)

    def submit(self, questions: Sequence[Question]) -> list[str]:
        for question in questions:
            self._open[str(question.key)] = _Open(question, time.monotonic())
            for place, item in enumerate(_items(question)):
                call = f"{question.key} {place}"
                self._of[call] = str(question.key), place
                self._workers.send(call, wire.encode(replace(item, columns={**self._known, **item.columns})))
        return [str(question.key) for question in questions]

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """Return answers to questions of `tickets`, each with its ticket. If none is ready, wait at most
        `seconds` for the first.

        Raises:
            OracleError: as in `CallableOracle.collect`, or a worker cannot be started.
        """
        end = time.monotonic() + seconds
        while not (there := [ticket for ticket in dict.fromkeys(tickets) if self._is_whole(ticket)]):
            left = end - time.monotonic()
            for call, outcome in self._workers.collect(max(0.0, left)):
                self._take_outcome(call, outcome)
            if left <= 0:
                break
            if not any(ticket in self._open for ticket in tickets):
                return []
        return [(ticket, self._answer(self._open.pop(ticket))) for ticket in there]

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    def _take_outcome(self, call: str, outcome: Outcome) -> None:
        ticket, place = self._of.pop(call)
        if outcome.failure:
            warn(f"oracle {self.name} {outcome.failure} about a response, which counts as failed")
        if outcome.failure:
            self._open[ticket].found[place] = None
            return
        answer, files = outcome.value
        plugins.elsewhere.update(files)
        self._open[ticket].found[place] = wire.decode(answer)

    def _is_whole(self, ticket: str) -> bool:
        return ticket in self._open and len(self._open[ticket].found) == self._open[ticket].question.size

    def _answer(self, asked: _Open) -> Answer:
        found = [asked.found[place] for place in range(asked.question.size)]
        failed: Mark = "failed"
        values = tuple(answer.values[0] if answer else 0.0 for answer in found)
        marks = tuple(answer.marks[0] if answer else failed for answer in found)
        steps = tuple(answer.steps[0] if answer and answer.steps else () for answer in found)
        return Answer(
            asked.question.key,
            values,
            marks,
            queries=len(found),
            by=self.name,
            seconds=time.monotonic() - asked.since,
            steps=steps if any(steps) else (),
            step_unit=self.gives_steps or "characters",
        )


class _Served:
    """The object that answers questions in a worker. Each question is about one item. Questions and answers
    are encoded as bytes. If modules were imported since the last answer, the hashes of the user's own files
    come with the answer."""

    def __init__(self, oracle: CallableOracle):
        self._oracle, self._modules = oracle, len(sys.modules)
        self.about: dict[str, Any] = {
            "answers": oracle.answers,
            "cacheable": oracle.cacheable,
            "gives_steps": oracle.gives_steps,
            "version": oracle.version or "",
            "may_read_group": oracle.answers == "score" and oracle.declares_group is None,
        }
        self.about |= {"made_of": oracle.made_of, "own_files": plugins.own_files(start())}
        self.about |= {"needed": list(oracle.needed), "given": list(oracle.given)}

    def __call__(self, question: bytes) -> tuple[bytes, dict[str, str]]:
        tickets, found = self._oracle.submit([wire.decode(question)]), list[tuple[str, Answer]]()
        while not found:
            found = self._oracle.collect(tickets, 3600.0)
        before, self._modules = self._modules, len(sys.modules)
        return wire.encode(found[0][1]), plugins.own_files(start()) if len(sys.modules) != before else {}


def serve(function: str) -> Callable[[bytes], tuple[bytes, dict[str, str]]]:
    """Make the object that a worker calls for each item (`plugins/isolated_side.py`).

    Raises:
        ConfigError: the function cannot be loaded, or is no function.
    """
    oracle: Any = build_oracle(function, {})
    if not isinstance(oracle, CallableOracle):
        raise ConfigError(
            f"{function} is a class, and the oracle isolated takes functions; write a function, or name "
            "the class as oracle.name"
        )
    if oracle.answers == "score" and oracle.declares_group:
        raise ConfigError(
            f"{function} declares `reads_group`, and the oracle isolated shows it one response at a time; "
            "name the function as oracle.name"
        )
    oracle.read_no_group()
    return _Served(oracle)


def _items(question: Question) -> list[Question]:
    """Return one question for each item of a question: for each candidate alone, or for the compared pair."""
    if question.kind == "compare":
        return [question]
    ids = question.ids or (None,) * len(question.candidates)
    return [
        replace(
            question,
            candidates=(text,),
            picks=(pick,),
            ids=() if own is None else (own,),
            known=(),
            features=None,
        )
        for text, pick, own in zip(question.candidates, question.picks, ids, strict=True)
    ]
