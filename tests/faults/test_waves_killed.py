"""R13: runs under a budget in money are killed with SIGKILL between waves, within waves and at other times.
Continued, they are the unbroken run.

The price of a question is up to twenty times its true cost, and answers arrive at random times that differ in
each process. There are two series: DPO asks its questions ahead; GRPO asks a mixture of this oracle, an async
function and a function in a worker, and normalises over each wave. The number of a kill decides where and
when it happens.
"""

import importlib
import json
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, counting, forked, kill_at, logged, named, oat

from oat.commands.digest import digest_run
from oat.ledger.audit import contradictions
from oat.ledger.store import Store
from oat.reports.accounts import accounts

pytestmark = pytest.mark.fault("R13")

PAID = '''
import random
import time

from oat.types import Answer, Price

chance = random.Random()


class Paid:
    """Counts letters, each text for up to a twentieth of what it may cost."""

    answers = "score"
    durable = False

    def __init__(self):
        self.open = {}

    def price(self, question):
        return Price(question.size, 10 * question.size, 0.05 * question.size)

    def submit(self, questions):
        for question in questions:
            self.open[str(question.key)] = (time.monotonic() + chance.uniform(0.0, 0.02), question)
        return [str(question.key) for question in questions]

    def collect(self, tickets, seconds):
        end = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            there = [ticket for ticket in tickets if self.open[ticket][0] <= now]
            if there or now >= end:
                break
            time.sleep(0.001)
        chance.shuffle(there)
        return [(ticket, self.answer(self.open.pop(ticket)[1])) for ticket in there]

    def answer(self, question):
        values = tuple(text.count("a") + 0.1 * text.count("b") for text in question.candidates)
        cost = sum(random.Random(text).uniform(0.0005, 0.0025) for text in question.candidates)
        size = question.size
        return Answer(question.key, values, ("ok",) * size, size, cost, tokens=size)
'''
LIMIT = 0.3
KILLS = 24
SAMPLE = ("mixture", 0)
CHANGES = {
    "stop": {"max_cost": LIMIT, "max_steps": 40},
    "checkpoint": {"every": 3, "keep_last": 9},
    "evaluation": None,
    "engine": {"name": "torch", "threads": 1},
}
POINTS = {
    "before a wave is formed": ("oat.ledger.budgets:BudgetedBatches.next", False),
    "inside the transaction of a wave": ("a wave is recorded", True),
    "a wave on disk, nothing sent": ("oat.ledger.outstanding:Outstanding.submit", False),
    "a wave sent": ("oat.ledger.outstanding:Outstanding.submit", True),
    "answers of a wave made, not on disk": ("answers are recorded", False),
    "inside the transaction of a wave's answers": ("oat.ledger.store:Store.add_answers", True),
    "some answers of a wave on disk": ("answers are recorded", True),
    "all taken, nothing learned": ("oat.ledger.store:Store.add_take", True),
}
SERIES = ("ahead", "mixture")


@dataclass(frozen=True)
class Whole:
    """The unbroken run.

    Attributes:
        calls: calls of each point.
        seconds: duration of the run.
    """

    run_dir: Path
    digest: dict[str, str]
    waves: list[tuple[Any, ...]]
    calls: dict[str, int]
    seconds: float


def config_of(world: World, folder: Path, series: str) -> Path:
    (paid := world.folder / "paid.py").write_text(PAID)
    if series == "ahead":
        return world.config(
            "dpo", folder, {**CHANGES, "oracle": {"name": f"{paid}:Paid", "max_outstanding": 7, "repeats": 0}}
        )
    late = {"name": world.late, "weight": 0.5, "normalise": "batch"}
    sources = [
        {"name": f"{paid}:Paid", "normalise": "batch"},
        late,
        {"name": "isolated", "function": world.oracle, "memory_gb": 64.0},
    ]
    return world.config("grpo", folder, {**CHANGES, "oracle": {"name": "mixture", "sources": sources}})


