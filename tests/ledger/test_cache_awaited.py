"""Equal questions that are in flight together are asked once: within a group, a round, a step, and ahead,
also over kills, failures and budgets."""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, forked, kill_at, logged, make_group, make_questions, named, oat, recorded

from oat.commands.digest import digest_run
from oat.errors import OracleError
from oat.ledger.audit import contradictions
from oat.ledger.intents import Awaited, Known
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.oracles.callables import CallableComparison
from oat.oracles.preferences import Preferences
from oat.reports.accounts import accounts
from oat.seeds import Seeds
from oat.testing import FakeOracle
from oat.types import UNASKED, Answer, Feedback, Group, Kind, Price, Question
from oat.types.questions import Budget


def lengths(question: Question) -> list[float]:
    return [float(len(text)) for text in question.candidates]


class Opened:
    """Opens the ledger of a test, again after each simulated kill, and checks the old one for
    contradictions."""

    def __init__(self, path: Path):
        self.path, self.ledger = path, None

    def __call__(self, oracle: Any, **settings: Any) -> Ledger:
        if self.ledger is not None:
            assert contradictions(self.ledger.store) == []
            self.ledger.close()
        self.ledger = Ledger(
            Store(self.path),
            {"o": oracle},
            Seeds(0),
            **{"labels": "threshold", "deadline_s": 60.0, **settings},
        )
        return self.ledger


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    return Opened(tmp_path / "ledger.sqlite")


def ask(
    ledger: Ledger, step: int, *groups: Group, round: int = 0, kind: Kind = "score", purpose: str = "train"
) -> None:
    ledger.ask(
        step,
        round,
        groups,
        make_questions(list(groups), kind, step, round, oracle="o", purpose=purpose),
        purpose,
    )


def texts(oracle: FakeOracle) -> list[tuple[str, ...]]:
    return [question.candidates for question in oracle.asked]


def values(feedback: Feedback) -> list[tuple[float, ...]]:
    return [item.answer.values for item in feedback.items]


def twin(occurrence: int, *candidates: str) -> Group:
    """Return another record with the prompt of record 0."""
    group = make_group(0, *candidates)
    return replace(group, prompt=replace(group.prompt, occurrence=occurrence))


def test_equal_samples_of_a_group_are_asked_once(opened: Opened) -> None:
    oracle = FakeOracle(lengths)
    ledger = opened(oracle)
    ask(ledger, 0, make_group(0, "a", "bb", "a", "ccc", "a", "bb", "dddd", "a"))
    feedback = ledger.take_feedback(0, 1)
    assert texts(oracle) == [("a", "bb", "ccc", "dddd")]
    assert values(feedback) == [(1.0, 2.0, 1.0, 3.0, 1.0, 2.0, 4.0, 1.0)]
    assert feedback.items[0].answer.marks == ("ok",) * 8
    assert (feedback.queries, feedback.items[0].answer.queries) == (4, 4)
    assert [(account.queries, account.cached) for account in accounts(ledger.store)] == [(4, 1)]
    assert contradictions(ledger.store) == []


def test_equal_pairs_of_a_round_are_asked_once_in_either_order(opened: Opened) -> None:
    asked = []

    def compare(prompts: Sequence[str], first: Sequence[str], second: Sequence[str]) -> list[float]:
        asked.extend(zip(first, second, strict=True))
        return [0.8] * len(first)

    ledger = opened(CallableComparison(compare, "counted"))
    ask(
        ledger,
        0,
        make_group(0, "aa", "b"),
        twin(1, "aa", "b"),
        twin(2, "b", "aa"),
        make_group(3, "aa", "b"),
        kind="compare",
    )
    items = ledger.take_feedback(0, 4).items
    assert asked == [("aa", "b")] * 2, "of another prompt it is another pair"
    assert [item.answer.values[0] for item in items] == pytest.approx([0.8, 0.8, 0.2, 0.8])
    assert [item.label for item in items] == [0, 0, 1, 0]
    assert [item.answer.queries for item in items] == [1, 0, 0, 1]
    assert contradictions(ledger.store) == []


def test_what_preferences_are_made_of_comes_along(opened: Opened) -> None:
    ledger = opened(Preferences(FakeOracle(lengths)))
    ask(ledger, 0, make_group(0, "aa", "b"), twin(1, "b", "aa"), kind="compare")
    assert [item.answer.scores for item in ledger.take_feedback(0, 2).items] == [(2.0, 1.0), (1.0, 2.0)]
    ask(ledger, 1, make_group(0, "b", "aa"), kind="compare")
    (item,) = ledger.take_feedback(1, 1).items
    assert (item.answer.scores, item.answer.queries) == ((1.0, 2.0), 0)


