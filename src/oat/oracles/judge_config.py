"""The options of the oracle `judge`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import msgspec

from oat.config.ranges import Count, NonNegative, Positive, Share
from oat.errors import ConfigError, did_you_mean

KEYS = ("OAI_KEY", "OPENAI_API_KEY")
"""Environment variables that may hold the endpoint's key."""
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
"""The options that do not change answers. They are not part of the oracle's version."""
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
    """The name of the judge model at the endpoint."""
    url: (
        Annotated[str, msgspec.Meta(min_length=1)]
        | Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
        | None
    ) = None
    """Base URL of the endpoint, such as http://127.0.0.1:8000/v1, or a list of endpoints with the same model.
    The default is the URL in the environment variable OAI_URL."""
    key_env: str | None = None
    """The environment variable that holds the key. The default is OAI_KEY or OPENAI_API_KEY; if neither is
    set, no key is sent."""
    mode: Literal["compare", "score"] = "compare"
    """`compare`: the judge says which of two responses is better. `score`: it scores each response."""
    rubric: str = ""
    """The criteria, in words for the judge. The default is quality and relevance."""
    reference: bool = False
    """True: the judge sees the question's reference. A question without a reference is
    shown without one."""
    orders: Literal["both", "random", "one"] = "both"
    """`both`: the judge sees a pair in both orders, and the answers are averaged. `random`: the judge sees it
    in one order, which a hash of the model's name and the two texts decides. `one`: the judge sees it in the
    order of the question."""
    ties: bool = False
    """True: the judge may answer that neither is better."""
    tie_width: Share = 0.0
    """A pair is a tie if the probability that its first response wins differs from one half by at most this
    number."""
    range: tuple[int, int] = (0, 9)
    """The lowest and the highest score. If both are from 0 to 9 and log-probabilities are read, a score is
    the expectation over the digits."""
    invalid: Literal["retry", "skip", "tie"] = "retry"
    """What happens after a reply without a verdict. `retry`: the judge is asked again; after `tries` tries
    without a verdict, the value has the mark `abstain`. `skip`: the value has the mark `abstain`. `tie`: the
    value has the mark `tie`."""
    reads: Literal["auto", "logprobs", "text"] = "auto"
    """The part of a reply that has the verdict. `logprobs`: the log-probabilities. `text`: the text. `auto`:
    the log-probabilities if the endpoint gives them, otherwise the text."""
    instructions: Literal["system", "user"] = "system"
    """The role of the message with the instructions. Use `user` for a model without a system role."""
    max_tokens: Count = 4
    """Largest number of tokens in a reply. A model that thinks first needs more than the default. With 1, a
    score is a whole number."""
    tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The name of the field in which a request tells the endpoint the value of `max_tokens`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request. The temperature is 0 by default; it can be set here, and null leaves
    it out."""
    price_in: NonNegative | None = None
    """Money per million prompt tokens."""
    price_out: NonNegative | None = None
    """Money per million tokens of replies."""
    template_tokens: Count = 256
    """Largest number of tokens that the endpoint's chat template adds to a request."""
    tries: Count = 3
    """Largest number of tries of a call. Another try follows if the reply is lost or broken, or if it has no
    verdict and `invalid` is `retry`. A try without a connection, or with the reply 429 or 503, does not
    count. A try with 502 or 504 counts only if a budget in tokens or money limits the judge."""
    timeout_s: Positive = 60.0
    """Seconds for one try."""
    max_outage_s: Positive = 300.0
    """If the endpoint gives no answer for this many seconds, the run ends. It can be continued."""
    concurrency: Count = 16
    """Largest number of calls under way together."""


def judge_config(options: Mapping[str, Any]) -> JudgeConfig:
    """Check the judge's options, and return them.

    Raises:
        ConfigError: an option is missing or unknown, has a wrong value, is not read in the set `mode`,
            or contradicts another option.
    """
    known = [each.name for each in fields(JudgeConfig)]
    for option in options:
        if option not in known:
            raise ConfigError(f"the oracle judge has no option {option!r}; {did_you_mean(option, known)}")
    try:
        c = msgspec.convert(dict(options), JudgeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"an option of the oracle judge is not what it takes: {error}; correct it (docs/oracles/judge.md)"
        ) from None
    unread = sorted(options.keys() & (_ONLY_COMPARE if c.mode == "score" else _ONLY_SCORE))
    low, high = c.range
    names = sorted(c.extra.keys() & _OURS)
    wrong = {
        f"{' and '.join(unread)} is set, and mode: {c.mode} does not read it; remove it": bool(unread),
        "invalid: tie is set, and a score has no tie; set skip or retry": c.mode == "score"
        and c.invalid == "tie",
        f"range is {list(c.range)}; the first must be the lower": low >= high,
        (
            f"reads: logprobs is set, and scores of the range {list(c.range)} are more than a digit, or "
            "fractions; set text, a range within [0, 9] of 2 or more, or max_tokens: 1 for whole scores"
        ): (c.mode == "score" and c.reads == "logprobs" and not is_of_digits(c)),
        "one of price_in and price_out is missing; set both": (c.price_in is None) != (c.price_out is None),
        f"extra has {', '.join(names)}, which this oracle sets itself; use its options": bool(names),
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"the oracle judge: {text}")
    return c


def is_of_digits(config: JudgeConfig) -> bool:
    """Return True if a digit tells a score about. In a range of 1, the beginning `0` of `0.9` would count as
    the other end, unless the scores are whole."""
    low, high = config.range
    return low >= 0 and high <= 9 and (high - low >= 2 or config.max_tokens == 1)


def key_of(name: str | None) -> tuple[str | None, str]:
    """Return the key, and the name of the environment variable that holds it.

    If `name` is None and no variable of `KEYS` is set, the key is None, and the name is a list of `KEYS` in
    words.

    Args:
        name: the name of the variable; None: the first of `KEYS` that is set.

    Raises:
        ConfigError: the variable `name` is not set, or is empty.
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
