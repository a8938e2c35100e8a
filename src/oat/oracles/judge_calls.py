"""The calls of a judge's endpoint: their order, what their refusals mean, and the warnings about them.

**Order.** Questions begin in the order in which they were asked. No more questions are begun and unfinished
than are finished, plus one. So if the credit ends, no more questions lose replies that are paid than have
answers, plus one; and a credit for the calls of one question brings an answer.

**Refusals.** A refused question may be the reason for its refusal, or every question may meet the error.
Words do not tell these apart. So the refusal is open until the endpoint has answered another call that was
sent after the refusal came: then the question alone fails. If no other call is under way or waits, the judge
asks a short question of its own. If the endpoint answers it, the refused questions fail. If the endpoint
refuses it too, every question would meet the error: the run ends, and no question fails.

The reason may also be the log-probabilities that a request asks for, even if the refusal does not name them.
So before its own question, the judge asks one of the refused questions with fewer alternatives, and at last
without log-probabilities. If the endpoint answers a call that asked for fewer alternatives than a refused
one, the refused one is asked again with as few, and does not fail yet.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from oat.errors import ClosedError, NoReplyError, OatError, RefusalError
from oat.oracles.http_client import ASKED_AGAIN
from oat.oracles.judge_replies import ChatCompletion
from oat.oracles.refusals import fewer_alternatives
from oat.types import Key, Kind, Message, Question

ALTERNATIVES = {"compare": 5, "score": 20}
"""How many alternatives of each token are asked for."""
_NO_LOGPROBS = (400, 403, 404, 422, 500, 501)
"""Statuses with which an endpoint may refuse to give log-probabilities."""
_MOST_OPEN = 8
"""Number of open refusals with which the judge asks its own question while other calls are under way."""
REFUSES_ALL = (
    "it refuses every question, also a short one of oat's own, with status {}{}; mend the request, or look "
    f"at the service{ASKED_AGAIN}"
)


@dataclass(eq=False)
class Call:
    """A call of the endpoint about one order of a pair, or about one candidate to score.

    Attributes:
        order: the indices of the candidates in the order in which the judge sees them; for a score, one
            index.
        messages: the messages that are sent.
        bound: largest number of prompt tokens of a try.
        wants: the number of alternatives of each token that the newest request asked for, and the most that
            the next one asks for; 0: no log-probabilities.
        tries: number of tries so far, without those that do not count against `JudgeConfig.tries`, such as a
            try that found no connection.
        prompt_tokens, completion_tokens: number of tokens of the counted tries. A try that failed counts with
            the most tokens that it can take.
        is_uncounted: True if a reply did not state the tokens that it took.
        said: the beginning of the newest reply.
        lacks: why the newest reply has no verdict, in words; "" if its text says none.
        unused: as `Reading.unused`, of the newest reply; "" if its request asked for no log-probabilities.
        value: the probability that the response shown first wins, or the score; None until there is one.
        tie: the probability of the verdict that neither is better.
        error: the error that ended the call; None if there is none.
        sent: the call is the one with this number that was sent.
        refused_at: number of calls that were sent before the call was refused, if the refusal is open (head
            of this file); None otherwise.
    """

    order: tuple[int, ...]
    messages: list[dict[str, str]]
    bound: int
    wants: int = max(ALTERNATIVES.values())
    tries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_uncounted: bool = False
    said: str = ""
    lacks: str = ""
    unused: str = ""
    value: float | None = None
    tie: float = 0.0
    error: OatError | None = None
    sent: int = 0
    refused_at: int | None = None

    def took(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count one more try and its tokens."""
        self.tries += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens

    def counted(self, reply: ChatCompletion, max_tokens: int) -> tuple[int, int]:
        """Return the tokens that a reply took: those that it states, or the most that a try can take. What
        the stated total has beyond them was billed too, and counts as part of the reply."""
        prompt, completion = reply.prompt_tokens, reply.completion_tokens
        prompt = self.bound if prompt is None else prompt
        return prompt, max(max_tokens if completion is None else completion, reply.total_tokens - prompt)

    def fewer(self, *, needs_logprobs: bool) -> int | None:
        """Return how many alternatives to ask for after a refusal. Return None if the refusal is about
        something else, or if no fewer can be asked for."""
        error = self.error
        if not isinstance(error, RefusalError) or error.status not in _NO_LOGPROBS or not self.wants:
            return None
        fewer = fewer_alternatives(error.said if error.names_logprobs else "", self.wants)
        return fewer if fewer or not needs_logprobs else None

    def complaints(self, judge: str, max_tokens: int, *, is_priced: bool) -> dict[str, str]:
        """Return the warnings about the call, by kind.

        Args:
            judge: the judge in words.
            max_tokens: largest number of tokens of a reply.
            is_priced: the number of tokens matters: there is a budget, or a price.
        """
        found = {}
        if self.error is not None:
            found["failed"] = f"{judge} gave no answer, and the question counts as failed: {self.error}"
        elif self.value is None:
            found["invalid"] = (
                f"{judge} said {self.said!r}, which is no verdict{': ' if self.lacks else ''}{self.lacks}; "
                "what becomes of the question is said by `invalid`"
            )
        elif self.unused:
            found[self.unused] = (
                f"{judge} gives replies whose log-probabilities cannot be used: {self.unused}; the text "
                "alone counts there, so a verdict is certain, and a score is the number that is written; "
                "a new run with oracle.reads: text reads every reply alike"
            )
        if self.is_uncounted and is_priced:
            found["usage"] = (
                f"{judge} does not say how many tokens its replies take (`usage`), so each counts with the "
                "most that it can take"
            )
        if self.prompt_tokens > self.tries * self.bound or self.completion_tokens > self.tries * max_tokens:
            found["bound"] = (
                f"{judge} took more tokens than were set aside, so a budget would not hold; raise "
                "template_tokens, or max_tokens"
            )
        return found


