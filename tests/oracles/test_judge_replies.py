"""How the oracle `judge` reads replies: those of real endpoints, generated ones, and broken ones."""

import contextlib
import copy
import itertools
import json
import math
import re
from typing import Any

import pytest
from faulty_server import Reply
from fixtures import make_group, make_questions
from hypothesis import example, given, settings
from hypothesis import strategies as st
from judge_forms import ENDS, FORMS, STREAMS, codings, stream
from judge_shapes import PROVIDERS, USAGE, reply, token
from judge_spellings import SCORES, SPELLINGS
from openai_server import Shown, judging

from oat.errors import OatWarning
from oat.oracles.judge import Judge
from oat.oracles.judge_calls import Call
from oat.oracles.judge_replies import read_completion
from oat.oracles.judge_texts import score_reader, verdict_reader
from oat.oracles.judge_verdicts import Reading, read_reply
from oat.types import Answer

COMPARED = verdict_reader(("0", "1"))
RATED = score_reader(0, 5)
SHAPES = {**PROVIDERS, **SPELLINGS}


def read(body: Any, reads: Any = "auto") -> Reading[str]:
    return read_reply(read_completion(json.dumps(body).encode()), COMPARED, reads)


def first_wins(reading: Reading[str]) -> float | None:
    return None if reading.shares is None else reading.shares.get("0", 0.0)


@pytest.mark.parametrize("name", SHAPES)
def test_verdicts(name: str) -> None:
    """A reply is read as the table says. The text alone says the same verdict, or there is none; and a
    reading that needs log-probabilities gives the same one, or none."""
    body, value = SHAPES[name]
    expected = None if value is None else pytest.approx(value, abs=1e-9)
    reading = read(body)
    assert first_wins(reading) == expected
    alone, strict = first_wins(read(body, "text")), first_wins(read(body, "logprobs"))
    assert strict is None or strict == expected
    assert value is None or alone == float(value > 0.5)
    assert bool(reading.unused) == (strict is None and value is not None), "and it is told"


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    body, score, (low, high) = SCORES[name]
    reads: Any = "auto" if low >= 0 and high <= 9 else "text"
    found = read_reply(read_completion(json.dumps(body).encode()), score_reader(low, high), reads).shares
    mean = None if found is None else math.fsum(value * share for value, share in found.items())
    assert mean == (None if score is None else pytest.approx(score, abs=1e-9))


@pytest.mark.parametrize("name", FORMS)
def test_a_field_of_another_form_loses_no_reply(name: str) -> None:
    body, value = FORMS[name]
    assert first_wins(read(body)) == pytest.approx(value)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_joined(name: str) -> None:
    found = read_completion(STREAMS[name])
    assert first_wins(read_reply(found, COMPARED, "logprobs")) == pytest.approx(0.8)
    assert (found.prompt_tokens, found.completion_tokens) == (
        USAGE["prompt_tokens"],
        USAGE["completion_tokens"],
    )


def test_a_stream_that_was_cut_is_no_reply() -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "0"}, "finish_reason": None}]}
    for raw in stream(chunk, end=""), stream(chunk, end="data: {"), stream(3), b"data: [DONE]\n", b"data:":
        with pytest.raises(ValueError, match=r"stream|Expecting"):
            read_completion(raw)


@pytest.mark.parametrize("end", ENDS)
def test_ends_that_take_the_verdict(end: str) -> None:
    for finish in ENDS[end]:
        found = read_completion(json.dumps(reply("0", finish=finish)).encode())
        assert found.end == end
        assert found.finish == (finish if isinstance(finish, str) else finish["reason"])


NOISE = [b"", b"\xef\xbb\xbf", b"\n\n  ", b": OPENROUTER PROCESSING\n\n: OPENROUTER PROCESSING\n\n"]


