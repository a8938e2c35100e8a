"""Threads that ask, take, read and drop at once share one ledger. Each sees only what is committed, and what
one of them does in memory never shows half-done to another."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from fixtures import make_group, make_questions

from oat.errors import LedgerError
from oat.ledger.audit import contradictions
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.oracles.callables import CallableOracle
from oat.types import Group, Question

PURPOSES = ("train", "eval", "gold")


@pytest.fixture(autouse=True)
def _eager_switches() -> Iterator[None]:
    """Let Python switch between threads far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def round_of(purpose: str, step: int) -> tuple[list[Group], list[Question]]:
    groups = [make_group(number, f"{purpose}{step}{number}", "b" * (number + 1)) for number in range(3)]
    return groups, make_questions(groups, "score", step, oracle="o", purpose=purpose)


def together(*actions: Callable[[], None]) -> None:
    """Run the actions in threads, and raise the first error of any of them."""
    errors: list[BaseException] = []

    def guarded(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    if errors:
        raise errors[0]


class Crowd:
    """Threads on one ledger until a time: one for each purpose asks and takes step after step, and three read
    what these have done, and drop what is old.

    Attributes:
        done: by purpose, the number of steps that have taken their answers.
    """

    def __init__(self, ledger: Ledger, seconds: float):
        self.ledger = ledger
        self.until = time.monotonic() + seconds
        self.done = dict.fromkeys(PURPOSES, 0)

    def run(self) -> None:
        asking = [partial(self.ask, purpose) for purpose in PURPOSES]
        together(*asking, *(partial(self.read, seed) for seed in range(3)))

    def ask(self, purpose: str) -> None:
        while time.monotonic() < self.until:
            step = self.done[purpose]
            groups, questions = round_of(purpose, step)
            self.ledger.ask(step, 0, groups, questions, purpose)
            items = self.ledger.take_feedback(step, 3, purpose).items
            assert [item.question.candidates for item in items] == [each.candidates for each in questions]
            assert [item.group.prompt.occurrence for item in items] == [0, 1, 2]
            self.done[purpose] += 1

    def read(self, seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < self.until:
            step = self.done["train"] - 1 - chance.randrange(3)
            if step >= 0:
                self.read_step(step)
            if step > 5:
                self.ledger.drop(step - 5)

    def read_step(self, step: int) -> None:
        ledger = self.ledger
        assert ledger.recalls(step, 0)
        assert ledger.has_taken(step)
        assert ledger.num_taken(step) == 3
        assert ledger.asked(step + 1, 0) == 3 * (step + 1)
        assert self.read_trajectories(step) in ([step] * 3, None)
        assert ledger.committed("train").queries >= 3 * (step + 1)
        assert not ledger.is_spent(step)
        ledger.spent_before(step + 1)
        ledger.price(round_of("train", step)[1])

    def read_trajectories(self, step: int) -> list[int] | None:
        """Return the steps that asked the questions of a step; None if another thread is far ahead and has
        dropped their trajectories."""
        try:
            assert self.ledger.num_prompts(step, 0) == 3
            return [item.question.key.step for item in self.ledger.taken(step)]
        except LedgerError as error:
            if "were dropped" not in str(error):
                raise
            return None


def scores(prompts: list[str], completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def slow_scores(prompts: list[str], completions: list[str]) -> list[float]:
    time.sleep(0.005)
    return scores(prompts, completions)


@pytest.mark.parametrize(
    "seconds", [1.5, pytest.param(30.0, marks=pytest.mark.slow(instead="1.5", seconds=30.0))]
)
def test_threads_that_ask_take_read_and_drop(opened: Callable[..., Ledger], seconds: float) -> None:
    ledger = opened(CallableOracle(scores, "o"))
    crowd = Crowd(ledger, seconds)
    crowd.run()
    assert min(crowd.done.values()) > 3
    assert contradictions(ledger.store) == []
    ledger.close()


def test_a_read_waits_for_a_transaction_and_sees_its_end(tmp_path: Path) -> None:
    """A transaction is undone. Meanwhile another thread has asked whether its round is recorded, and is told
    only afterwards, that it is not."""
    groups, questions = round_of("train", 0)
    found: list[bool] = []

    with closing(Store(tmp_path / "ledger.sqlite")) as store:
        reader = threading.Thread(target=lambda: found.append(store.has_round("train", 0, 0)))

        def undone() -> None:
            with store:
                store.add_round("train", 0, 0, groups, questions, range(3))
                reader.start()
                reader.join(0.2)
                assert found == [], "the round is not committed"
                store.db.execute("DELETE FROM nowhere")

        with pytest.raises(LedgerError, match="no such table: nowhere"):
            undone()
        reader.join(60.0)
    assert found == [False]


def test_two_threads_that_take_the_same_step_get_the_same(opened: Callable[..., Ledger]) -> None:
    """All wait for the answers. The first records a take, which the others find."""
    ledger = opened(CallableOracle(slow_scores, "o"))
    for step in range(20):
        groups, questions = round_of("train", step)
        ledger.ask(step, 0, groups, questions)
        found: list[list[str]] = []
        barrier = threading.Barrier(3)

        def take(
            step: int = step, found: list[list[str]] = found, barrier: threading.Barrier = barrier
        ) -> None:
            barrier.wait(60.0)
            found.append([str(item.question.key) for item in ledger.take_feedback(step, 3).items])

        together(take, take, take)
        assert found == [[str(question.key) for question in questions]] * 3
    assert contradictions(ledger.store) == []
    ledger.close()


def test_a_file_is_not_removed_under_a_round_that_names_it_again(tmp_path: Path) -> None:
    """One thread drops rounds whose trajectories another one asks about again. No row loses its file."""
    groups = [make_group(0, "a", "b")]
    with closing(Store(tmp_path / "ledger.sqlite")) as store:
        store.db.execute("PRAGMA synchronous = OFF")

        def add() -> None:
            for step in range(100):
                questions = make_questions(groups, "score", step, oracle="o")
                with store:
                    store.add_round("train", step, 0, groups, questions, [0])
                    store.db.execute("DELETE FROM waiting")  # as if it were taken

        def drop() -> None:
            for step in range(100):
                with store:
                    store.drop_groups(step)
                assert store.files.missing(store.kept_names()) == []

        together(add, drop)
        assert store.files.missing(store.kept_names()) == []
        assert len(store.groups("train", 99, 0)) == 1
