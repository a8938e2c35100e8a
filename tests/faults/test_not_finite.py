"""R20: a number that is not finite is caught before the optimiser changes a weight. The run then stops and
keeps the batch, or skips the update."""

import json
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import World, forked, kill_at, make_group, make_questions, named, oat
from learners import OPTIONS, is_unmoved, prepared, run_of, tensors_of, usual
from not_finite import SKIP, poisoned

from oat import wire
from oat.algorithms.base import Outputs, View
from oat.commands.digest import digest_run
from oat.errors import NonFiniteError, OracleError
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.loop import Run
from oat.oracles.base import Oracle
from oat.oracles.callables import CallableOracle
from oat.protocols import Objective
from oat.seeds import Seeds
from oat.types import Answer, Batch, Loss, Question

BAD = (math.nan, math.inf, -math.inf)
Figure = Callable[[str], None]


@pytest.fixture
def run(world: World, tmp_path: Path, algorithm: str) -> Run:
    """Return a run whose learner has made one good update, so that the optimiser has moments."""
    run = run_of(world, algorithm, tmp_path)
    run.learner.update(run.objectives[0], prepared(run, usual(run)))
    return run


def placed(count: int, *, each: bool) -> list[tuple[int, float]]:
    """Return places with bad numbers: every place with every bad number if `each`, otherwise every place with
    one of the three."""
    return [
        (place, value)
        for place in range(count)
        for value in (BAD if each else BAD[place % 3 : place % 3 + 1])
    ]


def with_bad(values: torch.Tensor, place: int, value: float) -> torch.Tensor:
    changed = values.clone()
    changed.view(-1)[place] = value
    return changed


def is_caught(run: Run, batch: Batch) -> bool:
    """Return True if the update is refused and nothing has changed."""
    before = tensors_of(run)
    with pytest.raises(NonFiniteError, match="no weight was moved"):
        run.learner.update(run.objectives[0], batch)
    return is_unmoved(run, before)


def columns_are_guarded(run: Run, *, each: bool) -> tuple[int, int]:
    batch, caught = prepared(run, usual(run)), []
    numbers = {name: values for name, values in batch.columns.items() if values.is_floating_point()}
    for name, values in numbers.items():
        for place, value in placed(values.numel(), each=each):
            caught.append(
                is_caught(
                    run, replace(batch, columns={**batch.columns, name: with_bad(values, place, value)})
                )
            )
    return sum(caught), len(caught)


def outputs_are_guarded(run: Run, *, each: bool) -> tuple[int, int]:
    batch, caught = prepared(run, usual(run)), []
    for trained, wants in run.objectives[0].wants.items():
        model = run.learner.models[trained]  # type: ignore[attr-defined]
        outputs, sizes = model.outputs, dict[str, int]()

        def measured(*arguments: Any, outputs: Any = outputs, sizes: Any = sizes) -> dict[str, torch.Tensor]:
            given = outputs(*arguments)
            sizes.update({name: values.numel() for name, values in given.items()})
            return given

        def poison(name: str, place: int, value: float, outputs: Any = outputs) -> Callable[..., Any]:
            def poisoned(*arguments: Any) -> dict[str, torch.Tensor]:
                given = outputs(*arguments)
                return {**given, name: with_bad(given[name], place, value)}

            return poisoned

        try:
            model.outputs = measured
            run.learner.update(run.objectives[0], batch)
            assert sizes.keys() >= set(wants)
            for name in sorted(wants):
                for place, value in placed(sizes[name], each=each):
                    model.outputs = poison(name, place, value)
                    caught.append(is_caught(run, batch))
        finally:
            model.outputs = outputs
    return sum(caught), len(caught)


