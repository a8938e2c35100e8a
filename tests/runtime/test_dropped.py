"""What nobody waits for any more is asked no more: an oracle, also one that clients ask, hears of questions
that failed at their deadline, and of those of an evaluation that failed."""

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import asked_apart
import pytest
from fixtures import World, make_group, make_questions
from planned_kills import StruckMachine

from oat import wire
from oat.assemble.oracle_side import OracleBox, plan_of
from oat.assemble.run_inputs import gather_inputs
from oat.config.load import load_config
from oat.errors import OatWarning, OracleError
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.oracles.mixture import Mixture
from oat.oracles.preferences import Preferences
from oat.oracles.users import UsersOracle
from oat.resolve.resolve import resolve
from oat.runtime.clients import ClientOracle, Clients
from oat.runtime.worker_group import Restarts, WorkerGroup
from oat.seeds import Seeds
from oat.testing.fakes import FakeOracle
from oat.types import Question

ORACLES = asked_apart.__file__


class Hearing(FakeOracle):
    """Never answers questions whose first candidate is "never". It notes which are dropped."""

    def __init__(self) -> None:
        super().__init__(lambda question: 1.0, late=lambda question: None if is_silent(question) else 0)
        self.dropped: list[str] = []

    def drop(self, tickets: Sequence[str]) -> None:
        self.dropped += tickets


def is_silent(question: Question) -> bool:
    return question.candidates[0] == "never"


def asking(*texts: str, purpose: str = "train") -> list[Question]:
    groups = [make_group(number, text) for number, text in enumerate(texts)]
    return make_questions(groups, "score", 0, oracle="own", purpose=purpose)


def ledger_of(folder: Path, oracle: Any, deadline_s: float) -> Ledger:
    store = Store(folder / "ledger.sqlite")
    return Ledger(store, {"own": oracle}, Seeds(0), labels="threshold", deadline_s=deadline_s)


def ask(ledger: Ledger, step: int, *texts: str, purpose: str = "train") -> None:
    groups = [make_group(number, text) for number, text in enumerate(texts)]
    questions = make_questions(groups, "score", step, oracle="own", purpose=purpose)
    ledger.ask(step, 0, groups, questions, purpose)


def test_an_oracle_hears_of_a_question_that_failed_at_its_deadline(tmp_path: Path) -> None:
    oracle = Hearing()
    ledger = ledger_of(tmp_path, oracle, deadline_s=0.3)
    ask(ledger, 0, "a", "never", "b")
    assert [item.answer.marks for item in ledger.take_feedback(0, 3).items] == [("ok",), ("failed",), ("ok",)]
    assert oracle.dropped == ["1"]
    ledger.close()


def test_an_oracle_hears_of_an_evaluation_that_failed(tmp_path: Path) -> None:
    oracle = Hearing()
    ledger = ledger_of(tmp_path, oracle, deadline_s=600.0)
    ask(ledger, 0, "never", purpose="train")
    ask(ledger, 0, "a", "never", purpose="eval")
    ledger.give_up(0, "eval")
    assert oracle.dropped == ["1", "2"]
    ledger.close()


def test_a_users_oracle_that_cannot_drop_gives_a_warning() -> None:
    class Sick(FakeOracle):
        def drop(self, tickets: Sequence[str]) -> None:
            raise RuntimeError("boo")

    class Other:
        answers, durable = "score", False

        def drop(self) -> None:
            raise AssertionError("it means something else")

    with pytest.warns(OatWarning, match="`drop` of oracle Sick: RuntimeError: boo"):
        UsersOracle(Sick(lambda question: 1.0)).drop(["1"])
    UsersOracle(Other()).drop(["1"])


@pytest.fixture
def clients(tmp_path: Path) -> Clients:
    crew = WorkerGroup(StruckMachine().machine(tmp_path).launcher(1.0), Restarts(3), "oracle client", 1)
    crew.make(f"{ORACLES}:SilentBox", wire.encode(str(tmp_path)))
    made = Clients(crew)
    made.begin()
    return made


def until(holds: Callable[[], bool]) -> bool:
    last = time.monotonic() + 60
    while not holds() and time.monotonic() < last:
        time.sleep(0.01)
    return holds()


def noted(folder: Path) -> list[str]:
    return [line for file in folder.glob("*.txt") for line in file.read_text(encoding="utf-8").splitlines()]


def answers_of(oracle: ClientOracle, tickets: Collection[str]) -> list[str]:
    found: list[str] = []
    while len(found) < len(tickets):
        found += [ticket for ticket, _ in oracle.collect([*tickets], 60.0)]
    return found


