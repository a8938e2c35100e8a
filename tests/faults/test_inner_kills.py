"""R32 and R33: runs are killed with SIGKILL inside a step that asks further rounds (dynamic sampling), and
inside an update of several optimiser steps that may end early. Continued, they are the unbroken run.

Each row has several series, and each series has KILLS runs. Every third kill is at a random time of the
run, and the last one of a series is in a cold process. The other kills are at points of the code. They are at
calls between the first and the last round of a step (R32), or between the first and the last mini-batch of an
update (R33). The number of a kill decides where and when it happens.
"""

import importlib
import json
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, forked, kill_at, named, oat
from kills import books, cold, killed_in_time

from oat.commands.digest import digest_run
from oat.ledger.audit import contradictions
from oat.ledger.store import Store

STEPS = 12
KILLS = 9
REWARDS = '''
import asyncio
import random

from oat.types import Answer, Price

chance = random.Random()


def coarse(prompts, completions, **columns):
    """Score 1 for a quarter of the responses, so that many groups have equal scores."""
    return [float(sum(map(ord, text)) % 4 == 0) for text in completions]


async def late(prompts, completions, **columns):
    """The same, after a while that is another one in every process."""
    await asyncio.sleep(chance.uniform(0.0, 0.02))
    return coarse(prompts, completions)


def graded(prompts, completions, **columns):
    return [sum(map(ord, text)) % 11 / 5 - 1 for text in completions]


class Dear:
    """The coarse scores. Each costs up to half of what it may cost."""

    answers = "score"
    durable = False

    def __init__(self):
        self.open = {}

    def price(self, question):
        return Price(question.size, 0, float(question.size))

    def submit(self, questions):
        self.open |= {str(question.key): question for question in questions}
        return [str(question.key) for question in questions]

    def collect(self, tickets, seconds):
        chance.shuffle(tickets)
        return [(ticket, self.answer(self.open.pop(ticket))) for ticket in tickets[:2]]

    def answer(self, question):
        values = tuple(coarse([], question.candidates))
        cost = sum(random.Random(text).uniform(0.1, 0.5) for text in question.candidates)
        return Answer(question.key, values, ("ok",) * len(values), len(values), cost)
'''
COMMON = {
    "checkpoint.every": 3,
    "evaluation.every": 4,
    "stop.max_steps": STEPS,
    "engine": {"name": "torch", "threads": 1},
}
EARLY = Path(__file__).parents[1] / "protocol" / "early.py"
REFILLED: dict[str, tuple[str, dict[str, Any]]] = {
    "scores": ("grpo", {"algorithm.samples": 2, "oracle.name": "late", "sampling.refill_rounds": 8}),
    "pairs": ("dpo", {"oracle.name": "late", "sampling.refill_rounds": 8, "sampling.max_new_tokens": 1}),
    "waves": (
        "grpo",
        {
            "algorithm.samples": 2,
            "oracle.name": "Dear",
            "sampling.refill_rounds": 3,
            "stop.max_cost": 60.0,
            "evaluation": None,
        },
    ),
    "used up": (
        "grpo",
        {
            "algorithm.samples": 2,
            "oracle.name": "coarse",
            "prompts.epochs": 3,
            "sampling.refill_rounds": 8,
            "stop": {},
        },
    ),
}
PASSES = {"algorithm.epochs": 3, "algorithm.minibatches": 2, "learner.schedule": "linear"}
UPDATED: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": (
        "grpo",
        {
            **PASSES,
            "algorithm.target_kl": 0.01,
            "algorithm.samples": 4,
            "learner.learning_rate": 0.02,
            "oracle.name": "graded",
        },
    ),
    "ppo": (
        "ppo",
        {
            **PASSES,
            "algorithm.samples": 2,
            "algorithm.target_kl": 0.01,
            "learner.critic_only_steps": 2,
            "learner.learning_rate": 0.02,
            "oracle.name": "graded",
        },
    ),
    "dpo": (
        "dpo",
        {
            **PASSES,
            "algorithm.name": f"{EARLY}:Enough",
            "algorithm.enough": 0.65,
            "learner.buffer": {"questions": 10},
            "learner.max_updates": 13,
            "learner.learning_rate": 0.02,
            "oracle.name": "graded",
        },
    ),
}
SERIES = REFILLED | UPDATED
SAMPLES = {"waves": 0, "ppo": 3}
"""The kills that `make test` makes, by series."""

Watch = Callable[[Callable[[bool], None]], None]
"""Replaces functions of `oat` so that they call the argument: with True when an inner part of a step begins,
with False when it ends."""


