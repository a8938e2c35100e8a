"""Forms of questions: the rendered prompt, examples that are right by the project's own rules, and runs that
use them."""

import json
import re
from pathlib import Path

import pytest
import yaml
from fixtures import World, make_model, oat, write_jsonl
from tiny_models import build_tokenizer

from oat.errors import TemplateError
from oat.ledger.store import Store
from oat.oracles.rules.countdown import grade, tagged_answer
from oat.oracles.rules.gsm8k import gsm8k, gsm8k_marked
from oat.oracles.rules.math import MathRule
from oat.text.question_forms import FORMS
from oat.text.renderer import Renderer
from oat.types import Message

pytestmark = pytest.mark.inventory(88)


@pytest.mark.parametrize("name", FORMS)
def test_a_prompt_ends_with_the_cue(name: str) -> None:
    form = FORMS[name]
    for few_shot in range(len(form.examples) + 1):
        text = form.render(" What is 1+1?\n", few_shot)
        assert text.endswith(f"{form.before} What is 1+1?\n{form.cue}")
        assert text.startswith(form.instruction)
        assert [text.count(part) for part in (form.before, form.cue)] == [few_shot + 1] * 2
        assert [example.worked in text for example in form.examples] == [
            place < few_shot for place in range(len(form.examples))
        ]
    assert not any(
        stop in example.worked or stop in example.question for stop in form.stop for example in form.examples
    )
    assert all(text.count(stop) == len(form.examples) + 1 for stop in form.stop)


def test_sizes() -> None:
    assert {name: len(form.examples) for name, form in FORMS.items()} == {
        "gsm8k": 8,
        "math": 4,
        "countdown": 3,
    }


@pytest.mark.parametrize("example", FORMS["gsm8k"].examples, ids=lambda example: example.answer)
def test_examples_of_gsm8k(example) -> None:
    """The rules of GSM8K find the example's answer, and every equation of its solution is right."""
    assert (
        gsm8k(["p"], [example.worked], [example.answer])
        == gsm8k_marked(["p"], [example.worked], [example.answer])
        == [1.0]
    )
    equations = re.findall(r"([0-9.]+) ([-+*/]) ([0-9.]+) = ([0-9.]+[0-9]|[0-9])", example.worked)
    assert equations
    for left, sign, right, value in equations:
        a, b = float(left), float(right)
        assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign] == float(value)


@pytest.mark.parametrize("example", FORMS["math"].examples, ids=lambda example: example.answer)
def test_examples_of_math(example) -> None:
    assert MathRule(symbolic=False).grade(["p"], [example.worked], [example.answer]) == [1.0]


@pytest.mark.parametrize("example", FORMS["countdown"].examples, ids=lambda example: example.answer)
def test_examples_of_countdown(example) -> None:
    target, *numbers = map(int, re.findall(r"\d+", example.question))
    assert grade(example.worked, target, sorted(numbers)) == 1.0
    assert tagged_answer(example.worked) == example.answer


def test_the_renderer_puts_one_question() -> None:
    tokenizer, form = build_tokenizer(), FORMS["math"]
    plain = Renderer(tokenizer, template=None)
    renderer = Renderer(tokenizer, template=None, question=form, few_shot=2)
    asked = renderer.prompt([Message("user", "what is 1?")])
    assert asked.tolist() == plain.prompt([Message("user", form.render("what is 1?", 2))]).tolist()
    with pytest.raises(TemplateError, match="user, assistant, user is not one question"):
        renderer.prompt([Message("user", "a"), Message("assistant", "b"), Message("user", "c")])


def test_a_run_puts_its_questions_and_the_oracle_sees_them_bare(world: World, tmp_path: Path) -> None:
    tokens = sorted({*FORMS["countdown"].render("12+=?", 3)})
    make_model(tmp_path / "model", tokens=[*tokens, "\n\nQuestion"])
    records = [{"prompt": f"{n}+1=?", "answer": "a"} for n in range(3)]
    changes = {
        "model.path": str(tmp_path / "model"),
        "prompts": {"path": str(write_jsonl(tmp_path / "data.jsonl", records))},
        "render": {"question": "countdown", "few_shot": 3},
        "sampling": {"max_new_tokens": 4, "overflow": "cut"},
        "evaluation": None,
        "stop.max_steps": 1,
    }
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    assert oat("train", world.config("grpo", tmp_path, changes)) == 0
    store = Store(tmp_path / "grpo" / "ledger.sqlite")
    (group, *_) = store.groups("train", 0, 0)
    store.close()
    assert re.fullmatch(r"\d\+1=\?", group.prompt.messages[0].content)
    length = len(FORMS["countdown"].render(group.prompt.messages[0].content, 3))
    assert len(group.trajectories[0].segments[0].ids) == length
    resolved = yaml.safe_load((tmp_path / "grpo" / "config.yaml").read_text())
    assert resolved["sampling"]["stop"] == ["\n\nQuestion"]


@pytest.mark.parametrize(
    ("render", "words"),
    [
        ({"few_shot": 2}, "set render.question, whose examples they are"),
        ({"question": "math", "few_shot": 5}, "the form math has 4 examples; lower it"),
        ({"question": "maths"}, "`render.question` is 'maths'"),
    ],
)
def test_mistakes(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], render: dict, words: str
) -> None:
    assert oat("check", world.config("grpo", tmp_path, {"render": render})) == 2
    assert words in capsys.readouterr().err