@pytest.mark.parametrize("mode", ["compare", "score"])
def test_all_of_them_over_the_wire(mode: Any) -> None:
    """A judge gets each reply of the tables from a server, after noise that keeps the connection open, and
    compressed in many ways. None is asked for again."""
    shapes = [*SHAPES.values()] if mode == "compare" else [s[:2] for s in SCORES.values() if s[2] == (0, 9)]
    groups = [make_group(n, f"case {n}", *["other"] * (mode == "compare")) for n in range(len(shapes))]

    def says(asked: Shown) -> Reply:
        number = int(re.findall(r"case (\d+)", asked.text)[0])
        raw = NOISE[number % 4] + json.dumps(shapes[number][0]).encode() + b"\r\n" * (number % 3)
        headers, sent = codings(raw)[number % 8]
        return Reply(sent, headers=headers)

    with judging(says) as (_, model, url):
        judge = Judge(model="m", url=url, mode=mode, invalid="skip", timeout_s=10.0, **ORDER[mode])
        tickets = judge.submit(make_questions(groups, mode, 0, oracle="judge"))
        found = dict[str, Answer]()
        with pytest.warns(OatWarning, match="which is no verdict"):  # noqa: PT031
            while len(found) < len(tickets):
                found |= dict(judge.collect([each for each in tickets if each not in found], 20.0))
        judge.close()
    for ticket, (_, value) in zip(tickets, shapes, strict=True):
        answer = found[ticket]
        assert answer.marks == ("abstain" if value is None else "ok",)
        assert value is None or answer.values == (pytest.approx(value, abs=1e-9),)
        assert 0 < answer.tokens < 10_000
    assert len(model.shown) == len(shapes)


ORDER: dict[str, dict[str, Any]] = {"compare": {"orders": "one"}, "score": {}}
OPENINGS = ["", "**", '"', "(", "[[", "`", "Answer: ", "\\boxed{", "\u200b", "\n", " ", '{"answer": "', "<b>"]
CLOSINGS = ["", "**", '"', ")", "]]", "`", ".", "\n", "\n\nBecause …é", " is better", ' "}', "</b>", "}"]
THOUGHTS = [
    "",
    "<think>{}</think>\n\n",
    "[THINK]{}[/THINK]",
    "{}</think>",
    "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>",
]


@st.composite
def replies(draw: st.DrawFn) -> tuple[dict[str, Any], float, bool]:
    """Draw a reply whose bytes are cut into tokens anywhere, and whose thoughts are in the text, in the
    tokens alone, or in a field, which may be unknown. Return it, the share of "0" at the token with the
    verdict, and whether the verdicts are probable there and their place is known."""
    verdict, other = draw(st.permutations(["0", "1"]))
    thoughts = draw(st.sampled_from(["1", "0", "0 wins", "1 or 0\n", "hm é"]))
    field = draw(st.sampled_from(["", "reasoning_content", "thinking", "musings"]))
    before = f"{thoughts}\n" if field else draw(st.sampled_from(THOUGHTS)).format(thoughts)
    answer = draw(st.sampled_from(OPENINGS)) + verdict + draw(st.sampled_from(CLOSINGS))
    raw = (before + answer).encode()
    cuts = sorted(draw(st.sets(st.integers(1, len(raw) - 1), max_size=len(raw)))) if len(raw) > 1 else []
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    place = raw.index(verdict.encode(), len(before.encode()))
    p = draw(st.sampled_from([0.95, 0.6, 0.45, 0.2]))
    tokens, end, share = [], 0, math.nan
    for piece in pieces:
        begin, end = end, end + len(piece)
        top = [(piece, 0.9), (b"0", 0.05), (b"1", 0.04)]
        if begin <= place < end:
            turned = piece[: place - begin] + other.encode() + piece[place - begin + 1 :]
            top = [(piece, p), (turned, 0.4 * p)]
            share = (1 if verdict == "0" else 0.4) / 1.4
        listed = [
            {"token": each.decode("utf-8", "replace"), "bytes": [*each], "logprob": math.log(q)}
            for each, q in top
        ]
        tokens.append({**listed[0], "top_logprobs": listed})
    is_apart = bool(field) or (before and draw(st.booleans()))
    body = reply(answer if is_apart else before + answer, tokens, **({field: thoughts} if field else {}))
    return body, share, 1.4 * p >= 0.5 and field != "musings"


