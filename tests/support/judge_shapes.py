"""Replies of a judge in the forms of real endpoints, each with what has to be read in it."""

import math
from collections.abc import Mapping
from typing import Any

USAGE = {"prompt_tokens": 30, "completion_tokens": 2, "total_tokens": 32}
NONE = None
"""No verdict."""


def token(text: str, *others: tuple[str, float], p: float = 1.0, **fields: Any) -> dict[str, Any]:
    """Return a token of the form `content`, and its alternatives with their probabilities."""
    listed = [{"token": each, "logprob": math.log(q)} for each, q in ((text, p), *others)]
    return {"token": text, "logprob": math.log(p), "top_logprobs": listed, **fields}


def spelt(text: str, *others: tuple[str, float], p: float = 1.0) -> dict[str, Any]:
    """Return a token with bytes, as OpenAI and vLLM give it."""
    found = token(text, *others, p=p)
    for each in (found, *found["top_logprobs"]):
        each["bytes"] = list(each["token"].encode())
    return found


def reply(
    content: Any, tokens: Any = None, *, finish: Any = "stop", usage: Any = USAGE, **message: Any
) -> dict[str, Any]:
    """Return a chat completion.

    Args:
        tokens: the tokens of `logprobs.content`; a dict: all of `logprobs`; None: there are none.
    """
    logprobs = {"content": tokens} if isinstance(tokens, list) else tokens
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [{**choice, "finish_reason": finish, "logprobs": logprobs}],
        "usage": usage,
    }


def changed(body: Mapping[str, Any], **choice: Any) -> dict[str, Any]:
    """Return a reply with other fields of its choice."""
    return {**body, "choices": [{**body["choices"][0], **choice}]}


ZERO = token("0", ("1", 0.2), p=0.8)
ONE = token("1", ("0", 0.2), p=0.8)
OLD: dict[str, Any] = {"tokens": ["0"], "token_logprobs": [math.log(0.8)]}
SAFE = {"hate": {"filtered": False, "severity": "safe"}}


def thought(*pieces: str) -> list[dict[str, Any]]:
    """Return tokens of thoughts, in which both verdicts have some probability."""
    return [token(piece, ("0", 0.05), ("1", 0.05), p=0.8) for piece in pieces]


