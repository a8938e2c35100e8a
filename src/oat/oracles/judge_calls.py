"""The calls of a judge's endpoint that are under way, and the warnings about those that have ended."""

import time
from dataclasses import dataclass, field

from oat.errors import OatError
from oat.types import Question


@dataclass(eq=False)
class Call:
    """A call of the endpoint about one order of a pair, or about one candidate to score.

    Attributes:
        order: the indices of the candidates in the order in which the judge sees them; for a score, one
            index.
        messages: the messages that are sent.
        bound: largest number of prompt tokens of a try.
        tries: number of tries so far, without those that do not count against `JudgeConfig.tries`, such as a
            try that found no connection.
        prompt_tokens, completion_tokens: number of tokens of the counted tries. A try that failed counts with
            the most tokens that it can take.
        is_uncounted: True if a reply did not state the tokens that it took.
        said: the beginning of the newest reply.
        lacks: why the newest reply has no verdict, in words; "" if its text says none.
        value: the probability that the response shown first wins, or the score; None until there is one.
        tie: the probability of the verdict that neither is better.
        error: the error that ended the call; None if there is none.
    """

    order: tuple[int, ...]
    messages: list[dict[str, str]]
    bound: int
    tries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_uncounted: bool = False
    said: str = ""
    lacks: str = ""
    value: float | None = None
    tie: float = 0.0
    error: OatError | None = None

    def took(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count one more try and its tokens."""
        self.tries += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens

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
