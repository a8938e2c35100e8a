"""Rules about format, length and patterns: tables by hand, and the time for hostile text."""

import re
import time
from typing import Any

import numpy as np
import pytest
from cpu_time import seconds
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.errors import ConfigError
from oat.oracles.make import build_oracle, oracle_options
from oat.oracles.rules.shape import FormatRule, LengthRule, RegexRule
from oat.types import Key, Message, Question

SETTINGS = settings(derandomize=True, deadline=None, max_examples=200)
TEMPLATE = "<think>...</think> <answer>...</answer>"


def score(oracle: Any, text: str) -> float:
    asked = Question(
        Key("train", 0, 0, 0),
        "score",
        (Message("user", "?"),),
        (text,),
        (0,),
        ids=(np.arange(len(text), dtype=np.int32),),
    )
    ((_, answer),) = oracle.collect(oracle.submit([asked]), 1.0)
    assert answer.marks == ("ok",)
    return float(answer.values[0])


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace(" ", "")])
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("<think>a</think> <answer>b</answer>", 1),
        ("<think>a</think>\n \n<answer>\nb\n</answer>\n", 1),
        (" <think>a < b</think> <answer>b</answer>", 1),
        ("<think></think><answer>b</answer>", 0),
        ("<think> </think><answer>b</answer>", 0),
        ("<think>a</think><answer></answer>", 0),
        ("x <think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer> x", 0),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<think>a<think></think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a</think><answer>b</answer></answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a<answer></think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</think></answer>", 0),
        ("<think>a</think>", 0),
        ("", 0),
        ("<think>" * 50_000, 0),
        ("<think>a</think>" + " " * 100_000 + "<answer>b</answer>", 1),
    ],
)
def test_a_template_of_tags(template: str, text: str, value: float) -> None:
    assert seconds(lambda: score(FormatRule(template), text)) < 5
    assert score(FormatRule(template), text) == value


@pytest.mark.parametrize(
    ("template", "text", "value"),
    [
        ("...<answer>...</answer>", "so <answer>5</answer>", 1),
        ("...<answer>...</answer>", "<answer>5</answer>", 0),
        ("<answer>...", "<answer>5 and more", 1),
        ("Answer: ...", "Answer: 5", 1),
        ("Answer: ...", "answer: 5", 0),
        ("... The answer is ...", "This is so. The answer is 5", 1),
        ("... The answer is ...", "This is so. The\nanswer is 5", 1),
        ("... The answer is ...", "The answer is 4. The answer is 5", 0),
        ("... The answer is ...", "So the answer is 5", 0),
        ("... is ...", "This is 5", 1),
        ("... is ...", "This, 5", 0),
        ("<a>...</a> So: ...", "<a>So: 4?</a>So: 5", 1),
        ("<a>...</a> So: ...", "<a>4</a> 5", 0),
        ("<a>...</a> so <b>...</b>", "<a>so</a> so <b>so</b>", 1),
        ("<a>...</a> so <b>...</b>", "<a>x</a> <b>y</b>", 0),
        ("x = ... and y = ...", "x = 1 and y = 2", 1),
        ("x = ... and y = ...", "y = 2 and x = 1", 0),
    ],
)
def test_templates_that_are_open_at_an_end(template: str, text: str, value: float) -> None:
    assert score(FormatRule(template), text) == value


@SETTINGS
@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " "]), max_size=9))
def test_the_template_agrees_with_a_pattern(parts: list[str]) -> None:
    """The format rule agrees with a pattern. The template allows each tag once; the pattern says this with
    gaps that contain no tag."""
    text, gap = "".join(parts), r"(?:(?!</?(?:think|answer)>).)*?\S(?:(?!</?(?:think|answer)>).)*?"
    slow = re.fullmatch(
        rf"\s*<think>(?=\s*a){gap}</think>\s*<answer>(?=\s*a){gap}</answer>\s*", text, re.DOTALL
    )
    assert score(FormatRule(TEMPLATE), text) == float(slow is not None)


