"""Fakes: an engine and an oracle that answer from a script."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from oat.oracles.base import Oracle
from oat.types import Answer, Completion, Kind, Mark, Question, Request, Work

if TYPE_CHECKING:
    import torch

Said = float | Mark
"""A value, or a mark instead of a value."""
Script = Callable[[Question], Said | Sequence[Said]]

_PAUSE_S = 0.01
_VALUELESS = 0.5


class FakeEngine:
    """An engine without a model. It answers requests with ids from a script, and yields the answers in
    reverse order of the requests.

    * The raw and sampled log-probability of every token is -log(`num_tokens`).
    * A response with more than `max_new_tokens` ids is cut to this length.
    * The finish reason is "stop" if the response was not cut and ends with a stop id; otherwise "length".

    Args:
        script: a function that gets the ids of a request and returns the ids of the response; or a list of
            responses, which the requests of all calls take in a cycle.
        num_tokens: size of the vocabulary.
        stop_ids: ids that end a response.

    Attributes:
        requests: all requests so far.
        released: the keys that were released, by slot.
        held: the weights that were loaded last into each slot.
    """

    def __init__(
        self,
        script: Callable[[np.ndarray], Sequence[int]] | Sequence[Sequence[int]],
        *,
        num_tokens: int = 256,
        stop_ids: Sequence[int] = (),
    ):
        self.script = script
        self.logp = -float(np.log(num_tokens))
        self.stop_ids = frozenset(stop_ids)
        self.requests: list[Request] = []
        self.released: dict[str, list[int]] = {}
        self.held: dict[str, dict[str, torch.Tensor]] = {}
        self._versions: dict[str, int] = {}

    def generate(self, requests: Sequence[Request], slot: str) -> Iterator[Completion]:
        answered = [self._answer(index, request, slot) for index, request in enumerate(requests)]
        yield from reversed(answered)

    def release(self, slot: str, keys: Sequence[int]) -> None:
        self.released.setdefault(slot, []).extend(keys)

    def logps(self, sequences: Sequence[np.ndarray], slot: str) -> list[np.ndarray]:
        return [np.full(len(ids) - 1, self.logp, dtype=np.float32) for ids in sequences]

    def load(self, slot: str, version: int, tensors: "Mapping[str, torch.Tensor]") -> None:
        self.held[slot] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._versions[slot] = version

    def tensors(self, slot: str) -> "dict[str, torch.Tensor]":
        return self.held[slot]

    def version(self, slot: str) -> int:
        return self._versions.get(slot, 0)

    def work(self) -> Work:
        return Work()

    def _answer(self, index: int, request: Request, slot: str) -> Completion:
        said = (
            self.script(request.ids)
            if callable(self.script)
            else self.script[len(self.requests) % len(self.script)]
        )
        self.requests.append(request)
        ids = np.asarray(said[: request.sampling.max_new_tokens], dtype=np.int32)
        logps = np.full(len(ids), self.logp, dtype=np.float32)
        is_whole = len(ids) == len(said) and len(ids) > 0 and int(ids[-1]) in self.stop_ids
        return Completion(
            index, ids, logps, logps.copy(), None, "stop" if is_whole else "length", self.version(slot)
        )


class FakeOracle(Oracle):
    """An oracle that answers from a script. It can answer immediately, late, in reverse order, or never.

    Args:
        script: a function that gets a question. For a comparison, it returns one value. For scores, it
            returns a list with one value per candidate, or one value for all candidates. Instead of a
            number, a value may be a mark: "tie", "abstain" or "failed".
        answers: the kind of questions that the oracle takes.
        late: a function that gets a question and returns a number n: the first n calls of `collect` do not
            return its answer, and the next call does. If it returns None, the question is never answered. The
            default returns 0.
        newest_first: True makes `collect` return the available answers in reverse order.

    Attributes:
        asked: all questions so far, in order.
    """

    def __init__(
        self,
        script: Script,
        *,
        answers: Kind = "score",
        late: Callable[[Question], int | None] = lambda question: 0,
        newest_first: bool = False,
    ):
        self.script = script
        self.answers = answers
        self.late = late
        self.newest_first = newest_first
        self.asked: list[Question] = []
        self._open: dict[str, tuple[Question, int | None]] = {}

    def submit(self, questions: Sequence[Question]) -> list[str]:
        tickets = [str(len(self.asked) + number) for number in range(len(questions))]
        self.asked += questions
        self._open |= {
            ticket: (question, self.late(question))
            for ticket, question in zip(tickets, questions, strict=True)
        }
        return tickets

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        due = {ticket: self._open[ticket] for ticket in tickets if ticket in self._open}
        there = [ticket for ticket, (_, left) in due.items() if left == 0]
        self._open |= {ticket: (question, left - 1) for ticket, (question, left) in due.items() if left}
        if not there:
            time.sleep(min(seconds, _PAUSE_S))
        order = reversed(there) if self.newest_first else there
        return [(ticket, self._answer(self._open.pop(ticket)[0])) for ticket in order]

    def _answer(self, question: Question) -> Answer:
        said = self.script(question)
        given = [said] * question.size if isinstance(said, str | float | int) else list(said)
        values = tuple(_VALUELESS if isinstance(value, str) else value for value in given)
        marks = tuple(value if isinstance(value, str) else "ok" for value in given)
        return Answer(question.key, values, marks, queries=question.size, by="fake")
