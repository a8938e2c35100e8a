"""How the oracle `judge` reads replies and shows texts, and its options."""

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from cpu_time import seconds
from openai_server import completion

from oat.errors import ConfigError
from oat.oracles.judge import Judge
from oat.oracles.judge_config import JudgeConfig
from oat.oracles.judge_prompts import quoted
from oat.oracles.judge_replies import read_completion
from oat.oracles.judge_verdicts import read_reply, score_in, verdict_in, verdict_reader
from oat.oracles.make import build_oracle


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
            ("1\n\n0", "1"),
        ],
        *[(text, None) for text in ("01", "1.5", "10", "This one", "Response 1", "", "None", "2", "-")],
    ],
)
def test_verdicts_in_texts(text: str, verdict: str | None) -> None:
    found = verdict_in(text, ("0", "1", "T"))
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
    found = score_in(text, 0, 9)
    assert (found and found.value) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("7 " + "x" * 15_000_000, 7.0),
        ("1" * 15_000_000 + ",1", None),
        ("." * 15_000_000 + "7", None),
        ("x" * 15_000_000, None),
    ],
    ids=["a reason", "digits", "marks", "letters"],
)
def test_of_a_long_reply_the_beginning_is_read(text: str, score: float | None) -> None:
    def read() -> None:
        reply = read_completion(completion({text: 1.0}, has_logprobs=False))
        number, verdict = score_in(reply.answer, 0, 10), verdict_in(reply.answer, ("0", "1", "7"))
        assert (number and number.value) == score
        assert (verdict and verdict.value) == (None if score is None else "7")
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