def test_a_pattern_over_the_whole_response() -> None:
    pytest.importorskip("re2")
    oracle = FormatRule(pattern=r"[A-D]\.?")
    assert [score(oracle, text) for text in ("A", " B.\n", "AB", "A because", "")] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("engine", ["re2", "python"])
def test_patterns(engine: Any) -> None:
    if engine == "re2":
        pytest.importorskip("re2")
    search = RegexRule(r"(?i)answer:\s*\d+", engine=engine, timeout_s=30)
    assert [score(search, text) for text in ("the Answer:\n 5.", "answer: x", "")] == [1, 0, 0]
    whole = RegexRule(r"<a>.*</a>", match="whole", engine=engine, timeout_s=30)
    assert [score(whole, text) for text in (" <a>x\ny</a> ", "<a>x</a>y")] == [1, 0]


@pytest.mark.fault("R25")
def test_a_catastrophic_pattern() -> None:
    """RE2 takes linear time for a pattern that takes Python exponential time. The process of the Python
    engine is ended at its time limit."""
    pytest.importorskip("re2")
    hostile = "a" * 60 + "b"
    linear = RegexRule(r"(a|aa)+", match="whole")
    assert score(linear, hostile * 1000) == 0
    assert seconds(lambda: score(linear, hostile * 1000)) < 5
    python = RegexRule(r"(a|aa)+", match="whole", engine="python", timeout_s=1.0)
    begin = time.monotonic()
    assert score(python, hostile) == 0
    assert time.monotonic() - begin < 30
    assert score(RegexRule(r"(.)\1", engine="python", timeout_s=30), "noon") == 1


@pytest.mark.parametrize(
    ("options", "sizes", "values"),
    [
        ({"target": 10}, [10, 5, 15, 0, 20, 99], [1, 0.5, 0.5, 0, 0, 0]),
        ({"most": 10, "buffer": 4}, [0, 6, 7, 8, 10, 11, 99], [0, 0, -0.25, -0.5, -1, -1, -1]),
        ({"most": 10, "buffer": 10}, [0, 5, 10], [0, -0.5, -1]),
    ],
)
@pytest.mark.parametrize("unit", ["tokens", "characters", "words"])
def test_lengths(options: dict[str, int], sizes: list[int], values: list[float], unit: Any) -> None:
    oracle = LengthRule(**options, unit=unit)
    texts = ["w " * size if unit == "words" else "w" * size for size in sizes]
    assert [score(oracle, text) for text in texts] == pytest.approx(values)
    assert oracle.cacheable == (unit != "tokens")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("regex", {"pattern": "(", "engine": "python"}, "is no regular expression"),
        ("regex", {"pattern": "("}, "RE2 does not take the pattern"),
        ("regex", {"pattern": r"(a)\1"}, "match it by the oracle regex with `engine: python`"),
        ("regex", {"pattern": 5}, "takes a text as pattern"),
        ("regex", {"pattern": "a", "match": "all"}, "match search or whole"),
        ("regex", {}, "missing a required argument: 'pattern'"),
        ("format", {}, "give one"),
        ("format", {"template": "a...b", "pattern": "a"}, "give one"),
        ("format", {"template": "<a></a>"}, "needs tags with"),
        ("format", {"template": "<a>......</a>"}, "needs tags with"),
        ("format", {"template": "..."}, "needs tags with"),
        ("length", {}, "takes a `target`"),
        ("length", {"target": 5, "most": 6, "buffer": 1}, "takes a `target`"),
        ("length", {"most": 6}, "takes a `target`"),
        ("length", {"most": 6, "buffer": 7}, "buffer at most"),
        ("length", {"target": 0}, "whole numbers from 1"),
        ("length", {"target": 5, "unit": "lines"}, "a `unit`"),
        ("length", {"targt": 5}, "did you mean `target`"),
    ],
)
def test_mistakes(name: str, options: dict[str, Any], words: str) -> None:
    if name == "regex":
        pytest.importorskip("re2")
    with pytest.raises(ConfigError, match=re.escape(words)):
        build_oracle(name, options)
    assert oracle_options(name)


def test_without_re2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'oat-align\[regex\]'"):
        RegexRule("a")
