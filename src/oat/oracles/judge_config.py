"""The options of the oracle `judge`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from oat.config.ranges import Count, NonNegative, Positive, Share
from oat.errors import ConfigError

KEYS = ("OAI_KEY", "OPENAI_API_KEY")
"""Environment variables that may hold the key."""
OPERATION = {
    "url",
    "key_env",
    "price_in",
    "price_out",
    "template_tokens",
    "tries",
    "timeout_s",
    "max_outage_s",
    "concurrency",
}
"""Options that change no answer, and so are no part of the version."""
_OURS = {
    "model",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "stream",
    "n",
}
_ONLY_COMPARE, _ONLY_SCORE = {"orders", "ties", "tie_width"}, {"range"}


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """Options of the oracle `judge`."""

    model: str
    """The judge's name, as the endpoint knows it."""
    url: (
        Annotated[str, msgspec.Meta(min_length=1)]
        | Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
        | None
    ) = None
    """Base of the endpoint, such as http://127.0.0.1:8000/v1, or a list of endpoints that serve the same
    model; by default the URL in OAI_URL."""
    key_env: str | None = None
    """The environment variable that holds the key; by default OAI_KEY or OPENAI_API_KEY, and no key if
    neither is set."""
    mode: Literal["compare", "score"] = "compare"
    """The judge says which of two responses is better, or gives each response a number."""
    rubric: str = ""
    """The criteria, in words for the judge; by default quality and relevance."""
    reference: bool = False
    """True: the judge sees the question's reference, if it has one."""
    orders: Literal["both", "random", "one"] = "both"
    """The order of a pair: both orders, whose answers are averaged; one that follows from the two texts; or
    the order of the question."""
    ties: bool = False
    """True: the judge may answer that neither is better."""
    tie_width: Share = 0.0
    """A pair whose probability is at most this far from one half is a tie."""
    range: tuple[int, int] = (0, 9)
    """The lowest and the highest score. Within 0 to 9, and with log-probabilities, a score is the expectation
    over digits."""
    invalid: Literal["retry", "skip", "tie"] = "retry"
    """A reply without a verdict is asked for again (and the question abstains after `tries`), is an
    abstention, or is a tie."""
    reads: Literal["auto", "logprobs", "text"] = "auto"
    """The place where the verdict is read: the log-probabilities if the endpoint gives them and else the
    text, or always one of the two."""
    instructions: Literal["system", "user"] = "system"
    """The role of the message with the instructions; `user` for models without a system role."""
    max_tokens: Count = 4
    """Most tokens of a reply. A model that thinks first needs room for its thought."""
    tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The endpoint's name for that field."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request; null removes one of ours. Unless set here, the temperature is 0."""
    price_in: NonNegative | None = None
    """Money for a million tokens of prompts."""
    price_out: NonNegative | None = None
    """Money for a million tokens of replies."""
    template_tokens: Count = 256
    """Most tokens that the endpoint's chat template adds to a request."""
    tries: Count = 3
    """Times that a call is tried if its reply is lost, broken or without a verdict. A refusal for the moment
    (429, 503) is no try."""
    timeout_s: Positive = 60.0
    """Seconds for one try."""
    max_outage_s: Positive = 300.0
    """Seconds without any answer from the endpoint after which the run ends, to be continued."""
    concurrency: Count = 16
    """Calls under way together."""


def judge_config(options: Mapping[str, Any]) -> JudgeConfig:
    """The judge's options, checked.

    Raises:
        ConfigError: a value is not what its option takes, nothing reads it, or it contradicts another.
    """
    try:
        c = msgspec.convert(dict(options), JudgeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"an option of the oracle judge is not what it takes: {error}; correct it (docs/oracles/judge.md)"
        ) from None
    unread = sorted(options.keys() & (_ONLY_COMPARE if c.mode == "score" else _ONLY_SCORE))
    low, high = c.range
    names, has_digits = sorted(c.extra.keys() & _OURS), is_of_digits(low, high)
    wrong = {
        f"{' and '.join(unread)} is set, and mode: {c.mode} does not read it; remove it": bool(unread),
        "invalid: tie is set, and a score has no tie; set skip or retry": c.mode == "score"
        and c.invalid == "tie",
        f"range is {list(c.range)}; the first must be the lower": low >= high,
        (
            f"reads: logprobs is set, and scores of the range {list(c.range)} are more than a digit; set "
            "text, or a range within [0, 9]"
        ): (c.mode == "score" and c.reads == "logprobs" and not has_digits),
        "one of price_in and price_out is missing; set both": (c.price_in is None) != (c.price_out is None),
        f"extra has {', '.join(names)}, which this oracle sets itself; use its options": bool(names),
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"the oracle judge: {text}")
    return c


def is_of_digits(low: int, high: int) -> bool:
    """True if every score from low to high is one digit."""
    return low >= 0 and high <= 9


def key_of(name: str | None) -> tuple[str | None, str]:
    """The key, and the environment variable that holds it.

    Args:
        name: of the variable; None: the first of `KEYS` that is set. If none is set, the key is None, and all
            of `KEYS` are named.

    Raises:
        ConfigError: the named variable is not set.
    """
    for each in [name] if name else KEYS:
        if key := os.environ.get(each, "").strip():
            return key, each
    if name:
        raise ConfigError(
            f"the oracle judge: key_env is {name}, and the environment has no such variable; set it, or "
            "remove key_env"
        )
    return None, " or ".join(KEYS)
