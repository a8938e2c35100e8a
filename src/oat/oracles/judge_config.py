"""The options of the oracle `judge`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from oat.config.ranges import Count, NonNegative, Positive, Share
from oat.errors import ConfigError

KEYS = ("OAI_KEY", "OPENAI_API_KEY")
"""Variables of the environment that may hold the key."""
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
"""Options that change no answer."""
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
    """Its name, as the endpoint knows it."""
    url: (
        Annotated[str, msgspec.Meta(min_length=1)]
        | Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
        | None
    ) = None
    """Base of the endpoint, such as http://127.0.0.1:8000/v1, or several that serve the same model; by
    default that in OAI_URL."""
    key_env: str | None = None
    """The environment's variable that holds the key; by default OAI_KEY or OPENAI_API_KEY, and no key where
    neither is set."""
    mode: Literal["compare", "score"] = "compare"
    """Which of two responses is better, or a number of each."""
    rubric: str = ""
    """What counts, in words for the judge; by default quality and relevance."""
    reference: bool = False
    """Whether the judge sees the question's reference, where it has one."""
    orders: Literal["both", "random", "one"] = "both"
    """A pair is shown in both orders and the answers are averaged, in one that follows from its texts, or as
    it stands."""
    ties: bool = False
    """Whether the judge may answer that neither is better."""
    tie_width: Share = 0.0
    """A pair whose probability is as near to one half, or nearer, is a tie."""
    range: tuple[int, int] = (0, 9)
    """The lowest and the highest score. Within 0 to 9 a score is an expectation over digits, where there are
    log-probabilities."""
    invalid: Literal["retry", "skip", "tie"] = "retry"
    """A reply without a verdict: ask again, and abstain after `tries`; abstain; or a tie."""
    reads: Literal["auto", "logprobs", "text"] = "auto"
    """Where the verdict is read: log-probabilities where the endpoint gives them and the text elsewhere, or
    always one of them."""
    instructions: Literal["system", "user"] = "system"
    """The role in whose message the instructions stand; `user` for models without a system role."""
    max_tokens: Count = 4
    """Most tokens of a reply. A model that thinks first needs room for it."""
    tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the endpoint calls that."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request; null leaves one of ours out. Beside those the temperature is 0."""
    price_in: NonNegative | None = None
    """Money for a million prompt tokens."""
    price_out: NonNegative | None = None
    """Money for a million tokens of replies."""
    template_tokens: Count = 256
    """Most tokens that the endpoint's chat template adds to a request."""
    tries: Count = 3
    """Times that a call is tried where a reply is lost, broken or without a verdict. Being refused for the
    moment (429, 503) is no try."""
    timeout_s: Positive = 60.0
    """Seconds of one try."""
    max_outage_s: Positive = 300.0
    """Seconds without any answer from the endpoint after which the run ends, to be continued."""
    concurrency: Count = 16
    """Calls under way together."""


def judge_config(options: Mapping[str, Any]) -> JudgeConfig:
    """The options by their names.

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
    """Whether every score from low to high is one digit."""
    return low >= 0 and high <= 9


def key_of(name: str | None) -> tuple[str | None, str]:
    """The key in the environment's variable of this name, by default in the first of `KEYS` that has one, and
    that variable. None where they have none, and which they are.

    Raises:
        ConfigError: there is none under the name.
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
