"""A judge behind OpenAI's chat completions, on 127.0.0.1: a real HTTP server (faulty_server.py) whose
verdicts a test writes."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from faulty_server import Asked, FaultyServer, Reply, serving

Says = str | Mapping[str, float]
"""What the model says: a text, or the probabilities of first tokens."""


@dataclass(frozen=True)
class Shown:
    """A request to the judge.

    Attributes:
        number: requests before it.
        body: all of it.
        material: the JSON object that it is shown.
    """

    number: int
    body: dict[str, Any]
    material: dict[str, Any]

    @property
    def text(self) -> str:
        """Every message, joined."""
        return "\n".join(message["content"] for message in self.body["messages"])


@dataclass
class Model:
    """Answers every request; what it took is its words.

    Attributes:
        says: of a request what the model says, or a whole reply with a fault.
        has_logprobs: gives log-probabilities; None refuses a request for them.
        has_usage: says what a request took.
        shown: every request so far.
        tokens: prompt and completion tokens of all replies with a verdict.
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
    """The body of a chat completion that says the most probable of some first tokens."""
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
    """The first JSON object in a text, and nothing else in it begins one."""
    found: dict[str, Any] = json.JSONDecoder().raw_decode(text, text.index('{"conversation"'))[0]
    return found


def counts(letter: str, sharpness: float = 1.0) -> Callable[[Shown], Says]:
    """Prefers, or scores, responses by how often they have a letter."""

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
    """A server that ends with the test, the model behind it, and the URL for `oracle.url`."""
    model = Model(says, **settings)
    with serving(model) as server:
        yield server, model, f"{server.url}/v1"
