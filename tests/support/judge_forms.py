"""Forms in which gateways write the same reply, and the words for its end."""

import gzip
import json
import zlib
from typing import Any

from judge_shapes import ZERO, reply

FORMS: dict[str, tuple[Any, float]] = {
    "a number": (reply(0, [ZERO]), 0.8),
    "another number": (reply(1), 0.0),
    "a part with content": (reply([{"type": "text", "content": "0"}], [ZERO]), 0.8),
    "a part with a value": (
        reply([{"type": "text", "text": {"value": "0", "annotations": []}}], [ZERO]),
        0.8,
    ),
    "a part with a number": (reply([{"type": "text", "text": 0}]), 1.0),
    "parts": (reply({"parts": [{"text": "0"}], "role": "model"}, [ZERO]), 0.8),
    "a part with a null type": (reply([{"type": None, "text": "0"}], [ZERO]), 0.8),
    "a part of another case": (reply([{"type": "Text", "text": "0"}], [ZERO]), 0.8),
    "parts that are null": (reply([None, {"type": "text", "text": None}, {"text": "1"}]), 0.0),
    "a message that is a text": (
        {"choices": [{"index": 0, "message": "0", "finish_reason": "stop"}], "usage": None},
        1.0,
    ),
    "a list with a reply": ([reply("0", [ZERO])], 0.8),
    **{
        f"an end of the form {finish!r}": (reply("0", [ZERO], finish=finish), 0.8)
        for finish in (1, True, [], {}, {"type": "stop"}, "COMPLETE", "normal", "Stop.", "eos_found", "done")
    },
}
"""Replies, and the probability that the first response wins."""
ENDS = {
    "broken": (
        "content_filter",
        "SAFETY",
        "ERROR_TOXIC",
        "tool_calls",
        "insufficient_system_resource",
        "abort",
    ),
    "cut": ("length", "MAX_TOKENS", "model_context_window_exceeded", {"reason": "max_output_tokens"}),
}


def _chunk(text: str, finish: Any = None, tokens: Any = None, **more: Any) -> dict[str, Any]:
    logprobs = None if tokens is None else {"content": tokens}
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish, "logprobs": logprobs}
    return {"object": "chat.completion.chunk", "choices": [choice], **more}


def stream(*chunks: Any, end: str = "data: [DONE]\n\n") -> bytes:
    """Return the events of a stream."""
    return "".join([*(f"data: {json.dumps(each)}\n\n" for each in chunks), end]).encode()


_REPLY = reply("0", [ZERO])
_USAGE = {"choices": [], "usage": _REPLY["usage"]}
STREAMS: dict[str, bytes] = {
    "a whole reply": stream(_REPLY),
    "chunks": stream(_chunk(""), _chunk("0", None, [ZERO]), _chunk("", "stop"), _USAGE),
    "events": b"event: message\n" + stream(_chunk("0", "stop", [ZERO]), _USAGE).replace(b"\n", b"\r\n"),
    "no last mark": stream(_chunk("0", "stop", [ZERO]), _USAGE, end=""),
    "an event in several lines": stream(_REPLY).replace(b'"created"', b'\ndata: "created"'),
    "other ends of lines in a text": stream(_chunk("", reasoning="a\u2028b\x85c")).replace(
        b"\\u2028", "\u2028".encode()
    )
    + stream(_chunk("0", "stop", [ZERO]), _USAGE),
    "comments": b": ping\n\n" + stream(_chunk("0", None, [ZERO]), _chunk("", "stop"), _USAGE),
}
"""Streams of one reply, in which the first response wins with the probability 0.8."""


def codings(body: bytes) -> list[tuple[dict[str, str], bytes]]:
    """Return the headers and the bytes of a body that a proxy has compressed, or says so."""
    raw = zlib.compressobj(wbits=-15)
    return [
        ({}, body),
        ({"content-encoding": "gzip"}, gzip.compress(body)),
        ({"content-encoding": "deflate"}, zlib.compress(body)),
        ({"content-encoding": "Deflate"}, raw.compress(body) + raw.flush()),
        ({}, gzip.compress(body)),
        ({"content-encoding": "gzip"}, body),
        ({"content-encoding": "x-gzip, identity"}, gzip.compress(body[:9]) + gzip.compress(body[9:])),
        ({"content-encoding": "deflate, gzip"}, gzip.compress(zlib.compress(body))),
    ]
