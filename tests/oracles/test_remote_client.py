"""The oracle `remote` against a real HTTP server with the format of reward servers."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from faulty_server import Asked, FaultyServer, Reply, serving

from oat.errors import ConfigError, OatWarning, OutageError, RefusalError, WireError
from oat.oracles.make import build_oracle, oracle_options
from oat.oracles.preferences import Preferences
from oat.oracles.remote.client import RemoteOracle
from oat.oracles.remote.format import (
    FeedbackRequest,
    decode_reply,
    decode_request,
    decode_steps,
    encode_reply,
    encode_request,
)
from oat.testing import check_oracle, make_question
from oat.types import Answer, Message, Question

pytestmark = pytest.mark.usefixtures("brief_waits")


def score(text: str) -> float:
    return text.count("a") + 0.1 * len(text)


def feedback(asked: Asked) -> Reply:
    """Return the reply of a server without faults: the score of each response by `score`."""
    assert asked.path == "/get_feedback"
    request = decode_request(asked.body)
    return Reply(encode_reply(request, [score(text) for _, text in request.items]))


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with serving(lambda asked: feedback(asked)) as server:
        yield server


def answers(
    oracle: RemoteOracle | Preferences, questions: list[Question], seconds: float = 20.0
) -> list[Answer]:
    tickets = oracle.submit(questions)
    found = collected(oracle, tickets, seconds)
    return [found[ticket] for ticket in tickets]


def collected(
    oracle: RemoteOracle | Preferences, tickets: list[str], seconds: float = 20.0
) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    end = time.monotonic() + seconds
    while len(found) < len(tickets) and time.monotonic() < end:
        found.update(oracle.collect([ticket for ticket in tickets if ticket not in found], 1.0))
    return found


@pytest.mark.inventory(82)
def test_order_is_kept_over_four_calls_at_a_time(server: FaultyServer) -> None:
    waits = [0.06, 0.0, 0.03, 0.015]
    server.answer = lambda asked: Reply(feedback(asked).body, delay_s=waits[asked.number % 4])
    oracle = RemoteOracle(server.url, concurrency=4)
    questions = [make_question("p", "a" * place, "b", occurrence=place) for place in range(40)]
    found = answers(oracle, questions)
    assert [answer.values for answer in found] == [(score("a" * place), score("b")) for place in range(40)]
    assert [answer.key for answer in found] == [question.key for question in questions]
    assert server.most == 4
    oracle.close()


def stepwise(asked: Asked, steps: list[Any], scores: list[float | None] | None = None) -> Reply:
    """Return a reply with rewards of steps; `scores` None: those of a server without faults."""
    request = decode_request(asked.body)
    own = [score(text) for _, text in request.items] if scores is None else scores
    return Reply(
        msgspec.msgpack.encode({"batch_first_win_prob": [], "batch_score": own, "batch_steps": steps})
    )


def test_a_server_may_reward_steps(server: FaultyServer) -> None:
    """The score of a response with steps is the exact sum of their rewards. A client that does not ask for
    steps reads the scores alone, and one that does may get none."""
    steps, scores = [[[2, 0.1], [4, 0.2]], [], None], [0.30000001, 0.5, None]
    server.answer = lambda asked: stepwise(asked, steps, scores)
    question = make_question("p", "abcd", "b", "")
    for gives, expected in (("characters", (((2, 0.1), (4, 0.2)), (), ())), (None, ())):
        oracle = RemoteOracle(server.url, gives_steps=gives)
        (found,) = answers(oracle, [question])
        assert (found.steps, found.marks) == (expected, ("ok", "ok", "abstain"))
        assert found.values[:2] == (math.fsum([0.1, 0.2]) if gives else 0.30000001, 0.5)
        oracle.close()
    server.answer = feedback
    oracle = RemoteOracle(server.url, gives_steps="characters")
    assert answers(oracle, [question])[0].steps == ()
    oracle.close()


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "has 1 entries for 2"),
        ([[[3, 1.0]]], "the response has 2 characters; give ends up to 2"),
        ([[[1, 1.0], [1, 0.5]]], "give ends above 0, each above the one before"),
        ([[[1, math.nan]]], "has the reward nan at 1"),
        ([[[2, 1.0]]], "batch_score has 0.2, and the steps of batch_steps sum to 1.0"),
        (["no"], "give a list of pairs"),
    ],
)
def test_steps_that_cannot_be_are_a_failed_try(server: FaultyServer, steps: list[Any], words: str) -> None:
    texts = ["bb", "c"] if not steps else ["bb"]
    body = msgspec.msgpack.encode(
        {"batch_first_win_prob": [], "batch_score": [0.2] * len(texts), "batch_steps": steps or [[]]}
    )
    with pytest.raises(ValueError, match=words):
        decode_steps(body, texts)
    server.answer = lambda asked: Reply(body)
    oracle = RemoteOracle(server.url, gives_steps="characters", max_tries=2)
    (found,) = answers(oracle, [make_question("p", *texts)])
    assert found.marks == ("failed",) * len(texts)
    oracle.close()


def test_steps_that_cannot_be_asked_for() -> None:
    for options in ({"gives_steps": "tokens"}, {"gives_steps": "characters", "answers": "compare"}):
        with pytest.raises(ConfigError, match="set characters, with answers: score, or leave gives_steps"):
            RemoteOracle("http://127.0.0.1:1", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("variable", ["OAT_REMOTE_TOKEN", "MY_TOKEN"])
def test_who_is_not_let_in_is_told_which_variable_to_look_at(
    server: FaultyServer, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    server.answer = lambda asked: Reply(status=401)
    options = {} if variable == "OAT_REMOTE_TOKEN" else {"token_env": variable}
    expected = {
        None: f"no token was sent, since the environment has no {variable};",
        "sesame": f"is the token in {variable} right?",
    }
    for token, says in expected.items():
        monkeypatch.delenv(variable, raising=False)
        if token:
            monkeypatch.setenv(variable, token)
        oracle = RemoteOracle(server.url, **options)
        with pytest.raises(RefusalError) as raised:
            answers(oracle, [make_question("p", "a", "b")])
        assert says in str(raised.value)
        oracle.close()
    monkeypatch.setenv(variable, "two words")
    with pytest.raises(ConfigError, match=f"the token in {variable} is empty, or has blanks"):
        RemoteOracle(server.url, **options)


@pytest.mark.inventory(82)
@pytest.mark.parametrize("status", [400, 413, 422])
def test_one_refused_question_does_not_end_the_run(server: FaultyServer, status: int) -> None:
    """The server refuses one question, perhaps before it answered another. The question is marked as failed,
    and the others have their answers."""
    oracle, long = RemoteOracle(server.url), "b" * 50
    server.answer = lambda asked: (
        Reply(b"too much", status=status)
        if long in str(asked.body)
        else Reply(feedback(asked).body, delay_s=0.15)
    )
    questions = [
        make_question("p", long, "a"),
        make_question("p", "aa", occurrence=1),
        make_question("p", long, occurrence=2),
    ]
    with pytest.warns(OatWarning, match=f"counts as failed: .* refused with status {status}: too much"):
        found = answers(oracle, questions)
    assert [answer.marks for answer in found] == [("failed", "failed"), ("ok",), ("failed",)]
    oracle.close()


@pytest.mark.parametrize("status", [400, 422])
def test_refusals_of_all_later_questions_end_the_run(server: FaultyServer, status: int) -> None:
    """The server's model is taken away, or its format changes, after it has answered. The questions are asked
    again when the server is mended; a refusal that was one question's stays one."""
    oracle = RemoteOracle(server.url)
    assert answers(oracle, [make_question("p", "aa")])[0].marks == ("ok",)
    server.answer = lambda asked: Reply(b"no model", status=status)
    for first in (1, 3):
        questions = [make_question("p", "a" * n, occurrence=n) for n in (first, first + 1)]
        tickets = oracle.submit(questions)
        with pytest.raises(RefusalError, match="no model"):
            collected(oracle, tickets)
    long = "b" * 50
    server.answer = lambda asked: Reply(status=status) if long in str(asked.body) else feedback(asked)
    tickets += oracle.submit([make_question("p", long, occurrence=5)])
    with pytest.warns(OatWarning, match="counts as failed"):
        found = collected(oracle, tickets)
    assert [found[ticket].marks for ticket in tickets] == [("ok",), ("ok",), ("failed",)]
    oracle.close()


