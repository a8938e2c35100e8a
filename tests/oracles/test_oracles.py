"""Oracles of plain functions, rules, preferences from scores, and names."""

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from questions import PLAIN, ask, length, question

from oat import wire
from oat.errors import ConfigError, OracleError
from oat.oracles.callables import CallableComparison, CallableOracle
from oat.oracles.make import build_oracle
from oat.oracles.preferences import Preferences
from oat.oracles.rules.exact import exact_match
from oat.oracles.rules.references import is_equal, reference_text
from oat.types import Key, Message, Question

SETTINGS = settings(derandomize=True, deadline=None, max_examples=40)
CHAT = (Message("system", "add"), Message("user", "1+1="))


def test_one_call_for_all_questions_in_order():
    calls = []

    def reward(prompts, completions, reference, level, **columns):
        calls.append(
            {
                "prompts": prompts,
                "completions": completions,
                "reference": reference,
                "level": level,
                **columns,
            }
        )
        return [1, 2.5, 3]

    oracle = CallableOracle(reward, "mine")
    first, second = ask(
        oracle,
        question(0, ["4", "5"], reference="4", level=1, note="n"),
        question(1, ["2"], messages=CHAT, reference="2", level=2),
    )
    assert calls == [
        {
            "prompts": [
                "2+2=",
                "2+2=",
                [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}],
            ],
            "completions": ["4", "5", [{"role": "assistant", "content": "2"}]],
            "reference": ["4", "4", "2"],
            "level": [1, 1, 2],
            "note": ["n", "n", None],
        }
    ]
    assert (first.values, first.marks, first.queries, first.by) == ((1.0, 2.5), ("ok", "ok"), 2, "mine")
    assert (second.key, second.values, second.queries) == (Key("train", 0, 0, 1), (3.0,), 1)
    assert first.seconds >= 0
    assert not oracle.durable
    assert wire.roundtrip(first) == first


def test_one_message_of_a_conversation_is_a_conversation():
    def reward(prompts, completions):
        return [
            float(
                prompts[0] == [{"role": "user", "content": "2+2="}]
                and completions == [[{"role": "assistant", "content": "4"}]]
            )
        ]

    asked = Question(Key("train", 0, 0, 0), "score", PLAIN, ("4",), (0,), is_chat=True)
    assert ask(CallableOracle(reward, "mine"), asked)[0].values == (1.0,)


@SETTINGS
@given(st.lists(st.lists(st.text("ab", max_size=9), min_size=1, max_size=4), max_size=5))
def test_values_stay_with_their_candidates(groups):
    answers = ask(CallableOracle(length, "length"), *(question(i, group) for i, group in enumerate(groups)))
    assert [answer.values for answer in answers] == [
        tuple(float(len(text)) for text in group) for group in groups
    ]


def test_none_is_no_reward():
    answer = ask(CallableOracle(lambda completions: [None, 2.0], "mine"), question(0, ["a", "b"]))[0]
    assert (answer.values, answer.marks, answer.queries) == ((0.0, 2.0), ("abstain", "ok"), 2)


@pytest.mark.parametrize(
    "returned",
    [
        [True, 2],
        (1, 2),
        np.array([1, 2], dtype=np.int8),
        [np.float32(1), np.bool_(True) + np.int64(1)],
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(1), torch.tensor(2.0)],
        (float(value) for value in (1, 2)),
    ],
)
def test_numbers_of_every_kind(returned):
    answer = ask(CallableOracle(lambda completions: returned, "mine"), question(0, ["a", "b"]))[0]
    assert answer.values == (1.0, 2.0)
    assert all(type(value) is float for value in answer.values)


def test_bools_of_numpy_and_torch():
    answer = ask(
        CallableOracle(lambda completions: [np.bool_(True), torch.tensor(False)], "mine"),
        question(0, ["a", "b"]),
    )[0]
    assert answer.values == (1.0, 0.0)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], r"returned 1 values for 2 entries, of question train/0/0/0/0 \(score 'a', 'b'\); r"),
        ([1.0, 2.0, 3.0], "returned 3 values for 2 entries"),
        ([], r"returned \[\] for 2 entries"),
        (None, "returned None for 2 entries"),
        (1.0, "returned 1.0 for 2 entries"),
        ("12", "returned '12' for 2 entries"),
        ({0: 1.0, 1: 2.0}, "for 2 entries"),
        ([1.0, math.nan], "returned nan as value 1"),
        ([math.inf, 1.0], "returned inf as value 0"),
        ([1.0, 10**400], r"as value 1, candidate 1 of question train/.*\); return a finite number"),
        ([1.0, "2"], "returned '2' as value 1"),
        ([1.0, 2j], "returned 2j as value 1"),
        ([1.0, [2.0]], r"returned \[2.0\] as value 1"),
        (np.ones((2, 1)), "as value 0, candidate 0 of .*; return a finite number"),
        (torch.tensor([1.0, float("nan")]), "as value 1"),
    ],
)
def test_what_a_function_may_not_return(returned, message):
    oracle = CallableOracle(lambda completions: returned, "mine.py:reward")
    with pytest.raises(OracleError, match=message) as seen:
        ask(oracle, question(0, ["a", "b"]))
    assert str(seen.value).startswith("mine.py:reward ")