def test_what_is_asked_ahead_is_asked_once(opened: Opened) -> None:
    """A question that was asked ahead is not asked again, whether its answer has come or not. Recorded rounds
    and steps alone decide what a round waits for."""
    for place, has_come in enumerate((False, True)):
        oracle = FakeOracle(lengths)
        ledger = opened(oracle)
        group = make_group(place, "a", "bb")
        ask(ledger, 2 * place, group)
        if has_come:
            ledger._settle("train", 2 * place, 1, 0, 60.0)
        ask(ledger, 2 * place, make_group(place, "a", "bb", "ccc"), round=1)
        ask(ledger, 2 * place, group, round=2)
        assert texts(oracle) == [("a", "bb"), ("ccc",)]
        assert values(ledger.take_feedback(2 * place, 2)) == [(1.0, 2.0), (1.0, 2.0, 3.0)]
        assert values(ledger.take_feedback(2 * place + 1, 1)) == [(1.0, 2.0)]
    assert contradictions(ledger.store) == []
    for step in (0, 2):
        (row,) = recorded(ledger.store, "train", step, 1)
        assert [type(value) for value in row.cached] == [Awaited, Awaited, type(None)]


def test_after_a_kill_what_is_awaited_is_asked_again_once(opened: Opened) -> None:
    ask(
        opened(FakeOracle(lengths, late=lambda question: None)),
        0,
        make_group(0, "a", "bb"),
        twin(1, "bb", "a"),
        twin(2, "a", "a", "ccc"),
    )
    oracle = FakeOracle(lengths)
    ledger = opened(oracle)
    feedback = ledger.take_feedback(0, 3)
    assert texts(oracle) == [("a", "bb"), ("ccc",)]
    assert values(feedback) == [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0, 3.0)]
    assert (ledger.reasked, feedback.queries) == (2, 3)
    assert contradictions(ledger.store) == []


@pytest.mark.parametrize("kills", [(), ("between",), ("between", "after")])
def test_the_rest_of_an_answer_may_come_before_what_is_awaited(opened: Opened, kills: Sequence[str]) -> None:
    """One question waits for an item of another. Its own item is answered first: this part is on disk and
    paid. It is not asked again, even if the process dies before the other question has its answer."""
    late = lambda question: None if question.candidates == ("a", "bb") else 0  # noqa: E731
    oracle = FakeOracle(lengths, late=late)
    ledger = opened(oracle, max_wait_s=0.2)
    ask(ledger, 0, make_group(0, "a", "bb"), twin(1, "bb", "ccc", "ccc"))
    assert ledger.take_feedback(0, 2).items == ()
    assert ledger.store.spent("train") == Price(1)
    assert [row.question.key.occurrence for row in ledger.store.unanswered()] == [0]
    for _ in kills:
        ledger = opened(FakeOracle(lengths, late=late), max_wait_s=0.0)
        ledger._settle("train", 0, 2, 0, 0.0)
    prompt = FakeOracle(lengths)
    if kills:
        ledger = opened(prompt)
    else:
        oracle._open = {ticket: (question, 0) for ticket, (question, _) in oracle._open.items()}
    feedback = ledger.take_feedback(1, 2)
    assert values(feedback) == [(1.0, 2.0), (2.0, 3.0, 3.0)]
    assert [item.answer.queries for item in feedback.items] == [2, 1]
    assert texts(prompt) == ([("a", "bb")] if kills else [])
    assert ledger.store.spent("train") == Price(3)
    assert contradictions(ledger.store) == []


@pytest.mark.parametrize("mark", ["failed", "abstain"])
def test_without_an_answer_none_has_one_and_the_next_step_asks_again(opened: Opened, mark: Any) -> None:
    oracle = FakeOracle(lambda question: mark)
    ledger = opened(oracle)
    ask(ledger, 0, make_group(0, "a", "bb"), twin(1, "a", "bb", "ccc"))
    assert [item.answer.marks for item in ledger.take_feedback(0, 2).items] == [(mark,) * 2, (mark,) * 3]
    ask(ledger, 1, make_group(0, "a"))
    assert texts(oracle) == [("a", "bb"), ("ccc",), ("a",)]


def test_what_passes_its_deadline_fails_for_all(opened: Opened) -> None:
    ledger = opened(
        FakeOracle(lengths, late=lambda question: None if "a" in question.candidates else 0), deadline_s=0.2
    )
    ask(ledger, 0, make_group(0, "a"), twin(1, "a", "bb"), twin(2, "a"))
    items = ledger.take_feedback(0, 3).items
    assert [item.answer.marks for item in items] == [("failed",), ("failed", "ok"), ("failed",)]
    assert ledger.store.spent("train") == Price(1)