def test_refusals_of_all_first_questions_end_the_run(server: FaultyServer) -> None:
    server.answer = lambda asked: Reply(b"no such route", status=422, delay_s=0.05 * asked.number)
    oracle = RemoteOracle(server.url)
    tickets = oracle.submit([make_question("p", "a", occurrence=number) for number in range(3)])
    with pytest.raises(RefusalError, match="no such route"):
        oracle.collect(tickets, 20.0)
    assert len(server.asked) == 3
    oracle.close()


@pytest.mark.inventory(82)
def test_two_failures_are_survived_and_a_refusal_is_one_clear_error(server: FaultyServer) -> None:
    server.answer = lambda asked: Reply(status=500) if asked.number < 2 else feedback(asked)
    oracle = RemoteOracle(server.url)
    assert answers(oracle, [make_question("p", "aa")])[0].values == (score("aa"),)
    assert oracle.metrics["oracle/retries"] == 2
    server.answer = lambda asked: Reply(b"no such route", status=404)
    (ticket,) = oracle.submit([make_question("p", "a", occurrence=1)])
    with pytest.raises(RefusalError, match="/get_feedback refused with status 404: no such route; mend"):
        oracle.collect([ticket], 20.0)
    server.answer = feedback
    ((again, answer),) = oracle.collect([ticket], 20.0)
    assert (again, answer.values) == (ticket, (score("a"),))
    oracle.close()