def test_a_function_that_raises_is_named_and_can_be_asked_again():
    trouble = [ZeroDivisionError("no luck")]

    def reward(completions):
        if trouble:
            raise trouble.pop()
        return length(completions)

    oracle = CallableOracle(reward, "mine")
    tickets = oracle.submit([question(0, ["a"])])
    with pytest.raises(OracleError, match="mine raised ZeroDivisionError: no luck") as seen:
        oracle.collect(tickets, 1.0)
    assert isinstance(seen.value.__cause__, ZeroDivisionError)
    assert oracle.collect(tickets, 1.0)[0][1].values == (1.0,)


def test_a_function_that_would_end_the_process_is_named():
    def reward(completions):
        raise SystemExit(7)

    with pytest.raises(OracleError, match="mine raised SystemExit: 7"):
        ask(CallableOracle(reward, "mine"), question(0, ["a"]))


def test_a_generator_that_raises():
    def reward(completions):
        yield 1 / 0

    with pytest.raises(OracleError, match="raised ZeroDivisionError"):
        ask(CallableOracle(reward, "mine"), question(0, ["a"]))


def test_a_column_that_a_calls_records_lack_is_none():
    """A function names a column that the records of one call lack and others have. It gets None for this
    column."""

    def reward(completions, answer, reference):
        return [
            None if own is None else float(text == own) for text, own in zip(completions, answer, strict=True)
        ]

    oracle = CallableOracle(reward, "reward")
    oracle.check_columns(["answer"], True)
    assert [answer.marks for answer in ask(oracle, question(0, ("a",)))] == [("abstain",)]
    assert [answer.values for answer in ask(oracle, question(1, ("a", "b"), answer="a", reference="c"))] == [
        (1.0, 0.0)
    ]


def test_a_column_that_the_data_lack_is_named():
    def reward(completions, ground_truth):
        return [0.0]

    with pytest.raises(
        OracleError, match=r"mine needs `ground_truth`.*it may have completions, level, prompts"
    ):
        ask(CallableOracle(reward, "mine"), question(0, ["a"], level=1))
    assert ask(CallableOracle(reward, "mine"), question(0, ["a"], ground_truth=1, level=2))[0].values == (
        0.0,
    )


def test_a_missing_reference_names_the_setting_that_gives_it():
    with pytest.raises(ConfigError, match=r"`reference` is neither .*; set prompts\.reference_key to"):
        build_oracle("exact_match", {}).check_columns(["answer"], False)


def test_columns_cannot_take_the_place_of_the_candidates():
    oracle = CallableOracle(
        lambda completions, reference: [float(completions == ["a"] and reference == ["r"])], "mine"
    )
    assert ask(oracle, question(0, ["a"], reference="r", completions="other"))[0].values == (1.0,)


def test_a_column_called_reference_serves_when_none_is_configured():
    oracle = CallableOracle(lambda completions, reference: [float(reference == ["a column"])], "mine")
    asked = Question(Key("train", 0, 0, 0), "score", PLAIN, ("a",), (0,), None, {"reference": "a column"})
    assert ask(oracle, asked)[0].values == (1.0,)


def test_comparisons():
    def compare(prompts, first, second, level):
        assert prompts == [
            "2+2=",
            [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}],
            "2+2=",
        ]
        assert first == ["a", [{"role": "assistant", "content": "c"}], "e"]
        assert second == ["b", [{"role": "assistant", "content": "d"}], "f"]
        assert level == [1, None, None]
        return [0.25, True, None]

    answers = ask(
        CallableComparison(compare, "mine"),
        question(0, ["a", "b"], kind="compare", level=1),
        question(1, ["c", "d"], kind="compare", messages=CHAT),
        question(2, ["e", "f"], kind="compare"),
    )
    assert [(answer.values, answer.marks, answer.queries) for answer in answers] == [
        ((0.25,), ("ok",), 1),
        ((1.0,), ("ok",), 1),
        ((0.0,), ("abstain",), 1),
    ]