def losses_are_guarded(run: Run, *, each: bool) -> tuple[int, int]:
    """Return how many poisoned losses were caught, and how many there were. Terms that a mask leaves out of
    the loss are not poisoned. The class is changed, since over the wire the learner has its own copy of the
    objective."""
    batch = prepared(run, usual(run))
    caught = []
    objective = run.objectives[0]
    losses = type(objective).losses
    counted: dict[str, torch.Tensor] = {}

    def measured(self: Objective, outputs: Outputs, view: View) -> dict[str, Loss]:
        found = losses(self, outputs, view)
        for name, loss in found.items():
            mask = view.columns.get("mask_U" if loss.per == "pair" else loss.mask)
            is_whole = mask is None or loss.per == "step"
            counted[name] = torch.ones(loss.terms.numel()) if is_whole else mask
        return found

    def poison(name: str, place: int, value: float) -> Callable[..., dict[str, Loss]]:
        def poisoned(self: Objective, outputs: Outputs, view: View) -> dict[str, Loss]:
            found = losses(self, outputs, view)
            return {
                **found,
                name: replace(found[name], terms=with_bad(found[name].terms, place, value)),
            }

        return poisoned

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(objective), "losses", measured)
        run.learner.update(objective, batch)
        for name, mask in counted.items():
            for place, value in placed(len(mask), each=each):
                if mask[place] > 0:
                    patched.setattr(type(objective), "losses", poison(name, place, value))
                    caught.append(is_caught(run, batch))
    return sum(caught), len(caught)


