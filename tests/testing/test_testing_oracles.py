"""`check_oracle` passes every oracle of `oat`, and finds the faults of others. `FakeOracle` answers by its
script."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oat.errors import ConfigError, ContractError, OracleError
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.oracles.builtin import KnownOracle
from oat.oracles.callables import CallableOracle
from oat.oracles.preferences import Preferences
from oat.quickstart import PermutedRewards
from oat.seeds import Seeds
from oat.testing import FakeOracle, check_oracle, make_question
from oat.testing.samples import make_group
from oat.types import Answer, Key, Message, Price, Question

TASK = {"target": 24, "nums": [4, 6, 1]}


def length(prompts: list, completions: list, **columns: list) -> list[float]:
    return [float(len(text)) for text in completions]


async def slow_length(prompts: list, completions: list, **columns: list) -> list[float]:
    return length(prompts, completions)


def few_tokens(prompts: list, completions: list, completion_ids: list) -> list[float]:
    return [-float(len(ids)) for ids in completion_ids]


def first_is_longer(prompts: list, first: list, second: list, **columns: list) -> list[float]:
    return [0.9 if len(a) > len(b) else 0.1 for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize("name", ["exact_match", "gsm8k", "gsm8k_marked", "countdown", "cheerful"])
def test_every_rule_passes(name: str) -> None:
    check_oracle(name, reference="4", columns=TASK)


OPTIONS: dict[str, dict[str, Any]] = {
    "math": {"symbolic": False},
    "format": {"template": "<answer>...</answer>"},
    "regex": {"pattern": "[0-9]", "engine": "python", "timeout_s": 60},
    "length": {"target": 9, "unit": "words"},
    "isolated": {"function": "oat.oracles.rules.exact:exact_match", "timeout_s": 60},
    "mixture": {
        "sources": [
            {"name": "exact_match", "weight": 2.0},
            {"name": "length", "target": 3, "unit": "characters"},
        ]
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_oracle_with_options_passes(name: str) -> None:
    check_oracle(name, reference="4", options=OPTIONS[name])


def test_a_mixture_with_scales_passes() -> None:
    """A mixture with normalised sources passes, since it declares that its answers depend on more than the
    question."""
    check_oracle(
        "mixture", reference="4", options={"sources": [{"name": "length", "target": 9, "normalise": "group"}]}
    )


@pytest.mark.parametrize(
    "oracle",
    [
        length,
        slow_length,
        few_tokens,
        first_is_longer,
        KnownOracle("recorded", "score"),
        KnownOracle("recorded", "compare"),
        Preferences(CallableOracle(length, "length")),
        FakeOracle(
            lambda question: [float(len(text)) for text in question.candidates],
            late=lambda question: len(question.candidates[0]) % 3,
        ),
        FakeOracle(
            lambda question: "tie" if len(question.candidates[0]) > 3 else 0.7,
            answers="compare",
            newest_first=True,
        ),
        FakeOracle(lambda question: "abstain"),
    ],
    ids=lambda oracle: getattr(oracle, "__name__", type(oracle).__name__),
)
def test_every_kind_of_oracle_passes(oracle: Any) -> None:
    check_oracle(oracle)


def test_an_oracle_that_says_it_is_no_function_of_the_question_passes() -> None:
    check_oracle(PermutedRewards, reference="4", options={"seed": 3})


class Broken(FakeOracle):
    """Scores by length. Subclasses add a fault."""

    def __init__(self, **settings: Any):
        super().__init__(lambda question: [float(len(text)) for text in question.candidates], **settings)

    def _answer(self, question: Question) -> Answer:
        return self.spoilt(super()._answer(question))

    def spoilt(self, answer: Answer) -> Answer:
        return answer


class TooFew(Broken):
    def spoilt(self, answer: Answer) -> Answer:
        return replace(answer, values=answer.values[:-1])


class NotANumber(Broken):
    def spoilt(self, answer: Answer) -> Answer:
        return replace(answer, values=tuple(float("nan") if value == 0 else value for value in answer.values))


class Infinite(Broken):
    def spoilt(self, answer: Answer) -> Answer:
        return replace(
            answer, values=tuple(float("inf") if value > 1_000 else value for value in answer.values)
        )


class Text(Broken):
    def spoilt(self, answer: Answer) -> Answer:
        return replace(answer, values=("good",) * len(answer.values))


class OfAnother(Broken):
    def spoilt(self, answer: Answer) -> Answer:
        return replace(answer, key=Key("train", 0, 0, 7))


class Unsure(Broken):
    def spoilt(self, answer: Answer) -> Answer:
        return replace(answer, marks=("unsure",) * len(answer.marks))


class Undecided(Broken):
    durable = "perhaps"


class Dearer(Broken):
    def price(self, question: Question) -> Price:
        return Price(queries=question.size, tokens=10)

    def spoilt(self, answer: Answer) -> Answer:
        return replace(answer, tokens=11)


class Random(Broken):
    def spoilt(self, answer: Answer) -> Answer:
        return replace(answer, values=tuple(random.random() for _ in answer.values))


class Ranked(Broken):
    """Scores by rank among the candidates of the question."""

    def spoilt(self, answer: Answer) -> Answer:
        return replace(
            answer, values=tuple(float(sorted(answer.values).index(value)) for value in answer.values)
        )


class Tired(Broken):
    """Lowers the score by the place of the question in the submission."""

    def collect(self, tickets: Any, seconds: float) -> list:
        found = super().collect(tickets, seconds)
        return [
            (t, replace(a, values=tuple(value - place for value in a.values)))
            for place, (t, a) in enumerate(found)
        ]


class Curious(Broken):
    def submit(self, questions: Any) -> list[str]:
        for question in questions:
            question.columns["seen"] = True
        return super().submit(questions)


class Tidy(Broken):
    """Sorts the list of questions that it gets, and removes answered tickets from the list."""

    def submit(self, questions: Any) -> list[str]:
        questions.sort(key=lambda question: -question.key.occurrence)
        return super().submit(questions)


class Consuming(Broken):
    def collect(self, tickets: Any, seconds: float) -> list:
        found = super().collect(tickets, seconds)
        tickets.clear()
        return found


class OneTicket(Broken):
    def submit(self, questions: Any) -> list[str]:
        return super().submit(questions)[:1] * len(questions)


class Repeating(Broken):
    def collect(self, tickets: Any, seconds: float) -> list:
        return [(ticket, self._answer(self.asked[int(ticket)])) for ticket in tickets]


class Eager(Broken):
    """Answers all open questions, also those that the call does not ask for."""

    def collect(self, tickets: Any, seconds: float) -> list:
        return super().collect(list(self._open), seconds)


class WithoutTickets(Broken):
    def collect(self, tickets: Any, seconds: float) -> list:
        return [answer for _, answer in super().collect(tickets, seconds)]


class Silent(Broken):
    def collect(self, tickets: Any, seconds: float) -> Any:
        return None


class Fragile(Broken):
    def spoilt(self, answer: Answer) -> Answer:
        return replace(answer, values=(1 / answer.values[0],))


@pytest.mark.parametrize(
    ("oracle", "said"),
    [
        (
            TooFew(),
            (
                r"TooFew: the answer to question train/0/0/0/0 \(score '4', '5'\) has 1 values and 2 marks; "
                r"give 2 of each"
            ),
        ),
        (
            NotANumber(),
            r"the answer to question .* '', 'four'\) is nan; give a finite number, or mark it abstain",
        ),
        (Infinite(), r"is inf; give a finite number"),
        (Text(), r"is 'good'; give a finite number"),
        (OfAnother(), r"has the key train/0/0/7/0; copy the question's, train/0/0/0/0"),
        (Unsure(), r"has the marks 'unsure', 'unsure'; an oracle may give ok, tie, abstain, failed"),
        (Dearer(), r"took Price\(queries=2, tokens=11.* may take at most Budget\(queries=2, tokens=10"),
        (Random(), r"and \(0\.\d+, 'ok'\) when asked again, with other keys; .* set `cacheable = False`"),
        (Ranked(), r"when asked alone; an answer that is no function of the prompt and the response"),
        (Tired(), r"when asked in the other order; "),
        (
            Curious(),
            (
                r"`columns` of question train/0/0/0/0 .* was changed by it; work on copies of lists, columns "
                r"and messages"
            ),
        ),
        (Tidy(), r"submit changed its argument `questions`, the list; work on copies"),
        (Consuming(), r"collect changed its argument `tickets`, the list; work on copies"),
        (
            OneTicket(),
            r"submit returned \['0', '0'.*; return a list with one string a question, each different",
        ),
        (Repeating(), r"for tickets that were answered; return each answer once"),
        (Eager(), r"collect returned the ticket '0', asked for \['6'\]; return those only, once"),
        (WithoutTickets(), r"collect returned Answer\(.*; return a list of \(ticket, Answer\) pairs"),
        (Silent(), r"Silent: collect returned None; return a list of \(ticket, Answer\) pairs"),
        (
            Fragile(),
            r"collect raised ZeroDivisionError: float division by zero \(.*test_testing_oracles.py:\d+\)",
        ),
        (
            Broken(late=lambda question: None if question.candidates[0] == "" else 0),
            r"no answer to question .* '', 'four'\) within 0.2 s; answer it",
        ),
        (FakeOracle(lambda question: 1.5, answers="compare"), r"is 1.5; give a probability from 0 to 1"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, FakeOracle) else "",
)
def test_what_is_wrong_is_said(oracle: FakeOracle, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        check_oracle(oracle, seconds=0.2)


def test_what_is_wrong_with_a_function_is_said() -> None:
    drawn = itertools.count()
    broken: list[tuple[Callable, type[Exception], str]] = [
        (
            lambda prompts, completions: [1.0],
            OracleError,
            "returned 1 values for 17 entries|returned 1 values for",
        ),
        (
            lambda prompts, completions: [float("nan")] * len(completions),
            OracleError,
            "returned nan as value 0",
        ),
        (lambda prompts, completions: [next(drawn) for _ in completions], ContractError, "when asked again"),
        (lambda prompts, completions, answer: [1.0] * len(completions), OracleError, "needs `answer`"),
        (lambda prompts, completions: completions.clear() or [], OracleError, "returned .* for"),
    ]
    for function, error, said in broken:
        with pytest.raises(error, match=said):
            check_oracle(function)


def test_a_function_that_changes_its_columns_is_found() -> None:
    def reward(prompts: list, completions: list, nums: list) -> list[float]:
        return [float(len(text) > numbers.pop()) for text, numbers in zip(completions, nums, strict=True)]

    with pytest.raises(
        ContractError,
        match=(
            r"reward: `columns` of question train/0/0/0/0 .* was changed by it; work on copies of lists, "
            r"columns"
        ),
    ):
        check_oracle(reward, [make_question("2+2=", "4", "5", nums=[6, 4, 1])])


def test_a_function_that_changes_its_arguments_is_found() -> None:
    def sorts(prompts: list, completions: list) -> list[float]:
        values = [float(len(text)) for text in completions]
        completions.sort()
        return values

    async def strips(prompts: list, completions: list) -> list[float]:
        values = [float(len(text)) for text in completions]
        prompts[:] = [prompt.strip("=") for prompt in prompts]
        return values

    def empties(prompts: list, first: list, second: list) -> list[float]:
        values = [float(len(a) > len(b)) for a, b in zip(first, second, strict=True)]
        first.clear()
        second.clear()
        return values

    for function, changed in ((sorts, "completions"), (strips, "prompts"), (empties, "first, second")):
        with pytest.raises(
            ContractError,
            match=f"{function.__name__}: its argument `{changed}` was changed by it; work on copies of lists",
        ):
            check_oracle(function)
    made = CallableOracle(sorts, "sorts")
    with pytest.raises(ContractError, match="its argument `completions` was changed by it"):
        check_oracle(made)
    assert made.function is sorts
    with pytest.raises(ContractError, match="its argument `completions` was changed by it"):
        check_oracle(replies_in_place, [make_question([Message("user", "2+2=")], "4", "5")])


def replies_in_place(prompts: list, completions: list) -> list[float]:
    """Score chats, whose completions are lists of messages, and change the messages."""
    for (message,) in completions:
        message["content"] = message["content"].lower() + "."
    return [float(len(message["content"])) for (message,) in completions]


def test_what_a_run_refuses_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r'the oracle Undecided must have `answers`, "compare" or "score", and `durable`'
    ):
        check_oracle(Undecided())
    with pytest.raises(ConfigError, match=r"the oracle dict lacks submit and collect"):
        check_oracle(dict)


def test_own_questions_are_asked() -> None:
    chat = [Message("system", "add"), Message("user", "2+2=")]

    def reward(prompts: list, completions: list, answer: list) -> list[float]:
        assert all(prompt[0]["role"] == "system" for prompt in prompts)
        return [float(text[0]["content"] == right) for text, right in zip(completions, answer, strict=True)]

    check_oracle(
        reward,
        [make_question(chat, "4", "5", answer="4"), make_question(chat, "6", occurrence=1, answer="6")],
    )
    with pytest.raises(ContractError, match="there is nothing to ask; give questions of the kind 'score'"):
        check_oracle(reward, [])
    with pytest.raises(ContractError, match="reference and columns are for made-up questions"):
        check_oracle(reward, [make_question(chat, "4")], columns={"answer": "4"})
    with pytest.raises(
        ContractError, match=r"FakeOracle: is made already, and nothing reads the options \{'late': 3\}"
    ):
        check_oracle(FakeOracle(lambda question: 1.0), options={"late": 3})


def test_a_fake_oracle_is_late_out_of_order_and_silent_as_scripted() -> None:
    questions = [make_question("2+2=", "4", "5", occurrence=n) for n in range(4)]
    late: list[int | None] = [1, 0, None, 0]
    oracle = FakeOracle(
        lambda q: [q.key.occurrence, "abstain"], late=lambda q: late[q.key.occurrence], newest_first=True
    )
    tickets = oracle.submit(questions)
    first, second, third = (oracle.collect(tickets, 0.0) for _ in range(3))
    assert [answer.key.occurrence for _, answer in first] == [3, 1]
    assert [answer.key.occurrence for _, answer in second] == [0]
    assert third == []
    assert first[0] == (
        tickets[3],
        Answer(questions[3].key, (3, 0.5), ("ok", "abstain"), queries=2, by="fake"),
    )
    assert oracle.asked == questions


def test_a_ledger_settles_with_a_fake_oracle(tmp_path: Path) -> None:
    """With a FakeOracle, the ledger waits for a late answer, and a question without an answer fails after its
    deadline. The order of answers is not the order of learning."""
    from numpy.random import default_rng

    groups = [make_group(n, {"sampler": 2}, default_rng(n)) for n in range(4)]
    questions = [
        Question.about(group, Key("train", 0, 0, n), "score", (0, 1), oracle="fake")
        for n, group in enumerate(groups)
    ]
    late: list[int | None] = [2, 0, None, 1]
    oracle = FakeOracle(
        lambda q: float(q.key.occurrence), late=lambda q: late[q.key.occurrence], newest_first=True
    )
    ledger = Ledger(
        Store(tmp_path / "ledger.sqlite"), {"fake": oracle}, Seeds(0), labels="threshold", deadline_s=0.3
    )
    ledger.ask(0, 0, groups, questions)
    items = ledger.take_feedback(0, 4).items
    ledger.close()
    assert [item.answer.marks for item in items] == [
        ("ok", "ok"),
        ("ok", "ok"),
        ("failed", "failed"),
        ("ok", "ok"),
    ]
    assert [item.answer.values[0] for item in items] == [0.0, 1.0, 0.5, 3.0]
