"""Errors of real services."""

import json
from typing import Any

OF_ALL: dict[str, tuple[int, Any]] = {
    "openai: quota": (
        429,
        {
            "error": {
                "message": "You exceeded ...",
                "type": "insufficient_quota",
                "code": "insufficient_quota",
            }
        },
    ),
    "openai: key": (401, {"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}}),
    "openai: model": (404, {"error": {"message": "The model `m` does not exist", "code": "model_not_found"}}),
    "openai: not logprobs": (403, {"error": {"message": "You are not allowed to request logprobs"}}),
    "openrouter": (402, {"error": {"code": 402, "message": "Insufficient credits"}}),
    "deepseek": (402, {"error": {"message": "Insufficient Balance", "type": "unknown_error"}}),
    "together": (402, {"error": {"message": "Credit limit exceeded", "type": "credit_limit"}}),
    "fireworks": (412, {"error": {"message": "Account is suspended"}}),
    "dashscope": (
        400,
        {"code": "Arrearage", "message": "Access denied, please make sure your account is in good standing."},
    ),
    "moonshot": (
        429,
        {"error": {"type": "exceeded_current_quota_error", "message": "suspended, please check your plan"}},
    ),
    "siliconflow": (403, {"code": 30001, "message": "Sorry, your account balance is insufficient"}),
    "groq": (
        400,
        {"error": {"message": "Organization has reached its spend limit", "code": "blocked_api_access"}},
    ),
    "a proxy": (407, "<html>proxy authentication</html>"),
    "a moved route": (301, ""),
    "gemini: key": (
        400,
        [
            {
                "error": {
                    "code": 400,
                    "message": "API key expired. Please renew the API key.",
                    "status": "INVALID_ARGUMENT",
                    "details": [{"reason": "API_KEY_INVALID"}],
                }
            }
        ],
    ),
    "groq: model": (400, {"error": {"message": "It is gone.", "code": "model_decommissioned"}}),
    "hugging face: model": (400, {"error": {"message": "It is not there.", "code": "model_not_supported"}}),
    "vllm: model": (404, {"object": "error", "message": "The model `m` does not exist.", "code": 404}),
}
"""Errors that every further question would meet, and whose status or code says so: status and body."""

OF_ALL_IN_WORDS: dict[str, tuple[int, Any]] = {
    "anthropic": (
        400,
        {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "Your credit balance is too low to access the API",
            },
        },
    ),
    "deepseek: model": (400, {"error": {"message": "Model Not Exist", "type": "invalid_request_error"}}),
    "a plain text": (400, "Insufficient credits"),
    "anthropic: disabled": (
        400,
        {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "This organization has been disabled."},
        },
    ),
    "a limit of use": (400, {"error": {"message": "You have reached your specified API usage limits."}}),
    "a reward server": (422, {"detail": [{"loc": ["body", "model"], "msg": "unknown model"}]}),
    "nothing": (400, ""),
    "a region": (451, "not in your region"),
    "a list": (403, ["for your safety this key was disabled"]),
    "an error within a reply, in words": (200, {"error": {"message": "Insufficient credits"}}),
}
"""Errors that every further question would meet, and that only words tell from those of one question."""

OF_ONE: dict[str, tuple[int, Any]] = {
    "openai: context": (
        400,
        {
            "error": {
                "message": "This model's maximum context length is 4096 tokens",
                "code": "context_length_exceeded",
            }
        },
    ),
    "openai: rate": (
        429,
        {"error": {"message": "Rate limit reached", "type": "requests", "code": "rate_limit_exceeded"}},
    ),
    "gemini: per minute": (
        429,
        [
            {
                "error": {
                    "code": 429,
                    "message": "You exceeded your current quota, please check your plan and billing details.",
                    "status": "RESOURCE_EXHAUSTED",
                }
            }
        ],
    ),
    "azure: filter": (
        400,
        {"error": {"code": "content_filter", "message": "The response was filtered", "innererror": {}}},
    ),
    "openrouter: moderation": (
        403,
        {"error": {"code": 403, "message": "Input was flagged", "metadata": {"reasons": ["violence"]}}},
    ),
    "pydantic": (
        422,
        {
            "detail": [
                {"loc": ["body", "messages"], "msg": "field required", "input": {"x": "insufficient credits"}}
            ]
        },
    ),
    "the question's own words": (
        400,
        {"error": {"message": "Invalid input: 'no credits left? my payment, billing, invalid api key'"}},
    ),
    "a model in the question's words": (422, {"detail": "rejected: 'the model m does not exist'"}),
    "tgi": (424, {"error": "Request failed during generation", "error_type": "generation"}),
    "too large": (413, ""),
    "a legal reason": (451, ""),
    "overloaded": (503, {"error": {"message": "billing service overloaded"}}),
    "an error of the server": (500, {"error": {"message": "Insufficient memory"}}),
    "no JSON": (400, "\x00\xff" * 9),
    "odd JSON": (400, [1, None]),
    "a null": (400, None),
}
"""Errors of one question, or of a moment."""


def body(said: Any) -> bytes:
    """Return the body of an error: a text, or a value as JSON."""
    return said.encode() if isinstance(said, str) else json.dumps(said).encode()