def gradients_are_guarded(run: Run, *, each: bool) -> tuple[int, int]:
    batch, caught = prepared(run, usual(run)), []
    for trained in run.objectives[0].wants:
        for parameter in run.learner.models[trained].trainable().values():  # type: ignore[attr-defined]
            for place in range(0, parameter.numel(), 1 if each else max(1, parameter.numel() // 3)):
                hook = parameter.register_hook(
                    lambda gradient, place=place: with_bad(gradient, place, BAD[place % 3])
                )
                caught.append(is_caught(run, batch))
                hook.remove()
    return sum(caught), len(caught)


GUARDED: dict[str, Callable[..., tuple[int, int]]] = {
    "columns of a batch": columns_are_guarded,
    "outputs of a model": outputs_are_guarded,
    "terms of a loss": losses_are_guarded,
    "gradients": gradients_are_guarded,
}


EVERY_GRADIENT = ("dpo", "ppo", "reward_model")
"""Algorithms for which every place of a gradient is tried. The guard knows no algorithm, so three places of
every tensor are enough for the others."""
WITHOUT_COLUMNS = {"sft", "simpo", "cpo", "orpo", "reward_model"}


@pytest.mark.sample("dpo-gradients", "grpo-columns of a batch", seconds=3.5)
@pytest.mark.fault("R20")
@pytest.mark.parametrize("what", GUARDED)
@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_a_bad_number_moves_nothing(run: Run, what: str, figure: Figure) -> None:
    caught, tried = GUARDED[what](run, each=False)
    figure(f"{caught:,} of {tried:,} bad numbers in {what} caught, no weight changed")
    assert caught == tried > 0


@pytest.mark.large
@pytest.mark.fault("R20")
@pytest.mark.parametrize("what", GUARDED)
@pytest.mark.parametrize("algorithm", OPTIONS)
def test_any_bad_number_at_any_place_moves_nothing(
    run: Run, algorithm: str, what: str, figure: Figure
) -> None:
    caught, tried = GUARDED[what](run, each=what != "gradients" or algorithm in EVERY_GRADIENT)
    figure(f"{caught:,} of {tried:,} bad numbers in {what} caught, no weight changed")
    assert caught == tried
    assert tried > 0 or (what == "columns of a batch" and algorithm in WITHOUT_COLUMNS)


class Careless(Oracle):
    """An oracle of scores that returns its numbers unchecked."""

    answers = "score"

    def __init__(self, scores: Sequence[float]):
        self.scores, self.open = list(scores), dict[str, Question]()

    def submit(self, questions: Sequence[Question]) -> list[str]:
        self.open = {str(question.key): question for question in questions}
        return list(self.open)

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        scores = iter(self.scores)
        return [
            (t, Answer(q.key, tuple(next(scores) for _ in q.candidates), ("ok",) * q.size, q.size))
            for t, q in self.open.items()
        ]


@pytest.mark.fault("R20")
def test_a_bad_reward_is_not_learned_from(tmp_path: Path, figure: Figure) -> None:
    """A bad reward is refused at each place of a step, from a reward function and from a user's own oracle,
    and no take is recorded."""
    groups = [make_group(number, "a", "bb", "ccc") for number in range(4)]
    questions = make_questions(groups, "score", 0, oracle="o")
    refused = 0
    tried = 0
    for place, value in placed(12, each=True):
        scores = [0.5] * 12
        scores[place] = value
        for oracle in (
            CallableOracle(lambda prompts, completions, scores=scores: scores, "o"),
            Careless(scores),
        ):
            tried += 1
            ledger = Ledger(
                Store(tmp_path / f"{tried}.sqlite"),
                {"o": oracle},
                Seeds(0),
                labels="threshold",
                deadline_s=5.0,
            )  # type: ignore[dict-item]
            ledger.ask(0, 0, groups, questions)
            with pytest.raises(OracleError, match="finite"):
                ledger.take_feedback(0, 4)
            refused += not ledger.has_taken(0)
            ledger.close()
    figure(f"{refused:,} of {tried:,} bad rewards refused, nothing learned from them")
    assert refused == tried


@pytest.mark.fault("R20")
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo"])
def test_a_reward_beyond_float32_moves_nothing(run: Run, algorithm: str) -> None:
    items = usual(run)
    items[2] = replace(items[2], answer=replace(items[2].answer, values=(1e39, 0.0)))
    assert is_caught(run, prepared(run, items))


def numbers(run_dir: Path, name: str) -> list[float]:
    return [
        json.loads(line)[name]
        for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    ]


@pytest.mark.fault("R20")
def test_a_run_stops_and_keeps_the_batch(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run stops at a number that is not finite, and the message names the file of the batch. The same
    command fails again. With the setting to skip, the run goes on and ends like a run that skipped from the
    start."""
    config, file = poisoned(world, tmp_path, [3]), tmp_path / "grpo" / "nonfinite" / "update_00000004.batch"
    for _ in range(2):
        assert oat("train", config) == 1
        message = capsys.readouterr().err
        assert (
            "update 4 of grpo: advantages_N = nan at 1 of 12 places; loss/policy = nan; loss/total = nan; "
            in message
        )
        assert f"The batch is in {file} " in message
        file.rename(file.with_name("kept"))
    batch = wire.decode(file.with_name("kept").read_bytes())
    assert isinstance(batch, Batch)
    assert batch.columns["advantages_N"].isnan().tolist() == [False, True, *[False] * 10]
    assert len(batch.rows) == 12
    with pytest.warns(UserWarning, match="is left out"):
        assert oat("train", config, "--learner.on_nonfinite", "skip") == 0
    with pytest.warns(UserWarning, match="is left out"):
        assert oat("train", config, "--run_dir", tmp_path / "skipping", "--learner.on_nonfinite", "skip") == 0
    assert digest_run(tmp_path / "grpo") == digest_run(tmp_path / "skipping")


@pytest.mark.fault("R20")
@pytest.mark.filterwarnings("ignore:update .* is left out")
def test_skipped_steps_are_counted_and_a_killed_run_skips_the_same(world: World, tmp_path: Path) -> None:
    config, run_dir = poisoned(world, tmp_path, [1, 2, 4], SKIP), tmp_path / "run"
    assert oat("train", config) == 0
    assert numbers(tmp_path / "grpo", "optim/skipped") == [0, 1, 2, 2, 3, 3]
    assert numbers(tmp_path / "grpo", "optim/steps") == [1, 1, 1, 2, 2, 3]

    def killed() -> int:
        kill_at(*named("oat.learner.learner:Learner.update"), 3, after=True)
        return oat("train", config, "--run_dir", run_dir)

    assert forked(killed, tmp_path / "log") == -signal.SIGKILL
    assert oat("train", config, "--run_dir", run_dir) == 0
    assert digest_run(run_dir) == digest_run(tmp_path / "grpo")


@pytest.mark.fault("R20")
@pytest.mark.filterwarnings("ignore:update .* is left out")
def test_one_more_in_a_row_than_may_be_skipped_stops(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The count of skipped updates is in the checkpoint, so it survives when the run is continued in
    between."""
    config = poisoned(world, tmp_path, [1, 2, 3], {**SKIP, "checkpoint.every": 1})
    assert oat("train", config, "--stop.max_steps", "3") == 0
    assert oat("train", config) == 1
    assert "after 2 in a row that were left out" in capsys.readouterr().err


def test_how_many_may_be_skipped_is_read_with_skip_only(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oat("train", poisoned(world, tmp_path, [], {"learner.max_skips": 2})) == 2
    assert "nothing reads learner.max_skips" in capsys.readouterr().err
