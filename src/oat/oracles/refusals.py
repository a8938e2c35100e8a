"""Says what an error of a service is about: one question, or every question; and how long it asks to wait.

Services agree on few things here. The status and the error's code are read. Its message is no evidence: it
may repeat the text of a question. Whom a refusal concerns that status and code do not explain, the oracle
`judge` finds out by a question of its own (judge_calls.py).
"""

import email.utils
import json
import re
import time
from datetime import UTC
from typing import Any

_OF_ONE = (400, 413, 422, 424, 451)
"""Statuses of refusals that may concern one question, unless the code says otherwise. 424: a server of
Hugging Face could not generate the text."""
_MOST_PARSED, _MOST_READ = 100_000, 2000

_CODES_OF_ALL = re.compile(
    r"insufficient_?(?:quota|balance|credit|funds)|exceeded_current_quota|billing|arrear|"
    r"api_?key_?(?:invalid|expired)|(?:invalid|incorrect|expired)_?api_?key|blocked_api_access|"
    r"model_?(?:not_?(?:found|exist|supported)|decommissioned)",
    re.IGNORECASE,
)
"""Codes for: the credit is used up, or the key or the model does not exist."""
_CODES_OF_ONE = re.compile(
    r"content_?(?:filter|polic|management)|moderation|flagged|\breasons\b|data_?inspection|"
    r"context_?(?:length|window)|string_above_max|(?:prompt|input|request|content)_?too_?(?:long|large)",
    re.IGNORECASE,
)
"""Codes for: the text was stopped by a filter, or is too long."""
_CREDIT = re.compile(r"insufficient|credit|balance|quota|余额不足|欠费", re.IGNORECASE)
_SPENT_CODES = re.compile(
    r"\b(?:insufficient_?(?:quota|balance|credits?|funds)|exceeded_current_quota|billing|1113$)",
    re.IGNORECASE,
)
"""Codes with which 429 means that the credit is used up (1113: Zhipu's), not that the requests come too fast.
Messages do not tell the two apart: Gemini's name the quota and billing for a limit per minute."""
_FLAGGED = re.compile(r"moderat|flagged|content[_ ]?(?:filter|polic|management)|safety", re.IGNORECASE)
_LOGPROBS = re.compile(r"log[\s_-]?prob|top_n_tokens", re.IGNORECASE)
"""`top_n_tokens`: the name of `top_logprobs` within a server of Hugging Face (TGI)."""


class ErrorInReply(ValueError):
    """A reply with the status 200 that is an error.

    Attributes:
        status: the status that the error names.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def concerns_all(status: int, reply: bytes, *, has_rest: bool = False) -> bool:
    """Return True if every further question would meet this error as well.

    Args:
        status: a status outside 2xx.
        has_rest: the reply has `Retry-After`, so the error passes.
    """
    code, message = _said(reply)
    if status == 429:
        return not has_rest and bool(_SPENT_CODES.search(code))
    if status in (408, 409, 425) or status >= 500:
        return False
    if status in _OF_ONE:
        return bool(_CODES_OF_ALL.search(code))
    return status != 403 or not _FLAGGED.search(f"{code} {message}")


def concerns_one(status: int, reply: bytes) -> bool:
    """Return True if this error is certainly about one question: it is too long, or a filter stopped it."""
    return status == 413 or (status in (400, 403, 422) and bool(_CODES_OF_ONE.search(_said(reply)[0])))


def names_logprobs(reply: bytes) -> bool:
    """Return True if an error names log-probabilities."""
    return bool(_LOGPROBS.search(reply[:_MOST_PARSED].decode("utf-8", "replace")))


def fewer_alternatives(said: str, asked: int) -> int:
    """Return how many alternatives of a token to ask for after an error that names log-probabilities: the
    greatest number below `asked` that it names, or else 5; 0 if that is no fewer.

    Args:
        said: what the error says.
        asked: the number that was asked for.
    """
    named = (int(number) for number in re.findall(r"(?<![\w.-])\d{1,2}(?!\w|\.\d)", said))
    return max((number for number in named if 1 < number < asked), default=5 if asked > 5 else 0)


def error_in(found: Any, *, is_bare: bool = False) -> tuple[int, str] | None:
    """Return the status and the message of an error inside a reply with the status 200, such as
    {"error": {"code": 402, "message": "..."}}. Return None if there is no error. An error without the number
    of a status counts as 500. It counts as 402 if its code says that the credit is used up, and as 400 if its
    code names another error of all questions, or its message may name the credit.

    Args:
        is_bare: `found` has no reply, so it is an error itself if it has a message, such as
            {"code": "InvalidApiKey", "message": "..."}.
    """
    if not isinstance(found, dict):
        return None
    error = found.get("error")
    if not error and (is_bare or found.get("object") == "error"):
        inner = found.get("base_resp")
        error = inner if isinstance(inner, dict) else found
        error = error if _code_and_message(error)[1] else None
    if not error:
        return None
    code, message = _code_and_message(error)
    number = re.match(r"([45]\d\d)(?:\.0)?\b", code)
    if number:
        status = int(number[1])
    else:
        is_of_all = _CODES_OF_ALL.search(code) or _CREDIT.search(message)
        status = 402 if _SPENT_CODES.search(code) else 400 if is_of_all else 500
    return status, message or code or "an error"


def retry_after_s(value: str) -> float:
    """Return the seconds that a `Retry-After` asks for, as a number or as a date; 0 if it is neither."""
    if re.fullmatch(r"\s*(?:[0-9]+\.?[0-9]*|\.[0-9]+)\s*", value):
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
        return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _said(reply: bytes) -> tuple[str, str]:
    """Return the codes and the message of an error; if the reply is no JSON, its beginning is the message."""
    text = reply[:_MOST_PARSED].decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return "", text[:_MOST_READ]
    if isinstance(found, list) and found:
        found = found[0]
    inner = found.get("error") or found.get("detail") if isinstance(found, dict) else None
    return _code_and_message(inner if isinstance(inner, dict) or not isinstance(found, dict) else found)


def _code_and_message(error: Any) -> tuple[str, str]:
    if not isinstance(error, dict):
        return "", str(error)[:_MOST_READ] if isinstance(error, str) else ""
    codes = [error.get(name) for name in ("code", "type", "status", "error_code", "status_code")]
    said = [error.get(name) for name in ("message", "error", "detail", "msg", "error_msg", "status_msg")]
    details, metadata = error.get("details"), error.get("metadata")
    codes += (
        [each.get("reason") for each in details if isinstance(each, dict)]
        if isinstance(details, list)
        else []
    )
    codes += list(metadata) if isinstance(metadata, dict) else []
    code = " ".join(str(each) for each in codes if isinstance(each, str | int | float))
    message = next((each for each in said if isinstance(each, str)), "")
    return code[:_MOST_READ], message[:_MOST_READ]
