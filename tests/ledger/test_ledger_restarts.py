"""The ledger after a restart, and with oracles that break their protocol."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fixtures import make_group
from posts import Clock, Post, ask, length, occurrences, rewards

from oat.errors import OracleError
from oat.ledger.audit import contradictions
from oat.ledger.ledger import Ledger
from oat.ledger.open_questions import Stage
from oat.oracles.callables import CallableOracle
from oat.types import Answer, Kind, Question
from oat.types.questions import Budget


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
    """A function with the parameter `completion_ids` gets the token ids, also for questions that are asked
    again after a restart. The made-up ids of `make_group` are 0, 1, 2 and so on."""
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
    assert (seen, again.reasked) == ([[[0, 1, 2], [0, 1]], [[0], [0, 1, 2, 3]]], 1)
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
    assert [row.purpose for row in ledger.open.at(Stage.SENT)] == ["train"]

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
    """The process was killed between recording the questions and recording their tickets. After the restart a
    durable oracle is asked again."""

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
    """An oracle whose answers a test chooses."""

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
    """One of three answers is not finite. The two sound answers are recorded, since they were paid. Only the
    broken one's question is asked again."""

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
