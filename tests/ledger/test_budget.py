"""Budgets are never exceeded. They are spent exactly if questions are small enough, for any askers and any
number of questions at a time."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fixtures import World, forked, kill_at, logged, make_group, make_questions, named, oat

from oat.commands.digest import digest_run
from oat.errors import OatWarning, OracleError
from oat.ledger.audit import contradictions
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.oracles.base import Oracle
from oat.oracles.callables import CallableComparison, CallableOracle
from oat.oracles.preferences import Preferences
from oat.seeds import Seeds
from oat.types import Answer, Kind, Price, Question, Spent
from oat.types.questions import Budget


class Judge(Oracle):
    """An oracle of comparisons for money. It sets aside 100 tokens and 1.00 per question and takes the given
    prices."""

    answers: Kind = "compare"

    def __init__(self, takes: Sequence[Price]):
        self.takes, self.open = list(takes), dict[str, Question]()

    def price(self, question: Question) -> Price:
        return Price(1, 100, 1.0)

    def submit(self, questions: Sequence[Question]) -> list[str]:
        self.open.update({str(question.key): question for question in questions})
        return [str(question.key) for question in questions]

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        answered = []
        for ticket in tickets:
            took = self.takes.pop(0)
            answered.append(
                (
                    ticket,
                    Answer(
                        self.open.pop(ticket).key,
                        (0.9,),
                        ("ok",),
                        took.queries,
                        took.cost,
                        tokens=took.tokens,
                    ),
                )
            )
        return answered


def opened(folder: Path, oracle: Oracle, budget: Budget) -> Ledger:
    return Ledger(
        Store(folder / "ledger.sqlite"),
        {"o": oracle},
        Seeds(0),
        labels="threshold",
        deadline_s=60.0,
        budgets={"train": budget},
    )


def ask(
    ledger: Ledger, step: int, *occurrences: int, kind: Kind = "compare", texts: Sequence[str] = ("a", "b")
) -> None:
    groups = [make_group(occurrence, *texts) for occurrence in occurrences]
    ledger.ask(step, 0, groups, make_questions(groups, kind, step, oracle="o"))


def test_what_is_beyond_it_is_not_asked(tmp_path: Path) -> None:
    """A budget of seven queries pays for three preferences of two scores each. The remaining query pays for
    nothing."""
    asked: list[str] = []
    oracle = CallableOracle(
        lambda prompts, completions: [asked.append(text) or 1.0 * len(asked) for text in completions], "o"
    )
    ledger = opened(tmp_path, Preferences(oracle), Budget(queries=7))
    ask(ledger, 0, 0, 1, 2, 3)
    feedback = ledger.take_feedback(0, 4)
    assert [item.answer.marks for item in feedback.items] == [("ok",)] * 3 + [("unpaid",)]
    assert (
        len(asked),
        ledger.store.spent("train").queries,
        feedback.items[3].label,
        feedback.items[3].answer.queries,
    ) == (6, 6, None, 0)
    assert ledger.spent_before(1) == Spent(Price(6), refused=Price(2))
    assert Budget(queries=7).used_up(ledger.spent_before(1)) is not None
    assert Budget(queries=8).used_up(ledger.spent_before(1)) is None, "a run that is made longer goes on"


def test_a_cheaper_question_behind_a_dear_one_is_still_paid(tmp_path: Path) -> None:
    oracle = CallableOracle(lambda prompts, completions: [1.0] * len(completions), "o")
    ledger = opened(tmp_path, oracle, Budget(queries=4))
    groups = [make_group(0, "a", "b", "c"), make_group(1, "d", "e"), make_group(2, "f")]
    ledger.ask(0, 0, groups, make_questions(groups, "score", 0, oracle="o"))
    assert [set(item.answer.marks) for item in ledger.take_feedback(0, 3).items] == [
        {"ok"},
        {"unpaid"},
        {"ok"},
    ]
    assert ledger.store.spent("train").queries == 4


@pytest.mark.parametrize("budget", [Budget(tokens=250), Budget(cost=2.5), Budget(queries=2)])
def test_the_most_is_set_aside_and_what_it_took_counts_once_taken(tmp_path: Path, budget: Budget) -> None:
    """The budget allows two of three questions at their highest price: 100 tokens, or 1.00 in money. They
    cost half of it, so the third question is paid in a second wave, and so is one of the next two. With a
    budget in queries the full price counts."""
    half = Price(1, 50, 0.5)
    ok = ("ok",)
    unpaid = ("unpaid",)
    ledger = opened(tmp_path, Judge([half] * 4), budget)
    ask(ledger, 0, 0, 1, 2)
    assert [item.answer.marks for item in ledger.take_feedback(0, 3).items] == [
        ok,
        ok,
        unpaid if budget.queries else ok,
    ]
    ask(ledger, 1, 3, 4)
    assert [item.answer.marks for item in ledger.take_feedback(1, 2).items] == [
        unpaid if budget.queries else ok,
        unpaid,
    ]
    assert budget.allows(ledger.store.spent("train"))


def test_an_oracle_that_takes_more_than_it_said(tmp_path: Path) -> None:
    ledger = opened(tmp_path, Judge([Price(1, 101, 0.1)]), Budget(tokens=1000))
    ask(ledger, 0, 0)
    with pytest.raises(
        OracleError, match=r"took Price\(queries=1, tokens=101.* at most Budget\(queries=1, tokens=100"
    ):
        ledger.take_feedback(0, 1)


@pytest.mark.fault("R13")
@pytest.mark.inventory(102)
@pytest.mark.parametrize("limit", [1_000, pytest.param(10_000, marks=pytest.mark.large)])
def test_64_concurrent_askers_spend_it_exactly(
    tmp_path: Path, limit: int, figure: Callable[[str], None]
) -> None:
    """64 threads ask rounds of five pairs, together more than the budget allows. The budget is spent
    exactly."""
    lock, paid = threading.Lock(), [0]

    def compare(prompts: Sequence[str], first: Sequence[str], second: Sequence[str]) -> list[float]:
        with lock:
            paid[0] += len(prompts)
        return [0.7] * len(prompts)

    ledger = opened(tmp_path, CallableComparison(compare, "o"), Budget(queries=limit))
    askers, rounds = 64, limit // 64 // 4 + 1
    start, errors = threading.Barrier(askers), []

    def work(asker: int) -> None:
        try:
            start.wait()
            for number in range(rounds):
                step = asker * rounds + number
                groups = [make_group(5 * step + place, "a", "b") for place in range(5)]
                ledger.ask(step, 0, groups, make_questions(groups, "compare", step, oracle="o"))
                ledger.take_feedback(step, 5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(asker,)) for asker in range(askers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    asked = askers * rounds * 5
    assert (paid[0], ledger.store.spent("train").queries, asked > limit) == (limit, limit, True)
    assert contradictions(ledger.store) == []
    figure(
        f"{paid[0]:,} of {limit:,} queries of the budget spent by {askers} threads that asked {asked:,} "
        f"questions"
    )


@pytest.mark.slow(instead="tests/faults/test_waves_killed.py", seconds=1.6)
def test_a_killed_run_spends_what_the_unbroken_one_spends(world: World, tmp_path: Path) -> None:
    changes = {"stop": {"max_queries": 31}, "oracle.repeats": 0}
    configs = []
    for name in ("unbroken", "killed"):
        (tmp_path / name).mkdir()
        configs.append(world.config("dpo", tmp_path / name, changes))
    assert oat("train", configs[0]) == 0
    place, log = named("oat.ledger.outstanding:Outstanding.submit"), tmp_path / "log"
    assert forked(lambda: kill_at(*place, 10) or oat("train", configs[1]), log) < 0
    assert logged(log, "train", configs[1]) == 0
    runs = [tmp_path / name / "dpo" for name in ("unbroken", "killed")]
    assert digest_run(runs[0]) == digest_run(runs[1])
    store = Store(runs[1] / "ledger.sqlite")
    assert store.spent("train") == Price(30), "a preference takes two"
    assert contradictions(store) == []


def test_a_budget_in_money_needs_a_price(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config("grpo", tmp_path, {"stop.max_cost": 3.0})
    assert oat("train", config) == 2
    assert "does not say what a question costs; give it a method `price`" in capsys.readouterr().err


def test_a_preference_made_from_rewards_has_no_price_of_its_own(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training oracle makes preferences from a reward function that has no price, so a budget in money is
    refused."""
    assert oat("train", world.config("dpo", tmp_path, {"stop.max_cost": 3.0, "evaluation": None})) == 2
    assert "does not say what a question costs" in capsys.readouterr().err


