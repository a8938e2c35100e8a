"""Questions that dynamic sampling throws away are taken: they are paid, counted, and known to the cache."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from fixtures import make_group, make_questions

from oat.ledger.audit import contradictions
from oat.ledger.ledger import Ledger
from oat.oracles.callables import CallableOracle
from oat.types import Item, Key


def spread(item: Item) -> bool:
    return len({*item.answer.values}) > 1


def keys(items: Sequence[Item]) -> list[Key]:
    return [item.question.key for item in items]


def oracle(asked: list[str]) -> CallableOracle:
    def score(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        asked.extend(completions)
        return [float(len(text)) for text in completions]

    return CallableOracle(score, "lengths", reads_group=False)


def ask(ledger: Ledger, step: int, round: int, *texts: tuple[str, str], first: int = 0) -> None:
    """Ask one question about each pair of texts."""
    groups = [make_group(first + number, *pair) for number, pair in enumerate(texts)]
    ledger.ask(step, round, groups, make_questions(groups, "score", step, round, oracle="o"))


def test_what_is_thrown_away_is_paid_and_asked_no_more(opened: Callable[..., Ledger]) -> None:
    asked: list[str] = []
    with closing(opened(oracle(asked))) as ledger:
        ask(ledger, 0, 0, ("a", "b"), ("a", "bb"))
        assert [spread(item) for item in ledger.answered(0, 0)] == [False, True]
        ask(ledger, 0, 1, ("c", "d"), ("cc", "d"), ("c", "ddd"), first=2)
        feedback = ledger.take_feedback(0, 2, is_usable=spread)
        assert [item.question.key.occurrence for item in feedback.items] == [1, 3]
        assert [item.question.key.occurrence for item in feedback.thrown_away] == [0, 2, 4]
        assert [item.question.key.occurrence for item in feedback.asked] == [1, 3, 0, 2, 4]
        assert (feedback.queries, feedback.expired) == (10, 0)
        before = [*asked]
        ask(ledger, 1, 0, ("b", "a"))
        ask(ledger, 1, 1, ("ddd", "c"), first=4)
        again = ledger.take_feedback(1, 1, is_usable=spread)
        assert [item.answer.values for item in again.asked] == [(3.0, 1.0), (1.0, 1.0)]
        assert (again.queries, asked) == (10, before)
        assert contradictions(ledger.store) == []
    with closing(opened(oracle(asked))) as ledger:
        for step, count, taken in ((0, 2, feedback), (1, 1, again)):
            read = ledger.take_feedback(step, count, is_usable=spread)
            assert keys(read.items) == keys(taken.items)
            assert keys(read.thrown_away) == keys(taken.thrown_away)
            assert (read.queries, read.expired) == (10, 0)


def test_answers_are_counted_round_by_round(opened: Callable[..., Ledger]) -> None:
    """A continued run counts the rounds that were asked before the one at hand, and no later ones."""
    asked: list[str] = []
    with closing(opened(oracle(asked))) as ledger:
        ask(ledger, 0, 0, ("a", "bb"))
        ask(ledger, 0, 1, ("c", "dd"), first=1)
    with closing(opened(oracle(asked))) as ledger:
        assert [len(ledger.answered(0, round)) for round in (0, 1)] == [1, 2]
        assert [ledger.num_prompts(0, round) for round in (0, 1)] == [1, 1]
        assert len(asked) == 4
        assert ledger.reasked <= 2


def test_another_rule_does_not_change_what_is_recorded(opened: Callable[..., Ledger]) -> None:
    with closing(opened(oracle([]))) as ledger:
        ask(ledger, 0, 0, ("a", "b"), ("a", "bb"))
        first = ledger.take_feedback(0, 2, is_usable=spread)
        second = ledger.take_feedback(0, 2, is_usable=lambda item: True)
        assert keys(first.items) == keys(second.items)
        assert keys(first.thrown_away) == keys(second.thrown_away)
        assert (len(first.items), len(first.thrown_away)) == (1, 1)
