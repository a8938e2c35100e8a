"""A judge with the interface of OpenAI's chat completions, on 127.0.0.1. It is an HTTP server
(faulty_server.py), and a test chooses its verdicts."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from faulty_server import Asked, FaultyServer, Reply, serving

Says = str | Mapping[str, float]
"""The model's output: a text, or the probabilities of first tokens."""


@dataclass(frozen=True)
class Shown:
    """A request to the judge.

    Attributes:
        number: number of requests before it.
        body: the body of the request.
        material: the JSON object that the judge is shown.
    """

    number: int
    body: dict[str, Any]
    material: dict[str, Any]

    @property
    def text(self) -> str:
        """Return all messages, joined."""
        return "\n".join(message["content"] for message in self.body["messages"])


@dataclass
class Model:
    """A judge model that answers every request. It counts words as tokens.

    Attributes:
        says: maps a request to the model's output, or to a complete reply with a fault.
        has_logprobs: the reply has log-probabilities; None: a request for them is refused.
        has_usage: the reply states the tokens of the request.
        shown: every request so far.
        tokens: prompt tokens and completion tokens of each reply with a verdict.
    """

    says: Callable[[Shown], Says | Reply]
    has_logprobs: bool | None = True
    has_usage: bool = True
    shown: list[Shown] = field(default_factory=list)
    tokens: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, asked: Asked) -> Reply:
        assert asked.path == "/v1/chat/completions", asked.path
        body = json.loads(asked.body)
        shown = Shown(asked.number, body, material(body["messages"][-1]["content"]))
        self.shown.append(shown)
        if self.has_logprobs is None and "logprobs" in body:
            return Reply(b'{"error": {"message": "logprobs are not supported"}}', status=400)
        said = self.says(shown)
        if isinstance(said, Reply):
            return said
        probabilities = {said: 1.0} if isinstance(said, str) else dict(said)
        usage = (len(re.findall(r"\w+", shown.text)), 1)
        self.tokens.append(usage)
        return Reply(
            completion(
                probabilities,
                usage if self.has_usage else None,
                has_logprobs=bool(self.has_logprobs and "logprobs" in body),
            )
        )


def completion(
    probabilities: Mapping[str, float], usage: tuple[int, int] | None = None, *, has_logprobs: bool = True
) -> bytes:
    """Return the body of a chat completion whose output is the most probable of some first tokens."""
    alternatives = [
        {"token": token, "logprob": math.log(p), "bytes": list(token.encode())}
        for token, p in probabilities.items()
    ]
    first = max(alternatives, key=lambda each: each["logprob"])
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": first["token"]},
        "finish_reason": "stop",
        "logprobs": None,
    }
    if has_logprobs:
        choice["logprobs"] = {"content": [{**first, "top_logprobs": alternatives}]}
    body: dict[str, Any] = {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [choice],
    }
    if usage is not None:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    return json.dumps(body).encode()


def material(text: str) -> dict[str, Any]:
    """Return the JSON object of the material in a text."""
    found: dict[str, Any] = json.JSONDecoder().raw_decode(text, text.index('{"conversation"'))[0]
    return found


def counts(letter: str, sharpness: float = 1.0) -> Callable[[Shown], Says]:
    """Return a judge that prefers or scores responses by the number of times that they contain a letter."""

    def says(shown: Shown) -> Says:
        found = shown.material
        if "response" in found:
            return str(min(9, found["response"].count(letter)))
        first, second = (found["responses"][name].count(letter) for name in ("0", "1"))
        p = 1 / (1 + math.exp(sharpness * (second - first)))
        return {"0": p, "1": 1 - p}

    return says


@contextmanager
def judging(
    says: Callable[[Shown], Says | Reply], **settings: Any
) -> Iterator[tuple[FaultyServer, Model, str]]:
    """Yield a server, the model behind it, and the URL for `oracle.url`. The server stops at the end."""
    model = Model(says, **settings)
    with serving(model) as server:
        yield server, model, f"{server.url}/v1"