def test_what_is_past_its_deadline_may_still_be_paid(tmp_path: Path) -> None:
    """A question past its deadline may still be paid. So it counts with its highest price, and the budget
    pays for no further question."""

    class Silent(Judge):
        def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
            return []

    budgets = {"train": Budget(tokens=250)}
    ledger = Ledger(
        Store(tmp_path / "ledger.sqlite"),
        {"o": Silent([])},
        Seeds(0),
        labels="threshold",
        deadline_s=0.05,
        budgets=budgets,
    )
    ask(ledger, 0, 0, 1)
    with pytest.warns(OatWarning, match="it failed"):
        assert [item.answer.marks for item in ledger.take_feedback(0, 2).items] == [("failed",)] * 2
    assert ledger.store.spent("train") == Price(2, 200, 2.0)
    ask(ledger, 1, 2)
    assert [item.answer.marks for item in ledger.take_feedback(1, 1).items] == [("unpaid",)]


def test_a_failed_evaluation_counts_in_its_budget(tmp_path: Path) -> None:
    """The questions of a failed evaluation may still be answered and paid, so their price counts in the
    budget."""
    ledger = opened(tmp_path, Judge([]), Budget())
    groups = [make_group(0, "a", "b"), make_group(1, "a", "b")]
    ledger.ask(0, 0, groups, make_questions(groups, "compare", 0, oracle="o", purpose="eval"), "eval")
    assert (ledger.store.spent("eval").queries, ledger.committed("eval").queries) == (0, 2)