@dataclass(eq=False)
class OpenQuestion:
    """A question with its calls.

    Attributes:
        left: number of calls that are under way.
    """

    question: Question
    calls: list[Call]
    left: int
    since: float = field(default_factory=time.monotonic)


class Calls:
    """The calls that wait or are under way, and the open refusals (head of this file). The caller holds a
    lock.

    Args:
        concurrency: largest number of calls under way.
        needs_logprobs: no call is asked without log-probabilities.

    Attributes:
        under_way: number of calls under way.
    """

    def __init__(self, concurrency: int, *, needs_logprobs: bool):
        self.under_way = 0
        self._needs_logprobs = needs_logprobs
        self._concurrency = concurrency
        self._waiting = deque[tuple[OpenQuestion, Call]]()
        self._begun = set[OpenQuestion]()
        self._finished = 0
        self._sent = 0
        self._refused: list[tuple[OpenQuestion, Call]] = []
        self._probed: Call | None = None

    def add(self, questions: Sequence[OpenQuestion]) -> None:
        """Let the calls of questions wait."""
        self._waiting.extend((opened, call) for opened in questions for call in opened.calls)

    def due(self) -> list[tuple[OpenQuestion, Call]]:
        """Return the calls to send now, in order."""
        found = []
        while self._waiting and self.under_way < self._concurrency:
            opened, call = self._waiting[0]
            if opened not in self._begun and len(self._begun) > self._finished:
                break
            self._waiting.popleft()
            self._begun.add(opened)
            self.under_way += 1
            self.sends(call)
            found.append((opened, call))
        return found

    def sends(self, call: Call) -> None:
        """Give a call its number."""
        self._sent += 1
        call.sent = self._sent

    def has_ended(self, opened: OpenQuestion, call: Call) -> None:
        """Take a call that has a value, no verdict, or an error."""
        self.under_way -= 1
        self._has_left(opened)
        if call is self._probed:
            self.probed()
        if call.error is None:
            self.explain(call)
        elif _is_open(call.error):
            call.refused_at = self._sent
            self._refused.append((opened, call))
        elif not isinstance(call.error, NoReplyError | RefusalError) or isinstance(call.error, ClosedError):
            self.end(call.error)

    def to_probe(self) -> Call | None:
        """Return a refused call if the judge shall now ask its own question about it; else None. If the call
        may be asked with fewer alternatives, this comes first: it waits to be sent."""
        is_due = not self.under_way or len(self._refused) >= _MOST_OPEN
        if not self._refused or self._probed is not None or not is_due:
            return None
        opened, self._probed = min(self._refused, key=lambda refused: refused[1].wants)
        fewer = self._probed.fewer(needs_logprobs=self._needs_logprobs)
        if fewer is None:
            return self._probed
        self._refused.remove((opened, self._probed))
        self._again(opened, self._probed, fewer)
        return None

    def probed(self) -> None:
        """Say that the judge's own question, or the call that was asked before it, has ended."""
        self._probed = None

    def explain(self, answered: Call) -> None:
        """Close the refusals that came before a call was sent that is answered now. They are about their
        questions alone, or about the number of alternatives if the answered call asked for fewer. A call
        about which the judge's own question is under way ends, since its last try may be spent on that."""
        before = [each for each in self._refused if (each[1].refused_at or 0) < answered.sent]
        self._refused = [each for each in self._refused if each not in before]
        for opened, call in reversed(before):
            is_fewer = answered.wants < call.wants and call is not self._probed
            if is_fewer and call.fewer(needs_logprobs=self._needs_logprobs) is not None:
                self._again(opened, call, answered.wants)
                continue
            call.refused_at = None
            if isinstance(call.error, ClosedError):
                text, *rest = call.error.args
                call.error = RefusalError(text.removesuffix(ASKED_AGAIN), *rest)

    def end(self, error: OatError) -> None:
        """End the calls that wait, and those with an open refusal, with an error that all would meet."""
        for opened, call in self._waiting:
            call.error = error
            self._has_left(opened)
        for _, call in self._refused:
            call.error, call.refused_at = error, None
        self._waiting.clear()
        self._refused.clear()
        self._probed = None
        self._finished = 0

    def _again(self, opened: OpenQuestion, call: Call, wants: int) -> None:
        """Let a refused call wait again, before all others, with a number of alternatives."""
        call.error, call.refused_at, call.wants = None, None, wants
        opened.left += 1
        self._begun.add(opened)
        self._waiting.appendleft((opened, call))

    def _has_left(self, opened: OpenQuestion) -> None:
        opened.left -= 1
        if not opened.left:
            self._begun.discard(opened)
            self._finished += all(call.error is None for call in opened.calls)


def _is_open(error: OatError) -> bool:
    """Return True if a refusal may concern one question, or all. 403 is a refused key, or a firewall that
    stops one text."""
    is_of_all = isinstance(error, ClosedError) and error.status != 403
    return isinstance(error, RefusalError) and not is_of_all and not error.is_of_one


def own_question(mode: Kind) -> Question:
    """Return the judge's own question, as short as a question can be."""
    texts = ("Hi",) if mode == "score" else ("Hi", "Ho")
    return Question(Key("", 0, 0, 0), mode, (Message("user", "Hi"),), texts, tuple(range(len(texts))))
