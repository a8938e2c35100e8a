"""What the errors of services say: whom they concern, and how long they ask to wait."""

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from judge_forms import stream
from service_errors import OF_ALL, OF_ONE, body

from oat.oracles.judge_replies import read_completion
from oat.oracles.refusals import (
    ErrorInReply,
    concerns_all,
    fewer_alternatives,
    names_logprobs,
    retry_after_s,
)


@pytest.mark.parametrize("name", OF_ALL)
def test_errors_that_every_question_would_meet(name: str) -> None:
    status, said = OF_ALL[name]
    assert concerns_all(status, body(said))
    assert concerns_all(status, body(said), has_rest=True) == (status != 429), "a limit that passes is no end"


@pytest.mark.parametrize("name", OF_ONE)
def test_errors_of_one_question_or_of_a_moment(name: str) -> None:
    status, said = OF_ONE[name]
    assert not concerns_all(status, body(said))


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("not allowed to request logprobs from this model", True),
        ('Unknown name "top_logprobs": Cannot find field.', True),
        ("Log probabilities are not supported", True),
        ("`top_n_tokens` must be >= 0 and <= 5. Given: 20", True),
        ({"detail": [{"loc": ["body", "logprobs"], "type": "extra_forbidden"}]}, True),
        ("maximum context length is 4096", False),
        ("", False),
    ],
)
def test_an_error_that_names_log_probabilities(said: Any, names: bool) -> None:
    assert names_logprobs(body(said)) == names


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"code": 402, "message": "Insufficient credits"}, 402),
        ({"code": "429", "message": "slow down"}, 429),
        ({"code": 502, "message": "Provider returned error"}, 502),
        ({"code": "insufficient_quota", "message": "You exceeded"}, 402),
        ({"code": "1113", "message": "Your balance has run out"}, 402),
        ({"message": "the server had an error"}, 500),
        ({"code": "invalid_api_key", "message": "Incorrect API key provided"}, 400),
        ({"code": "model_not_found", "message": "gone"}, 400),
        ({"code": 200}, 500),
        ({"code": None, "type": ["x"]}, 500),
        ("broken", 500),
        ([1], 500),
    ],
)
@pytest.mark.parametrize("is_in_choice", [False, True])
def test_an_error_within_a_reply(error: Any, status: int, is_in_choice: bool) -> None:
    """It counts with its own status, at the top or at a choice without a text."""
    choice = {"error": error, "message": {"content": ""}, "finish_reason": "error"}
    with pytest.raises(ErrorInReply) as raised:
        read_completion(json.dumps({"choices": [choice]} if is_in_choice else {"error": error}).encode())
    assert raised.value.status == status


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"choices": None, "base_resp": {"status_code": 1008, "status_msg": "insufficient balance"}}, 400),
        ({"code": "InvalidApiKey", "message": "Invalid API-key provided.", "request_id": "x"}, 400),
        ({"object": "error", "message": "insufficient quota", "code": 40303}, 400),
        ({"error_code": 17, "error_msg": "Open api daily request limit reached"}, 500),
    ],
)
def test_a_body_that_is_an_error(body: Any, status: int) -> None:
    with pytest.raises(ErrorInReply) as raised:
        read_completion(json.dumps(body).encode())
    assert raised.value.status == status


ERROR = {"error": {"code": 502, "message": "upstream"}}


@pytest.mark.parametrize("finish", [None, "", "length", "error", {}])
@pytest.mark.parametrize(
    ("of_reply", "of_choice", "of_message"),
    [
        ({}, {}, {}),
        (ERROR, {}, {}),
        ({"object": "error", "message": "upstream"}, {}, {}),
        ({}, ERROR, {}),
        ({}, {}, ERROR),
    ],
)
def test_a_text_before_an_error_is_no_reply(
    of_reply: dict[str, Any], of_choice: dict[str, Any], of_message: dict[str, Any], finish: Any
) -> None:
    """A service that breaks off states its error beside the text so far: in a reply, or in a stream."""
    part = {"message": {"content": "1", **of_message}, "finish_reason": finish, **of_choice}
    chunk = {"delta": {"content": "1"}, "finish_reason": finish}
    last = {"choices": [{"delta": of_message, "finish_reason": None, **of_choice}], **of_reply}
    for raw in json.dumps({"choices": [part], **of_reply}).encode(), stream({"choices": [chunk]}, last):
        if of_reply or of_choice or of_message:
            with pytest.raises(ValueError, match="upstream") as raised:
                read_completion(raw)
            assert not isinstance(raised.value, ErrorInReply), "a lost try may have been billed"
        else:
            assert read_completion(raw).answer == "1"


@pytest.mark.parametrize(
    ("said", "fewer"),
    [
        ("top_logprobs must be between 0 and 5", {20: 5, 5: 0}),
        ("top_logprobs must be <= 3, got 20", {20: 3, 5: 3, 3: 0}),
        ("Requested sample logprobs of 20, which is greater than max allowed: 10", {20: 10}),
        ('{"loc": ["top_logprobs"], "msg": "should be less than or equal to 5", "ctx": {"le": 5}}', {20: 5}),
        ("logprobs are not supported by gpt-4.1-2 at 10:00:00.5", {20: 10, 10: 5, 5: 0}),
        ("logprobs are not supported", {20: 5, 5: 0}),
        ("top_logprobs must be 0 or 1", {20: 5, 5: 0}),
    ],
)
def test_how_many_alternatives_are_asked_for_next(said: str, fewer: dict[int, int]) -> None:
    assert {asked: fewer_alternatives(said, asked) for asked in fewer} == fewer


@pytest.mark.parametrize("error", [None, "", {}, 0, "warning: slow", {"code": 0}])
def test_what_stands_beside_a_whole_reply_is_no_error(error: Any) -> None:
    choice = {"error": error, "message": {"content": "0"}, "finish_reason": "stop"}
    assert read_completion(json.dumps({"choices": [choice], "error": error}).encode()).answer == "0"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *[("1", 1.0), ("1.5", 1.5), (" 2.25 ", 2.25), (".5", 0.5), ("3.", 3.0), ("0", 0.0), ("0.0", 0.0)],
        *[
            (value, 0.0)
            for value in ("", "-5", "-1.5", "soon", "nan", "inf", "1e3", "1_0", "0x10", "1,5", "²")
        ],
        *[
            (value, 0.0)
            for value in ("Mon, 99 Foo", "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:28:00")
        ],
    ],
)
def test_seconds_of_retry_after(value: str, seconds: float) -> None:
    assert retry_after_s(value) == seconds


@pytest.mark.parametrize("value", ["9" * 30, "9" * 5000, "9" * 400 + ".5", "Wed, 21 Oct 9999 07:28:00 GMT"])
def test_an_absurd_retry_after_is_long(value: str) -> None:
    """The client bounds it by the call's deadline."""
    assert retry_after_s(value) > 1e9


@pytest.mark.parametrize("is_gmt", [True, False])
def test_a_date_of_retry_after_is_in_utc(is_gmt: bool) -> None:
    text = format_datetime(datetime.now(UTC) + timedelta(hours=3), usegmt=True)
    assert 3 * 3600 - 60 < retry_after_s(text if is_gmt else text.removesuffix(" GMT")) <= 3 * 3600
