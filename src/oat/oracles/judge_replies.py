"""Reads a chat completion: its verdict or score, and the number of tokens that it took.

The oracle `judge` reads a verdict or score from log-probabilities or from the text; the head of `judge.py`
says when. The log-probabilities are those of the first generated token that is not blank, and of the
alternatives that the endpoint reports for this token. Alternatives that differ only in blanks are one, and
their probabilities are added. A verdict or score that is not among the alternatives has probability 0. If a
reply contains `</think>`, only the part after it counts.
"""

import math
import re
from collections.abc import Sequence

import msgspec

_END_OF_THOUGHT = "</think>"
_SCORE = re.compile(r"[^\w-]*(?:(?:score|rating)\b[^\w-]*)?(-?\d+(?:\.\d+)?)(?![\w.,]*\d)", re.IGNORECASE)
_MOST_TOKENS = 2**31
_MOST_CHARACTERS = 1000
"""Largest number of characters of a text that are kept. A verdict is at the beginning of the text. The limit
bounds the time to search for it, which may grow with the square of the length."""


class _Alternative(msgspec.Struct):
    token: str
    logprob: float


class _Token(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_Alternative] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    """A chat completion. If it contains `</think>`, only the part after it counts.

    Attributes:
        text: the text, stripped of blanks and cut to `_MOST_CHARACTERS` characters.
        logps: log-probabilities, in nats, of the first token that is not blank and of its alternatives. Keys
            are tokens, stripped of blanks. None if the endpoint gives none; {} if all tokens are blank.
        usage: number of tokens of the prompt and of the completion; None if the reply does not state them.
    """

    text: str
    logps: dict[str, float] | None
    usage: tuple[int, int] | None = None


def read_completion(body: bytes) -> ChatCompletion:
    """Read the first choice of a chat completion, and its usage.

    Raises:
        ValueError: the body is no chat completion.
    """
    try:
        found = msgspec.json.decode(body, type=_Body)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if not found.choices:
        raise ValueError("a completion without choices")
    choice, usage = found.choices[0], found.usage
    tokens = choice.logprobs.content if choice.logprobs is not None else None
    text = (choice.message.content or "").rpartition(_END_OF_THOUGHT)[2].strip()[:_MOST_CHARACTERS]
    logps = _first_logps(tokens) if tokens else None
    if usage is None or not (
        0 <= usage.prompt_tokens < _MOST_TOKENS and 0 <= usage.completion_tokens < _MOST_TOKENS
    ):
        return ChatCompletion(text, logps)
    return ChatCompletion(text, logps, (usage.prompt_tokens, usage.completion_tokens))


def probabilities(logps: dict[str, float], verdicts: Sequence[str]) -> dict[str, float] | None:
    """Return the probability of each verdict, given that the reply is one of the verdicts: a softmax over
    their log-probabilities. A verdict that is not in `logps` has probability 0. Return None if no verdict is
    in `logps`."""
    known = {verdict: logps.get(verdict, -math.inf) for verdict in verdicts}
    top = max(known.values())
    if top == -math.inf:
        return None
    weights = {verdict: math.exp(logp - top) for verdict, logp in known.items()}
    total = math.fsum(weights.values())
    return {verdict: weight / total for verdict, weight in weights.items()}


def verdict_in(text: str, verdicts: Sequence[str]) -> str | None:
    """Return the verdict at the beginning of a text. Punctuation before it is skipped. Return None if the
    text begins with no verdict. "Also" does not begin with the verdict "A", nor "1.5" with "1"."""
    found = re.match(rf"\W*({'|'.join(map(re.escape, verdicts))})\b(?!\W?\d)", text)
    return found[1] if found else None


def score_in(text: str, low: float, high: float) -> float | None:
    """Return the number at the beginning of a text, such as "7", "Score: 7" or "**7.5** / 10". Return None if
    there is no number, or if it is not from `low` to `high`."""
    found = _SCORE.match(text)
    score = float(found[1]) if found else math.nan
    return score if low <= score <= high else None


def _first_logps(tokens: Sequence[_Token]) -> dict[str, float] | None:
    ends = [place for place, token in enumerate(tokens) if token.token.strip() == _END_OF_THOUGHT]
    behind = tokens[ends[-1] + 1 :] if ends else tokens
    first = next((token for token in behind if token.token.strip()), None)
    if first is None:
        return {}
    alternatives = {each.token: each.logprob for each in first.top_logprobs or ()} | {
        first.token: first.logprob
    }
    logps: dict[str, float] = {}
    for token, logp in alternatives.items():
        name = token.strip()
        logps[name] = _logaddexp(logps[name], logp) if name in logps else logp
    return logps


def _logaddexp(a: float, b: float) -> float:
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))
