"""The format of reward servers. A request is one MessagePack map, and so is a reply.

    POST /get_feedback
    request  batch_prompt           b prompts: strings, or conversations as lists of {role, content}, with the
                                    further fields of a message, such as tool_calls
             batch_candidates       b pairs of responses, for preferences; or empty
             batch_response         b responses, for scores; or empty
    reply    batch_first_win_prob   b probabilities that the first of a pair wins; or empty
             batch_score            b scores; or empty
             batch_steps            optional: for each score the rewards of the response's steps, as pairs of
                                    an end in characters and a reward; an empty list for a response without

The other fields are those of the predecessor's server. So our client can ask its server, and its client can
ask ours. Departures:
1. A request with both kinds of responses, with neither kind, or with lists of unequal lengths is refused.
2. A prompt may be a conversation. A single message of a user without further fields is sent as a string,
   because every server understands strings. The field `weight` is not sent: it says what is learned.
3. If a response is too long for the model, its score is nil. If a response of a pair is too long, the pair's
   probability is nil.
4. If a reply has too many or too few values, or a value that is not finite or not a probability, or a step
   outside its response, the try has failed. The fields that were not asked for may be missing or malformed.
5. `batch_steps` is ours. Our server does not send it. A client reads it if `gives_steps` is set.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from oat.errors import WireError
from oat.oracles.steps import is_sum, plain_steps, sum_of
from oat.types import Kind, Message, Steps

ROUTE = "/get_feedback"
CONTENT_TYPE = "application/msgpack"

_MAX_DEPTH = 64
ANSWERED = b"+"
REFUSED = b"-"
FAILED = b"!"
"""The first byte of a worker's reply to the server's front. It says what follows: after `ANSWERED` the reply
to the client, after `REFUSED` the reason why the request cannot be scored, after `FAILED` an error."""


class FeedbackRequest(msgspec.Struct):
    """A request. The messages of a conversation are the `plain` forms of `Message`."""

    batch_prompt: list[str | list[dict[str, Any]]]
    batch_candidates: list[tuple[str, str]]
    batch_response: list[str]

    @property
    def size(self) -> int:
        """Number of responses to be scored."""
        return 2 * len(self.batch_candidates) or len(self.batch_response)

    @property
    def items(self) -> list[tuple[tuple[Message, ...], str]]:
        """Every response with its conversation. If the responses are pairs, all first responses come before
        all second responses."""
        prompts = [_messages(prompt) for prompt in self.batch_prompt]
        if self.batch_response:
            return list(zip(prompts, self.batch_response, strict=True))
        return [
            (prompt, pair[place])
            for place in (0, 1)
            for prompt, pair in zip(prompts, self.batch_candidates, strict=True)
        ]


class FeedbackReply(msgspec.Struct, omit_defaults=True):
    batch_first_win_prob: list[float | None]
    batch_score: list[float | None]
    batch_steps: list[Any] = []


class _Reply(msgspec.Struct):
    """A reply as it was received. Only the fields that are needed are checked."""

    batch_first_win_prob: Any = None
    batch_score: Any = None
    batch_steps: Any = None


def encode_request(asked: Sequence[tuple[Sequence[Message], Sequence[str]]], kind: Kind) -> bytes:
    """Return the bytes of a request about conversations and their candidates.

    Args:
        asked: each conversation with its candidates: two to compare, or any number to score.

    Raises:
        WireError: a text cannot be encoded as UTF-8.
    """
    if kind == "compare":
        request = FeedbackRequest(
            [_prompt(m) for m, _ in asked], [(first, second) for _, (first, second) in asked], []
        )
    else:
        request = FeedbackRequest(
            [_prompt(m) for m, texts in asked for _ in texts],
            [],
            [text for _, texts in asked for text in texts],
        )
    try:
        return msgspec.msgpack.encode(request)
    except UnicodeEncodeError as error:
        raise WireError(
            f"a text cannot be sent to a reward server: {error}; clean it before it is asked about"
        ) from None


def decode_request(body: bytes) -> FeedbackRequest:
    """Return the request that a body contains.

    Raises:
        WireError: the body is no request; it has both single responses and pairs, or neither; the number of
            prompts differs from the number of responses or pairs; a conversation has no messages; or one of
            its messages has no role and content as text, or a field that JSON could not hold.
    """
    try:
        request = msgspec.msgpack.decode(body, type=FeedbackRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise WireError(
            f"the body is no request ({error}); send a MessagePack map of batch_prompt, batch_candidates "
            "and batch_response"
        ) from None
    if bool(request.batch_candidates) == bool(request.batch_response):
        raise WireError(
            "either batch_candidates or batch_response must have entries, and the other one must be empty"
        )
    given = len(request.batch_candidates) or len(request.batch_response)
    if len(request.batch_prompt) != given:
        raise WireError(
            f"batch_prompt has {len(request.batch_prompt)} entries, and the responses are {given}; give "
            "one prompt for each"
        )
    if [] in request.batch_prompt:
        raise WireError("a conversation without messages; give at least one")
    for prompt in request.batch_prompt:
        for said in () if isinstance(prompt, str) else prompt:
            if not isinstance(said.get("role"), str) or not isinstance(said.get("content"), str):
                raise WireError("the body is no request: a message has no text as `role` or as `content`")
            if not _is_json(said):
                raise WireError("the body is no request: a message has a field that JSON could not hold")
    return request


def encode_reply(request: FeedbackRequest, scores: Sequence[float | None]) -> bytes:
    """Return the bytes of the reply to a request.

    Args:
        scores: the score of each of the request's `items`, or None. If the request has pairs, the reply has
            the preferences that follow from their scores (Bradley and Terry, 1952):
            p = sigmoid(first - second).
    """
    if request.batch_response:
        return msgspec.msgpack.encode(FeedbackReply([], list(scores)))
    half = len(scores) // 2
    return msgspec.msgpack.encode(
        FeedbackReply([_probability(*pair) for pair in zip(scores[:half], scores[half:], strict=True)], [])
    )


def decode_reply(body: bytes, kind: Kind, count: int) -> list[float | None]:
    """Return the values in a reply; None for a value that the server does not give.

    Raises:
        ValueError: the body is no reply, the reply does not have `count` values of this kind, or a value is
            not finite or not a probability.
    """
    return _values(_reply(body), kind, count)


def decode_steps(body: bytes, texts: Sequence[str]) -> tuple[list[float | None], list[Steps]]:
    """Return the scores in a reply about these responses, and the rewards of the steps of each response: ()
    for a response without a score or without steps. The score of a response with steps is their sum.

    Raises:
        ValueError: as `decode_reply`; or steps are no pairs of an end and a finite reward, with ascending
            ends within the response; or a score differs from the sum of the steps by more than rounding.
    """
    reply = _reply(body)
    values = _values(reply, "score", len(texts))
    if not reply.batch_steps:
        return values, [()] * len(texts)
    if not isinstance(reply.batch_steps, list):
        raise ValueError("batch_steps is no list")
    if len(reply.batch_steps) != len(texts):
        raise ValueError(f"batch_steps has {len(reply.batch_steps)} entries for {len(texts)}")
    steps: list[Steps] = []
    for place, (given, value, text) in enumerate(zip(reply.batch_steps, values, texts, strict=True)):
        try:
            own = () if value is None else plain_steps(given, len(text))
        except ValueError as error:
            raise ValueError(f"entry {place} of batch_steps {error}") from None
        if own and value is not None and not is_sum(value, own):
            raise ValueError(f"batch_score has {value}, and the steps of batch_steps sum to {sum_of(own)}")
        steps.append(own)
    return [sum_of(own) if own else value for value, own in zip(values, steps, strict=True)], steps


def _reply(body: bytes) -> _Reply:
    try:
        return msgspec.msgpack.decode(body, type=_Reply)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no map of batch_first_win_prob and batch_score ({error})") from None


def _values(reply: _Reply, kind: Kind, count: int) -> list[float | None]:
    name, given = (
        ("batch_score", reply.batch_score)
        if kind == "score"
        else ("batch_first_win_prob", reply.batch_first_win_prob)
    )
    try:
        values = msgspec.convert(given, list[float | None])
    except msgspec.ValidationError as error:
        raise ValueError(f"{name} is no list of numbers ({error})") from None
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} values for {count}")
    for value in values:
        if value is not None and (
            not math.isfinite(value) or (kind == "compare" and not 0.0 <= value <= 1.0)
        ):
            raise ValueError(f"{name} has the value {value}")
    return values


def _prompt(messages: Sequence[Message]) -> str | list[dict[str, Any]]:
    sent = [
        {name: value for name, value in message.plain.items() if name != "weight"} for message in messages
    ]
    is_text = len(sent) == 1 and messages[0].role == "user" and sent[0].keys() == {"role", "content"}
    return messages[0].content if is_text else sent


def _messages(prompt: str | list[dict[str, Any]]) -> tuple[Message, ...]:
    """Return the messages of a prompt. As in data, a field that is null counts as missing."""
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    return tuple(
        Message.of({name: value for name, value in said.items() if value is not None}) for said in prompt
    )


def _is_json(value: Any, depth: int = 0) -> bool:
    """Return True if a value of MessagePack is one of JSON, and not too deep to be rendered."""
    if depth > _MAX_DEPTH:
        return False
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(part, depth + 1) for name, part in value.items())
    if isinstance(value, list):
        return all(_is_json(part, depth + 1) for part in value)
    return value is None or isinstance(value, str | int | float)


def _probability(first: float | None, second: float | None) -> float | None:
    if first is None or second is None:
        return None
    x = first - second
    small = math.exp(-abs(x))
    return (1.0 if x >= 0 else small) / (1.0 + small)
