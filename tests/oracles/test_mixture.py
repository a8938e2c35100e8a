"""Mixtures of oracles: sums and scales computed by hand, the choice by a column, prices, and rounds that are
answered completely."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, forked, kill_at, oat, write_jsonl
from tiny_models import build_config, save_reward_model

from oat.commands.digest import digest_run
from oat.errors import ConfigError, OracleError
from oat.ledger.store import Store
from oat.oracles.make import build_oracle
from oat.oracles.mixture import Mixture
from oat.oracles.preferences import Preferences
from oat.types import Answer, Key, Message, Price, Question

CODE = '''
from oat.types import Answer, Price


def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


def letters(prompts, completions, **columns):
    return [None if text == "skip" else 10.0 * text.count("a") for text in completions]


def level(completions, level):
    return [float(own) for own in level]


def compare(prompts, first, second):
    return [0.5 for _ in first]


class Slow:
    """Answers one question a call, the last first, and fails what says so."""

    answers, durable = "score", False

    def __init__(self, cost=0.25):
        self.cost, self.open = cost, {}

    def price(self, question):
        return Price(len(question.candidates), 7, self.cost)

    def submit(self, questions):
        self.open |= {f"t{question.key.occurrence}": question for question in questions}
        return [f"t{question.key.occurrence}" for question in questions]

    def collect(self, tickets, seconds):
        ticket = tickets[-1]
        question = self.open.pop(ticket)
        marks = tuple("failed" if text == "fail" else "ok" for text in question.candidates)
        n = len(question.candidates)
        answer = Answer(question.key, (1.0,) * n, marks, queries=n, cost=self.cost, tokens=7, by="slow")
        return [(ticket, answer)]
'''


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("code") / "code.py"
    path.write_text(CODE, encoding="utf-8")
    return str(path)


def question(number: int, *texts: str, round: int = 0, purpose: str = "train", **columns: Any) -> Question:
    return Question(
        Key(purpose, 0, round, number),
        "score",
        (Message("user", "?"),),
        texts,
        tuple(range(len(texts))),
        None,
        columns,
    )


def ask(oracle: Mixture, *questions: Question) -> list[Answer]:
    tickets, found = oracle.submit(questions), dict[str, Answer]()
    while len(found) < len(tickets):
        found.update(oracle.collect([ticket for ticket in tickets if ticket not in found], 5.0))
    assert not oracle._rounds
    return [found[ticket] for ticket in tickets]


def std(*values: float) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


@pytest.mark.inventory(54)
def test_a_weighted_sum(code: str) -> None:
    mixture = Mixture([{"name": f"{code}:length", "weight": 0.5}, {"name": f"{code}:letters", "weight": 2}])
    first, second = ask(mixture, question(0, "aab", "b"), question(1, "skip"))
    assert (first.values, first.marks, first.queries, first.by) == ((41.5, 0.5), ("ok", "ok"), 4, "mixture")
    assert (second.values, second.marks) == ((2.0,), ("ok",)), (
        "what one says nothing about is the sum of the others"
    )
    assert mixture.cacheable
    alone = ask(Mixture([{"name": f"{code}:letters"}]), question(0, "skip", "a"))[0]
    assert (alone.values, alone.marks) == ((0.0, 10.0), ("abstain", "ok"))


@pytest.mark.parametrize(
    ("normalise", "expected"),
    [
        ({"normalise": "none"}, [(1.0, 3.0), (2.0, 2.0), (8.0,)]),
        ({"normalise": "fixed", "mean": 2.0, "std": 4.0}, [(-0.25, 0.25), (0.0, 0.0), (1.5,)]),
        ({"normalise": "group"}, [(-1 / (std(1, 3) + 1e-4), 1 / (std(1, 3) + 1e-4)), (0.0, 0.0), (0.0,)]),
        (
            {"normalise": "batch"},
            [
                tuple((r - 3.2) / (std(1, 3, 2, 2, 8) + 1e-4) for r in group)
                for group in [(1, 3), (2, 2), (8,)]
            ],
        ),
    ],
)
def test_scales(code: str, normalise: dict[str, Any], expected: list[tuple[float, ...]]) -> None:
    mixture = Mixture([{"name": f"{code}:length", **normalise}])
    answers = ask(mixture, question(0, "a", "bbb"), question(1, "cc", "dd"), question(2, "eeeeeeee"))
    for answer, values in zip(answers, expected, strict=True):
        assert answer.values == pytest.approx(values)
    assert mixture.cacheable == (normalise["normalise"] in ("none", "fixed"))


def test_what_abstains_is_in_no_statistic(code: str) -> None:
    (answer,) = ask(
        Mixture([{"name": f"{code}:letters", "normalise": "group"}]), question(0, "skip", "a", "aaa")
    )
    assert answer.marks == ("abstain", "ok", "ok")
    assert answer.values == pytest.approx((0.0, -10 / (std(10, 30) + 1e-4), 10 / (std(10, 30) + 1e-4)))


def test_rounds_are_scaled_apart_however_they_are_asked(code: str) -> None:
    """Two rounds are asked again together, as after a kill. Each round keeps its own scale, in any order of
    the questions."""
    sources = [
        {"name": f"{code}:length", "normalise": "batch"},
        {"name": f"{code}:letters", "normalise": "batch", "weight": 0.3},
    ]
    rows = [
        question(0, "a", "bbb"),
        question(1, "cc", "aaaa"),
        question(0, "a", "b", round=1),
        question(1, "ccc", "aa", round=1),
    ]
    apart = [*ask(Mixture(sources), *rows[:2]), *ask(Mixture(sources), *rows[2:])]
    together = ask(Mixture(sources), *rows)
    turned = ask(Mixture(sources), *reversed(rows))
    assert [a.values for a in apart] == [a.values for a in together] == [a.values for a in reversed(turned)]


def test_a_round_is_answered_whole(code: str) -> None:
    mixture = Mixture([{"name": f"{code}:length"}, {"name": f"{code}:Slow", "cost": 0.5}])
    tickets = mixture.submit([question(n, "a", "fail" if n == 1 else "b") for n in range(3)])
    assert mixture.collect(tickets, 0.0) == [], "the slow one has said one answer of three"
    found = dict(mixture.collect(tickets[:1], 5.0))
    assert list(found) == tickets[:1]
    found |= dict(mixture.collect(tickets, 0.0))
    assert {ticket: answer.marks for ticket, answer in found.items()} == {
        tickets[0]: ("ok", "ok"),
        tickets[1]: ("ok", "failed"),
        tickets[2]: ("ok", "ok"),
    }
    assert found[tickets[2]].values == (2.0, 2.0)
    assert (found[tickets[2]].queries, found[tickets[2]].tokens, found[tickets[2]].cost) == (4, 7, 0.5)


def test_the_scores_of_each_source_are_kept(code: str) -> None:
    """The answer has the raw scores of the sources that were asked, without weight and scale."""
    mixture = Mixture(
        [
            {"name": f"{code}:length", "weight": 0.5, "normalise": "batch", "label": "size"},
            {"name": f"{code}:letters", "label": "a"},
        ],
        by="kind",
        recipe={"long": ["size"], "default": ["size", "a"]},
    )
    first, second = ask(mixture, question(0, "skip", "aab", kind="other"), question(1, "b", kind="long"))
    assert first.sources == {"size": (4.0, 3.0), "a": (None, 20.0)}
    assert second.sources == {"size": (1.0,)}
    assert mixture.metrics == {}


@pytest.mark.parametrize(
    ("sound", "broken", "words"),
    [
        (
            "(1.0,) * n",
            "(1.0,) * (n - 1)",
            "Slow: the answer to question train/0/0/0/0 (score 'a', 'b') has 1 values and 2 marks; give 2",
        ),
        (
            "return [(ticket",
            "return [('x'",
            "Slow: collect returned the ticket 'x', which is not open; return those it was given",
        ),
        ("return [(ticket, ", "return [(", "Slow: collect returned "),
    ],
)
def test_what_a_source_returns_is_held_against_the_contract(
    tmp_path: Path, sound: str, broken: str, words: str
) -> None:
    assert sound in CODE
    (tmp_path / "source.py").write_text(CODE.replace(sound, broken), encoding="utf-8")
    with pytest.raises(OracleError, match=re.escape(words)):
        ask(Mixture([{"name": f"{tmp_path / 'source.py'}:Slow"}]), question(0, "a", "b"))


def test_prices_add_up(code: str) -> None:
    both = Mixture(
        [
            {"name": f"{code}:length"},
            {"name": f"{code}:Slow"},
            {"name": f"{code}:Slow", "cost": 1.0, "label": "dear"},
        ]
    )
    assert both.price(question(0, "a", "b")) == Price(6, 14, 1.25)
    assert both.names_price, "the length, which does not say what it costs, costs a query for each value"
    assert not Mixture([{"name": f"{code}:length"}]).names_price
    assert Mixture([{"name": f"{code}:Slow"}]).names_price
    rows = {"by": "task", "recipe": {"x": ["slow"], "default": ["length"]}}
    chosen = Mixture(
        [{"name": f"{code}:Slow", "label": "slow"}, {"name": f"{code}:length", "label": "length"}], **rows
    )
    assert chosen.price(question(0, "a", task="x")) == Price(1, 7, 0.25)
    assert chosen.price(question(0, "a", task="y")) == Price(1)


def test_a_column_chooses(code: str) -> None:
    sources = [
        {"name": f"{code}:length", "label": "long", "weight": 3.0},
        {"name": f"{code}:letters", "label": "a"},
    ]
    mixture = Mixture(
        sources, by="task", recipe={"story": ["long"], 2: {"a": 0.5, "long": 1}, "default": ["a"]}
    )
    rows = [
        question(0, "aa", task="story"),
        question(1, "aa", task=2),
        question(2, "aa", task="other"),
        question(3, "aa"),
    ]
    answers = ask(mixture, *rows)
    assert [answer.values for answer in answers] == [(6.0,), (12.0,), (20.0,), (20.0,)]
    assert [answer.queries for answer in answers] == [1, 2, 1, 1]
    mixture.check_columns(["task"], False)
    with pytest.raises(ConfigError, match="did you mean `tasks`"):
        mixture.check_columns(["tasks"], False)
    strict = Mixture(sources, by="task", recipe={"story": ["long"]})
    with pytest.raises(OracleError, match="has no sources for 'poem', the task of question"):
        strict.submit([question(0, "a", task="poem")])


def test_columns_of_sources_are_checked(code: str) -> None:
    with pytest.raises(ConfigError, match="its parameter `level`"):
        Mixture([{"name": f"{code}:level"}]).check_columns(["levels"], False)


def test_preferences_of_a_mixture(code: str) -> None:
    pair = Question(Key("train", 0, 0, 0), "compare", (Message("user", "?"),), ("aa", "b"), (0, 1))
    oracle = Preferences(Mixture([{"name": f"{code}:length", "weight": 2.0}]))
    ((_, answer),) = oracle.collect(oracle.submit([pair]), 1.0)
    assert answer.values[0] == pytest.approx(1 / (1 + math.exp(-2)))
    assert answer.scores == (4.0, 2.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sources": []}, "give at least one"),
        ({"sources": [{"weight": 1}]}, "give the `name` of an oracle"),
        (
            {"sources": [{"name": "exact_match", "normalise": "running"}]},
            "`normalise` of exact_match is 'running'",
        ),
        (
            {"sources": [{"name": "exact_match", "weight": "1"}]},
            "weight of exact_match in the oracle mixture is '1'",
        ),
        ({"sources": [{"name": "exact_match", "mean": 1}]}, "are what `normalise: fixed` reads"),
        ({"sources": [{"name": "exact_match", "normalise": "fixed", "std": 0}]}, "give a number above 0"),
        ({"sources": [{"name": "exact_match", "wieght": 1}]}, "takes no options; remove wieght"),
        ({"sources": [{"name": "exact_mtch"}]}, "did you mean `exact_match`"),
        ({"sources": [{"name": "exact_match"}, {"name": "exact_match"}]}, "a `label` of its own"),
        ({"sources": [{"name": "exact_match"}], "by": "task"}, "give both, or neither"),
        (
            {"sources": [{"name": "exact_match"}], "by": "task", "recipe": {"a": ["exact"]}},
            "did you mean `exact_match`",
        ),
        ({"sources": [{"name": "exact_match"}], "by": "task", "recipe": {"a": []}}, "give a list of labels"),
    ],
)
def test_mistakes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        build_oracle("mixture", options)


def test_a_comparison_is_no_source(code: str) -> None:
    with pytest.raises(ConfigError, match="compares pairs, and the oracle mixture is a sum of scores"):
        Mixture([{"name": f"{code}:compare"}])


@pytest.mark.sample("check-oracle", "train-gold", seconds=0.8)
@pytest.mark.parametrize("field", ["oracle", "gold"])
@pytest.mark.parametrize("command", ["check", "train"])
def test_relative_scores_are_no_evaluation(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, field: str
) -> None:
    """A mixture that normalises over the batch is refused as the oracle of an evaluation, since its scores
    have mean 0. A mixture that does not normalise is accepted."""
    relative, plain = (
        {"name": "mixture", "sources": [{"name": world.oracle, "normalise": way}]}
        for way in ("batch", "none")
    )
    judges = (
        {"evaluation.oracle": relative}
        if field == "oracle"
        else {"evaluation.oracle": plain, "evaluation.gold": relative}
    )
    assert oat(command, world.config("grpo", tmp_path, {"oracle": relative, **judges})) == 2
    said = capsys.readouterr().err
    assert f"name another evaluation.{field}" in " ".join(said.split())
    assert oat("check", world.config("grpo", tmp_path, {"oracle": relative, "evaluation.oracle": plain})) == 0


@pytest.mark.slow(
    instead="the other tests of the file, which compute the scales by hand; tests/faults/test_kill.py",
    seconds=2.8,
)
@pytest.mark.parametrize("after", [False, True])
def test_a_killed_run_with_scales_of_the_batch_ends_as_the_unbroken_one(
    world: World, tmp_path: Path, after: bool
) -> None:
    """A run with normalised sources is killed before or after answers are recorded. Continued, it ends like
    the unbroken run."""
    records = [{"prompt": f"{n % 10}+{n // 10}=", "task": "long" if n % 3 else "both"} for n in range(30)]
    mixture = {
        "name": "mixture",
        "sources": [
            {"name": world.oracle, "label": "reward", "normalise": "batch"},
            {"name": "length", "label": "length", "target": 3, "normalise": "group", "weight": 0.5},
        ],
        "by": "task",
        "recipe": {"long": ["length"], "both": {"reward": 1.0, "length": 2.0}},
    }
    changes = {
        "prompts": {"path": str(write_jsonl(tmp_path / "data.jsonl", records))},
        "oracle": mixture,
        "evaluation": None,
        "stop.max_steps": 5,
    }

    for run in ("whole", "killed"):
        config = world.config("grpo", tmp_path, {**changes, "run_dir": str(tmp_path / run)})

        def action(config: Path = config, run: str = run) -> int:
            if run == "killed":
                kill_at(Store, "add_answers", 3, after=after)
            return oat("train", config)

        code = forked(action, tmp_path / f"{run}.log")
        assert code == (0 if run == "whole" else -9), (tmp_path / f"{run}.log").read_text()[-2000:]
        if run == "killed":
            assert oat("train", config) == 0
    assert digest_run(tmp_path / "whole") == digest_run(tmp_path / "killed")


def test_what_its_sources_are_goes_through(tmp_path: Path) -> None:
    """The mixture passes on the run's device, its sources' metrics, and whether a source can price a
    question."""
    file = tmp_path / "sources.py"
    file.write_text(
        CODE
        + (
            "\n\nclass Counted(Slow):\n    names_cost = False\n\n    @property\n    def metrics(self):\n  "
            "      return {'oracle/retries': 3.0}\n"
        )
    )
    counted, slow = {"name": f"{file}:Counted"}, {"name": f"{file}:Slow"}
    assert Mixture([counted]).metrics == {"oracle/retries": 3.0}
    waiting = Mixture(
        [{"name": "remote", "url": "http://127.0.0.1:1", "max_outage_s": 7}, {"name": f"{file}:length"}]
    )
    assert (waiting.max_outage_s, Mixture([counted]).max_outage_s) == (7, None)
    waiting.close()
    assert [Mixture(sources).names_cost for sources in ([counted], [counted, slow])] == [False, True]
    path = save_reward_model(tmp_path / "model", build_config("llama"))
    mixture = build_oracle("mixture", {"sources": [{"name": "reward_model", "path": path}]}, "meta")
    assert mixture._sources["reward_model"].oracle.scorer.device.type == "meta"  # type: ignore[attr-defined]
