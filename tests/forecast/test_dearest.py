"""The highest price of questions: `oat check` prints it, and it is compared with the budget before the first
step."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import World, make_group, oat, write_jsonl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oat.assemble.run_inputs import gather_inputs
from oat.config.load import load_config
from oat.errors import OatWarning
from oat.forecast.highest_cost import highest_price, longest_responses
from oat.ledger.store import Store
from oat.oracles.judge import Judge
from oat.resolve.resolve import resolve
from oat.text.renderer import Renderer
from oat.types import Key, Price, Question
from oat.types.questions import Budget

BY_LENGTH = '''
from oat.types import Answer, Price


class ByLength:
    """A hundredth for each letter of the prompt and the responses; or, once it is really asked, `really`."""

    answers = "score"
    durable = False

    def __init__(self, really=None):
        self.really, self.open = really, {}

    def price(self, question):
        prompt = len(question.messages[0].content) * question.size
        letters = sum(len(text) for text in question.candidates) + prompt
        most = letters / 100 if self.really is None or not question.ids else self.really
        return Price(question.size, letters, most)

    def submit(self, questions):
        self.open.update({str(question.key): question for question in questions})
        return list(map(str, (question.key for question in questions)))

    def collect(self, tickets, seconds):
        asked = [(ticket, self.open.pop(ticket)) for ticket in tickets]
        return [(ticket, self.answer(question)) for ticket, question in asked]

    def answer(self, question):
        values = tuple(float(len(text)) for text in question.candidates)
        return Answer(question.key, values, ("ok",) * question.size, question.size)
'''


@pytest.fixture
def by_length(tmp_path: Path) -> str:
    (tmp_path / "by_length.py").write_text(BY_LENGTH)
    return f"{tmp_path / 'by_length.py'}:ByLength"


def costs(capsys: pytest.CaptureFixture[str], config: Path) -> dict[str, dict[str, float]]:
    """Return the costs that `oat check` says, by what costs and by unit."""
    assert oat("check", config, "--json") == 0
    found: dict[str, dict[str, float]] = {}
    for row in json.loads(capsys.readouterr().out)["rows"]:
        if row["name"].startswith("cost of "):
            what = row["name"].removeprefix("cost of ").removesuffix(", most")
            found.setdefault(what, {})[row["unit"]] = pytest.approx(row["number"])
    return found


def test_what_check_says_is_what_can_come(
    world: World, tmp_path: Path, by_length: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`oat check` prints the highest price of a question about three responses of four letters to a prompt of
    four letters. No question of the run costs more."""
    config = world.config(
        "grpo",
        tmp_path,
        {"oracle.name": by_length, "stop": {"max_steps": 3, "max_cost": 2.0}, "evaluation": None},
    )
    assert costs(capsys, config) == {
        "a question": {"queries": 3, "tokens": 24, "money": 0.24},
        "a step": {"queries": 12, "tokens": 96, "money": 0.96},
        "all steps left": {"queries": 36, "tokens": 288, "money": 2.0},
    }
    assert oat("train", config) == 0
    store = Store(tmp_path / "grpo" / "ledger.sqlite")
    asked = [row.question for row in store.answered()]
    assert max(sum(map(len, question.candidates)) for question in asked) <= 12
    assert len(asked) == 12