def test_it_keeps_the_protocol_of_oracles(server: FaultyServer) -> None:
    for kind in ("score", "compare"):
        oracle = RemoteOracle(server.url, answers=kind)  # type: ignore[arg-type]
        check_oracle(oracle)
        oracle.close()


def test_preferences_are_the_servers_or_made_of_its_scores(server: FaultyServer) -> None:
    pair = [
        make_question("p", "aab", "b", kind="compare"),
        make_question("p", "b", "b", kind="compare", occurrence=1),
    ]
    own, made = RemoteOracle(server.url, answers="compare"), RemoteOracle(server.url)
    by_server, by_us = answers(own, pair), answers(Preferences(made), pair)
    assert by_server[0].values[0] == pytest.approx(by_us[0].values[0])
    assert by_server[0].values[0] > 0.5
    assert by_server[1].marks == by_us[1].marks == ("tie",)
    assert (by_server[0].queries, by_us[0].queries) == (1, 2)
    own.close()
    made.close()


GOOD = msgspec.msgpack.encode({"batch_first_win_prob": [], "batch_score": [1.5]})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\x00",
        GOOD[:-1],
        msgspec.msgpack.encode({"batch_first_win_prob": [1.0]}),
        msgspec.msgpack.encode({"batch_first_win_prob": [], "batch_score": [1.0, 2.0]}),
        msgspec.msgpack.encode({"batch_first_win_prob": [], "batch_score": []}),
        msgspec.msgpack.encode({"batch_first_win_prob": [], "batch_score": 1.0}),
        msgspec.msgpack.encode({"batch_first_win_prob": [], "batch_score": [float("nan")]}),
        msgspec.msgpack.encode({"batch_first_win_prob": [], "batch_score": [float("inf")]}),
        msgspec.msgpack.encode({"batch_first_win_prob": [], "batch_score": ["1"]}),
        b"\x91" * 100_000,
    ],
    ids=[
        "empty",
        "garbage",
        "cut",
        "another field",
        "too many",
        "none",
        "no list",
        "nan",
        "inf",
        "text",
        "deep",
    ],
)
def test_a_reply_that_cannot_be_used_is_tried_again_and_then_failed(
    server: FaultyServer, body: bytes
) -> None:
    server.answer = lambda asked: Reply(body) if b"poison" in asked.body else feedback(asked)
    oracle = RemoteOracle(server.url, max_tries=2)
    bad, good = answers(oracle, [make_question("p", "poison"), make_question("p", "a", occurrence=1)])
    assert (bad.marks, bad.queries) == (("failed",), 0)
    assert good.values == (score("a"),)
    oracle.close()


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"batch_first_win_prob": None},
        {"batch_first_win_prob": [0.5], "batch_steps": None},
        {"batch_first_win_prob": "none", "batch_steps": {"a": 1}, "took_ms": 3, "usage": [None]},
    ],
)
def test_fields_that_were_not_asked_for_do_not_matter(server: FaultyServer, others: dict[str, Any]) -> None:
    """No reply is thrown away, and none is asked for again, for another field than the one that was asked."""
    server.answer = lambda asked: Reply(msgspec.msgpack.encode({**others, "batch_score": [2, None]}))
    oracle = RemoteOracle(server.url, max_tries=1)
    (found,) = answers(oracle, [make_question("p", "a", "b")])
    assert (found.values, found.marks) == ((2.0, 0.5), ("ok", "abstain"))
    assert len(server.asked) == 1
    oracle.close()


