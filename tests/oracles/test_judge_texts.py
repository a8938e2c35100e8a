"""How the oracle `judge` reads replies and shows texts, and its options."""

import json
import math
import re
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from cpu_time import seconds
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_sayings import SCORES, VERDICTS
from openai_server import completion

from oat.errors import ConfigError
from oat.oracles.judge import Judge
from oat.oracles.judge_config import JudgeConfig
from oat.oracles.judge_prompts import comparison, quoted
from oat.oracles.judge_replies import read_completion
from oat.oracles.judge_texts import score_reader, verdict_reader
from oat.oracles.judge_verdicts import read_reply
from oat.oracles.make import build_oracle
from oat.testing import make_question
from oat.types import Message

COMPARED = verdict_reader(("0", "1", "T"))
SCORED = score_reader(0, 9)


@pytest.mark.parametrize(
    "character",
    [
        *"\u034f\u115f\u1160\u17b4\u17b5\u180f\u2800\u3164\ufe00\ufe0f\uffa0\u00ad\u2060",
        "\U000e0100",
        "\U000e01ef",
    ],
)
def test_what_nobody_sees_is_an_escape(character: str) -> None:
    """Invisible characters are escaped, including those that Python counts as printable."""
    text = f"a{character}b"
    assert quoted(text) == json.dumps(text)
    assert json.loads(quoted(text)) == text


def test_what_stays_readable() -> None:
    text = 'if a < b <= c: x[1] = "é日本🙂"; [A](url) [link]'
    assert quoted(text) == json.dumps(text, ensure_ascii=False)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        *[
            ("0", "0"),
            ("1.", "1"),
            ('"1"', "1"),
            ("**0**", "0"),
            ("0 is better", "0"),
            ("T", "T"),
        ],
        *[(text, None) for text in ("01", "1.5", "10", "This one", "Response 1", "", "None", "2", "-")],
    ],
)
def test_verdicts_in_texts(text: str, verdict: str | None) -> None:
    found = COMPARED.says(text)
    assert (found and found.value) == verdict
    assert found is None or text[found.start : found.end] == verdict


@pytest.mark.parametrize(
    ("text", "score"),
    [
        *[
            ("7", 7.0),
            ("Score: 7", 7.0),
            ("**7.5** / 9", 7.5),
            ("7/10", 7.0),
            ("rating=5", 5.0),
            ("0", 0.0),
            ("9.", 9.0),
        ],
        *[
            (text, None)
            for text in ("75", "-3", "1,000", "12", "7abc9", "five", "", "9.01", "I give 7", "nan", "1e99")
        ],
    ],
)
def test_scores_in_texts(text: str, score: float | None) -> None:
    found = SCORED.says(text)
    assert (found and found.value) == score


@pytest.mark.parametrize(
    ("text", "verdict"), [(text, verdict) for verdict, texts in VERDICTS.items() for text in texts]
)
def test_a_text_says_a_verdict_only_if_nothing_else_could_be_one(text: str, verdict: str) -> None:
    found = COMPARED.says(text)
    assert (found and found.value) == (None if verdict.startswith("none") else verdict)
    assert found is None or text[found.start : found.end] == verdict


@pytest.mark.parametrize(
    ("text", "score"), [(text, score) for score, texts in SCORES.items() for text in texts]
)
def test_a_text_says_a_score_only_if_nothing_else_could_be_one(text: str, score: str) -> None:
    found = SCORED.says(text)
    assert (found and found.value) == (None if score == "none" else float(score))
    assert found is None or text[found.start : found.end].startswith(score)


@pytest.mark.parametrize(
    ("text", "range", "score"),
    [
        ("1/2", (0, 1), None),
        ("0.5/1", (0, 1), 0.5),
        ("8/10", (1, 9), None),
        ("4/5", (1, 5), 4.0),
        ("50/100", (0, 99), 50.0),
        ("85 percent", (0, 100), None),
        ("1'000", (0, 2000), None),
    ],
)
def test_scores_out_of_the_highest(text: str, range: tuple[int, int], score: float | None) -> None:
    found = score_reader(*range).says(text)
    assert (found and found.value) == score


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        *[
            ("1\n\nThe second", "1"),
            ("0\n\nThe first", "0"),
            ("0\n\nResp", "0"),
            ("T\n\nBoth", "T"),
            ("**0", "0"),
        ],
        *[(text, None) for text in ("1\n\nThe first", "0\n\nWait", "0 is better", "1.", "0:", "0 -", "1)")],
        *[(text, None) for text in ("Hm.\n\nVerdict: 0", "Verdict: 1.", '{"verdict": 0', "1\n\nNo")],
    ],
)
def test_a_text_that_was_cut(text: str, verdict: str | None) -> None:
    found = COMPARED.says(text, is_cut=True)
    assert (found and found.value) == verdict


