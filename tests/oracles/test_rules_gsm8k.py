"""The rules of GSM8K: how they find the answer, how they compare numbers, and the test set's way through
reader, renderer and grader."""

import json
import warnings
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import pytest
from fixtures import oat, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oat.data.prompts import Source, read_prompts
from oat.oracles.make import build_oracle
from oat.oracles.rules.gsm8k import gsm8k, gsm8k_marked, last_number, marked_number
from oat.text.renderer import Renderer
from oat.types import Key, Prompt, Question

pytestmark = pytest.mark.inventory(85)

SETTINGS = settings(derandomize=True, deadline=None, max_examples=200)
TEST_SET = Path(__file__).resolve().parents[3] / "shared" / "real" / "gsm8k_test.jsonl"


def start(value: object) -> str:
    """Return a short name of a long parameter."""
    return str(value)[:20]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7", "7"),
        ("she pays $1,234.50.", "1234.5"),
        ("it is -$5", "-5"),
        ("it is $-5", "-5"),
        ("it is \u22125", "-5"),
        (r"\$18", "18"),
        (r"it is -\$5", "-5"),
        (r"it is \$-5", "-5"),
        ("5$ and $5", "5"),
        ("20$-5", "-5"),
        ("a total of \u20ac2,000,000!", "2000000"),
        ("16-3-4=9 and then 20-5", "5"),
        ("in 2020-12", "12"),
        ("(3)-5", "5"),
        ("20 -5", "-5"),
        ("- 5 eggs", "5"),
        ("probability .25.", "0.25"),
        ("about 1.5e3 miles", "1500"),
        ("about 2E-2", "0.02"),
        ("12 eggs and 3e", "3"),
        ("_-7_", "-7"),
        ("x=-7", "-7"),
        ("+7", "7"),
        ("72.0", "72"),
        ("9, 10, 11", "11"),
        ("25%", "25"),
        ("**Answer:** \\boxed{72}", "72"),
        ("<<16-3-4=9>>9 eggs\n#### 9", "9"),
        ("007", "7"),
        ("-0", "0"),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "seventy-two", ".", "-", "$", "e", "\u0667\u0662", ",,,"])
def test_a_text_without_a_number(text):
    assert last_number(text) is None
    assert gsm8k(["p"], [text], ["72"]) == [0.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", "72"),
        ("9 + 9 = 18\n####   $1,800.00 dollars for 2 weeks", "1800"),
        ("#### 1\n#### 2", "2"),
        ("####-3", "-3"),
        ("#### -$3", "-3"),
        ("#### $-3", "-3"),
        ("#### 72/5", "72"),
        ("72", None),
        ("#### the answer is 72", None),
        ("72 ####", None),
        ("### 72", None),
    ],
)
def test_the_marked_number_of_a_text(text, number):
    assert marked_number(text) == (None if number is None else Decimal(number))
    assert gsm8k_marked(["p"], [text], [f"#### {number or 72}"]) == [float(number is not None)]


@pytest.mark.parametrize(
    "reference", ["72", "72.0", " $72. ", "72%", "7.2e1", "+72", 72, 72.0, "9 times 8 is 72\n#### 72"]
)
def test_a_reference_is_a_number_or_an_answer_of_the_data_set(reference):
    responses = ["72", "72.00", "it is $72.", "72\n#### 72", "#### 73", "7,3", "-72", "0.72"]
    assert gsm8k(["p"] * 8, responses, [reference] * 8) == [1.0] * 4 + [0.0] * 4
    assert gsm8k_marked(["p"] * 8, responses, [reference] * 8) == [0.0] * 3 + [1.0] + [0.0] * 4


@pytest.mark.parametrize(
    "reference",
    [None, "", "seventy-two", "72 or 73", "so it is 72", "the mark #### alone", "1" * 101, "nan", "inf"],
    ids=start,
)
def test_without_a_number_in_the_reference_there_is_no_reward(reference):
    assert gsm8k(["p", "p"], ["72", "nan"], [reference, reference]) == [None, None]