@pytest.mark.parametrize("text", ["1.0", "0.00", "5.0.", "**4.0**", "4", "4/5", "Score: 3."])
def test_a_score_is_read_at_a_token_that_has_the_whole_number(text: str) -> None:
    """Wherever a text is cut into tokens: the score is an expectation only if one token has the whole number,
    for the first digit of a `1.0` may be the beginning of another number as well as of another score."""
    number = re.search(r"\d(?:\.\d+)?", text)
    assert number is not None
    score, places = float(number[0]), range(max(1, len(text) - 6), len(text))
    for cuts in itertools.chain(*(itertools.combinations(places, n) for n in range(len(places) + 1))):
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        tokens = [token(each, (re.sub(r"\d(?!.*/)", "2", each, count=1), 0.4), p=0.6) for each in pieces]
        found = read_reply(read_completion(json.dumps(reply(text, tokens)).encode()), RATED, "auto").shares
        is_cut = any(number.start() < cut < number.end() for cut in cuts)
        assert found is not None
        assert found.keys() <= {score} if is_cut else score in found
        assert "." in number[0] or is_cut or len(found) == 2 or text == "4/5"


@settings(derandomize=True, deadline=None, max_examples=60)
@given(replies())
def test_any_cut_into_tokens_has_one_reading(drawn: tuple[dict[str, Any], float, bool]) -> None:
    """Wherever the bytes of a reply are cut into tokens, and whatever the thoughts before say: the reading is
    the share at the verdict, or the text's verdict, or none."""
    body, share, is_probable = drawn
    reading, alone = first_wins(read(body)), first_wins(read(body, "text"))
    assert reading in (None, alone, pytest.approx(share))
    assert reading is None or alone == float(reading > 0.5)
    if is_probable and alone is not None:
        assert reading is not None, "a sound reply is read"
    strict = first_wins(read(body, "logprobs"))
    assert strict in (None, pytest.approx(share))


NUMBERS = [0, 1, -1, 7.5, 2**31, 2**70, -(10**400), math.nan, math.inf, -math.inf]
TEXTS = ["", "x", "null", "</think>", "<think>", "\ud800", "length", "error", 10**5 * "1"]
ODD = st.sampled_from([None, True, False, *NUMBERS, *TEXTS, [], {}, [None], [[]], {"a": 1}, [1, "x"]])
VERDICTS = ["0", "1", " 1", "1.", "10", [48], [49], {"0": -0.1, "1": -3}, [{"token": "1", "logprob": 0}]]
SOUND = [
    SHAPES[name] for name in ("openai", "azure", "mistral: parts", "qwen: thoughts in the text, one token")
] + [
    SHAPES[name]
    for name in ("vllm: reasoning parser, all tokens", "fireworks", "bold", "a null log-probability")
]


def paths(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [at, *(path for name, child in inner for path in paths(child, (*at, name)))]


@st.composite
def broken(draw: st.DrawFn) -> tuple[Any, bool]:
    """Draw a sound reply, change some of its values, and return it with whether "0" wins in it."""
    body, value = draw(st.sampled_from(SOUND))
    body = copy.deepcopy(body)
    assert value is not None
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths(body)[1:]))
        if not path:
            continue
        parent = body
        for name in path[:-1]:
            parent = parent[name]
        what = draw(st.sampled_from(["replace", "delete", "double"]))
        if what == "delete":
            del parent[path[-1]]
        elif what == "double" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[path[-1]]))
        else:
            is_said = "message" in path  # a number there is what the judge says
            odd = ODD.filter(lambda each: each not in (0, 1)) if is_said else ODD | st.sampled_from(VERDICTS)
            parent[path[-1]] = copy.deepcopy(draw(odd))
        if not isinstance(body, dict) or len(paths(body)) < 2:
            break
    return body, value > 0.5


@settings(derandomize=True, deadline=None, max_examples=100)
@given(broken())
def test_a_broken_reply_has_its_verdict_or_none(drawn: tuple[Any, bool]) -> None:
    """Changed values of a reply make it unusable (a ValueError, which the client counts as a failed try), or
    take the verdict away, or leave it. They never turn it round, and no other exception comes."""
    body, is_first = drawn
    raw = json.dumps(body).encode()
    for mode in ("auto", "logprobs", "text"):
        try:
            found = read_completion(raw)
        except ValueError:
            return
        reading = read_reply(found, COMPARED, mode)  # type: ignore[arg-type]
        first = first_wins(reading)
        assert first is None or (first > 0.5) == is_first
        read_reply(found, score_reader(0, 9), mode)  # type: ignore[arg-type]
        for count in (found.prompt_tokens, found.completion_tokens):
            assert count is None or 0 <= count < 2**31


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
@example(b"[" * 100_000)
@example(b'{"choices": ' * 50_000)
@example(b'{"choices": [{"message": {"content": ' + b"[" * 500 + b"]" * 500 + b"}}]}")
@example(b'{"choices": [{"message": {"content": "0"}}], "usage": {"prompt_tokens": ' + b"9" * 5000 + b"}}")
@example(b"\xef\xbb\xbf: x\n:y\n")
def test_any_bytes_are_a_reply_or_a_fault(raw: bytes) -> None:
    with contextlib.suppress(ValueError):
        read_completion(raw)


