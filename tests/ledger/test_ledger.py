"""The ledger: questions, answers in any order or none, labels, takes, restarts."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures import make_group, make_questions
from posts import Clock, Post, ask, occurrences, rewards

from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.oracles.callables import CallableComparison
from oat.oracles.preferences import Preferences
from oat.seeds import Seeds
from oat.types import UNASKED, Question


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
    """The probability of a preference is sigmoid(difference of scores), here of lengths. Equal lengths have
    no winner under either rule of labels. A preference costs two queries."""
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
    assert (ledger.asked(1, 0), oracle.asked, ledger.open.rows, ledger.rounds.groups) == (
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
    """Answers arrive after 3, 1 and 2 seconds. A step of two waits for the first one; the next step has its
    answer already."""
    ledger = opened(Post(clock, {0: 3.0, 1: 1.0, 2: 2.0}))
    ask(ledger, 0, *(make_group(number, "a", "b") for number in range(3)))
    first = ledger.take_feedback(0, 2)
    assert (occurrences(first), first.queries, clock.now) == ([0, 1], 2, 103.0)
    second = ledger.take_feedback(1, 2)
    assert (occurrences(second), second.queries, clock.now) == ([2], 3, 103.0)


def test_late_answers_in_another_order(opened: Callable[..., Ledger], clock: Clock) -> None:
    """With a limit on the wait, a step takes the first two answers that have arrived, in the order of their
    questions. The next step takes the last one."""
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
    """A step also waits for an answer that is too old to learn from. So the money set aside and the known
    answers do not depend on arrival times. Question 1 is one step too old when step 2 reaches it."""
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
    """A training step waits at most `max_wait_s` and takes the answers that have come. An evaluation waits
    for all its questions."""
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
    """An answer may be one step old. Questions 0 and 1 are of step 0, and question 2 is of step 2. An older
    answer is counted as expired and not learned from."""
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


def test_rounds_leave_memory_when_nothing_waits_for_them(opened: Callable[..., Ledger], clock: Clock) -> None:
    ledger = opened(Post(clock, {1: 40.0}))
    ask(ledger, 0, make_group(0, "a", "b"))
    ask(ledger, 0, make_group(1, "a", "b"), round=1)
    ledger.take_feedback(0, 1)
    assert list(ledger.rounds.groups) == [("train", 0, 1)]
    ledger.take_feedback(1, 1)
    assert ledger.rounds.groups == {}