def waves_of(run_dir: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as ledger:
        return ledger.execute(
            "SELECT first, last, queries, tokens, cost FROM waves ORDER BY number"
        ).fetchall()


@pytest.fixture(scope="module")
def wholes(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    importlib.import_module("oat.assemble.run")  # so that children start warm
    found: dict[str, Whole] = {}

    def make(series: str) -> Whole:
        if series not in found:
            folder = tmp_path_factory.mktemp(series)
            config, run_dir = config_of(world, folder, series), folder / "run"

            def counted() -> int:
                counts = {name: counting(*named(place)) for name, (place, _) in POINTS.items()}
                code = oat("train", config, "--run_dir", run_dir)
                (folder / "calls").write_text(json.dumps({name: count() for name, count in counts.items()}))
                return code

            began = time.monotonic()
            assert forked(counted, folder / "log") == 0, (folder / "log").read_text()
            seconds = time.monotonic() - began
            found[series] = Whole(
                run_dir,
                digest_run(run_dir),
                waves_of(run_dir),
                json.loads((folder / "calls").read_text()),
                seconds,
            )
        return found[series]

    return make


@pytest.mark.parametrize(
    ("series", "number"),
    [
        pytest.param(series, number, marks=[] if (series, number) == SAMPLE else pytest.mark.large)
        for series in SERIES
        for number in range(KILLS)
    ],
)
def test_killed_once(
    world: World, tmp_path: Path, wholes: Any, figure: Callable[[str], None], series: str, number: int
) -> None:
    """Every third kill is at a random time of the run. The other kills are at points, at different calls of
    each point."""
    whole = wholes(series)
    drawn = random.Random(f"{series} {number}").random()
    log = tmp_path / "log"
    run_dir = tmp_path / "run"
    config = config_of(world, tmp_path, series)
    if number % 3 == 2:
        seconds = drawn * whole.seconds
        while (
            forked(lambda: oat("train", config, "--run_dir", run_dir), log, kill_after_s=seconds)
            != -signal.SIGKILL
        ):
            shutil.rmtree(run_dir)
            seconds /= 2
    else:
        name = list(POINTS)[(number - number // 3 + 3 * SERIES.index(series)) % len(POINTS)]
        place, is_after = POINTS[name]

        def armed() -> int:
            kill_at(*named(place), 1 + int(drawn * whole.calls[name]), after=is_after)
            return oat("train", config, "--run_dir", run_dir)

        assert forked(armed, log) == -signal.SIGKILL, log.read_text()
    assert logged(log, "train", config, "--run_dir", run_dir) == 0, log.read_text()
    with closing(Store(run_dir / "ledger.sqlite")) as store:
        (account,) = accounts(store)
        assert contradictions(store) == []
    is_equal = (digest_run(run_dir), waves_of(run_dir)) == (whole.digest, whole.waves)
    figure(
        f"{int(is_equal)} of 1 runs killed during a wave equal the unbroken one bitwise, waves "
        f"included (series: {series})"
    )
    assert is_equal
    assert account.cost <= LIMIT
    assert account.unpaid
    assert account.pending == 0


@pytest.mark.sample(
    "mixture", instead="tests/ledger/test_waves.py has questions that are asked ahead", seconds=1.5
)
@pytest.mark.parametrize("series", SERIES)
def test_rounds_have_waves_and_the_budget_is_spent(wholes: Any, series: str) -> None:
    """A run has more than 15 waves. The rest of its budget is too small for one more question: three texts of
    a group, or two of a pair, at 0.05 per text."""
    whole = wholes(series)
    assert len(whole.waves) > 15
    assert whole.waves[-1][-1] < LIMIT < whole.waves[-1][-1] + 2 * 0.05 * (2 if series == "ahead" else 3)


@pytest.mark.sample("mixture", seconds=0.8)
@pytest.mark.parametrize("series", SERIES)
def test_a_fork_that_changes_nothing_is_granted_the_same(
    world: World, tmp_path: Path, wholes: Any, series: str
) -> None:
    whole = wholes(series)
    config = config_of(world, tmp_path, series)
    run_dir = tmp_path / "run"
    assert (
        forked(
            lambda: oat("train", config, "--from", f"{whole.run_dir}@6", "--run_dir", run_dir),
            tmp_path / "log",
        )
        == 0
    )
    assert (digest_run(run_dir), waves_of(run_dir)) == (whole.digest, whole.waves)