@pytest.mark.parametrize(
    ("low", "high"), [(-5, 0), (-5, -1), (-1, 1), (0, 1), (0, 9), (0, 10), (1, 5), (1, 10), (1, 100)]
)
def test_a_number_that_was_cut_is_the_whole_number_or_none(low: int, high: int) -> None:
    """Whatever number of the range a judge writes, and wherever it is cut: no other number is read."""
    reader = score_reader(low, high)
    for value in {low, low + 0.9, low + 0.05, (low + high) / 2, high - 0.1, float(high), high}:
        text = f"**Score:** {value:g}" if value % 1 else f"**Score:** {value}"
        whole = reader.says(text)
        assert whole is not None
        for end in range(len("**Score:** ") + 1, len(text) + 1):
            found = reader.says(text[:end], is_cut=True)
            assert found is None or found.value == whole.value == (low if text[11] == "-" else high)


@pytest.mark.parametrize(("text", "score"), [("7", 7.0), ("0", 0.0), ("1", None), ("10", 10.0), ("7/", None)])
def test_a_whole_number_that_was_cut_is_whole(text: str, score: float | None) -> None:
    """A judge with `max_tokens: 1` is asked for a whole number, and always cut behind it."""
    found = score_reader(0, 10, are_whole=True).says(text, is_cut=True)
    assert (found and found.value) == score


PLACES = (
    "{}",
    "{}.",
    "**{}**",
    "({})",
    "[[{}]]",
    "```\n{}\n```",
    "\\boxed{{{}}}",
    "Verdict: {}",
    "**Final answer:** {}",
    "### Verdict\n\n{}",
    "The answer is {}.",
    "<answer>{}</answer>",
    '{{"verdict": {}}}',
    "So I choose {}.",
    "{} fails to answer.",
    "{} has more words than I can count",
)
PROSE = (
    "",
    "Hm.",
    "Both name 3 facts.",
    "Response 1 is long, and response 0 is short.",
    "It is better.",
    "Не знаю.",
    "| a | b |\n",
)


@st.composite
def between(draw: st.DrawFn, *said: str) -> str:
    """Draw a text that says something in places where verdicts stand, with prose anywhere."""
    parts = [draw(st.sampled_from(PROSE))]
    for each in said:
        parts += [draw(st.sampled_from(PLACES)).format(each), draw(st.sampled_from(PROSE))]
    ends = draw(
        st.lists(st.sampled_from(["\n", "\n\n", "\r\n", " "]), min_size=len(parts), max_size=len(parts))
    )
    return "".join(part + end for part, end in zip(parts, ends, strict=True) if part)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.permutations(["0", "1", "T"]).flatmap(lambda all: between(*all[:2])),
    st.permutations([*"0123456789"]).flatmap(lambda all: between(*all[:2])),
    st.booleans(),
)
def test_two_different_verdicts_are_none(verdicts: str, scores: str, is_cut: bool) -> None:
    """Two verdicts, or two scores, in two places where they stand are no verdict, in any order and with any
    prose before, between and behind them."""
    assert COMPARED.says(verdicts, is_cut) is None
    assert SCORED.says(scores, is_cut) is None


AGAINST = "worse not no lost fails wrong but wait actually other second zero neither opposite lies"
STRANGE = ["нет", "不对", "👎", "❌", "?", "1", "①", "-> 1", "\u0336", "<b>", "100%"]


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    st.sampled_from([place for place in PLACES if not place.startswith("#")]),
    st.lists(st.sampled_from(["it", "is", "the", "better", "response", "because", "clear"]), max_size=4),
    st.sampled_from([*AGAINST.split(), *STRANGE]),
    st.lists(st.sampled_from(["it", "is", "the", "better", "answer"]), max_size=4),
    st.sampled_from([" ", ", ", "\n", "\n\n", " - ", ": "]),
)
def test_what_may_turn_a_verdict_round_is_none(
    place: str, before: list[str], turn: str, after: list[str], end: str
) -> None:
    """A word that is not known to be in favour of the verdict, anywhere behind it, takes it away."""
    assert COMPARED.says(place.format("0") + end + " ".join([*before, turn, *after])) is None


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.lists(
        st.sampled_from([*PROSE, "1. The first is long.\n2. The second is short."]), max_size=3, unique=True
    ),
    st.sampled_from(["Verdict: {}", "**Final answer:** **{}**", "### Verdict\n\n{}", "<answer>{}</answer>"]),
    st.sampled_from("01T"),
)
def test_prose_before_a_last_line_with_a_label_is_no_verdict(prose: list[str], last: str, said: str) -> None:
    """A chain of thought that names verdicts, without a label, leaves the last line its verdict."""
    text = "\n\n".join([*prose, last.format(said)])
    found = COMPARED.says(text)
    assert found is not None
    assert (found.value, text[found.start : found.end]) == (said, said)