@pytest.mark.parametrize("value", [-0.1, 1.1, 5])
def test_a_comparison_is_a_probability(value):
    oracle = CallableComparison(lambda prompts, first, second: [value], "mine")
    with pytest.raises(OracleError, match="the probability that the first wins, from 0 to 1"):
        ask(oracle, question(0, ["a", "b"], kind="compare"))


def test_exact_match():
    completions = [" 4\n", "5", [{"role": "assistant", "content": "2"}], "x"]
    assert exact_match(["p"] * 4, completions, ["4", "4", " 2", None], level=[1] * 4) == [1.0, 0.0, 1.0, None]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("42", 1.0),
        (" 42.0 ", 1.0),
        ("<think>\n\n</think>\n\n42", 1.0),
        ("hm, 41?\n</think>\n42\n", 1.0),
        ("[THINK]41[/THINK]42", 1.0),
        ("◁think▷41◁/think▷42", 1.0),
        ("<|channel|>final<|message|>42", 1.0),
        ("<|channel|>analysis<|message|>41<|end|><|start|>assistant<|channel|>final<|message|>42", 1.0),
        ("<|START_THINKING|>41<|END_THINKING|><|START_RESPONSE|>42<|END_RESPONSE|>", 1.0),
        ("<think>42</think>41", 0.0),
        ("<think>42</think>", 0.0),
        ("<think>\n42", 0.0),
        ("41 </b> 42", 0.0),
        ("the answer is 42", 0.0),
    ],
)
def test_an_answer_stands_behind_the_thoughts(text: str, score: float) -> None:
    assert exact_match(["?"], [text], ["42"]) == [score]
    assert exact_match(
        [[{"role": "user", "content": "?"}]], [[{"role": "assistant", "content": text}]], [42.0]
    ) == [score]
    assert exact_match(["?"], ["<think>" + text], [""]) == [0.0]


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (42.0, "42 42.0 +42 042 4.2e1 42.", "42.1 4.2 x42 ٤٢ 42/1 1e9999"),
        ("42.0", "42 42.0", "43 42,0"),
        (42, "42 42.0", "-42"),
        (-0.0, "0 -0 0.0 +0", "1"),
        (1e3, "1000 1e3", "1,000"),
        (1e16, "10000000000000000 1e16", "10000000000000001"),
        (1e-7, "0.0000001 1e-07 1E-7", "0"),
        (0.1, "0.1 .10", "0.1000000000000000055"),
        (2**53 + 1, "9007199254740993 9007199254740993.0", "9007199254740992"),
        pytest.param(10**400, "1" + 400 * "0" + " 1e400", "1e401", id="a long number"),
        (Decimal("42.00"), "42", "42.01"),
        ("007", "007", "7 7.0"),
        ("1.10", "1.10", "1.1"),
        ("+5", "+5", "5"),
        ("1,234", "1,234", "1234"),
        ("nan", "nan", "0"),
        ("abc", "abc", "ABC"),
    ],
)
def test_numbers_are_compared_as_numbers(reference: Any, right: str, wrong: str) -> None:
    """A number of the data, or a text as Python writes a number, equals every number of its value. Any other
    text equals itself alone."""
    texts = [*right.split(), *wrong.split()]
    wanted = [1.0] * len(right.split()) + [0.0] * len(wrong.split())
    found = ask(build_oracle("exact_match", {}), question(0, texts, reference=reference))[0]
    assert dict(zip(texts, found.values, strict=True)) == dict(zip(texts, wanted, strict=True))


@pytest.mark.parametrize(
    "reference", [None, True, False, float("nan"), float("inf"), ["42"], {"a": 42}, b"42"]
)
@pytest.mark.parametrize("rule", ["exact_match", "gsm8k", "math"])
def test_what_is_neither_text_nor_number_is_no_reference(rule: str, reference: Any) -> None:
    oracle = build_oracle(rule, {"symbolic": False} if rule == "math" else {})
    asked = Question(Key("train", 0, 0, 0), "score", PLAIN, ("42",), (0,), None, {"reference": reference})
    assert ask(oracle, asked)[0].marks == ("abstain",)


