"""The ledger: asking, answers in any order or none, labels, takes, restarts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import make_group, make_questions

from oat.errors import OracleError
from oat.ledger import ledger as ledger_module
from oat.ledger import outstanding as outstanding_module
from oat.ledger.audit import contradictions
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.oracles.base import Oracle
from oat.oracles.callables import CallableComparison, CallableOracle
from oat.oracles.preferences import Preferences
from oat.seeds import Seeds
from oat.types import UNASKED, Answer, Group, Kind, Question
from oat.types.budget import Budget


class Clock:
    """Time that passes only where somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now


class Post(Oracle):
    """Comparisons by post: each prompt's answer arrives so many seconds after it was asked, the newest
    letters first; None is never.

    Attributes:
        asked: occurrences in the order they were submitted, over all restarts that share the list.
    """

    answers: Kind = "compare"

    def __init__(
        self, clock: Clock, delays: dict[int, float | None], *, p: float = 0.8, durable: bool = False
    ):
        self.clock = clock
        self.delays = delays
        self.p = p
        self.durable = durable
        self.asked: list[int] = []
        self.open: dict[str, tuple[Question, float]] = {}

    def submit(self, questions: Sequence[Question]) -> list[str]:
        tickets = []
        for question in questions:
            delay = self.delays.get(question.key.occurrence, 0.0)
            tickets.append(f"letter {len(self.asked)}")
            self.asked.append(question.key.occurrence)
            self.open[tickets[-1]] = (question, math.inf if delay is None else self.clock.now + delay)
        return tickets

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        open = {ticket: self.open[ticket] for ticket in tickets if ticket in self.open}
        first = min((arrival for _, arrival in open.values()), default=math.inf)
        self.clock.now += min(seconds, max(0.0, first - self.clock.now))
        arrived = [ticket for ticket, (_, arrival) in open.items() if arrival <= self.clock.now]
        return [
            (ticket, Answer(self.open.pop(ticket)[0].key, (self.p,), ("ok",), 1, by="post"))
            for ticket in reversed(arrived)
        ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (ledger_module, outstanding_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Ledger]:
    """Opens the ledger of this test, again and again."""

    def make(
        oracle: Any,
        *,
        labels: Any = "threshold",
        deadline_s: float = 600.0,
        name: str = "o",
        seed: int = 0,
        **late: Any,
    ) -> Ledger:
        return Ledger(
            Store(tmp_path / "ledger.sqlite"),
            {name: oracle},
            Seeds(seed),
            labels=labels,
            deadline_s=deadline_s,
            **late,
        )

    return make


def ask(
    ledger: Ledger,
    step: int,
    *groups: Group,
    round: int = 0,
    kind: Kind = "compare",
    oracle: str = "o",
    purpose: str = "train",
) -> None:
    ledger.ask(
        step,
        round,
        groups,
        make_questions(list(groups), kind, step, round, oracle=oracle, purpose=purpose),
        purpose,
    )


def occurrences(feedback: Any) -> list[int]:
    return [item.question.key.occurrence for item in feedback.items]


def length(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def rewards() -> Oracle:
    return CallableOracle(length, "length")


def test_scores_of_a_real_function(opened: Callable[..., Ledger]) -> None:
    ledger = opened(rewards())
    ask(ledger, 0, make_group(0, "a", "bbb"), make_group(1, "cc", ""), kind="score")
    assert (ledger.asked(0, 0), ledger.asked(0, 1), ledger.recalls(0, 0), ledger.recalls(0, 1)) == (
        0,
        2,
        True,
        False,
    )
    assert ledger.store.spent("train").queries == 0
    feedback = ledger.take_feedback(0, 2)
    assert [item.answer.values for item in feedback.items] == [(1.0, 3.0), (2.0, 0.0)]
    assert [item.label for item in feedback.items] == [None, None]
    assert [item.group.trajectories[1].text for item in feedback.items] == ["bbb", ""]
    assert (feedback.step, feedback.queries, ledger.store.spent("train").queries) == (0, 4, 4)


@pytest.mark.parametrize("labels", ["threshold", "bernoulli"])
def test_preferences_from_scores(opened: Callable[..., Ledger], labels: str) -> None:
    """p = sigmoid(difference of lengths); equal lengths have no winner under either rule; a preference costs
    two queries."""
    ledger = opened(Preferences(rewards()), labels=labels)
    ask(ledger, 0, make_group(0, "a" * 60, "b"), make_group(1, "c", "d" * 60), make_group(2, "ee", "ff"))
    first, second, tied = ledger.take_feedback(0, 3).items
    assert (first.label, second.label, tied.label) == (0, 1, None)
    assert first.answer.values[0] == pytest.approx(1.0)
    assert (tied.answer.values, tied.answer.marks) == ((0.5,), ("tie",))
    assert ledger.store.spent("train").queries == 6


def test_thresholds_by_hand(opened: Callable[..., Ledger]) -> None:
    chances = {0: 0.5, 1: 0.500001, 2: 0.499999, 3: 1.0, 4: 0.0}
    oracle = CallableComparison(
        lambda prompts, first, second: [chances[int(prompt[1:])] for prompt in prompts], "chances"
    )
    ledger = opened(oracle)
    ask(ledger, 0, *(make_group(number, "a", "b") for number in chances))
    assert [item.label for item in ledger.take_feedback(0, 5).items] == [None, 0, 1, 0, 1]


def test_unasked_questions_cost_nothing_and_have_no_winner(opened: Callable[..., Ledger]) -> None:
    def forbidden(prompts: Sequence[str], first: Sequence[str], second: Sequence[str]) -> list[float]:
        assert prompts == ["p1"], "only the askable question may arrive"
        return [0.7]

    ledger = opened(CallableComparison(forbidden, "forbidden"), labels="bernoulli")
    groups = [make_group(0, "a", "a"), make_group(1, "a", "b")]
    unasked, askable = (
        make_questions(groups, "compare", 0, oracle=UNASKED)[0],
        make_questions(groups, "compare", 0, oracle="o")[1],
    )
    ledger.ask(0, 0, groups, [unasked, askable])
    assert ledger.asked(0, 1) == 2
    first, second = ledger.take_feedback(0, 2).items
    assert (first.label, first.answer.marks, first.answer.queries) == (None, ("tie",), 0)
    assert second.label in (0, 1)
    assert ledger.store.spent("train").queries == 1


@pytest.mark.inventory(89)
def test_drawn_labels_are_functions_of_the_address_with_the_right_frequency(tmp_path: Path) -> None:
    def labels(seed: int, name: str, order: int = 1) -> dict[int, int | None]:
        oracle = CallableComparison(lambda prompts, first, second: [0.3] * len(prompts), "chance")
        ledger = Ledger(
            Store(tmp_path / name), {"o": oracle}, Seeds(seed), labels="bernoulli", deadline_s=600
        )
        ask(ledger, 0, *[make_group(number, "a", "b") for number in range(1000)][::order])
        return {item.question.key.occurrence: item.label for item in ledger.take_feedback(0, 1000).items}

    drawn = labels(0, "first")
    assert labels(0, "again", order=-1) == drawn
    assert labels(1, "other") != drawn
    wins = sum(label == 0 for label in drawn.values())
    assert abs(wins - 300) < 4 * math.sqrt(1000 * 0.3 * 0.7)


def test_ask_is_one_transaction(opened: Callable[..., Ledger]) -> None:
    oracle = Post(Clock(), {})
    ledger = opened(oracle)
    group = make_group(0, "a", "b")
    with pytest.raises(Exception, match="UNIQUE"):
        ledger.ask(0, 0, [group], make_questions([group, group], "compare", 0, oracle="o"))
    assert not ledger.recalls(0, 0)
    assert (ledger.asked(1, 0), oracle.asked, ledger.outstanding.pending, ledger.rounds.groups) == (
        0,
        [],
        {},
        {},
    )


def test_intents_are_on_disk_before_the_oracle_hears_of_them(
    opened: Callable[..., Ledger], tmp_path: Path
) -> None:
    class Looking(Post):
        def submit(self, questions: Sequence[Question]) -> list[str]:
            seen.extend(row.question for row in Store(tmp_path / "ledger.sqlite").unanswered())
            return super().submit(questions)

    seen: list[Question] = []
    ledger = opened(Looking(Clock(), {}))
    ask(ledger, 0, make_group(0, "a", "b"), make_group(1, "c", "d"))
    assert [question.candidates for question in seen] == [("a", "b"), ("c", "d")]


def test_a_step_waits_for_its_questions_in_the_order_they_were_asked(
    opened: Callable[..., Ledger], clock: Clock
) -> None:
    """Answers arrive at 3, 1, 2 seconds: a step of two waits for the first; the next one needs nothing
    more."""
    ledger = opened(Post(clock, {0: 3.0, 1: 1.0, 2: 2.0}))
    ask(ledger, 0, *(make_group(number, "a", "b") for number in range(3)))
    first = ledger.take_feedback(0, 2)
    assert (occurrences(first), first.queries, clock.now) == ([0, 1], 2, 103.0)
    second = ledger.take_feedback(1, 2)
    assert (occurrences(second), second.queries, clock.now) == ([2], 3, 103.0)


def test_late_answers_in_another_order(opened: Callable[..., Ledger], clock: Clock) -> None:
    """Where a step waits only so long, it takes the first two that are there, in the order they were asked;
    the next takes the rest."""
    ledger = opened(Post(clock, {0: 3.0, 1: 1.0, 2: 2.0}), max_wait_s=600.0)
    ask(ledger, 0, *(make_group(number, "a", "b") for number in range(3)))
    first = ledger.take_feedback(0, 2)
    assert (occurrences(first), first.queries, clock.now) == ([1, 2], 2, 102.0)
    second = ledger.take_feedback(1, 2)
    assert (occurrences(second), second.queries, clock.now) == ([0], 3, 103.0)
    assert [occurrences(ledger.take_feedback(step, 2)) for step in (0, 1)] == [[1, 2], [0]]
    assert [item.group.trajectories[0].text for item in ledger.take_feedback(0, 2).items] == ["a", "a"]


def test_what_is_too_old_to_learn_from_is_waited_for_as_well(
    opened: Callable[..., Ledger], clock: Clock
) -> None:
    """So that what is set aside for it, and what is known, do not depend on when it comes. Question 1 is a
    step too old when step 2 comes to it."""
    ledger = opened(Post(clock, {1: 50.0}), max_age=1)
    ask(ledger, 0, make_group(0, "a", "b"), make_group(1, "c", "d"))
    assert occurrences(ledger.take_feedback(0, 1)) == [0]
    ask(ledger, 2, make_group(2, "e", "f"))
    found = ledger.take_feedback(2, 1)
    assert (occurrences(found), found.expired, found.queries, clock.now) == ([2], 1, 3, 150.0)


def test_a_take_is_replayed_as_it_was_recorded_also_a_short_one(
    opened: Callable[..., Ledger], clock: Clock
) -> None:
    ledger = opened(Post(clock, {1: 15.0}), max_wait_s=10.0)
    ask(ledger, 0, make_group(0, "a", "b"), make_group(1, "a", "b"))
    assert occurrences(ledger.take_feedback(0, 2)) == [0]
    assert clock.now == 110.0
    assert occurrences(ledger.take_feedback(1, 2)) == [1]
    ledger.close()

    silent = Post(clock, {})
    again = opened(silent)
    assert [
        (occurrences(feedback), feedback.queries)
        for feedback in (again.take_feedback(0, 2), again.take_feedback(1, 2))
    ] == [([0], 1), ([1], 2)]
    assert (silent.asked, again.reasked, clock.now) == ([], 0, 115.0)
    assert occurrences(again.take_feedback(2, 2)) == []
    assert again.take_feedback(2, 2).queries == 2


def test_a_step_waits_no_longer_than_it_may(opened: Callable[..., Ledger], clock: Clock) -> None:
    """In training; an evaluation waits for all it asked."""
    ledger = opened(Post(clock, {1: 50.0, 2: 90.0, 3: 300.0}), max_wait_s=20.0)
    ask(ledger, 0, *(make_group(number, "a", "b") for number in range(3)))
    assert (occurrences(ledger.take_feedback(0, 3)), clock.now) == ([0], 120.0)
    assert (occurrences(ledger.take_feedback(1, 3)), clock.now) == ([], 140.0)
    assert (occurrences(ledger.take_feedback(2, 3)), clock.now) == ([1], 160.0)
    ask(ledger, 3, make_group(3, "a", "b"), purpose="eval")
    assert (occurrences(ledger.take_feedback(3, 1, purpose="eval")), clock.now) == ([3], 460.0)


def test_an_answer_that_is_too_old_is_counted_and_not_learned_from(
    opened: Callable[..., Ledger], clock: Clock
) -> None:
    """Questions 0 and 1 are of step 0, question 2 is of step 2; an answer may be one step old."""
    ledger = opened(Post(clock, {0: 30.0, 1: 60.0}), max_wait_s=20.0, max_age=1)
    ask(ledger, 0, make_group(0, "a", "b"), make_group(1, "c", "d"))
    assert occurrences(ledger.take_feedback(0, 2)) == []
    first = ledger.take_feedback(1, 1)
    assert (occurrences(first), first.expired, first.queries, clock.now) == ([0], 0, 1, 130.0)
    ask(ledger, 2, make_group(2, "e", "f"))
    clock.now += 40
    second = ledger.take_feedback(2, 2)
    assert (occurrences(second), second.expired, second.queries) == ([2], 1, 3)
    assert ledger.take_feedback(2, 2).expired == 1
    ledger.close()
    again = opened(Post(clock, {}))
    assert [
        (occurrences(found), found.expired) for found in (again.take_feedback(step, 2) for step in range(4))
    ] == [
        ([], 0),
        ([0], 0),
        ([2], 1),
        ([], 0),
    ]


def test_a_lost_answer_fails_at_its_deadline_and_blocks_nothing(
    opened: Callable[..., Ledger], clock: Clock
) -> None:
    oracle = Post(clock, {0: None, 1: 5.0, 2: None})
    ledger = opened(oracle, deadline_s=30.0)
    ask(ledger, 0, make_group(0, "a", "b"), make_group(1, "a", "b"))
    clock.now += 20
    ask(ledger, 0, make_group(2, "a", "b"), round=1)
    first = ledger.take_feedback(0, 2)
    assert (occurrences(first), clock.now) == ([0, 1], 130.0)
    assert [item.answer.marks for item in first.items] == [("failed",), ("ok",)]
    assert (first.items[0].label, first.items[0].answer.queries, first.queries) == (None, 0, 1)
    late = ledger.take_feedback(1, 1)
    assert (occurrences(late), clock.now, late.items[0].answer.marks) == ([2], 150.0, ("failed",))
    assert late.items[0].answer.seconds == pytest.approx(30.0)


def test_an_answer_after_its_deadline_changes_nothing(opened: Callable[..., Ledger], clock: Clock) -> None:
    ledger = opened(Post(clock, {0: 31.0, 1: 60.0}), deadline_s=30.0)
    ask(ledger, 0, make_group(0, "a", "b"))
    assert ledger.take_feedback(0, 1).items[0].answer.marks == ("failed",)
    ask(ledger, 1, make_group(1, "a", "b"))
    clock.now += 10
    assert ledger.take_feedback(1, 1).items[0].answer.marks == ("failed",)
    assert ledger.take_feedback(0, 1).items[0].answer.marks == ("failed",)
    assert ledger.store.spent("train").queries == 0


def test_scores_that_fail_have_one_mark_a_value(opened: Callable[..., Ledger], clock: Clock) -> None:
    oracle = Post(clock, {0: None})
    oracle.answers = "score"
    ledger = opened(oracle, deadline_s=1.0)
    ask(ledger, 0, make_group(0, "a", "b", "c"), kind="score")
    assert ledger.take_feedback(0, 1).items[0].answer.marks == ("failed",) * 3


def test_purposes_do_not_mix(opened: Callable[..., Ledger]) -> None:
    ledger = opened(CallableComparison(lambda prompts, first, second: [0.9] * len(prompts), "sure"))
    ask(ledger, 0, make_group(0, "a", "b"))
    ask(ledger, 0, make_group(0, "c", "d"), make_group(1, "c", "d"), purpose="eval")
    assert [item.question.candidates for item in ledger.take_feedback(0, 5, purpose="eval").items] == [
        ("c", "d")
    ] * 2
    assert (
        ledger.store.spent("eval").queries,
        ledger.store.spent("train").queries,
        ledger.asked(1, 0),
        ledger.asked(1, 0, "eval"),
    ) == (2, 0, 1, 2)
    assert occurrences(ledger.take_feedback(0, 5)) == [0]


def test_two_oracles_of_which_one_never_answers(tmp_path: Path, clock: Clock) -> None:
    quick, dead = Post(clock, {}), Post(clock, {0: None})
    late: dict[str, Any] = {"labels": "threshold", "deadline_s": 60.0, "max_wait_s": 60.0}
    ledger = Ledger(Store(tmp_path / "ledger.sqlite"), {"quick": quick, "dead": dead}, Seeds(0), **late)
    groups = [make_group(0, "a", "b"), make_group(1, "a", "b")]
    first, second = (
        make_questions(groups, "compare", 0, oracle="dead")[0],
        make_questions(groups, "compare", 0, oracle="quick")[1],
    )
    ledger.ask(0, 0, groups, [first, second])
    assert occurrences(ledger.take_feedback(0, 1)) == [1]
    assert clock.now < 110.0
    assert ledger.take_feedback(1, 1).items[0].answer.marks == ("failed",)


def test_after_a_restart_unanswered_intents_are_asked_again_and_counted(
    opened: Callable[..., Ledger], clock: Clock
) -> None:
    ledger = opened(Post(clock, {1: 99.0, 2: 99.0}))
    ask(ledger, 0, *(make_group(number, "a", "b") for number in range(3)))
    assert occurrences(ledger.take_feedback(0, 1)) == [0]
    ledger.close()

    other = Post(clock, {}, p=0.1)
    again = opened(other)
    assert occurrences(again.take_feedback(0, 1)) == [0]
    assert (other.asked, again.reasked) == ([], 0)
    assert occurrences(again.take_feedback(1, 2)) == [1, 2]
    assert (other.asked, again.reasked) == ([1, 2], 2)
    assert [
        item.label for step, count in ((0, 1), (1, 2)) for item in again.take_feedback(step, count).items
    ] == [
        0,
        1,
        1,
    ]


def test_token_ids_reach_a_function_that_names_them_also_when_it_is_asked_again(
    opened: Callable[..., Ledger],
) -> None:
    """The ids that `make_group` makes up are 0, 1, 2 and so on, one a letter."""
    seen: list[list[list[int]]] = []

    def reward(completions: Sequence[str], completion_ids: list[list[int]]) -> list[float]:
        seen.append(completion_ids)
        return [float(sum(ids)) for ids in completion_ids]

    oracle = CallableOracle(reward, "mine")
    ledger = opened(oracle, repeats=1)
    ask(ledger, 0, make_group(0, "abc", "ab"), kind="score")
    ledger.close()
    again = opened(oracle, repeats=1)
    ask(again, 1, make_group(1, "a", "abcd"), kind="score")
    assert [again.take_feedback(step, 1).items[0].answer.values for step in (0, 1)] == [
        (3.0, 1.0),
        (0.0, 6.0),
    ]
    assert (seen, again.reasked) == ([[[0], [0, 1, 2, 3], [0, 1, 2], [0, 1]]], 1)
    assert all(type(id) is int for call in seen for ids in call for id in ids)
    ask(again, 2, make_group(1, "a", "abcd"), kind="score")
    assert again.take_feedback(2, 1).items[0].answer.queries == 2, (
        "an answer about ids is no function of the text"
    )


def test_messages_stay_messages_over_a_restart(opened: Callable[..., Ledger]) -> None:
    group = make_group(0, "a", "b")
    group = replace(group, prompt=replace(group.prompt, is_chat=True))
    seen = []

    def reward(prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        seen.append((prompts[0], completions))
        return [0.0, 1.0]

    ledger = opened(CallableOracle(reward, "mine"))
    ask(ledger, 0, group, kind="score")
    ledger.close()
    item = opened(CallableOracle(reward, "mine")).take_feedback(0, 1).items[0]
    assert seen == [
        ([{"role": "user", "content": "p0"}], [[{"role": "assistant", "content": text}] for text in "ab"])
    ]
    assert (item.question.is_chat, item.group.prompt.is_chat) == (True, True)


def test_after_a_restart_tickets_of_a_durable_oracle_are_attached_again(
    opened: Callable[..., Ledger], clock: Clock
) -> None:
    oracle = Post(clock, {0: 5.0, 1: 7.0}, durable=True)
    ledger = opened(oracle)
    ask(ledger, 0, make_group(0, "a", "b"), make_group(1, "a", "b"))
    ledger.close()

    again = opened(oracle)
    assert occurrences(again.take_feedback(0, 2)) == [0, 1]
    assert (oracle.asked, again.reasked, clock.now) == ([0, 1], 0, 107.0)


def test_a_ticket_keeps_its_deadline_over_a_restart(opened: Callable[..., Ledger], clock: Clock) -> None:
    oracle = Post(clock, {0: None, 1: 40.0}, durable=True)
    ask(opened(oracle, deadline_s=30.0), 0, make_group(0, "a", "b"), make_group(1, "a", "b"))
    clock.now += 20
    feedback = opened(oracle, deadline_s=30.0).take_feedback(0, 2)
    assert ([item.answer.marks for item in feedback.items], clock.now) == ([("failed",)] * 2, 130.0)
    clock.now += 50
    ask(opened(oracle, deadline_s=30.0), 1, make_group(2, "a", "b"))
    clock.now += 31
    assert opened(oracle, deadline_s=60.0).take_feedback(1, 1).items[0].answer.marks == ("ok",), (
        "a longer deadline counts at once"
    )


@pytest.mark.parametrize("durable", [False, True])
def test_what_is_given_up_is_closed_and_what_was_answered_is_known(
    opened: Callable[..., Ledger], clock: Clock, durable: bool
) -> None:
    class Breaks(Post):
        def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
            if clock.now > 100:
                raise RuntimeError("down")
            return super().collect(tickets, seconds)

    oracle, group = Breaks(clock, {0: 5.0, 1: 40.0}, durable=durable), make_group(0, "a", "b")
    ledger = opened(oracle, budgets={"eval": Budget(queries=3)})
    ask(ledger, 2, group, make_group(1, "c", "d"), purpose="eval")
    ask(ledger, 2, make_group(2, "e", "f"))
    with pytest.raises(OracleError, match="down"):
        ledger.take_feedback(2, 2, purpose="eval")
    assert ledger.committed("eval").queries == 2
    ledger.give_up(2, "eval")
    assert (ledger.committed("eval").queries, ledger.store.spent("eval").queries) == (1, 1)
    assert [pending.question.key.purpose for pending in ledger.outstanding.pending.values()] == ["train"]

    ledger.close()
    ledger = opened(mended := Post(clock, {}, durable=durable), budgets={"eval": Budget(queries=3)})
    mended.open, mended.asked = oracle.open, oracle.asked
    assert (occurrences(ledger.take_feedback(2, 2, purpose="eval")), ledger.reasked) == ([], 0)
    ask(ledger, 3, group, purpose="eval")
    assert [item.answer.values for item in ledger.take_feedback(3, 1, purpose="eval").items] == [(0.8,)]
    assert occurrences(ledger.take_feedback(2, 1)) == [2]
    assert oracle.asked == [0, 1, 2] + [2] * (not durable)
    assert contradictions(ledger.store) == []


def test_a_durable_oracle_that_was_never_reached_is_asked(
    opened: Callable[..., Ledger], clock: Clock
) -> None:
    """The process died between the intents and their tickets."""

    class Unreachable(Post):
        def submit(self, questions: Sequence[Question]) -> list[str]:
            raise KeyboardInterrupt

    ledger = opened(Unreachable(clock, {}, durable=True))
    with pytest.raises(KeyboardInterrupt):
        ask(ledger, 0, make_group(0, "a", "b"))
    ledger.close()
    oracle = Post(clock, {}, durable=True)
    again = opened(oracle)
    assert (occurrences(again.take_feedback(0, 1)), oracle.asked, again.reasked) == ([0], [0], 1)


def test_an_answer_that_came_before_the_kill_is_not_paid_again(opened: Callable[..., Ledger]) -> None:
    calls: list[str] = []

    def counted(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        calls.extend(completions)
        return length(prompts, completions)

    ledger = opened(CallableOracle(counted, "counted"))
    ask(ledger, 0, make_group(0, "a", "bb"), kind="score")
    ledger._settle("train", 0, 1, 0, math.inf)
    ledger.close()
    again = opened(CallableOracle(counted, "counted"))
    assert again.take_feedback(0, 1).items[0].answer.values == (1.0, 2.0)
    assert calls == ["a", "bb"]


class Broken(Post):
    """Answers with whatever it is told."""

    def __init__(self, answer: Any, answers: Kind = "compare"):
        super().__init__(Clock(), {})
        self.answer, self.answers = answer, answers

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        return [(ticket, Answer(self.open.pop(ticket)[0].key, *self.answer)) for ticket in tickets]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (((0.1, 0.9), ("ok", "ok"), 1), "compare", "has 2 values and 2 marks; give 1 of each"),
        (((0.1,), ("ok",), 1), "score", "has 1 values and 1 marks; give 2 of each"),
        (((0.1, 0.2), ("ok",), 1), "score", "has 2 values and 1 marks; give 2 of each"),
        (((1.5,), ("ok",), 1), "compare", "is 1.5; give a probability from 0 to 1"),
        (((-1e-9,), ("ok",), 1), "compare", "give a probability from 0 to 1"),
        (((math.nan,), ("ok",), 1), "compare", "is nan;"),
        (((1.0, math.nan), ("ok", "ok"), 1), "score", "is nan; give a finite number"),
        (((1.0, -math.inf), ("ok", "ok"), 1), "score", "is -inf;"),
        ((("0.7",), ("ok",), 1), "compare", "is '0.7';"),
        (((None,), ("ok",), 1), "compare", "is None;"),
        (((0.7,), ("sure",), 1), "compare", "question train/0/0/0/0 .* has the marks 'sure'.*abstain"),
    ],
)
def test_a_broken_answer_is_an_error_and_not_recorded(
    opened: Callable[..., Ledger], answer: Any, kind: Kind, words: str
) -> None:
    ledger = opened(Broken(answer, kind))
    ask(ledger, 0, make_group(0, "a", "b"), kind=kind)
    with pytest.raises(OracleError, match=f"oracle o: .*{words}"):
        ledger.take_feedback(0, 1)
    assert not ledger.has_taken(0)
    ledger.close()
    repaired = opened(Post(Clock(), {}))
    assert len(repaired.store.unanswered()) == 1


def test_the_sound_answers_beside_a_broken_one_are_kept(opened: Callable[..., Ledger]) -> None:
    """They were paid: only the broken question is asked again."""

    class OneBroken(Post):
        def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
            given = [(ticket, self.open.pop(ticket)[0].key) for ticket in tickets]
            return [
                (ticket, Answer(key, (math.nan if key.occurrence == 1 else 0.8,), ("ok",), 1))
                for ticket, key in given
            ]

    ledger = opened(OneBroken(Clock(), {}))
    ask(ledger, 0, *(make_group(number, "a", "b") for number in range(3)))
    with pytest.raises(OracleError, match="is nan;"):
        ledger.take_feedback(0, 3)
    ledger.close()
    repaired = Post(Clock(), {})
    assert occurrences(opened(repaired).take_feedback(0, 3)) == [0, 1, 2]
    assert repaired.asked == [1]


def test_values_without_a_meaning_are_not_looked_at(opened: Callable[..., Ledger]) -> None:
    ledger = opened(Broken(((math.nan, np.float32(0.25)), ("abstain", "ok"), 1), "score"))
    ask(ledger, 0, make_group(0, "a", "b"), kind="score")
    (item,) = ledger.take_feedback(0, 1).items
    assert (item.answer.marks, item.answer.values[1], type(item.answer.values[1])) == (
        ("abstain", "ok"),
        0.25,
        float,
    )


@pytest.mark.parametrize("tickets", [["x", "x"], ["x"], [1, 2], []])
def test_tickets_must_tell_questions_apart(opened: Callable[..., Ledger], tickets: list[Any]) -> None:
    class Careless(Post):
        def submit(self, questions: Sequence[Question]) -> list[str]:
            return tickets

    ledger = opened(Careless(Clock(), {}))
    with pytest.raises(OracleError, match="one string a question, each different"):
        ask(ledger, 0, make_group(0, "a", "b"), make_group(1, "a", "b"))


def test_a_ticket_still_open_is_not_given_again(opened: Callable[..., Ledger], clock: Clock) -> None:
    class Forgetful(Post):
        def submit(self, questions: Sequence[Question]) -> list[str]:
            return ["the ticket"]

    ledger = opened(Forgetful(clock, {}))
    ask(ledger, 0, make_group(0, "a", "b"))
    with pytest.raises(OracleError, match="each different"):
        ask(ledger, 1, make_group(1, "a", "b"))


def test_whatever_an_oracle_raises_names_it(opened: Callable[..., Ledger]) -> None:
    class Offline(Post):
        def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
            raise ConnectionRefusedError("nobody there")

    ledger = opened(Offline(Clock(), {}))
    ask(ledger, 0, make_group(0, "a", "b"))
    with pytest.raises(OracleError, match="oracle o raised ConnectionRefusedError: nobody there"):
        ledger.take_feedback(0, 1)


def test_a_question_to_an_oracle_that_is_not_there(opened: Callable[..., Ledger]) -> None:
    ledger = opened(rewards())
    with pytest.raises(OracleError, match=r"addressed to the oracle 'absent'.*it has o"):
        ask(ledger, 0, make_group(0, "a", "b"), oracle="absent", kind="score")


def test_rounds_leave_memory_when_nothing_waits_for_them(opened: Callable[..., Ledger], clock: Clock) -> None:
    ledger = opened(Post(clock, {1: 40.0}))
    ask(ledger, 0, make_group(0, "a", "b"))
    ask(ledger, 0, make_group(1, "a", "b"), round=1)
    ledger.take_feedback(0, 1)
    assert list(ledger.rounds.groups) == [("train", 0, 1)]
    ledger.take_feedback(1, 1)
    assert ledger.rounds.groups == {}