def test_an_evaluation_that_is_given_up_leaves_nobody_waiting(opened: Opened) -> None:
    ledger = opened(FakeOracle(lengths, late=lambda question: None if question.candidates == ("a",) else 0))
    ask(ledger, 0, make_group(0, "a"), twin(1, "a", "bb"), twin(2, "a"), purpose="eval")
    ledger._settle("eval", 0, 3, 0, 0.1)
    ledger.give_up(0, "eval")
    assert [ledger.store.answer(row)[0].marks for row in recorded(ledger.store, "eval", 0)] == [
        ("failed",),
        ("failed", "ok"),
        ("failed",),
    ]
    assert contradictions(ledger.store) == []
    assert ({row.stage for row in ledger.open.rows.values()}, ledger.store.unanswered()) == (set(), [])
    ask(ledger, 1, make_group(0, "a", "bb"), purpose="eval")
    assert recorded(ledger.store, "eval", 1)[0].cached == (None, Known(2.0, "ok")), (
        "what failed is asked again, and awaits nobody"
    )


def test_the_budget_pays_once(opened: Opened) -> None:
    oracle = FakeOracle(lengths)
    ledger = opened(oracle, budgets={"train": Budget(queries=3)})
    group = make_group(0, "a", "a", "bb")
    again = [
        *make_questions([group], "score", 0, oracle="o"),
        *make_questions([twin(1, "a", "bb", "bb")], "score", 0, oracle="o"),
    ]
    assert ledger.price(again) == Price(2)
    ask(
        ledger,
        0,
        group,
        twin(1, "a", "bb", "bb"),
        twin(2, "ccc", "a", "dddd"),
        twin(3, "a", "ccc"),
        twin(4, "a", "bb"),
    )
    assert ledger.committed("train").queries == 3
    items = ledger.take_feedback(0, 5).items
    assert [item.answer.marks for item in items if "unpaid" in item.answer.marks] == [
        ("unpaid", "unpaid", "unpaid")
    ]
    assert values(Feedback(0, tuple(item for item in items if "unpaid" not in item.answer.marks), 0)) == [
        (1, 1, 2),
        (1, 2, 2),
        (1, 3),
        (1, 2),
    ]
    assert texts(oracle) == [("a", "bb"), ("ccc",)]
    assert ledger.store.spent("train") == Price(3)
    assert contradictions(ledger.store) == []


def test_repeats_are_asked_and_the_others_get_their_mean(opened: Opened) -> None:
    said = iter([1.0, 2.0, 6.0, 99.0])
    oracle = FakeOracle(lambda question: [next(said) for _ in question.candidates])
    ledger = opened(oracle, repeats=3)
    ask(ledger, 0, make_group(0, "a"))
    assert values(ledger.take_feedback(0, 1)) == [(1.0,)]
    ask(ledger, 1, make_group(0, "a", "a", "a", "a"), twin(1, "a"))
    assert values(ledger.take_feedback(1, 2)) == [(2.0, 6.0, 3.0, 3.0), (3.0,)]
    assert texts(oracle) == [("a",), ("a", "a")]


@pytest.mark.parametrize("why", ["repeats", "cacheable", "version"])
def test_what_is_not_used_again_is_not_awaited(opened: Opened, why: str) -> None:
    class Versioned(FakeOracle):
        cacheable = why != "cacheable"
        version = "1"

    first, second = Versioned(lengths), Versioned(lengths)
    ledger = opened(first, repeats=int(why != "repeats"))
    ask(ledger, 0, make_group(9, "ccc"))
    ledger.take_feedback(0, 1)  # an oracle that has never answered may change
    ask(ledger, 1, make_group(0, "a", "bb"))
    if why == "version":
        second.version = "2"
        with pytest.warns(UserWarning, match="oracle o has changed"):
            ledger = opened(second)
    ask(ledger, 1, make_group(0, "a", "bb"), round=1)
    assert texts(first) + texts(second) == [("ccc",), *[("a", "bb")] * 2]


def test_purposes_await_nothing_of_each_other(opened: Opened) -> None:
    oracle = FakeOracle(lengths)
    ledger = opened(oracle)
    for purpose in ("train", "eval"):
        ask(ledger, 0, make_group(0, "a", "a"), purpose=purpose)
    assert texts(oracle) == [("a",)] * 2


def test_an_answer_that_is_too_old_to_learn_from_is_awaited_by_newer_questions(opened: Opened) -> None:
    oracle = FakeOracle(lengths)
    ledger = opened(oracle, max_age=1)
    ask(ledger, 0, make_group(0, "a"))
    ask(ledger, 2, make_group(0, "a", "bb"))
    feedback = ledger.take_feedback(2, 1)
    assert (values(feedback), feedback.expired) == ([(1.0, 2.0)], 1)
    assert texts(oracle) == [("a",), ("bb",)]