@pytest.mark.parametrize(
    "reference",
    ["-$5", "$-5", r"-\$5", r"\$-5", "\u2212\u20ac5.00", "\u20ac\u22125", "so\n#### $-5", "so\n#### -$5"],
)
def test_a_negative_sum_of_money_as_reference(reference):
    assert gsm8k(["p"] * 4, ["it is -$5", "it is $-5", "-5", "$5"], [reference] * 4) == [1.0, 1.0, 1.0, 0.0]


def test_numbers_are_compared_exactly():
    near, exact = "0.30000000000000000000000000000000000000000000000004", "0.3"
    assert gsm8k(["p"] * 3, [near, "0.1 + 0.2 = 0.30000000000000004", "3e-1"], [exact] * 3) == [0.0, 0.0, 1.0]
    assert gsm8k(["p"] * 2, ["10000000000000000000000000000001", "1e31"], ["1" + "0" * 31] * 2) == [0.0, 1.0]


@pytest.mark.parametrize(
    "huge",
    ["9" * 101, "1e1000", "1e-1000", "1e" + "0" * 99 + "1", "0." + "0" * 100 + "1", "9" * 1_000_000],
    ids=start,
)
def test_a_number_beyond_the_limits_equals_nothing(huge):
    assert last_number(f"5 or rather {huge}") is None
    assert gsm8k(["p"], [huge], ["5"]) == [0.0]
    assert gsm8k(["p"], [huge], [huge]) == [None]


def test_numbers_up_to_the_limits():
    for longest in ("9" * 100, "1e999", "1e-999"):
        assert gsm8k(["p"], [longest], [longest]) == [1.0]


def test_conversations():
    assert gsm8k(
        [[{"role": "user", "content": "9*8?"}]], [[{"role": "assistant", "content": "it is 72"}]], ["72"]
    ) == [1.0]


NUMBERS = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=4)


@SETTINGS
@given(
    NUMBERS,
    st.sampled_from(["{}", "{:f}", "{:,f}", "{:,.6f}", "{:e}", "${:,f}", "#### {:f}.", "**{:f}**"]),
    st.text(max_size=30),
)
def test_a_number_is_read_however_it_is_written(number, form, before):
    written = form.format(number).replace("$-", "-$")
    text = f"{before} {written}\n"
    assert last_number(text) == number
    assert gsm8k(["p"], [text], [str(number)]) == [1.0]
    assert gsm8k(["p"], [text], [str(number + 1)]) == [0.0]


@SETTINGS
@given(st.one_of(st.text(max_size=60), st.text("0123456789.,-+eE$# /\\\u2212", max_size=60)))
def test_any_text_has_one_number_or_none_and_its_grade_is_0_or_1(text):
    number = last_number(text)
    assert number is None or number.is_finite()
    assert gsm8k(["p"], [text], ["5"]) == [float(number == 5)]
    assert gsm8k_marked(["p"], [text], ["5"]) == [float(marked_number(text) == 5)]
    assert gsm8k(["p"], ["5"], [text])[0] in (None, 0.0, 1.0)


