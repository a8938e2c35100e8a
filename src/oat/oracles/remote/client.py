"""The oracle `remote`, which asks a reward server. The server may be `oat serve reward`, the predecessor's
server, or any other server with the format of `format.py`.

Each question is a request of its own, so a question that cannot be answered does not affect others. The
server makes the batches.
"""

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace

from oat.errors import ClosedError, ConfigError, NoReplyError, RefusalError, warn
from oat.oracles.base import Oracle
from oat.oracles.contract import nothing
from oat.oracles.http_client import HttpClient
from oat.oracles.remote.format import CONTENT_TYPE, ROUTE, decode_reply, decode_steps, encode_request
from oat.types import Answer, Kind, Mark, Question, Steps, StepUnit

_Read = tuple[list[float | None], list[Steps]]
"""The values in a reply, and the rewards of the steps of each candidate; no list if it has none."""


@dataclass(frozen=True, eq=False)
class _Call:
    """A question that was sent, and the future that gets the values of the server's reply.

    Attributes:
        since: time of the first sending.
        sent: time of the last sending.
    """

    question: Question
    since: float
    sent: float
    future: Future[_Read]


class RemoteOracle(Oracle):
    """An oracle that asks one reward server, or several servers that share the questions.

    If a text is too long for the server's model, the server gives no value, and the oracle abstains. A
    question counts as failed in three cases:

    * `max_tries` tries have failed;
    * the question has no answer within `max_outage_s` + `timeout_s`;
    * the server refuses this question (for example with 400, 413 or 422), and afterwards still answers
      another one. For this an earlier question is sent once more; its answer is not used.

    The run ends in three cases:

    * the server refuses every question, for example with 401 or 404 (`refusals.py`), or with 400 also a
      question that it has answered before;
    * the server gives no answer at all for `max_outage_s`;
    * the server refuses a question before it has answered any question, and no other question is under way.

    If the same command continues the run, the unanswered questions are asked again.

    Args:
        url: the URL of the server without the route, or a list of servers with the same model.
        answers: "score": the server is asked for scores. "compare": it is asked for its own preferences.
        timeout_s: seconds of one try. If the server's own limit is longer, slow answers are lost and asked
            for again.
        max_tries: number of failed tries after which a question counts as failed. A try that cannot reach the
            server (no connection, 429, 502, 503, 504) does not count.
        max_outage_s: seconds without any answer after which the run ends.
        concurrency: largest number of questions under way together.
        token_env: environment variable with the server's token; if it is not set, no token is sent.
        version: a text that names the model of the server. Answers of another version are not used again.
        gives_steps: "characters" if the server's replies may have the rewards of a response's steps.

    Raises:
        ConfigError: an argument cannot be used.
    """

    when_it_abstains = "the server gave no score; look at its own log"

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        answers: Kind = "score",
        timeout_s: float = 60.0,
        max_tries: int = 8,
        max_outage_s: float = 300.0,
        concurrency: int = 32,
        token_env: str = "OAT_REMOTE_TOKEN",
        version: str = "",
        gives_steps: StepUnit | None = None,
    ):
        if answers not in ("score", "compare"):
            raise ConfigError(
                f"answers is {answers!r}; set score, or compare for the server's own preferences"
            )
        for name, value in {"timeout_s": timeout_s, "max_outage_s": max_outage_s}.items():
            if not (isinstance(value, float | int) and math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value!r}; set seconds above 0")
        for name, count in {"max_tries": max_tries, "concurrency": concurrency}.items():
            if not (isinstance(count, int) and count > 0):
                raise ConfigError(f"{name} is {count!r}; set a whole number from 1 on")
        if gives_steps is not None and (gives_steps != "characters" or answers != "score"):
            raise ConfigError(
                f"gives_steps is {gives_steps!r}, and answers {answers!r}; set characters, with answers: "
                "score, or leave gives_steps out"
            )
        self.answers: Kind = answers
        self.gives_steps = gives_steps
        self.version = str(version)
        self.where_asked = f"at {url if isinstance(url, str) else ', '.join(url)}"
        self.max_outage_s, self._deadline_s = max_outage_s, max_outage_s + timeout_s
        self._client = HttpClient(
            url,
            token=os.environ.get(token_env),
            token_from=token_env,
            timeout_s=timeout_s,
            max_tries=max_tries,
            max_outage_s=max_outage_s,
            concurrency=concurrency,
        )
        self._calls: dict[str, _Call] = {}
        self._again: set[str] = set()
        self._good: _Call | None = None
        self._check: tuple[list[str], Future[_Read]] | None = None
        """The tickets of refused questions, and the future of a good question that is sent once more."""
        self._refused_alone: set[str] = set()
        self._closed = -math.inf
        """The time at which the server was last found to refuse every question."""
        self._has_warned = False

    @property
    def metrics(self) -> dict[str, float]:
        return {f"oracle/{name}": value for name, value in self._client.counts.items() if name != "calls"}

    def submit(self, questions: Sequence[Question]) -> list[str]:
        self._calls.update(
            {str(question.key): self._sent(question, time.monotonic()) for question in questions}
        )
        return [str(question.key) for question in questions]

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """Return answers to questions of `tickets`, each with its ticket. If none is ready, wait at most
        `seconds` for the first. If `collect` raises, its next call sends those questions again that ended
        with an error.

        Raises:
            ClosedError: the server refuses every question.
            RefusalError: the server refuses a question and afterwards also one that it has answered before;
                or it has answered no question so far, and no other question is under way.
            OutageError: no server has answered for `max_outage_s`.
        """
        due = [ticket for ticket in dict.fromkeys(tickets) if ticket in self._calls]
        for ticket in [each for each in due if each in self._again or self._is_of_all(each)]:
            self._again.discard(ticket)
            self._calls[ticket] = self._sent(self._calls[ticket].question, self._calls[ticket].since)
        end = time.monotonic() + seconds
        while not (ended := self._ended(due)) and due and (left := end - time.monotonic()) > 0:
            wait(self._under_way(), timeout=left, return_when=FIRST_COMPLETED)
        of_one = {ticket: error for ticket, error in ended.items() if ticket in self._refused_alone}
        errors = {
            ticket: error
            for ticket, error in ended.items()
            if ticket not in of_one and not isinstance(error, NoReplyError | None)
        }
        if errors:
            self._again.update(errors)
            raise next(iter(errors.values()))
        if of_one and not self._has_warned:
            self._has_warned = True
            warn(
                "a reward server gave no answer, and the question counts as failed: "
                f"{next(iter(of_one.values()))}"
            )
        self._refused_alone.difference_update(ended)
        return [(ticket, _answer(self._calls.pop(ticket))) for ticket in ended]

    def close(self) -> None:
        """End the requests that are under way."""
        self._client.close()

    def _under_way(self) -> list[Future[_Read]]:
        check = [] if self._check is None else [self._check[1]]
        return [*check, *(call.future for call in self._calls.copy().values() if not call.future.done())]

    def _ended(self, tickets: Sequence[str]) -> dict[str, BaseException | None]:
        """Return, by ticket, the error of each call of `tickets` that has ended; None if the call brought an
        answer. Refused questions are left out while it is not clear whether the server refuses all."""
        calls = self._calls.copy()  # another thread may submit meanwhile
        done = {ticket: call.future.exception() for ticket, call in calls.items() if call.future.done()}
        good = (calls[ticket] for ticket, error in done.items() if error is None)
        self._good = next(good, self._good)
        self._find_out(tickets)
        is_open = self._good is not None or len(done) < len(calls)
        unclear = {each for each in tickets if is_open and self._is_unclear(each)}
        return {ticket: done[ticket] for ticket in tickets if ticket in done and ticket not in unclear}

    def _find_out(self, tickets: Sequence[str]) -> None:
        """Find out whether the server still answers after it has refused questions of `tickets`: send a
        question once more that it has answered before."""
        if self._check is not None and self._check[1].done():
            (asked, again), self._check = self._check, None
            if again.exception() is None:
                self._refused_alone.update(asked)
            else:
                self._closed = time.monotonic()
        unknown = [each for each in tickets if self._is_unclear(each)]
        if unknown and self._check is None and self._good is not None:
            self._check = unknown, self._sent(self._good.question, time.monotonic()).future

    def _is_of_all(self, ticket: str) -> bool:
        """Return True if the server has refused this question, and was then found to refuse every one."""
        return self._is_refused(ticket) and self._calls[ticket].sent <= self._closed

    def _is_unclear(self, ticket: str) -> bool:
        """Return True if the server has refused this question, and it is not known whether it refuses all."""
        return self._is_refused(ticket) and self._calls[ticket].sent > self._closed

    def _is_refused(self, ticket: str) -> bool:
        call = self._calls[ticket]
        return (
            ticket not in self._refused_alone and call.future.done() and _is_of_one(call.future.exception())
        )

    def _sent(self, question: Question, since: float) -> _Call:
        body = encode_request([(question.messages, question.candidates)], self.answers)

        def read(reply: bytes) -> _Read:
            if self.gives_steps is not None:
                return decode_steps(reply, question.candidates)
            return decode_reply(reply, self.answers, question.size), []

        return _Call(
            question,
            since,
            time.monotonic(),
            self._client.post(ROUTE, body, read, deadline_s=self._deadline_s, content_type=CONTENT_TYPE),
        )


def _is_of_one(error: BaseException | None) -> bool:
    """Return True if the error may concern one question alone."""
    return isinstance(error, RefusalError) and not isinstance(error, ClosedError)


def _answer(call: _Call) -> Answer:
    """Return the answer of a call that has ended: its values, or "failed" if it ended with an error."""
    question, seconds = call.question, time.monotonic() - call.since
    if call.future.exception() is not None:
        return nothing(question, "failed", question.oracle, seconds)
    given, steps = call.future.result()
    marks, values = (
        tuple(_mark(question.kind, value) for value in given),
        tuple(0.5 if value is None else value for value in given),
    )
    plain = Answer(question.key, values, marks, queries=question.size, by=question.oracle, seconds=seconds)
    return replace(plain, steps=tuple(steps)) if any(steps) else plain


def _mark(kind: Kind, value: float | None) -> Mark:
    if value is None:
        return "abstain"
    return "tie" if kind == "compare" and value == 0.5 else "ok"
