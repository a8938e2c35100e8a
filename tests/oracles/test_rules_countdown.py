"""The countdown rule: scores, tasks and grammar. Speed and hostile text are in
faults/test_hostile_text.py."""

import json
import re
import warnings
from fractions import Fraction
from operator import add, mul, sub, truediv
from pathlib import Path

import pytest
from fixtures import oat
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.errors import OracleError
from oat.oracles.make import build_oracle
from oat.oracles.rules.countdown import countdown, evaluate, grade
from oat.types import Key, Message, Question

pytestmark = pytest.mark.inventory(86)

SETTINGS = settings(derandomize=True, deadline=None, max_examples=200)
TASK = '{"target": 24, "numbers": [4, 6, 1]}'


def score(response, reference=TASK):
    return countdown(["p"], [response], reference=[reference])[0]


@pytest.mark.parametrize(
    "response",
    [
        "<answer>4*6*1</answer>",
        "think\n<answer>(6 - 1) * 4 + 4</answer>\nno:\n<answer> 6*4/1 </answer>\nDone.",
        "<answer>\n6*4*1\n</answer>",
        "<answer>6*4*1</answer></answer>",
        "<answer><answer>6*4*1</answer>",
        "<answer>6*4*1</answer> <answer>6*4",
        "<answer>-6*-4*1</answer>",
        "<answer>6.0*4*1</answer>",
        "<answer>((((6))*(4)))*\t1</answer>",
    ],
)
def test_a_right_answer(response):
    assert score(response) == 1.0


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "4*6",
        "4*6*1*1",
        "4*6*1+0",
        "4+6+1",
        "24",
        "6.4*1",
        "46*1",
        "4*6*1=24",
        "4*6*1 = 24",
        "(4*6*1",
        "4*6*1)",
        "4 6 1",
        "4*(6)(1)",
        "4*6//1",
        "4**6**1",
        "4*6*01",
        "4\u00d76\u00d71",
        "4*6*\u0661",
        "4*6\n*1",
        "4*6*1#",
        "1/(4-4)*6",
        "__import__('os')",
    ],
)
def test_any_other_answer_has_the_format_score(expression):
    assert score(f"<answer>{expression}</answer>") == 0.1


@pytest.mark.parametrize(
    "response",
    ["", "4*6*1", "<answer>4*6*1", "4*6*1</answer>", "</answer>4*6*1<answer>", "<ANSWER>4*6*1</ANSWER>"],
)
def test_no_answer_scores_nothing(response):
    assert score(response) == 0.0


def test_division_by_zero_has_the_format_score():
    assert grade("<answer>1/(4-4)</answer>", 24, [1, 4, 4]) == 0.1


def test_values_are_exact_and_1e_5_is_close():
    assert grade("<answer>8/(3-8/3)</answer>", 24, [3, 3, 8, 8]) == 1.0
    assert grade("<answer>1/3</answer>", Fraction("0.33333"), [1, 3]) == 1.0
    assert grade("<answer>1/3</answer>", Fraction("0.3333"), [1, 3]) == 0.1
    assert grade("<answer>1/100000</answer>", 0, [1, 100_000]) == 0.1
    assert grade("<answer>1/100001</answer>", 0, [1, 100_001]) == 1.0


def test_a_score_is_a_float_for_every_completion():
    values = countdown(["p"] * 3, ["<answer>4*6*1</answer>", "<answer>4</answer>", ""], reference=[TASK] * 3)
    assert values == [1.0, 0.1, 0.0]
    assert all(type(value) is float for value in values)


@pytest.mark.parametrize(
    "reference",
    [
        None,
        24,
        "",
        "24",
        "[24, [4, 6, 1]]",
        '{"target": 24}',
        '{"numbers": [4, 6, 1]}',
        '{"target": "24,", "numbers": [4, 6, 1]}',
        '{"target": true, "numbers": [4, 6, 1]}',
        '{"target": 24, "numbers": []}',
        '{"target": 24, "numbers": 461}',
        '{"target": 24, "numbers": ["four", 6, 1]}',
        '{"target": 24, "numbers": [NaN, 6, 1]}',
        '{"target": Infinity, "numbers": [4, 6, 1]}',
        '{"target": 24, "numbers": [4, 6, 1]',
        '{"target": 24, "numbers": ' + "[" * 5000 + "]" * 4000 + "}",
        '{"target": ' + "9" * 5000 + ', "numbers": [4]}',
        '{"target": 24, "numbers": [' + "4," * 10_000 + "4]}",
    ],
    ids=lambda reference: str(reference)[:40],
)
def test_without_a_task_there_is_no_reward(reference):
    assert score("<answer>4*6*1</answer>", reference) is None


