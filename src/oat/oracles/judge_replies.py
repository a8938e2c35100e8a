"""Reads a chat completion: the answer without thoughts, the tokens with their log-probabilities, and the
number of tokens that it took.

Servers differ in what they send. A field that is not needed never makes a reply unusable: a field of an
unknown form counts as missing. A text may be a string, a number (a gateway has read it as JSON), or a list of
parts. An unknown `finish_reason` is a normal end. The forms of the log-probabilities are those of chat
completions (`content`, a list of tokens with `top_logprobs`) and of the older completions (`tokens`,
`token_logprobs`, `top_logprobs`).

**Thoughts are no answer.** Of the message, only the text is read, not fields such as `reasoning_content`, and
no parts such as `thinking`. The thoughts in a text end with the last mark of an end, such as `</think>` or
`<|channel|>final<|message|>`. A text whose thoughts have no end has no answer. A text has none either if it
contains a control token or the end of an element that does not begin in it: it may end thoughts.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from oat.oracles.judge_streams import is_stream, joined
from oat.oracles.refusals import ErrorInReply, error_in

_DECODER = json.JSONDecoder(parse_int=float)
_MOST_TOKENS = 2.0**31
_MOST_SHOWN = 1000
_TAIL = 400
_SURE = 0.05
"""A token's log-probability, and the probabilities of a token and its alternatives together minus 1, are at
most this number. They may be above 0 by rounding. Larger numbers are no log-probabilities."""
_UNKNOWN = -1000.0
"""A log-probability below this is no number of a sampled token, but stands for "not known": OpenAI sends
-9999."""

_BROKEN = re.compile(
    r"filter|safety|sensitive|error|fail|cancel|abort|block|prohibit|recitation|spii|refus|moderat|flagged|"
    r"violat|interrupt|incomplete|tool|function|insufficient|time_?(?:out|limit)|overload|disconnect|language",
    re.IGNORECASE,
)
_CUT = re.compile(r"length|max|limit|truncat|context|budget", re.IGNORECASE)
_DEEPEST = 3
"""Largest depth of the parts of a text."""

_NAMES = r"(?:seed:)?(?:ant)?(?:think(?:ing)?|thoughts?|reason(?:ing)?|reflect(?:ion)?|analysis|scratchpad)"
_END_OF_THOUGHTS = re.compile(
    rf"</\s*{_NAMES}\s*>|\[/{_NAMES}\]|◁/{_NAMES}▷|<\|/{_NAMES}\|>|<\|?end_?(?:of_?)?{_NAMES}\|?>|<unused95>"
    r"|<\|channel\|>\s*final\b[^<>]{0,40}(?:<\|constrain\|>[^<>]{0,40})?<\|message\|>",
    re.IGNORECASE,
)
_BEGIN_OF_THOUGHTS = re.compile(
    rf"<\|?{_NAMES}\b[^<>]{{0,100}}>|\[{_NAMES}\]|◁{_NAMES}▷|<\|?(?:start|begin)_?(?:of_?)?{_NAMES}\|?>",
    re.IGNORECASE,
)
_CONTROL = r"<\|[^|<>\s]{1,60}\|>|<｜[^｜<>\s]{1,60}｜>|<unused\d{1,4}>"
_CONTROL_TOKEN = re.compile(_CONTROL)
_FIRST_TOKENS = re.compile(rf"(?:\s|{_CONTROL}|<s>|<bos>)+")
_LAST_TOKENS = re.compile(rf"(?:\s|{_CONTROL}|</s>|<eos>|<end_of_turn>|\[EOS\])+\Z")
_ELEMENT = re.compile(r"<(/?)([A-Za-z][\w:.-]{0,40})(?:\s[^<>]{0,200})?>")
_ENDS_THOUGHTS = re.compile(rf"(?:{_END_OF_THOUGHTS.pattern})\Z", re.IGNORECASE)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_RAW_BLANKS = re.compile("[Ġ▁Ċ]+")
"""How vocabularies write blanks at the beginning of a token. Some servers give tokens as they are there."""


@dataclass(frozen=True)
class Token:
    """A token of a reply.

    Attributes:
        piece: its bytes.
        logps: log-probabilities, in nats, of this token and of its alternatives, by their bytes. It is empty
            if they are not known, or if the token's own is not.
    """

    piece: bytes
    logps: Mapping[bytes, float]


@dataclass(frozen=True)
class ChatCompletion:
    """A chat completion.

    Attributes:
        answer: the text without thoughts, and without blanks and control tokens at its ends.
        end: "whole"; "cut", if the largest number of tokens ended the reply; "broken", if something else did,
            such as a filter.
        finish: why the reply has ended, in the endpoint's words; "" if it does not say so.
        tokens: the tokens with their log-probabilities; None if the endpoint gives none.
        start: number of bytes of the tokens before the answer; None if it is not certain where the tokens
            have the answer.
        said: the beginning of the text, for messages; if there is no text, that of the refusal.
        prompt_tokens, completion_tokens: what the reply says that it took; None if it does not say so.
        total_tokens: what it says that both took together; 0 if it does not say so. It may be more than their
            sum: some services bill thoughts that they do not count in `completion_tokens`.
    """

    answer: str
    end: Literal["whole", "cut", "broken"] = "whole"
    finish: str = ""
    tokens: tuple[Token, ...] | None = None
    start: int | None = None
    said: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int = 0


def read_completion(body: bytes, most_tokens: float = math.inf) -> ChatCompletion:
    """Read the first choice of a chat completion, and its usage.

    Args:
        most_tokens: the largest number of tokens that was asked for. A reply of so many that does not say why
            it has ended counts as cut.

    Raises:
        ErrorInReply: the body is an error with the status of a service.
        ValueError: the body is no chat completion, or the service broke off behind the beginning of a text,
            which may have been billed.
    """
    found = _json(body)
    choice = _first_choice(found)
    message, finish = choice.get("message"), _reason(choice.get("finish_reason"))
    end = _end(finish)
    if isinstance(message, str | list) and message:
        message = {"content": message}
    text = _text(message.get("content")) if isinstance(message, dict) else ""
    if not (text and finish and end == "whole"):
        error = error_in(choice) or error_in(message) or error_in(found, is_bare=not choice)
        if error is not None and text and (error[0] == 429 or error[0] >= 500):
            raise ValueError(f"it broke off with an error: {error[1]}")
        if error is not None:
            raise ErrorInReply(*error)
    if not isinstance(message, dict):
        raise ValueError("no chat completion: it has no choice with a message")
    said = (text.strip() or _text(message.get("refusal")).strip())[:_MOST_SHOWN]
    answer, thoughts, tokens = answer_in(text), _thoughts(message), _tokens(choice.get("logprobs"))
    asked, taken, both = _usage(found.get("usage"), is_empty=not said and not thoughts)
    if not finish and max(taken or 0, len(tokens or ())) >= most_tokens:
        end = "cut"
    place = _place(text, answer, tokens or (), thoughts)
    return ChatCompletion(answer, end, finish, tokens, place, said, asked, taken, both)


def answer_in(text: str) -> str:
    """Return the answer in a text: what comes after the thoughts, without blanks and control tokens at its
    ends. Return "" if the thoughts have no end, or if something else may end them."""
    text = _without_last_tokens(text)
    for end in _END_OF_THOUGHTS.finditer(text):
        answer_at = end.end()
    if _END_OF_THOUGHTS.search(text):
        text = text[answer_at:]
    if _BEGIN_OF_THOUGHTS.search(text):
        return ""
    first = _FIRST_TOKENS.match(text)
    text = text[first.end() :] if first and not re.search(r"<\|channel\|>", first[0]) else text
    return "" if _CONTROL_TOKEN.search(text) or _ends_an_element(text) else text.strip()


def _json(body: bytes) -> Any:
    """Read JSON. A mark of the byte order, the comments of a server that keeps the connection open, and what
    follows the first value are skipped. A stream is joined (judge_streams.py). NaN, infinite numbers and lone
    surrogates are allowed."""
    text = body.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    while text.startswith(":"):
        text = text.partition("\n")[2].lstrip()
    try:
        if is_stream(text):
            return joined(text, _DECODER.raw_decode)
        found = _DECODER.raw_decode(text)[0]
        return found[0] if isinstance(found, list) and len(found) == 1 else found
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def _first_choice(found: Any) -> dict[str, Any]:
    """Return the choice with the index 0, or else the first; {} if there is none."""
    choices = found.get("choices") if isinstance(found, dict) else None
    sound = [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
    return next((each for each in sound if each.get("index") == 0), sound[0] if sound else {})


def _text(content: Any, depth: int = 0) -> str:
    """Return the text of a message: a string, a number, or parts that are no thoughts."""
    if isinstance(content, str):
        return content
    if isinstance(content, float) and math.isfinite(content):
        return str(int(content) if content.is_integer() else content)
    if isinstance(content, list) and depth < _DEEPEST:
        return "".join(_text(part, depth + 1) for part in content)
    if isinstance(content, dict) and depth < _DEEPEST and not content.get("thought"):
        kind = content.get("type")
        is_text = not isinstance(kind, str) or kind.casefold() in ("", "text", "output_text", "message")
        inner = (content.get(name) for name in ("text", "content", "value", "parts")) if is_text else ()
        return _text(next((each for each in inner if each is not None), ""), depth + 1)
    return ""


def _reason(finish: Any) -> str:
    """Return the reason of an end in words; "" if it has another form."""
    if isinstance(finish, dict):
        finish = next((finish[name] for name in ("reason", "type", "name") if name in finish), "")
    return finish if isinstance(finish, str) else ""


def _end(finish: str) -> Literal["whole", "cut", "broken"]:
    return "broken" if _BROKEN.search(finish) else "cut" if _CUT.search(finish) else "whole"


def _usage(usage: Any, *, is_empty: bool) -> tuple[int | None, int | None, int]:
    """Return `ChatCompletion.prompt_tokens`, `completion_tokens` and `total_tokens`.

    No prompt has 0 tokens, and no reply with a text or thoughts: some gateways state 0 and do not count.
    Thoughts that are more than `completion_tokens` are not counted there (Perplexity), so they are added.

    Args:
        is_empty: the reply has neither text nor thoughts.
    """
    stated = usage if isinstance(usage, dict) else {}
    details = stated.get("completion_tokens_details")
    thoughts = max(
        _count(each.get("reasoning_tokens")) or 0 for each in (stated, details) if isinstance(each, dict)
    )
    prompt, completion, total = (
        _count(stated.get(f"{name}_tokens")) for name in ("prompt", "completion", "total")
    )
    if completion is not None and thoughts > completion:
        completion += thoughts
    return prompt or None, completion if completion or is_empty else None, total or 0


def _count(value: Any) -> int | None:
    """Return a number of tokens; None if the value is no whole number from 0 to 2^31. All numbers of a reply
    are read as floats."""
    is_count = isinstance(value, float) and 0 <= value < _MOST_TOKENS and value.is_integer()
    return int(value) if is_count else None


def _tokens(logprobs: Any) -> tuple[Token, ...] | None:
    entries: Sequence[Any] = ()
    if isinstance(logprobs, list):
        entries = logprobs
    elif isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
        entries = logprobs["content"]
    elif isinstance(logprobs, dict) and isinstance(logprobs.get("tokens"), list):
        own, others = (
            found if isinstance(found := logprobs.get(name), list) else []
            for name in ("token_logprobs", "top_logprobs")
        )
        count = len(logprobs["tokens"])
        entries = [
            {"token": token, "logprob": logp, "top_logprobs": top}
            for token, logp, top in zip_longest(logprobs["tokens"], own[:count], others[:count])
        ]
    return tuple(map(_token, entries)) or None


def _token(entry: Any) -> Token:
    piece = _piece(entry)
    if piece is None:
        return Token(b"\xff", {})  # no text has this byte, so nothing is read beyond it
    logps: dict[bytes, float] = {}
    top = entry.get("top_logprobs")
    if isinstance(top, dict):
        top = [{"token": token, "logprob": logp} for token, logp in top.items()]
    for each in top if isinstance(top, list) else ():
        other, logp = _piece(each), _logp(each)
        if other is not None and logp is not None:
            logps[other] = max(logp, logps.get(other, -math.inf))
    own = _logp(entry)
    if piece not in logps and own is not None and own > _UNKNOWN:
        logps[piece] = own
    is_sound = piece in logps and all(logp <= _SURE for logp in logps.values())
    is_sound = is_sound and math.fsum(map(math.exp, logps.values())) <= 1 + _SURE
    return Token(piece, logps if is_sound else {})


def _piece(entry: Any) -> bytes | None:
    """Return the bytes of a token; None if the entry has no token, or if its bytes are not those of its
    text."""
    text = entry.get("token") if isinstance(entry, dict) else None
    if not isinstance(text, str):
        return None
    given = entry.get("bytes")
    if isinstance(given, list) and all(isinstance(b, float) and b in range(256) for b in given):
        piece = bytes(map(int, given))
        whole = piece.decode("utf-8", "replace")
        # servers write a part of a character, a single byte, and what is not ASCII, in their own ways
        is_byte = bool(_BYTE_TOKEN.fullmatch(text)) and piece == bytes.fromhex(text[3:5])
        is_same = whole in (text, _spaced(text)) or is_byte or "\ufffd" in whole or not text.isascii()
        return piece if is_same else None
    if single := _BYTE_TOKEN.fullmatch(text):
        return bytes.fromhex(single[1])
    return _spaced(text).encode("utf-8", "surrogatepass")


def _spaced(text: str) -> str:
    """Return the text of a token with its first blanks as blanks."""
    raw = _RAW_BLANKS.match(text)
    return text if raw is None else re.sub("[Ġ▁]", " ", raw[0]).replace("Ċ", "\n") + text[raw.end() :]


def _logp(entry: Any) -> float | None:
    value = entry.get("logprob") if isinstance(entry, dict) else None
    return value if isinstance(value, float) and not math.isnan(value) else None


def _thoughts(message: Mapping[str, Any]) -> set[str]:
    """Return what the fields and the parts of a message have of thoughts, without blanks at the ends."""
    content, details = (
        [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
        for found in (message.get("content"), message.get("reasoning_details"))
    )
    texts = [_text(message.get(name)) for name in ("reasoning_content", "reasoning", "thinking")]
    texts.append("".join(_text(each.get("thinking")) for each in content))
    texts.append("".join(_text(each.get("text")) for each in content if each.get("thought")))
    texts.append("".join(_text(each.get("text")) for each in details))
    return {text.strip() for text in texts} - {""}


def _place(text: str, answer: str, tokens: Sequence[Token], thoughts: set[str]) -> int | None:
    """Return `ChatCompletion.start`.

    The tokens must be those of the text. Or they must end with the answer, and what comes before must be
    nothing, the thoughts that the server took apart, or something that ends with the mark of their end.
    """
    joined, sought = b"".join(token.piece for token in tokens), answer.encode("utf-8", "surrogatepass")
    if not answer or not joined:
        return None
    last = _LAST_TOKENS.search(joined[-_TAIL:].decode("utf-8", "replace"))
    for rest in (joined.rstrip(), joined[: -len(last[0].encode())] if last else joined):
        before = rest[: -len(sought)].decode("utf-8", "replace").strip()
        is_text = not before or rest.strip() == text.strip().encode("utf-8", "surrogatepass")
        is_apart = before in thoughts or _ENDS_THOUGHTS.search(before[-_TAIL:])
        if rest.endswith(sought) and ((is_text and answer not in thoughts) or is_apart):
            return len(rest) - len(sought)
    return None


def _without_last_tokens(text: str) -> str:
    last = _LAST_TOKENS.search(text, max(0, len(text) - _TAIL))
    return text[: last.start()] if last else text


def _ends_an_element(text: str) -> bool:
    """Return True if the text has the end of an element that does not begin in it, such as `</b>`."""
    begun = set[str]()
    for slash, name in _ELEMENT.findall(text):
        if slash and name not in begun:
            return True
        begun.add(name)
    return False