@pytest.mark.parametrize("of", ["prompt_tokens", "completion_tokens"])
@pytest.mark.parametrize("count", [None, "30", 0, -1, 0.5, 2**31, 10**400, True, [], {}])
def test_a_count_that_is_none(of: str, count: Any) -> None:
    """A count that is no number of tokens counts as not stated, and so does 0; the other one is kept."""
    found = read_completion(
        json.dumps(reply("0", usage={"prompt_tokens": 30, "completion_tokens": 2, of: count})).encode()
    )
    stated = {"prompt_tokens": found.prompt_tokens, "completion_tokens": found.completion_tokens}
    assert stated == {"prompt_tokens": 30, "completion_tokens": 2} | {of: None}


LEFT_OUT = st.sampled_from([None, 0, "30", -1])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.integers(1, 2000),
    st.integers(1, 9),
    st.integers(0, 9000),
    st.sampled_from(["inside", "total", "details", "usage"]),
    st.dictionaries(st.sampled_from(["prompt_tokens", "completion_tokens", "total_tokens"]), LEFT_OUT),
)
def test_what_was_paid_is_counted(
    prompt: int, answer: int, thoughts: int, stated: str, lost: dict[str, Any]
) -> None:
    """Services count thoughts in `completion_tokens` (inside), or bill them beside it, and state them in the
    total, in the details (if they are more than the answer) or in the usage itself. Any count may be missing,
    0 or odd: then it is the most that a try can take. What is counted is never less than what was paid."""
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": answer}
    most = answer + thoughts if stated == "inside" else answer
    if stated == "inside":
        usage |= {"completion_tokens": answer + thoughts, "total_tokens": prompt + answer + thoughts}
    elif stated == "total":
        usage["total_tokens"] = prompt + answer + thoughts
        lost.pop("total_tokens", None)
    elif thoughts > answer:
        own = {"reasoning_tokens": thoughts}
        usage |= own if stated == "usage" else {"completion_tokens_details": own}
        lost.pop("completion_tokens", None)
    else:
        thoughts = 0
    found = read_completion(json.dumps(reply("0", usage=usage | lost)).encode())
    call = Call((0, 1), [], bound=prompt + 7)
    counted = call.counted(found, most)
    paid = prompt + answer + thoughts
    assert sum(counted) >= paid
    assert lost or counted == (prompt, answer + thoughts)
    assert counted[0] >= prompt


@pytest.mark.parametrize("counted", ["usage", "tokens", "neither"])
@pytest.mark.parametrize("finish", [None, "", "stop", "missing"])
@pytest.mark.parametrize("taken", [3, 4])
def test_a_reply_of_the_most_tokens_without_a_reason_was_cut(
    counted: str, finish: str | None, taken: int
) -> None:
    """The `1` of `Score: 1` may be the beginning of `10`. With a reason the reply is what the reason says."""
    tokens = [
        {"token": text, "logprob": 0.0, "top_logprobs": []} for text in ("Score", ": ", "1", "")[:taken]
    ]
    choice: dict[str, Any] = {"message": {"content": "Score: 1"}, "finish_reason": finish}
    choice |= {"logprobs": {"content": tokens}} if counted == "tokens" else {}
    body: dict[str, Any] = {"choices": [choice]}
    body |= {"usage": {"prompt_tokens": 9, "completion_tokens": taken}} if counted == "usage" else {}
    if finish == "missing":
        del choice["finish_reason"]
    is_cut = finish != "stop" and counted != "neither" and taken == 4
    assert read_completion(json.dumps(body).encode(), 4).end == ("cut" if is_cut else "whole")
