"""The rules for answers of an oracle. One check applies them in the ledger, in preferences that are made of
scores, and in `check_oracle`."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import make_group, make_questions

from oat.errors import ContractError, OracleError
from oat.ledger.audit import contradictions
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.oracles.preferences import Preferences
from oat.seeds import Seeds
from oat.testing import FakeOracle, check_oracle
from oat.types import Answer, Question


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[Any], Ledger]]:
    stores: list[Store] = []

    def open_(oracle: Any) -> Ledger:
        stores.append(Store(tmp_path / f"{len(stores)}.sqlite"))
        return Ledger(stores[-1], {"o": oracle}, Seeds(0), labels="threshold", deadline_s=60.0)

    yield open_
    for store in stores:
        store.close()


class Odd(FakeOracle):
    """An oracle that scores by length and changes its answer.

    Args:
        changes: a dictionary of functions, each of which changes one field; any other value replaces the
            answer.
    """

    def __init__(self, changes: Any):
        super().__init__(lambda question: [float(len(text)) for text in question.candidates])
        self.changes = changes

    def _answer(self, question: Question) -> Any:
        sound = super()._answer(question)
        if not isinstance(self.changes, dict):
            return self.changes
        return replace(sound, **{name: change(getattr(sound, name)) for name, change in self.changes.items()})


def ask(ledger: Ledger, kind: Any = "score") -> Answer:
    groups = [make_group(0, "a", "bb")]
    ledger.ask(0, 0, groups, make_questions(groups, kind, 0, oracle="o"))
    return ledger.take_feedback(0, 1).items[0].answer


def always(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


BROKEN: dict[str, tuple[Any, str]] = {
    "no answer": (None, "came None; return an oat.types.Answer"),
    "a number": (1.0, "came 1.0; return an oat.types.Answer"),
    "the key of another kind": ({"key": always("x")}, "has the key x; copy the question's"),
    "one value for all": ({"values": always(1.0)}, "`values` of the answer to .* is 1.0; give a tuple"),
    "a text for values": ({"values": always("12")}, "`values` of the answer to .* is '12'; give a tuple"),
    "a text for marks": ({"marks": always("ok")}, "`marks` of the answer to .* is 'ok'; give a tuple"),
    "no value": (
        {"values": lambda values: [None] * len(values)},
        "is None; give a finite number, or mark it abstain",
    ),
    "NaN": ({"values": lambda values: [math.nan] * len(values)}, "is nan; give a finite number"),
    "a tensor": ({"values": lambda values: [*torch.tensor(values)]}, "is tensor.*; give a finite number"),
    "larger than a float": (
        {"values": lambda values: [10**400] * len(values)},
        "is 10+[.]{3}; give a finite number",
    ),
    "unpaid": (
        {"marks": lambda marks: ["unpaid"] * len(marks)},
        "has the marks 'unpaid'.*; an oracle may give ok, tie, abstain, failed",
    ),
    "awaited": ({"marks": lambda marks: ["awaited"] * len(marks)}, "has the marks 'awaited'"),
    "no mark": ({"marks": lambda marks: [None] * len(marks)}, "has the marks None"),
    "nested marks": ({"marks": lambda marks: [["ok"]] * len(marks)}, r"has the marks \['ok'\]"),
    "no queries": (
        {"queries": always(None)},
        "`queries` of the answer .* is None; give a whole number from 0",
    ),
    "negative queries": ({"queries": always(-2)}, "`queries` of the answer .* is -2"),
    "half a query": ({"queries": always(0.5)}, "`queries` of the answer .* is 0.5"),
    "too many queries": ({"queries": always(2**70)}, "`queries` of the answer .* is 1180591620717411303424"),
    "negative tokens": ({"tokens": always(-1)}, "`tokens` of the answer .* is -1"),
    "NaN for its cost": ({"cost": always(math.nan)}, "`cost` of the answer .* is nan; give a number from 0"),
    "a negative cost": ({"cost": always(-0.1)}, "`cost` of the answer .* is -0.1"),
    "no seconds": ({"seconds": always(None)}, "`seconds` of the answer .* is None"),
    "nobody": ({"by": always(None)}, "`by` of the answer .* is None; give the name of who answered"),
    "scores beside scores": (
        {"scores": always((1.0, 2.0))},
        r"has the scores \(1.0, 2.0\); give the pair's two",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_answer_is_refused_everywhere(opened: Callable[[Any], Ledger], name: str) -> None:
    changes, words = BROKEN[name]
    ledger = opened(Odd(changes))
    with pytest.raises(OracleError, match=f"oracle o: .*{words}"):
        ask(ledger)
    assert ledger.store.unanswered(), "nothing is recorded"
    with pytest.raises(ContractError, match=words):
        check_oracle(Odd(changes))
    if name not in ("the key of another kind", "scores beside scores"):
        with pytest.raises(OracleError, match=words):
            ask(opened(Preferences(Odd(changes))), "compare")
        with pytest.raises(OracleError, match=words):
            check_oracle(Preferences(Odd(changes)))


SOUND: dict[str, dict[str, Callable[[Any], Any]]] = {
    "lists": {"values": list, "marks": list, "scores": list},
    "an array": {"values": np.array, "queries": np.int64, "cost": np.float32},
    "other numbers": {
        "values": lambda values: tuple(Fraction(value) for value in values),
        "seconds": np.float64,
    },
}


@pytest.mark.parametrize("name", SOUND)
def test_what_means_the_same_is_taken_as_plain_numbers(opened: Callable[[Any], Ledger], name: str) -> None:
    ledger = opened(Odd(SOUND[name]))
    answer = ask(ledger)
    assert (answer.values, answer.marks, answer.queries) == ((1.0, 2.0), ("ok", "ok"), 2)
    assert [type(value) for value in (*answer.values, answer.queries, answer.cost, answer.seconds)] == [
        float,
        float,
        int,
        float,
        float,
    ]
    assert contradictions(ledger.store) == []
    check_oracle(Odd(SOUND[name]))
    check_oracle(Preferences(Odd(SOUND[name])))


@pytest.mark.parametrize("mark", ["abstain", "failed", "tie"])
@pytest.mark.parametrize("value", [None, math.nan, math.inf, "none"])
def test_beside_another_mark_a_value_without_a_meaning_is_stored_as_a_neutral_one(
    opened: Callable[[Any], Ledger], mark: str, value: Any
) -> None:
    changes = {"values": lambda values: (value,) * len(values), "marks": lambda marks: (mark,) * len(marks)}
    ledger = opened(Odd(changes))
    answer = ask(ledger)
    assert (answer.values, answer.marks) == ((0.5, 0.5), (mark, mark))
    assert contradictions(ledger.store) == []
    check_oracle(Odd(changes))


class Mute(Odd):
    """Returns other values than tickets from `submit`, or than pairs from `collect`."""

    def __init__(self, submitted: Any = list, collected: Any = list):
        super().__init__({})
        self.submitted, self.collected = submitted, collected

    def submit(self, questions: Any) -> Any:
        return self.submitted(super().submit(questions))

    def collect(self, tickets: Any, seconds: float) -> Any:
        return self.collected(super().collect(tickets, seconds))


async def later(pairs: Any) -> Any:
    return pairs


@pytest.mark.parametrize(
    ("oracle", "words"),
    [
        (
            lambda: Mute(submitted=always(None)),
            "submit returned None for .* question.*; return a list with one string a question",
        ),
        (lambda: Mute(submitted=lambda tickets: "0" * len(tickets)), "submit returned '0+' for"),
        (
            lambda: Mute(submitted=lambda tickets: [[ticket] for ticket in tickets]),
            r"submit returned \[\['0'\].* for",
        ),
        (
            lambda: Mute(collected=always(None)),
            (
                r"collect returned None; return a list of \(ticket, Answer\) pairs, empty where nothing is "
                r"there"
            ),
        ),
        (lambda: Mute(collected=dict), "collect returned {'"),
        (lambda: Mute(collected=lambda pairs: [answer for _, answer in pairs]), "collect returned Answer"),
        (
            lambda: Mute(collected=lambda pairs: [([ticket], answer) for ticket, answer in pairs]),
            r"collect returned \(\['",
        ),
        pytest.param(
            lambda: Mute(collected=later),
            "collect returned <coroutine",
            marks=pytest.mark.filterwarnings("ignore:coroutine"),
        ),
    ],
)
def test_tickets_and_pairs_are_lists(
    opened: Callable[[Any], Ledger], oracle: Callable[[], Any], words: str
) -> None:
    with pytest.raises(OracleError, match=f"oracle o: {words}"):
        ask(opened(oracle()))
    with pytest.raises(ContractError, match=f"Mute: {words}"):
        check_oracle(oracle())
    with pytest.raises(OracleError, match=words):
        ask(opened(Preferences(oracle())), "compare")


def test_the_sound_preferences_beside_a_broken_one_are_kept(opened: Callable[[Any], Ledger]) -> None:
    ledger = opened(
        Preferences(FakeOracle(lambda question: [math.nan if question.key.occurrence == 1 else 2.0, 1.0]))
    )
    groups = [make_group(number, "a", "bb") for number in range(3)]
    ledger.ask(0, 0, groups, make_questions(groups, "compare", 0, oracle="o"))
    with pytest.raises(OracleError, match="is nan; give a finite number"):
        ledger.take_feedback(0, 3)
    assert [row.question.key.occurrence for row in ledger.store.unanswered()] == [1]


@pytest.mark.parametrize("mark", ["abstain", "failed"])
def test_the_score_of_the_one_that_has_one_stays(opened: Callable[[Any], Ledger], mark: str) -> None:
    ledger = opened(Preferences(FakeOracle(lambda question: [3.0, mark])))
    answer = ask(ledger, "compare")
    assert (answer.marks, answer.scores) == ((mark,), (3.0, None))
    ((_, again, _),) = ledger.store.answers(ledger.store.taken("train", 0))
    assert again.scores == (3.0, None)
    none = ask(opened(Preferences(FakeOracle(always(mark)))), "compare")
    assert (none.marks, none.scores) == ((mark,), ())
