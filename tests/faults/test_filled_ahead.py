"""A checkpoint of a step that was written after later steps were filled: a run that is killed then, and
continued by the same command, ends bitwise equal to the unbroken one that fills no step early."""

import random
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, forked, kill_at, named, oat

from oat import loop
from oat.commands.digest import digest_run

STEPS = 6
KILLS = 10
SERIES: dict[str, tuple[str, dict[str, Any]]] = {
    "late": ("dpo", {"oracle.max_outstanding": 3}),
    "refill": ("grpo", {"algorithm.samples": 2, "sampling.refill_rounds": 4}),
    "dpo": ("dpo", {"learner.sync_every": 2}),
}
COMMON = {"checkpoint.every": 1, "evaluation.every": 3, "stop.max_steps": STEPS, "engine.threads": 1}
POINTS = ("tensors are copied for a save", "a checkpoint is published", "the newest checkpoint is named")


def fill_early(steps: list[int]) -> None:
    """From now on, fill the next step before a checkpoint is written, and note the step. For a forked child
    only."""
    fill, checkpoint = loop.fill, loop.checkpoint
    filled: dict[int, Mapping[str, float]] = {}

    def filled_before(run: loop.Run, step: int) -> Mapping[str, float]:
        return filled.pop(step) if step in filled else fill(run, step)

    def late(run: loop.Run, row: loop.Row, *, is_last: bool) -> Any:
        if not is_last:
            filled[row.number] = fill(run, row.number)
            steps.append(row.number)
        return checkpoint(run, row, is_last=is_last)

    loop.fill, loop.checkpoint = filled_before, late


@pytest.mark.fault("R1")
@pytest.mark.sample("1", seconds=8)
@pytest.mark.parametrize("number", range(KILLS))
def test_a_checkpoint_written_after_the_next_step_was_filled(
    world: World, tmp_path: Path, figure: Callable[[str], None], number: int
) -> None:
    name = [*SERIES][number % len(SERIES)]
    algorithm, changes = SERIES[name]
    background = {"checkpoint.background": number % 2 == 0}
    (tmp_path / "whole").mkdir()
    whole = world.config(algorithm, tmp_path / "whole", {**COMMON, **changes, **background})
    log, run_dir = tmp_path / "log", tmp_path / algorithm
    assert forked(lambda: oat("train", whole), log) == 0, log.read_text()
    config = world.config(algorithm, tmp_path, {**COMMON, **changes, **background})
    draw = random.Random(number)
    point, call, after = draw.choice(POINTS), draw.randrange(3, STEPS), draw.random() < 0.5

    def killed() -> int:
        fill_early([])
        kill_at(*named(point), call, after=after)
        return oat("train", config)

    while (code := forked(killed, log)) != -signal.SIGKILL:
        assert code == 0, log.read_text()
        shutil.rmtree(run_dir)
        call -= 1
    assert (run_dir / "checkpoints" / "latest").exists()

    def continued() -> int:
        early: list[int] = []
        if draw.random() < 0.5:
            fill_early(early)
        return oat("train", config)

    assert forked(continued, log) == 0, log.read_text()
    is_equal = digest_run(run_dir) == digest_run(tmp_path / "whole" / algorithm)
    figure(
        f"{int(is_equal)} of 1 runs killed at a checkpoint that is written after the next step was filled "
        "equal the unbroken one bitwise"
    )
    assert is_equal


def test_states_before_a_step_that_has_begun(world: World, tmp_path: Path) -> None:
    """What a checkpoint of a step holds does not change when later steps are filled."""
    config = world.config("grpo", tmp_path, {**COMMON, "algorithm.samples": 2, "evaluation": None})
    seen: dict[int, Any] = {}
    checkpoint = loop.checkpoint

    def look(run: loop.Run, row: loop.Row, *, is_last: bool) -> Any:
        if not is_last and row.number == 2:
            before = run.collector.states_at(2)
            loop.fill(run, 2), loop.fill(run, 3)
            seen.update({0: before, 1: run.collector.states_at(2), 2: run.collector.states_at(3)})
            seen[3] = run.parts["prompts"].state
            raise KeyboardInterrupt
        return checkpoint(run, row, is_last=is_last)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "checkpoint", look)
        oat("train", config)
    assert seen[0] == seen[1]
    taken = [seen[number]["prompts"]["taken"] for number in (0, 2)] + [seen[3]["taken"]]
    assert taken == sorted({*taken}), "each step takes prompts"