PROVIDERS: dict[str, tuple[dict[str, Any], float | None]] = {
    "openai": (
        reply("0", [spelt("0", ("1", 0.2), p=0.8)], refusal=None, annotations=[])
        | {"system_fingerprint": "f"},
        0.8,
    ),
    "openai without the sampled token among five": (
        reply("0", [{**ZERO, "top_logprobs": ZERO["top_logprobs"][1:]}]),
        0.8,
    ),
    "openai: very improbable": (
        reply(
            "0",
            [
                token("0")
                | {"top_logprobs": [{"token": "0", "logprob": 0.0}, {"token": "1", "logprob": -9999.0}]}
            ],
        ),
        1.0,
    ),
    "openai: refusal": (
        changed(
            reply(None, refusal="I cannot."),
            logprobs={"content": None, "refusal": [token("I"), token(" cannot")]},
        ),
        NONE,
    ),
    "openai: details of usage": (
        reply("1", usage={**USAGE, "completion_tokens_details": {"reasoning_tokens": 0}, "cost": None}),
        0.0,
    ),
    "azure": (
        changed(reply("1", [ONE]), content_filter_results=SAFE) | {"prompt_filter_results": [SAFE]},
        0.2,
    ),
    "azure: filtered": (
        changed(reply("0", [ZERO], finish="content_filter"), content_filter_results=SAFE),
        NONE,
    ),
    "azure: filtered before the first token": (reply("", finish="content_filter"), NONE),
    "anthropic": (reply("1", usage={**USAGE, "prompt_tokens_details": None}), 0.0),
    "anthropic: cut": (reply("1. The", finish="max_tokens"), NONE),
    "mistral: parts": (
        reply(
            [{"type": "thinking", "thinking": [{"type": "text", "text": "0"}]}, {"type": "text", "text": "1"}]
        ),
        0.0,
    ),
    "mistral: parts without an answer": (
        reply(
            [{"type": "thinking", "thinking": [{"type": "text", "text": "0"}], "closed": False}],
            finish="length",
        ),
        NONE,
    ),
    "mistral: cut": (reply("0 is", finish="model_length"), NONE),
    "magistral raw": (
        reply(
            "[THINK]1 seems good[/THINK]\n0",
            [*thought("[THINK]", "1", " seems", " good", "[/THINK]", "\n"), ZERO],
        ),
        0.8,
    ),
    "deepseek: reasoning apart": (
        changed(
            reply("0", reasoning_content="1 or 0?"),
            logprobs={"content": [ZERO], "reasoning_content": thought("1", " or", " 0?")},
        ),
        0.8,
    ),
    "deepseek: raw end of sentence": (
        reply("0<｜end▁of▁sentence｜>", [ZERO, token("<｜end▁of▁sentence｜>")]),
        0.8,
    ),
    "qwen: thoughts in the text, one token": (
        reply("<think>\n1?\n</think>\n\n0", [*thought("<think>", "\n1", "?\n", "</think>", "\n\n"), ZERO]),
        0.8,
    ),
    "qwen: thoughts in the text, end of three tokens": (
        reply("<think>1</think>0", [*thought("<think>", "1", "</", "think", ">"), ZERO]),
        0.8,
    ),
    "qwen: the template has opened the thoughts": (
        reply("1 is good</think>\n0", [*thought("1", " is", " good", "</think>", "\n"), ZERO]),
        0.8,
    ),
    "qwen: end of thoughts within a token": (
        reply("<think>1</think>0", [*thought("<think>", "1", "</think"), token(">0", (">1", 0.2), p=0.8)]),
        0.8,
    ),
    "qwen: no thoughts": (
        reply("<think>\n\n</think>\n\n1", [*thought("<think>", "\n\n", "</think>", "\n\n"), ONE]),
        0.2,
    ),
    "qwen: thoughts were cut": (reply("<think>\n1", thought("<think>", "\n", "1"), finish="length"), NONE),
    "qwen: thoughts were cut after a stop": (reply("<think>\n1", thought("<think>", "\n", "1")), NONE),
    "vllm: reasoning parser, all tokens": (
        reply(
            "1",
            [*thought("0", " first"), token("</"), token("think"), token(">"), ONE],
            reasoning_content="0 first",
        ),
        0.2,
    ),
    "vllm: reasoning parser, special tokens dropped": (
        reply("1", [*thought("First", " 0"), ONE], reasoning="First 0"),
        0.2,
    ),
    "vllm: reasoning parser without an answer": (
        reply(None, thought("1", "."), finish="length", reasoning_content="1."),
        NONE,
    ),
    "vllm: token ids": (reply("1", [token("token_id:16", ("token_id:15", 0.2), p=0.8)]), 0.0),
    "vllm: stop_reason and a service tier": (
        changed(reply("0", [ZERO]), stop_reason=None, token_ids=None)
        | {"service_tier": None, "kv_transfer_params": None},
        0.8,
    ),
    "vllm: end token": (reply("0", [ZERO, token("<|im_end|>")]), 0.8),
    "sglang": (
        changed(reply("0", [spelt("0", ("1", 0.15), (" 1", 0.05), p=0.8)]), matched_stop=151645)
        | {"metadata": {}},
        0.8,
    ),
    "sglang: raw vocabulary": (reply("0", [token("Ġ0", ("Ġ1", 0.1), ("1", 0.1), p=0.8)]), 0.8),
    "sglang: aborted": (reply("0", [ZERO], finish="abort"), NONE),
    "llama.cpp": (
        changed(reply("0", [spelt("0", ("1", 0.2), p=0.8) | {"id": 15}]))
        | {"timings": {"prompt_n": 3}, "usage": USAGE},
        0.8,
    ),
    "llama.cpp: thoughts in the tokens alone": (
        reply("0", [*thought("<think>", "1", "\n", "</think>", "\n\n"), ZERO], reasoning_content="1"),
        0.8,
    ),
    "llama.cpp: bytes of the vocabulary": (reply("0", [token("<0x30>", ("<0x31>", 0.2), p=0.8)]), 0.8),
    "llama.cpp: bytes of the vocabulary, and bytes": (
        reply(
            "0",
            [
                token("<0x30>", p=0.8, bytes=[48])
                | {
                    "top_logprobs": [
                        {"token": "<0x30>", "logprob": math.log(0.8), "bytes": [48]},
                        {"token": "<0x31>", "logprob": math.log(0.2), "bytes": [49]},
                    ]
                }
            ],
        ),
        0.8,
    ),
    "ollama: thoughts in a field of its own": (
        reply("0", [token("0", ("1", 0.45), p=0.55), *thought(" seems", ".\n\n"), ZERO], thinking="0 seems."),
        0.8,
    ),
    "openrouter: thoughts in details": (
        reply(
            "1",
            [token("1", ("0", 0.49), p=0.51), *thought(" is long", "\n"), ONE],
            reasoning_details=[{"type": "reasoning.text", "text": "1 is "}, {"text": "long"}],
        ),
        0.2,
    ),
    "mistral: thoughts in parts and in the tokens": (
        reply(
            [
                {"type": "thinking", "thinking": [{"type": "text", "text": "0 seems."}]},
                {"type": "text", "text": "0"},
            ],
            [token("0", ("1", 0.45), p=0.55), *thought(" seems", "."), ZERO],
        ),
        0.8,
    ),
    "thoughts in an unknown field": (
        reply("0", [token("0", ("1", 0.45), p=0.55), *thought(" seems", ".\n\n"), ZERO], musings="0 seems."),
        1.0,
    ),
    "thoughts that are told in short": (
        reply("1", [token("1", ("0", 0.49), p=0.51), *thought(" maybe", "\n"), ONE], reasoning="(summary)"),
        0.0,
    ),
    "tokens of thoughts alone, equal to the answer": (
        reply("0", [token("0", ("1", 0.45), p=0.55)], reasoning="0"),
        1.0,
    ),
    "tokens that end too early": (reply("0 is better", [token("0", ("1", 0.45), p=0.55)]), 1.0),
    "tokens of the prompt too": (reply("0", [*thought("<|im_start|>", "assistant\n"), ZERO]), 1.0),
    "a mark before the answer that ends no thoughts": (
        reply("0", [token("1", ("0", 0.45), p=0.55), token("<br>"), ZERO]),
        1.0,
    ),
    "ollama": (reply("0\n"), 1.0),
    "ollama: a list at the choice": (changed(reply("0"), logprobs=[ZERO]), 0.8),
    "together": (changed(reply("0"), logprobs=OLD), 1.0),
    "together: nothing else": (
        changed(reply("1"), logprobs={"tokens": ["1"], "token_logprobs": [None]}),
        0.0,
    ),
    "fireworks": (
        changed(
            reply("0"),
            logprobs={**OLD, "top_logprobs": [{"0": math.log(0.8), "1": math.log(0.2)}], "text_offset": [0]},
        ),
        0.8,
    ),
    "fireworks: lists of unequal length": (
        changed(reply("0"), logprobs={**OLD, "token_logprobs": [], "top_logprobs": [None, {}]}),
        1.0,
    ),
    "gemini": (reply("1\n", finish="STOP", usage={"prompt_tokens": 30, "total_tokens": 30}), 0.0),
    "gemini: cut": (reply("0: The", finish="MAX_TOKENS"), NONE),
    "gemini: thoughts are parts": (reply([{"text": "0", "thought": True}, {"text": "1"}]), 0.0),
    "gemini: no content at all": (
        {
            **reply(None),
            "choices": [{"index": 0, "finish_reason": "length", "message": {"role": "assistant"}}],
        },
        NONE,
    ),
    "openrouter": (
        changed(
            reply("0", [ZERO], reasoning="1?", reasoning_details=[{"type": "x"}]), native_finish_reason="stop"
        ),
        0.8,
    ),
    "openrouter: an error after the text": (changed(reply("1"), error=None), 0.0),
    "cohere: complete": (reply("0", finish="COMPLETE"), 1.0),
    "qianfan": (reply("0", finish="normal"), 1.0),
    "a reason to finish in an object": (reply("0", finish={"type": "stop"}), 1.0),
    "a reason to finish in an object, cut": (reply("0 is", finish={"type": "length"}), NONE),
    "a reason to finish that is a number": (reply("0", finish=3), 1.0),
    "an assistant's text": (reply([{"type": "text", "text": {"value": "0", "annotations": []}}]), 1.0),
    "a part with content": (reply([{"type": "text", "content": "1"}]), 0.0),
    "a gateway that reads the text as json": (reply(0), 1.0),
    "a gateway that reads the text as json, one": (reply(1, [ONE]), 0.2),
    "a gateway that reads the text as json, a decimal": (reply(0.5), NONE),
    "a gateway that reads the text as json, a list": (reply([1]), 0.0),
    "a gateway that reads the text as json, false": (reply(False), NONE),
    "groq": (reply("0") | {"x_groq": {"id": "r"}, "usage": {**USAGE, "queue_time": 0.1}}, 1.0),
    "tgi": (reply("0", [ZERO, token("</s>")], finish="eos_token"), 0.8),
    "gpt-oss: raw channels": (
        reply(
            "<|channel|>analysis<|message|>1<|end|><|start|>assistant<|channel|>final<|message|>0<|return|>"
        ),
        1.0,
    ),
    "gpt-oss: channels in the tokens alone": (
        reply(
            "0",
            [
                *thought(
                    "<|channel|>",
                    "analysis",
                    "<|message|>",
                    "1",
                    "<|end|>",
                    "<|start|>",
                    "assistant",
                    "<|channel|>",
                ),
                *thought("final", "<|message|>"),
                ZERO,
                token("<|return|>"),
            ],
            reasoning="1",
        ),
        0.8,
    ),
    "gpt-oss: special tokens dropped": (
        reply("0", [*thought("analysis", "We", " need", "assistant", "final"), ZERO], reasoning="We need"),
        1.0,
    ),
    "gpt-oss: no final channel": (reply("<|channel|>analysis<|message|>1", finish="length"), NONE),
    "gpt-oss: channels without their marks": (reply("analysis1assistantfinal0"), NONE),
    "kimi": (reply("◁think▷1◁/think▷0"), 1.0),
    "cohere": (reply("<|START_THINKING|>1<|END_THINKING|>0"), 1.0),
    "seed": (reply("<seed:think>1</seed:think>0"), 1.0),
    "thoughts of another name": (reply("1 is good</deliberation>0"), NONE),
    "two thoughts": (reply("<think>0</think><think>0</think>1"), 0.0),
    "thoughts after the answer": (reply("0<think>or 1"), NONE),
    "two choices": (
        {
            **reply("0"),
            "choices": [{**reply("1")["choices"][0], "index": 1}, reply("0", [ZERO])["choices"][0]],
        },
        0.8,
    ),
}
"""Replies to `mode: compare`, by endpoint, each with the probability that "0" wins."""