def test_of_a_run_that_its_budget_ends_check_says_the_budget(
    world: World, tmp_path: Path, by_length: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = {"max_steps": None, "max_cost": 2.0, "max_queries": 20}
    config = world.config("grpo", tmp_path, {"oracle.name": by_length, "stop": stop, "evaluation": None})
    assert costs(capsys, config)["the run"] == {"queries": 20, "money": 2.0}


@pytest.mark.parametrize("limit", [{"max_cost": 0.2}, {"max_tokens": 23}, {"max_queries": 2}])
def test_a_budget_below_a_question_is_refused(
    world: World, tmp_path: Path, by_length: str, capsys: pytest.CaptureFixture[str], limit: dict[str, Any]
) -> None:
    config = world.config(
        "grpo", tmp_path, {"oracle.name": by_length, "stop": {"max_steps": 3, **limit}, "evaluation": None}
    )
    (name, value), most = (
        next(iter(limit.items())),
        {"max_cost": "0.24", "max_tokens": "24", "max_queries": "3"},
    )
    for command in ("check", "train"):
        assert oat(command, config) == 2
        said = capsys.readouterr().err
        assert re.search(
            (
                rf"grpo.yaml:\d+: stop.{name} is {value:g}, and one question can cost {most[name]} "
                r"\(.*by_length.py:ByLength"
            ),
            said,
        )
        assert "raise it, or lower what a question can cost" in said
    assert not (tmp_path / "grpo").exists()


def test_one_below_a_step_is_warned_of(world: World, tmp_path: Path, by_length: str) -> None:
    config = world.config(
        "grpo",
        tmp_path,
        {"oracle.name": by_length, "stop": {"max_steps": 3, "max_cost": 0.5}, "evaluation": None},
    )
    for command in ("check", "train"):
        with pytest.warns(
            OatWarning,
            match=(
                r"stop.max_cost is 0.5, and a step of 4 questions can cost 0.96, so its questions are asked "
                r"in waves"
            ),
        ):
            assert oat(command, config) == 0
    tree = yaml.safe_load(config.read_text())
    tree["stop"]["max_cost"] = 0.1
    config.write_text(yaml.safe_dump(tree))
    for command in ("check", "train"):
        with pytest.warns(OatWarning, match=r"stop.max_cost is 0.1, and one question can cost 0.24"):
            assert oat(command, config) == 0, "a run that is begun goes on"


def test_recorded_responses_are_as_they_are(
    world: World, tmp_path: Path, by_length: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl(
        tmp_path / "pairs.jsonl",
        [{"prompt": "1+1=", "chosen": "a" * number, "rejected": "b"} for number in range(1, 30)],
    )
    changes = {
        "prompts": {"path": str(data), "responses": ["chosen", "rejected"]},
        "oracle.name": by_length,
        "evaluation": None,
    }
    tree = world.tree("dpo", tmp_path / "dpo", changes)
    del tree["algorithm"]["samples"]
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(tree))
    found = costs(capsys, tmp_path / "dpo.yaml")
    assert found["a question"] == {"queries": 2, "tokens": 38, "money": 0.38}


def test_no_question_of_a_judge_costs_more(world: World, tmp_path: Path) -> None:
    """No question to a judge about random responses of up to four tokens costs more than the limit that `oat
    check` prints."""
    options = {
        "name": "judge",
        "model": "m",
        "url": "http://127.0.0.1:1/v1",
        "price_in": 1.0,
        "price_out": 2.0,
    }
    resolved = resolve(
        *load_config(
            world.config(
                "dpo",
                tmp_path,
                {"oracle": options, "stop": {"max_steps": 3, "max_cost": 9.0}, "evaluation": None},
            )
        )
    )
    run_inputs = gather_inputs(resolved)
    most = highest_price(resolved, run_inputs)
    judge = run_inputs.training_oracle[1]
    draw = random.Random(0)
    assert isinstance(judge, Judge)
    prices = []
    for number, prompt in enumerate(run_inputs.prompts.all()):
        texts = ["".join(draw.choice("0123456789+=ab") for _ in range(draw.randrange(5))) for _ in range(2)]
        prices.append(
            judge.price(
                Question.about(
                    make_group(number, *texts), Key("train", 0, 0, number), "compare", (0, 1), "judge"
                )
            )
        )
        prices.append(
            judge.price(
                Question(Key("train", 0, 0, number), "compare", prompt.messages, tuple(texts), (0, 1))
            )
        )
    run_inputs.close()
    assert max(price.tokens for price in prices) <= most.tokens < 1.2 * max(price.tokens for price in prices)
    assert max(price.cost for price in prices) <= most.cost


def test_the_longest_texts_by_any_measure() -> None:
    """The longest text of a vocabulary is found for each measure: letters, bytes, and characters that JSON
    escapes. Ids that end a response do not count."""
    words = [
        "<pad>",
        "<eos>",
        "a",
        "bbbbbb",
        "\u4e00\u4e00\u4e00\u4e00",
        "\u200b\u200b\u200b",
        "<a very long end of turn>",
    ]
    built = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<pad>"))
    built.pre_tokenizer, built.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, pad_token="<pad>", eos_token="<eos>")
    found = longest_responses(Renderer(tokenizer, template=None, eos_ids=[6]), 3)
    assert {"b" * 18, "\u4e00" * 12, "\u200b" * 9} <= set(found)
    assert not any("turn" in text or "eos" in text for text in found)