@pytest.mark.parametrize(
    "text",
    [
        "7 " + "x" * 2_000_000,
        "1" * 2_000_000 + ",1",
        "." * 2_000_000 + "7",
        *(
            "Answer:" + '"' * 99_000 + "x",
            "prose.\n" + "answer is " * 9_900 + "\nVerdict: 0",
            "7" + " (" * 40_000,
        ),
        *(
            "so " * 30_000 + "\nVerdict: 0",
            '{"verdict":' * 9_000,
            "7 - " + "good " * 19_000,
            "1. a\n" * 16_000,
            "{" + " " * 99_000 + "x",
            "Hm.\n" + "so 1 " * 8_000 + "\nVerdict: 0",
        ),
    ],
    ids=range(12),
)
def test_a_long_text_is_read_in_time_or_not_at_all(text: str) -> None:
    """A text that is too long has no verdict, since what it says at its end may be another one."""

    def read() -> None:
        reply = read_completion(completion({text: 1.0}, has_logprobs=False))
        for reader in (SCORED, COMPARED):
            found = reader.says(reply.answer)
            assert found is None or len(text) < 100_000
        assert len(reply.said) <= 1000

    assert seconds(read) < 5.0


def test_what_a_model_thinks_is_not_read() -> None:
    tokens = [("<think>", -0.1), ("1", -0.2), ("</think>", -0.1), ("\n\n", -0.1), ("0", math.log(0.7))]
    content = [
        {"token": token, "logprob": logp, "top_logprobs": [{"token": token, "logprob": logp}]}
        for token, logp in tokens
    ]
    content[-1]["top_logprobs"] = [
        {"token": "1", "logprob": math.log(0.1)},
        {"token": " 1", "logprob": math.log(0.2)},
    ]
    choice = {"message": {"content": "<think>1</think>\n\n0"}, "logprobs": {"content": content}}
    reply = read_completion(json.dumps({"choices": [choice]}).encode())
    assert reply.answer == "0"
    shares = read_reply(reply, verdict_reader(("0", "1")), "auto").shares
    assert shares == {"0": pytest.approx(0.7), "1": pytest.approx(0.3)}


def test_the_page_has_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "oracles" / "judge.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|\s*(.*?)\s*\|", page, flags=re.MULTILINE)
    named = {name: default.strip("`") for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    assert named.keys() == {f.name for f in fields(JudgeConfig)}
    for each in fields(JudgeConfig):
        if named[each.name] not in ("", "OAI_URL", "quality and relevance"):
            assert yaml.safe_load(named[each.name]) == (
                list(each.default) if isinstance(each.default, tuple) else each.default
            )


def test_a_version_is_of_what_changes_answers() -> None:
    def version(**options: Any) -> str:
        return Judge(model="m", **{"url": "http://127.0.0.1:1", **options}).version

    same = [
        {},
        {"url": "http://127.0.0.1:2"},
        {"price_in": 1.0, "price_out": 1.0},
        {"tries": 5},
        {"concurrency": 1},
        {"orders": "both"},
    ]
    other = [
        {"rubric": "r"},
        {"orders": "one"},
        {"ties": True},
        {"max_tokens": 9},
        {"extra": {"seed": 1}},
        {"mode": "score"},
        {"invalid": "tie"},
    ]
    assert len({version(**options) for options in same}) == 1
    assert len({version(**options) for options in [{}, *other]}) == 1 + len(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "m"}, "has no `url`"),
        ({"url": "http://h"}, "missing a required (keyword-only )?argument: 'model'"),
        ({"model": "m", "url": "http://h", "rubrik": 1}, "did you mean `rubric`"),
        ({"model": "m", "url": "http://h", "mode": "rank"}, "Invalid enum value 'rank' - at `\\$.mode`"),
        (
            {"model": "m", "url": "http://h", "mode": "score", "orders": "one"},
            "orders is set, and mode: score does not read it",
        ),
        (
            {"model": "m", "url": "http://h", "range": [1, 5]},
            "range is set, and mode: compare does not read it",
        ),
        ({"model": "m", "url": "http://h", "mode": "score", "invalid": "tie"}, "a score has no tie"),
        ({"model": "m", "url": "http://h", "mode": "score", "range": [5, 1]}, "the first must be the lower"),
        (
            {"model": "m", "url": "http://h", "mode": "score", "range": [1, 10], "reads": "logprobs"},
            "are more than a digit",
        ),
        ({"model": "m", "url": "http://h", "price_in": 1.0}, "set both"),
        ({"model": "m", "url": "http://h", "extra": {"max_tokens": 9}}, "extra has max_tokens"),
        ({"model": "m", "url": "http://h", "key_env": "NO_SUCH_KEY"}, "key_env is NO_SUCH_KEY"),
        ({"model": "m", "url": "ftp://h"}, "is no URL of a service"),
    ],
)
def test_options_that_cannot_be(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OAI_URL", raising=False)
    with pytest.raises(ConfigError, match=message):
        build_oracle("judge", options)


def test_calls_that_a_judge_is_not_shown_are_told() -> None:
    asked, call = Message("user", "where?"), {"tool_calls": [{"name": "find", "arguments": {}}]}
    for further in (call, {}):
        question = make_question([asked, Message("assistant", "", further), asked], "here", "there")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comparison(question, (0, 1), rubric="", ties=False, has_reference=False)
        assert len(caught) == bool(further)