def test_a_client_asks_no_more_for_what_was_dropped(clients: Clients, tmp_path: Path) -> None:
    """Neither does the one that takes its place."""
    oracle = ClientOracle(clients, "oracle", asked_apart.Noting(str(tmp_path)))
    silent, answered = oracle.submit(asking("never", "fast"))
    assert answers_of(oracle, [answered]) == [answered]
    assert until(lambda: "collect train/0/0/0/0" in noted(tmp_path))
    oracle.drop([silent])
    assert until(lambda: "drop train/0/0/0/0" in noted(tmp_path))
    (tmp_path / "gate").touch()  # from here on what is asked for is answered by an error
    (later,) = oracle.submit(asking("fast", purpose="later"))
    assert answers_of(oracle, [later]) == [later]
    (last,) = oracle.submit(asking("never", purpose="last"))
    os.kill(clients.crew.members[0].remote.number or 0, signal.SIGKILL)
    with pytest.raises(OracleError, match="own breaks for last"):
        oracle.collect([last], 60.0)
    asked = [line for line in noted(tmp_path) if line.startswith("submit")]
    assert asked.count("submit train/0/0/0/0") == 1
    assert asked.count("submit last/0/0/0/0") >= 1
    clients.close()


def test_a_question_that_is_dropped_while_it_is_sent(clients: Clients, tmp_path: Path) -> None:
    oracle = ClientOracle(clients, "oracle", asked_apart.Noting(str(tmp_path)))
    slow, other = oracle.submit(asking("slow to submit", "fast"))
    assert until(lambda: "submit train/0/0/0/0" in noted(tmp_path))
    oracle.drop([slow])
    (tmp_path / "gate").touch()
    assert answers_of(oracle, [other]) == [other]
    assert until(lambda: "drop train/0/0/0/0" in noted(tmp_path))
    assert "collect train/0/0/0/0" not in noted(tmp_path)
    clients.close()


def test_a_client_ignores_what_the_ledger_would_ignore(world: World, tmp_path: Path) -> None:
    """The second answer to a ticket, and those to tickets that nobody waits for, also if they are broken."""
    oracle = {"name": f"{ORACLES}:Babbling", "folder": str(tmp_path)}
    resolved = resolve(*load_config(world.config("grpo", tmp_path, {"oracle": oracle})))
    run_inputs = gather_inputs(resolved)
    box = OracleBox(plan_of(resolved, resolved.config, run_inputs).encoded)
    run_inputs.close()
    *first, last = [wire.encode(each) for each in asking("a", "b", "c", "d")]
    dropped, *asked = box.submit("oracle", first)
    box.drop("oracle", [dropped])
    answers, _ = box.collect("oracle", "train", asked[:1], 1.0)
    assert [ticket for ticket, _ in answers] == asked
    wire.encode(answers)
    waiting = box.submit("oracle", [last])
    answers, _ = box.collect("oracle", "train", waiting, 1.0)
    assert [ticket for ticket, _ in answers] == waiting
    wire.encode(answers)
    with pytest.raises(OracleError, match="the answer under the ticket old: a value of type object"):
        box.collect("oracle", "train", ["old"], 1.0)
    box.close()


class Late(Hearing):
    """After a question was dropped, it answers that question with what is no answer, twice."""

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Any]]:
        return [*super().collect(tickets, seconds), *((ticket, object()) for ticket in self.dropped * 2)]


def test_the_sources_of_a_mixture_hear_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Late()
    monkeypatch.setattr("oat.oracles.mixture.build_oracle", lambda *_, **__: source)
    mixture = Mixture([{"name": "own", "normalise": "batch"}])
    first, silent, last = mixture.submit(asking("a", "never", "c"))
    assert mixture.collect([first, silent, last], 0.0) == [], "a round is answered as a whole"
    mixture.drop([silent])
    assert source.dropped == ["1"]
    assert [ticket for ticket, _ in mixture.collect([first, last], 0.0)] == [first, last]
    (again,) = mixture.submit(asking("d"))
    assert [ticket for ticket, _ in mixture.collect([again], 0.0)] == [again]


def test_preferences_ignore_what_nobody_waits_for() -> None:
    source = Late()
    preferences = Preferences(source)
    pairs = make_questions([make_group(0, "a", "b"), make_group(1, "never", "b")], "compare", 0, oracle="own")
    first, silent = preferences.submit(pairs)
    assert [ticket for ticket, _ in preferences.collect([first, silent], 0.0)] == [first]
    preferences.drop([silent])
    assert source.dropped == [silent]
    (last,) = preferences.submit(pairs[:1])
    assert [ticket for ticket, _ in preferences.collect([last], 0.0)] == [last]
    assert preferences.collect([], 0.0) == []