def inside_rounds(tell: Callable[[bool], None]) -> None:
    from oat.collector import Collector
    from oat.ledger.ledger import Ledger

    original, taking = Collector._round, Ledger.take_feedback

    def round_(self: Collector, step: int, round: int, plan: Any, prompts: int) -> bool:
        tell(round > 0)
        return original(self, step, round, plan, prompts)

    def take(self: Ledger, *args: Any, **kwargs: Any) -> Any:
        taken = taking(self, *args, **kwargs)
        tell(False)
        return taken

    Collector._round, Ledger.take_feedback = round_, take  # type: ignore[method-assign]


def inside_updates(tell: Callable[[bool], None]) -> None:
    from oat.learner.learner import Learner

    update, step, made = Learner.update, Learner._step, 0

    def whole(self: Learner, *args: Any) -> Any:
        nonlocal made
        made = 0
        report = update(self, *args)
        tell(False)
        return report

    def one(self: Learner, *args: Any) -> Any:
        nonlocal made
        tell(made > 0)
        made += 1
        return step(self, *args)

    Learner.update, Learner._step = whole, one  # type: ignore[method-assign]


ROUNDS = {
    "before a further round is sampled": ("a round is asked", False),
    "a further round sampled, not on disk": ("oat.ledger.ledger:Ledger.ask", False),
    "inside the transaction of a further round": ("oat.ledger.store:Store.add_round", True),
    "a further round on disk, nothing sent": ("oat.ledger.outstanding:Outstanding.submit", False),
    "inside the transaction of its answers": ("oat.ledger.store:Store.add_answers", True),
    "its answers on disk, not counted": ("answers are recorded", True),
    "its answers counted": ("oat.ledger.ledger:Ledger.answered", True),
    "all rounds asked, nothing taken": ("oat.ledger.store:Store.add_take", False),
}
MINIBATCHES = {
    "before a mini-batch": ("an optimiser step", False),
    "inside an optimiser step": ("torch.optim.adamw:AdamW.step", True),
    "a gradient made, no step": ("a gradient is clipped", True),
    "after a mini-batch": ("an optimiser step", True),
    "the end of an update decided": ("passes end", True),
}


def points_of(series: str) -> dict[str, tuple[str, bool]]:
    return ROUNDS if series in REFILLED else MINIBATCHES


@dataclass(frozen=True)
class Whole:
    """The unbroken run.

    Attributes:
        calls: for each point, the numbers of its calls that are inside a step's rounds or an update.
        seconds: duration of the run.
    """

    run_dir: Path
    digest: dict[str, str]
    accounts: list[list[str]]
    calls: dict[str, list[int]]
    seconds: float

    @property
    def rows(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()][1:]


def config_of(world: World, folder: Path, series: str) -> Path:
    (rewards := world.folder / "inner_rewards.py").write_text(REWARDS, encoding="utf-8")
    algorithm, changes = SERIES[series]
    oracle = f"{rewards}:{changes['oracle.name']}"
    return world.config(algorithm, folder, {**COMMON, **changes, "oracle.name": oracle})


def noted(series: str) -> Callable[[], dict[str, list[int]]]:
    """From now on, note the calls of each point that are inside. For a forked child only."""
    calls: dict[str, list[int]] = {}
    is_inside = False

    def tell(now: bool) -> None:
        nonlocal is_inside
        is_inside = now

    def note(name: str, place: str) -> None:
        owner, attribute = named(place)
        original, count, found = getattr(owner, attribute), 0, calls.setdefault(name, [])

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            found.extend([count] if is_inside else [])
            return original(*args, **kwargs)

        setattr(owner, attribute, counted)

    for name, (place, _) in points_of(series).items():
        note(name, place)
    watch: Watch = inside_rounds if series in REFILLED else inside_updates
    watch(tell)
    return lambda: calls