def byte_renderer(template: str | None) -> Renderer:
    """Return a renderer whose tokenizer has one token per byte."""
    vocabulary = {
        character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    built = Tokenizer(models.BPE(vocabulary, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=built, eos_token="<eos>", extra_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    return Renderer(tokenizer, template=template)


def sampled(renderer: Renderer, text: str) -> str:
    """Return a response as an oracle gets it, after encoding and decoding."""
    return renderer.text(renderer.response(text))


def scores(rule: str, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    oracle = build_oracle(rule, {})
    questions = [
        Question(
            Key("train", 0, 0, prompt.occurrence),
            "score",
            prompt.messages,
            (response,),
            (0,),
            prompt.reference,
            prompt.columns,
        )
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    answers = dict(oracle.collect(tickets := oracle.submit(questions), 1.0))
    assert all(answers[ticket].marks == ("ok",) for ticket in tickets)
    return [answers[ticket].values[0] for ticket in tickets]


def check_data_set(path: Path, rule: str, template: str | None) -> int:
    """Check all required properties of a file in the data set's form, and return its number of rows."""
    prompts, renderer = (
        read_prompts(Source(path), prompt_key="question", reference_key="answer"),
        byte_renderer(template),
    )
    for prompt in prompts:
        assert prompt.messages[0].content in renderer.decode(renderer.prompt(prompt.messages))
    size = len(prompts)
    gold = [prompt.reference or "" for prompt in prompts]
    values = [int(answer.split("####")[1].replace(",", "")) for answer in gold]
    heads = [answer.split("####")[0] for answer in gold]
    seen = [sampled(renderer, answer) for answer in gold]
    assert seen == gold
    plus_one = [
        sampled(renderer, f"{head}#### {value + 1:,}") for head, value in zip(heads, values, strict=True)
    ]
    assert scores(rule, prompts, seen) == [1.0] * size
    assert scores(rule, prompts, plus_one) == [0.0] * size
    assert scores(rule, prompts, [sampled(renderer, "")] * size) == [0.0] * size
    following = [float(values[row] == values[(row + 1) % size]) for row in range(size)]
    assert scores(rule, [*prompts[1:], prompts[0]], seen) == following
    assert 0 < sum(following) < size
    return size


@pytest.mark.sample("gsm8k-None", seconds=1.9)
@pytest.mark.parametrize("template", [None, "chatml"])
@pytest.mark.parametrize("rule", ["gsm8k", "gsm8k_marked"])
def test_the_test_set_of_gsm8k(rule, template):
    if not TEST_SET.exists():
        pytest.skip(
            "the test set of GSM8K is not at ../shared/real/gsm8k_test.jsonl; rows written for this file "
            "are graded in its place"
        )
    assert check_data_set(TEST_SET, rule, template) == 1319


@pytest.mark.parametrize("rule", ["gsm8k", "gsm8k_marked"])
def test_rows_in_the_form_of_gsm8k(tmp_path, rule):
    rows = [
        {
            "question": "Ann has 3 boxes of 400 nails. How many nails?",
            "answer": "3*400=<<3*400=1200>>1200\n#### 1,200",
        },
        {
            "question": "30 crates hold 40 apples each. How many apples?",
            "answer": "30*40 \u2013 that\u2019s 1200\n#### 1200",
        },
        {"question": "It is 2 degrees and falls by 5. What now?", "answer": "2-5=<<2-5=-3>>-3\n#### -3"},
    ]
    assert check_data_set(write_jsonl(tmp_path / "rows.jsonl", rows), rule, "chatml") == 3


@pytest.mark.sample("grpo-0-True", seconds=1.0)
@pytest.mark.parametrize(
    ("algorithm", "usable", "told"), [("grpo", 0, True), ("dpo", 0, True), ("grpo", 1, False)]
)
def test_a_run_whose_references_are_no_numbers_says_so_once(world, tmp_path, algorithm, usable, told):
    records = [{"prompt": f"{n}=", "answer": "72" if n < usable else "seventy-two"} for n in range(4)]
    path = str(write_jsonl(tmp_path / "words.jsonl", records))
    changes = {
        "prompts.path": path,
        "evaluation.path": path,
        "oracle.name": "gsm8k",
        "stop.max_steps": 3,
        "evaluation.every": 1,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert oat("train", world.config(algorithm, tmp_path, changes)) == 0
    seen = [str(warning.message) for warning in caught if "no usable answer" in str(warning.message)]
    name = "gsm8k/preferences" if algorithm == "dpo" else "gsm8k"
    assert seen == [
        f"{what}: oracle {oracle} gave no usable answer to any of {count} questions, so {lost}; it "
        "abstained: look at prompts.reference_key and the "
        "columns of the data that it reads"
        for what, oracle, count, lost in (
            ("the evaluation after 0 steps", "gsm8k", 8, "it has no result"),
            ("step 1", name, 4, "it learns nothing"),
        )
        if told
    ]
    rows = [json.loads(line) for line in (tmp_path / algorithm / "metrics.jsonl").read_text().splitlines()]
    assert [row["answers/abstained_frac"] for row in rows[1:]] == [1.0 - usable / 4] * 3