def test_a_value_that_the_server_does_not_give_is_an_abstention(server: FaultyServer) -> None:
    def answer(asked: Asked) -> Reply:
        request = decode_request(asked.body)
        return Reply(
            encode_reply(request, [None if text == "long" else score(text) for _, text in request.items])
        )

    server.answer = answer
    for kind, marks in (("score", [("ok", "abstain")]), ("compare", [("abstain",)])):
        oracle = RemoteOracle(server.url, answers=kind)  # type: ignore[arg-type]
        assert [
            found.marks for found in answers(oracle, [make_question("p", "a", "long", kind=kind)])
        ] == marks  # type: ignore[arg-type]
        oracle.close()


def test_a_probability_beyond_one_is_no_answer() -> None:
    body = msgspec.msgpack.encode({"batch_first_win_prob": [1.5], "batch_score": []})
    with pytest.raises(ValueError, match=r"has the value 1\.5"):
        decode_reply(body, "compare", 1)


def test_an_outage_ends_in_one_error_and_what_is_unanswered_is_asked_again(server: FaultyServer) -> None:
    oracle = RemoteOracle(server.url, max_outage_s=0.3)
    server.stop()
    tickets = oracle.submit([make_question("p", "a"), make_question("p", "b", occurrence=1)])
    with pytest.raises(OutageError, match="run the same command again"):
        oracle.collect(tickets, 20.0)
    server.start()
    found: dict[str, Answer] = {}
    while len(found) < 2:
        with contextlib.suppress(OutageError):  # the other one's
            found.update(oracle.collect([ticket for ticket in tickets if ticket not in found], 20.0))
    assert [found[ticket].values for ticket in tickets] == [(score("a"),), (score("b"),)]
    oracle.close()


def test_the_request_is_the_predecessors(server: FaultyServer) -> None:
    """A request has the fields of the predecessor's format, by name. A prompt of one message is a string; a
    longer prompt is a conversation."""
    oracle = RemoteOracle(server.url)
    chat = make_question([Message("system", "s"), Message("user", "u")], "a", occurrence=1)
    answers(oracle, [make_question("p", "a", "b"), chat])
    sent = sorted(
        (msgspec.msgpack.decode(asked.body) for asked in server.asked),
        key=lambda each: len(each["batch_prompt"]),
    )
    assert sent[1] == {"batch_prompt": ["p", "p"], "batch_candidates": [], "batch_response": ["a", "b"]}
    assert sent[0]["batch_prompt"] == [[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]]
    oracle.close()


def test_a_pair_is_scored_first_ones_first_and_one_pair_stays_a_list() -> None:
    request = decode_request(
        encode_request(
            [((Message("user", "p"),), ("x", "yy")), ((Message("user", "q"),), ("zzz", "w"))], "compare"
        )
    )
    assert [text for _, text in request.items] == ["x", "zzz", "yy", "w"]
    assert [messages[0].content for messages, _ in request.items] == ["p", "q", "p", "q"]
    alone = decode_request(encode_request([((Message("user", "p"),), ("x", "yy"))], "compare"))
    assert decode_reply(encode_reply(alone, [1.0, 1.0]), "compare", 1) == [0.5]
    assert decode_reply(encode_reply(alone, [800.0, -800.0]), "compare", 1) == [1.0]