def test_the_task_in_columns():
    responses = ["<answer>4*6*1</answer>", "<answer>2+2.5</answer>", "<answer>1</answer>"]
    assert countdown(["p"] * 3, responses, target=[24, 4.5, None], nums=[[1, 4, 6], (2.5, 2), [1]]) == [
        1.0,
        1.0,
        None,
    ]
    assert countdown(
        ["p"] * 2, responses[:2], reference=[TASK, TASK], target=[25, None], nums=[[1, 4, 6], None]
    ) == [0.1, 0.1]


@pytest.mark.parametrize(
    ("target", "nums"),
    [("24", "[4, 6, 1]"), (" 24.0 ", "[1.0, 4, 6]"), ("+24.", '["4", "6", "1"]'), (24, "[4,6,1]")],
)
def test_a_task_as_text(target, nums):
    """The task may be given as texts, as the values of a CSV file are."""
    responses = ["<answer>4*6*1</answer>", "<answer>4*6</answer>", ""]
    assert countdown(["p"] * 3, responses, target=[target] * 3, nums=[nums] * 3) == [1.0, 0.1, 0.0]


TEXTS = [
    ("", "[4, 6, 1]"),
    ("24 eggs", "[4, 6, 1]"),
    ("1/2", "[4, 6, 1]"),
    ("1e999999999", "[4, 6, 1]"),
    ("1_0", "[4, 6, 1]"),
    ("nan", "[4, 6, 1]"),
    (".", "[4, 6, 1]"),
    ("\u0662\u0664", "[4, 6, 1]"),
    ("9" * 101, "[4, 6, 1]"),
    ("24", "4, 6, 1"),
    ("24", "[]"),
    ("24", "[4, 6, 1"),
    ("24", '{"numbers": [4, 6, 1]}'),
    ("24", "[" * 9000),
    ("24", "24"),
    ("24", "[" + "4," * 10_000 + "4]"),
]


@pytest.mark.parametrize(("target", "nums"), TEXTS, ids=lambda text: text[:20])
def test_text_that_gives_no_task(target, nums):
    assert countdown(["p"], ["<answer>4*6*1</answer>"], target=[target], nums=[nums]) == [None]


def test_a_run_on_a_csv_file(world, tmp_path):
    path = tmp_path / "tasks.csv"
    path.write_text(
        "prompt,target,nums\n" + "".join(f'{n}=,24,"[4, 6, 1]"\n' for n in range(8)), encoding="utf-8"
    )
    changes = {
        "prompts": {"path": str(path)},
        "oracle.name": "countdown",
        "stop.max_steps": 1,
        "evaluation": None,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert oat("train", world.config("grpo", tmp_path, changes)) == 0
    last = json.loads((tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["answers/abstained_frac"], last["rows/trained"]) == (0.0, 12.0)


def question(candidates, reference=None, **columns):
    return Question(
        Key("train", 0, 0, 0),
        "score",
        (Message("user", "make 24"),),
        tuple(candidates),
        tuple(range(len(candidates))),
        reference,
        columns,
    )


@pytest.mark.parametrize(
    ("reference", "columns"),
    [(TASK, {}), (None, {"target": 24, "nums": [4, 6, 1]}), ("24", {"target": 24, "nums": [4, 6, 1]})],
)
def test_by_name_with_a_reference_or_columns(reference, columns):
    oracle = build_oracle("countdown", {})
    (ticket,) = oracle.submit([question(["<answer>4*6*1</answer>", "no"], reference, **columns)])
    assert dict(oracle.collect([ticket], 1.0))[ticket].values == (1.0, 0.0)


def test_data_without_tasks_are_an_error():
    oracle = build_oracle("countdown", {})
    with pytest.raises(OracleError, match="needs the columns `target` and `nums`, or a reference like"):
        oracle.collect(oracle.submit([question(["a", "b"], target=24)]), 1.0)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", "7"),
        ("(1+2)*3", "9"),
        ("10-4-3", "3"),
        ("100/10/5", "2"),
        ("2*3/4*5", "15/2"),
        ("-2*3", "-6"),
        ("2--3", "5"),
        ("- - -(1)", "-1"),
        ("1/3+1/3+1/3", "1"),
        ("0.1+.2", "3/10"),
        ("1.", "1"),
        ("00", "0"),
        ("\t 7 ", "7"),
    ],
)
def test_the_value_of_an_expression(expression, value):
    assert evaluate(expression) == Fraction(value)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 2",
        "1+",
        "*1",
        "()",
        ")(",
        "1..2",
        ".",
        "1.2.3",
        "1e3",
        "0x1",
        "1_0",
        "\u00b2",
        "1,2",
        "1\n",
        "\u00a01",
    ],
)
def test_what_is_no_expression(expression):
    with pytest.raises(ValueError):
        evaluate(expression)