@SETTINGS
@given(number=st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_equals_what_python_writes_for_it(number: float) -> None:
    """So it is the same whether the data have numbers, or a CSV file of these numbers."""
    plain = reference_text(number)
    assert plain == reference_text(str(number)) == reference_text(f" {number} ")
    assert plain is not None
    assert "e" not in plain
    assert Decimal(plain) == Decimal(str(number))
    assert is_equal(str(number), plain) or len(str(number)) > 100


def test_math_reads_numbers_of_the_data() -> None:
    oracle = build_oracle("math", {"symbolic": False})
    for reference, text in (
        (42.0, "42"),
        (1e22, "1" + 22 * "0"),
        ("1e-07", "0.0000001"),
        (1e-7, r"\boxed{0.0000001}"),
    ):
        assert ask(oracle, question(0, [text, "1"], reference=reference))[0].values == (1.0, 0.0)


def test_preferences_by_hand():
    scores = {"a": 1.0, "b": 0.0, "c": None, "best": 1000.0, "worst": -1000.0}
    inner = CallableOracle(lambda completions: [scores[completion] for completion in completions], "mine")
    pairs = [("a", "b"), ("b", "a"), ("a", "a"), ("c", "a"), ("worst", "best"), ("best", "worst")]
    oracle = Preferences(inner, scale=2.0)
    assert (oracle.answers, oracle.durable) == ("compare", False)
    answers = ask(oracle, *(question(i, pair, kind="compare") for i, pair in enumerate(pairs)))
    # sigmoid(1 / 2) = 1 / (1 + exp(-0.5)) = 0.62245933
    assert answers[0].values == pytest.approx((0.62245933,), abs=1e-8)
    assert answers[1].values == pytest.approx((1 - 0.62245933,), abs=1e-8)
    assert [answer.values[0] for answer in answers[2:]] == pytest.approx([0.5, 0.5, 0.0, 1.0], abs=1e-12)
    assert [answer.marks for answer in answers] == [
        ("ok",),
        ("ok",),
        ("tie",),
        ("abstain",),
        ("ok",),
        ("ok",),
    ]
    assert [answer.queries for answer in answers] == [2] * 6
    assert [answer.by for answer in answers] == ["mine"] * 6


@SETTINGS
@given(st.floats(-500, 500), st.floats(-500, 500), st.floats(0.1, 10))
def test_preferences_are_antisymmetric(first, second, scale):
    inner = CallableOracle(lambda completions: [float(completion) for completion in completions], "mine")
    pairs = [(repr(first), repr(second)), (repr(second), repr(first))]
    there, back = ask(
        Preferences(inner, scale), *(question(i, pair, kind="compare") for i, pair in enumerate(pairs))
    )
    assert there.values[0] + back.values[0] == pytest.approx(1.0, abs=1e-12)
    assert (there.marks == ("tie",)) == (first == second)
    assert (there.values[0] - 0.5) * (first - second) >= 0


def test_preferences_need_scores_and_a_scale():
    with pytest.raises(ConfigError, match="answers 'compare'"):
        Preferences(CallableComparison(lambda prompts, first, second: [], "mine"))
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="the scale of preferences"):
            Preferences(CallableOracle(length, "length"), scale)


USERS = """
def reward(prompts, completions, **columns):
    return [float(len(completion)) for completion in completions]

def compare(prompts, first, second):
    return [1.0 for _ in prompts]

class Constant:
    answers = "score"
    durable = False

    def __init__(self, value, *, delay=0.0):
        self.value = value

    def submit(self, questions):
        return [str(question.key) for question in questions]

    def collect(self, tickets, seconds):
        return []

class Nothing:
    pass

class Vague(Constant):
    answers = "maybe"

number = 5
"""


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    path = tmp_path_factory.mktemp("users") / "mine.py"
    path.write_text(USERS, encoding="utf-8")
    return path


def test_oracles_by_name(users):
    named = build_oracle("exact_match", {})
    assert ask(named, question(0, ["4", "5"], reference="4"))[0].values == (1.0, 0.0)
    scored = build_oracle(f"{users}:reward", {})
    assert ask(scored, question(0, ["abc"]))[0].by == f"{users}:reward"
    compared = build_oracle(f"{users}:compare", {})
    assert isinstance(compared, CallableComparison)
    assert ask(compared, question(0, ["a", "b"], kind="compare"))[0].values == (1.0,)
    assert build_oracle(f"{users}:Constant", {"value": 3, "delay": 1.0}).oracle.value == 3
    assert build_oracle("oat.oracles.rules.exact:exact_match", {}).answers == "score"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("exact_mach", {}, "did you mean `exact_match`.*path/to/file.py:Name"),
        ("Skywork-gpt-remote", {}, "no oracle is called 'Skywork-gpt-remote'; valid: .*exact_match"),
        ("exact_match", {"scale": 1}, "takes no options; remove scale"),
        ("{users}:rewards", {}, "did you mean `reward`"),
        ("{users}:Constant", {"value": 1, "dealy": 2}, "has no option 'dealy'; did you mean `delay`"),
        ("{users}:Constant", {}, "missing a required argument: 'value'"),
        ("{users}:Nothing", {}, "lacks submit and collect"),
        ("{users}:Vague", {"value": 1}, "must have `answers`"),
        ("{users}:number", {}, "is int, neither a function nor a class"),
    ],
)
def test_names_and_options_that_do_not_fit(users, name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_oracle(name.format(users=users), options)