@pytest.fixture(scope="module")
def wholes(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    """Return a function that gives the unbroken run of a series. Each run is made once."""
    importlib.import_module("oat.assemble.run")  # so that children start warm
    found: dict[str, Whole] = {}

    def make(series: str) -> Whole:
        if series not in found:
            folder = tmp_path_factory.mktemp("whole")
            config, run_dir = config_of(world, folder, series), folder / "run"

            def watched() -> int:
                calls = noted(series)
                code = oat("train", config, "--run_dir", run_dir)
                (folder / "calls").write_text(json.dumps(calls()), encoding="utf-8")
                return code

            began = time.monotonic()
            assert forked(watched, folder / "log") == 0, (folder / "log").read_text()
            seconds, calls = time.monotonic() - began, json.loads((folder / "calls").read_text())
            accounts = books(run_dir, folder / "copy", STEPS).accounts
            found[series] = Whole(run_dir, digest_run(run_dir), accounts, calls, seconds)
        return found[series]

    return make


def die(series: str, number: int, config: Path, run_dir: Path, whole: Whole) -> str | None:
    """Train until the kill. Return the name of its point; None if it was at a random time."""
    drawn, log = random.Random(f"{series} {number}").random(), run_dir.parent / "log"
    if number % 3 == 2:
        is_cold = number == KILLS - 1

        def train(seconds: float) -> int:
            if is_cold:
                return cold(config, run_dir, seconds)
            return forked(lambda: oat("train", config, "--run_dir", run_dir), log, kill_after_s=seconds)

        killed_in_time(train, run_dir, drawn * whole.seconds)
        return None
    points = {name: calls for name, calls in whole.calls.items() if calls}
    name = [*points][(number - number // 3) % len(points)]
    place, is_after = points_of(series)[name]
    call = points[name][int(drawn * len(points[name]))]

    def armed() -> int:
        kill_at(*named(place), call, after=is_after)
        return oat("train", config, "--run_dir", run_dir)

    while (code := forked(armed, log)) != -signal.SIGKILL:  # late answers came in fewer calls
        assert code == 0, log.read_text()
        shutil.rmtree(run_dir)
        call = max(1, call // 2)
    return name


def assert_killed_once_is_the_same(
    world: World, folder: Path, whole: Whole, series: str, number: int, figure: Callable[[str], None]
) -> None:
    config, run_dir, log = config_of(world, folder, series), folder / "run", folder / "log"
    point = die(series, number, config, run_dir, whole)
    before = books(run_dir, folder / "before", STEPS)
    code = (
        cold(config, run_dir)
        if number == KILLS - 1
        else forked(lambda: oat("train", config, "--run_dir", run_dir), log)
    )
    assert code == 0, log.read_text()
    after = books(run_dir, folder / "after", STEPS)
    with closing(Store(run_dir / "ledger.sqlite")) as store:
        assert contradictions(store) == []
    is_equal = (digest_run(run_dir), after.accounts) == (whole.digest, whole.accounts)
    lost = sum(after.answers.get(key) != answer for key, answer in before.answers.items())
    inside = "between rounds of a step" if series in REFILLED else "between mini-batches of an update"
    place = inside if point else "at a random time"
    figure(f"{int(is_equal)} of 1 runs killed {place} equal the unbroken one bitwise ({series})")
    figure(f"{lost:,} of {len(before.answers):,} answers lost")
    assert is_equal
    assert (lost, len(after.trained)) == (0, len({*after.trained}))
    assert after.again == len(before.in_flight)


def kills_of(series: Mapping[str, Any]) -> list[Any]:
    return [
        pytest.param(name, number, marks=[] if SAMPLES.get(name) == number else pytest.mark.large)
        for name in series
        for number in range(KILLS)
    ]


@pytest.mark.fault("R32")
@pytest.mark.parametrize(("series", "number"), kills_of(REFILLED))
def test_killed_inside_a_refilled_step(
    world: World, tmp_path: Path, wholes: Any, figure: Callable[[str], None], series: str, number: int
) -> None:
    assert_killed_once_is_the_same(world, tmp_path, wholes(series), series, number, figure)


@pytest.mark.fault("R33")
@pytest.mark.parametrize(("series", "number"), kills_of(UPDATED))
def test_killed_inside_an_update(
    world: World, tmp_path: Path, wholes: Any, figure: Callable[[str], None], series: str, number: int
) -> None:
    assert_killed_once_is_the_same(world, tmp_path, wholes(series), series, number, figure)


@pytest.mark.parametrize("series", [pytest.param(name, marks=pytest.mark.large) for name in REFILLED])
@pytest.mark.fault("R32")
def test_most_steps_are_refilled(wholes: Any, series: str) -> None:
    """Every point has calls between the first and the last round of a step."""
    rows = wholes(series).rows
    assert sum(row["refill/rounds"] > 1 for row in rows) > len(rows) / 2
    assert sum(row["refill/thrown_away"] for row in rows) > len(rows)
    assert all(wholes(series).calls[point] for point in ROUNDS)


@pytest.mark.parametrize("series", [pytest.param(name, marks=pytest.mark.large) for name in UPDATED])
@pytest.mark.fault("R33")
def test_some_updates_end_early_and_others_do_not(wholes: Any, series: str) -> None:
    rows = wholes(series).rows
    totals = [row["optim/steps"] for row in rows]
    made = [total - earlier for total, earlier in zip(totals, [0, *totals[:-1]], strict=True)]
    planned = 6 if series != "dpo" else 13
    assert min(made) < planned
    assert rows[-1]["optim/left_out"] > 0
    assert all(wholes(series).calls[point] for point in MINIBATCHES)