def test_prompts_are_spread_over_all_sources(world: World, tmp_path: Path) -> None:
    files = [
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{number}"} for number in range(size)])
        for name, size in (("a", 2), ("b", 7))
    ]
    resolved = resolve(
        *load_config(
            world.config(
                "grpo", tmp_path, {"prompts": {"path": [str(file) for file in files]}, "evaluation": None}
            )
        )
    )
    prompts = gather_inputs(resolved).prompts
    state = prompts.state
    assert [prompt.messages[0].content for prompt in prompts.spread(99)] == [
        "a0",
        "a1",
        *(f"b{number}" for number in range(7)),
    ]
    assert [prompt.messages[0].content for prompt in prompts.spread(3)] == ["a0", "b1", "b4"]
    assert prompts.state == state


def test_a_run_that_asked_nobody_does_not_say_that_it_finished(
    world: World, tmp_path: Path, by_length: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oracle's real price is so high that the budget pays for no question. The run warns at the first
    question, and its last line does not say that it finished."""
    oracle = {"name": by_length, "really": 9.0}
    config = world.config(
        "grpo", tmp_path, {"oracle": oracle, "stop": {"max_steps": 3, "max_cost": 5.0}, "evaluation": None}
    )
    with pytest.warns(OatWarning) as caught:
        assert oat("train", config) == 0
    said = capsys.readouterr().out
    assert "finished" not in said
    assert "nobody was asked: the budget did not allow them: raise stop.max_cost" in said.splitlines()[-1]
    first = "step 1: a question is not asked, since it may take 9 cost, and 0 of 5 are spent (stop.max_cost)"
    assert [str(warning.message).startswith(first) for warning in caught].count(True) == 1
    rows = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["answers/unpaid_frac"] == 1.0


def test_what_is_left_bounds_what_waits() -> None:
    assert Budget(cost=2.0, tokens=10).within(Price(7, 30, 1.5)) == Price(7, 10, 1.5)
    assert Budget(queries=3, cost=1.0).within(Price(7, 30, 1.5)) == Price(3, 30, 1.0)


def test_a_recipe_without_a_default_is_priced_by_the_prompts(world: World, tmp_path: Path) -> None:
    """`oat check` and a budget price questions about the data's own prompts, whose column chooses sources."""
    (tmp_path / "zero.py").write_text(
        "def zero(prompts, completions, **columns):\n    return [0.0] * len(prompts)\n"
    )
    sources = [{"name": f"{tmp_path / 'zero.py'}:zero", "label": label} for label in ("one", "two")]
    recipe = {"a": ["one"], "b": ["one", "two"]}
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "ab", "task": "ab"[n % 2]} for n in range(8)])
    changes = {
        "prompts": {"path": str(prompts)},
        "evaluation": None,
        "stop": {"max_steps": 1, "max_queries": 99},
    }
    oracle = {"name": "mixture", "sources": sources, "by": "task", "recipe": recipe}
    config = world.config("grpo", tmp_path, {**changes, "oracle": oracle})
    resolved = resolve(*load_config(config))
    assert highest_price(resolved, gather_inputs(resolved)).queries == 2 * resolved.plan.most_candidates
    assert oat("check", config) == 0
    assert oat("train", config) == 0