@pytest.mark.parametrize(
    ("longest", "unit"), [("(" * 32 + "1" + ")" * 32, "("), ("1" * 16, "1"), ("+" * 255 + "1", "+")]
)
def test_limits_are_where_they_are_said_to_be(longest, unit):
    evaluate(longest)
    with pytest.raises(ValueError):
        evaluate(unit + longest + (")" if unit == "(" else ""))


def expressions() -> st.SearchStrategy[tuple[str, Fraction | None, list[int]]]:
    """Return a strategy of bracketed expressions, each with its value and its numbers. A value of None means
    a division by zero."""
    blank = st.sampled_from(["", " ", "\t "])
    number = st.integers(0, 99).map(lambda n: (str(n), Fraction(n), [n]))

    def join(left, sign, right, gap):
        (a, x, m), (b, y, n) = left, right
        undefined = x is None or y is None or (sign == "/" and y == 0)
        value = None if undefined else {"+": add, "-": sub, "*": mul, "/": truediv}[sign](x, y)
        return f"({a}{gap}{sign}{gap}{b})", value, m + n

    return st.recursive(
        number, lambda inner: st.builds(join, inner, st.sampled_from("+-*/"), inner, blank), max_leaves=8
    )


@SETTINGS
@given(expressions())
def test_bracketed_expressions_have_the_value_of_their_tree(made):
    text, value, numbers = made
    response = f"so <answer>{text}</answer>."
    if value is None:
        with pytest.raises(ZeroDivisionError):
            evaluate(text)
        assert grade(response, 24, sorted(numbers)) == 0.1
        return
    assert evaluate(text) == value
    assert grade(response, value, sorted(numbers)) == 1.0
    assert grade(response, value + Fraction(1, 100_000), sorted(numbers)) == 0.1
    assert grade(response, value - Fraction(1, 100_001), sorted(numbers)) == 1.0
    assert grade(response, value, sorted([*numbers, 1])) == 0.1
    assert grade(response, value, sorted(numbers)[1:]) == 0.1


@SETTINGS
@given(st.one_of(st.text(max_size=60), st.text("0123456789+-*/(). ", max_size=60)))
def test_any_text_is_graded(text):
    assert score(text) in (0.0, 0.1)
    assert score(f"<answer>{text}</answer>") in (0.1, 1.0)
    assert countdown(["p"], ["<answer>1</answer>"], reference=[text]) == [None]


def test_the_rule_in_the_documentation_works_as_it_stands(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "oracles" / "rules.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "rule.py").write_text(block, encoding="utf-8")
    oracle = build_oracle(f"{tmp_path / 'rule.py'}:short_and_right", {})
    (ticket,) = oracle.submit([question(["4", "the answer is 4", "4 " + "because " * 40], "4")])
    assert dict(oracle.collect([ticket], 1.0))[ticket].values == (1.0, 1.0, 0.5)