def test_labels_of_equal_pairs_are_drawn_for_each(opened: Opened) -> None:
    ledger = opened(FakeOracle(lambda question: 0.6, answers="compare"), labels="bernoulli")
    ask(
        ledger,
        0,
        make_group(0, "aa", "b"),
        *(twin(number, "aa", "b") for number in range(1, 20)),
        kind="compare",
    )
    assert {item.label for item in ledger.take_feedback(0, 20).items} == {0, 1}


CHANGES: dict[str, Any] = {
    "algorithm.prompts": 4,
    "prompts.max_prompts": 2,
    "sampling": {"max_new_tokens": 1, "top_k": 3},
    "stop.max_steps": 6,
}
AHEAD = {"grpo": 0, "dpo": 8}
"""Questions asked ahead, by algorithm. Two prompts occur twice per step, and a response is one of three
tokens. So most questions are already in flight."""
POINTS = [
    ("oat.ledger.outstanding:Outstanding.submit", 3, False),
    ("oat.ledger.store:Store.add_answers", 6, True),
    ("answers are recorded", 5, False),
]


def reward(text: str) -> float:
    return float(sum(map(ord, text)))


def configured(world: World, algorithm: str, folder: Path) -> Path:
    file = world.folder / "letter.py"
    file.write_text(
        "def reward(prompts, completions):\n    return [float(sum(map(ord, text))) for text in completions]\n"
        "reward.reads_group = False\n"
    )
    return world.config(
        algorithm,
        folder,
        {**CHANGES, "oracle": {"name": f"{file}:reward", "max_outstanding": AHEAD[algorithm]}},
    )


@pytest.fixture(scope="module")
def unbroken(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def run(algorithm: str) -> Path:
        if algorithm not in made:
            folder = tmp_path_factory.mktemp(algorithm)
            assert oat("train", configured(world, algorithm, folder)) == 0
            made[algorithm] = folder / algorithm
        return made[algorithm]

    return run


@pytest.mark.slow(instead="test_a_fork_awaits_what_the_run_did; tests/faults/test_kill.py", seconds=6.5)
@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point[0].split(".")[-1])
def test_a_killed_run_awaits_what_the_unbroken_one_did(
    world: World,
    tmp_path: Path,
    unbroken: Callable[[str], Path],
    algorithm: str,
    point: tuple[str, int, bool],
) -> None:
    place, call, after = point
    config = configured(world, algorithm, tmp_path)
    assert (
        forked(lambda: kill_at(*named(place), call, after=after) or oat("train", config), tmp_path / "log")
        < 0
    )
    assert logged(tmp_path / "log", "train", config) == 0
    whole = unbroken(algorithm)
    assert digest_run(tmp_path / algorithm) == digest_run(whole)
    with closing(Store(tmp_path / algorithm / "ledger.sqlite")) as store:
        assert contradictions(store) == []
        awaited = [row for step in range(6) for row in recorded(store, "train", step) if row.others]
        assert awaited
        assert all(not set(store.answer(row)[0].marks) & {"failed", "unpaid"} for row in awaited)
        rows = [
            json.loads(line)
            for line in (tmp_path / algorithm / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        for step, row in enumerate(rows[1:]):
            letters = [
                text
                for asked in store.taken("train", step)
                for text in asked.question.candidates
                if asked.question.oracle != UNASKED
            ]
            assert row["reward/mean"] == pytest.approx(sum(map(reward, letters)) / len(letters)), (
                "of pairs as of groups, after a kill too"
            )


@pytest.mark.sample("dpo", seconds=0.6)
@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_a_fork_awaits_what_the_run_did(
    world: World, tmp_path: Path, unbroken: Callable[[str], Path], algorithm: str
) -> None:
    """A fork begins at a step when answers are in flight, without the later records. It ends like the run
    itself."""
    config = configured(world, algorithm, tmp_path)
    assert oat("train", config, "--from", f"{unbroken(algorithm)}@4") == 0
    assert digest_run(tmp_path / algorithm) == digest_run(unbroken(algorithm))


def test_an_answer_made_of_scores_that_are_none_is_an_error(opened: Opened) -> None:
    class Odd(FakeOracle):
        def _answer(self, question: Question) -> Answer:
            return replace(super()._answer(question), scores=(1.0, float("nan")))

    ledger = opened(Odd(lambda question: 0.7, answers="compare"))
    ask(ledger, 0, make_group(0, "a", "bb"), kind="compare")
    with pytest.raises(
        OracleError,
        match=(
            r"oracle o: the answer to question train/0/0/0/0 .* has the scores \(1.0, nan\); give the pair's "
            r"two"
        ),
    ):
        ledger.take_feedback(0, 1)