def test_what_a_message_has_beside_its_text_arrives() -> None:
    """The server reads the messages that the run has, with every field that a template may read. Messages
    without further fields have the bytes of the predecessor's format."""
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "find", "arguments": {"q": ["cat", None, 1.5]}},
    }
    fields: list[tuple[str, dict[str, Any]]] = [
        ("assistant", {"tool_calls": [call]}),
        ("tool", {"name": "find", "tool_call_id": "c"}),
        ("assistant", {"reasoning_content": "hm"}),
        ("user", {"name": "ann"}),
    ]
    for chat in [[each] for each in fields] + [fields]:
        said = [Message(role, "text", given) for role, given in chat]
        for kind, texts in (("score", ("a", "b")), ("compare", ("a", "b"))):
            request = decode_request(encode_request([(said, texts)], kind))  # type: ignore[arg-type]
            assert [[each.plain for each in messages] for messages, _ in request.items] == [
                [each.plain for each in said]
            ] * 2
    weighed = [Message("user", "p", {"weight": 0})]
    assert encode_request([(weighed, ("a",))], "score") == encode_request(
        [([Message("user", "p")], ("a",))], "score"
    )


GIVEN = {"batch_prompt": ["p"], "batch_candidates": [], "batch_response": ["r"]}
GIVEN_CHAT = {"role": "user", "content": "p"}
DEEP = msgspec.json.decode("[" * 100 + "]" * 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_prompt": [[{"role": "user"}]]}, "is no request"),
        ({"batch_prompt": [[{"role": "user", "content": None}]]}, "is no request"),
        ({"batch_prompt": [[{"role": 1, "content": "p"}]]}, "is no request"),
        ({"batch_prompt": [[{**GIVEN_CHAT, "name": b"x"}]]}, "is no request"),
        ({"batch_prompt": [[{**GIVEN_CHAT, "tool_calls": [{1: "x"}]}]]}, "is no request"),
        ({"batch_prompt": [[{**GIVEN_CHAT, "name": DEEP}]]}, "is no request"),
        ({"batch_response": []}, "either batch_candidates or batch_response"),
        ({"batch_candidates": [["a", "b"]]}, "either batch_candidates or batch_response"),
        ({"batch_prompt": ["p", "q"]}, "batch_prompt has 2 entries, and the responses are 1"),
        ({"batch_prompt": [[]]}, "a conversation without messages"),
        ({"batch_prompt": [1]}, "is no request"),
        ({"batch_candidates": [["a", "b", "c"]], "batch_response": []}, "is no request"),
        ({"batch_prompt": None}, "is no request"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    assert isinstance(decode_request(msgspec.msgpack.encode(GIVEN)), FeedbackRequest)
    with pytest.raises(WireError, match=message):
        decode_request(msgspec.msgpack.encode({**GIVEN, **changes}))
    with pytest.raises(WireError, match="is no request"):
        decode_request(
            msgspec.msgpack.encode({name: value for name, value in GIVEN.items() if name not in changes})
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "url"),
        ({"url": []}, "at least one URL"),
        ({"url": "localhost:8000"}, "is no URL"),
        ({"url": "http://h", "answers": "rank"}, "answers is 'rank'"),
        ({"url": "http://h", "timeout_s": 0}, "timeout_s is 0"),
        ({"url": "http://h", "max_outage_s": float("nan")}, "max_outage_s is nan"),
        ({"url": "http://h", "concurrency": 0}, "concurrency is 0"),
        ({"url": "http://h", "max_tries": "8"}, "max_tries is '8'"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    assert oracle_options("remote") >= {"url", "answers", "timeout_s", "max_outage_s", "token_env"}  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message):
        build_oracle("remote", options)


def test_a_text_that_is_not_unicode_is_said() -> None:
    with pytest.raises(WireError, match="cannot be sent"):
        encode_request([((Message("user", "p"),), ("\ud800",))], "score")
