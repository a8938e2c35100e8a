"""R21: with the smallest batches and with empty responses every algorithm has a finite loss or a clear
error."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import World, oat, write_jsonl
from learners import OPTIONS, item, prepared, run_of, settings_of, tensors_of, usual
from weights import weights_of

from oat.loop import Run
from oat.types import Item

END = 1
"""The id of the end-of-sequence token."""

CASES: dict[str, Callable[[Run], list[Item]]] = {
    "all rewards equal": lambda run: [item(run, n, [(2, 3, 4), (5, 6)], (0.5, 0.5)) for n in range(3)],
    "an empty response": lambda run: [*usual(run), item(run, 5, [(), (5, 6)], (1, 0))],
    "empty responses only": lambda run: [item(run, n, [(), ()], (1, 0)) for n in range(2)],
    "all masked": lambda run: [item(run, n, [(2, 3), (4, 5, 6)], (1, 0), is_trained=False) for n in range(2)],
    "no answer": lambda run: [item(run, n, [(2, 3), (4, 5, 6)], (1, 0), "failed") for n in range(2)],
    "a single group": lambda run: [item(run, 0, [(2, 3), (4, 5, 6)], (1, 0))],
    "length one": lambda run: [item(run, n, [(2,), (3 + n,)], (1, 0)) for n in range(2)],
    "end of text only": lambda run: [item(run, n, [(END,), (END,)], (1, 0)) for n in range(2)],
    "end of text and a token": lambda run: [item(run, 0, [(END,), (2, END)], (0, 1))],
    "twice the same response": lambda run: [item(run, 0, [(2, 3), (2, 3)], (1, 0))],
    "nothing": lambda run: [],
}
TEACH_NOTHING = {"empty responses only", "all masked", "nothing"}


@pytest.mark.sample(
    "dpo",
    "kto",
    "aot",
    "sft",
    "reward_model",
    "grpo",
    "reinforce_pp",
    "rloo",
    "ppo",
    seconds=5.1,
)
@pytest.mark.fault("R21")
@pytest.mark.parametrize("algorithm", OPTIONS)
def test_an_edge_batch_has_a_finite_loss(
    world: World, tmp_path: Path, algorithm: str, figure: Callable[[str], None]
) -> None:
    run, finite = run_of(world, algorithm, tmp_path), 0
    start = tensors_of(run)
    cases: dict[str, Callable[[Run], list[Item]]] = dict(CASES)
    if run.objectives[0].requires.feedback == "score":
        cases["a group of one"] = lambda run: [item(run, 0, [(2, 3)], (1,))]
    for name, items in cases.items():
        run.parts["learner"].load_state(start)
        for part in run.learner.trained.values():  # type: ignore[attr-defined]
            part.optimiser.state.clear()
        report = run.learner.update(run.objectives[0], prepared(run, items(run)))
        assert {key: value for key, value in report.items() if not math.isfinite(value)} == {}, name
        for learning in run.objectives[0].wants:
            weights = weights_of(run.learner, learning)
            assert all(tensor.isfinite().all() for tensor in weights.values()), name
            if name in TEACH_NOTHING:
                assert all(
                    torch.equal(weights[key], start[f"{learning}/weights/{key}"])
                    for key in run.learner.trainable(learning)
                ), name
        finite += 1
    figure(f"{finite} of {len(cases)} edge batches give a finite loss")


@pytest.mark.sample("dpo", "grpo", seconds=4.2)
@pytest.mark.fault("R21")
@pytest.mark.parametrize("algorithm", OPTIONS)
def test_a_prompt_beyond_the_context(
    world: World, tmp_path: Path, algorithm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `sampling.overflow: cut`, a prompt that is longer than the context is refused before the first
    step. A prompt that fills the context exactly gets empty responses."""
    for size, code in ((65, 2), (64, 0)):
        folder = tmp_path / str(size)
        folder.mkdir()
        prompts = write_jsonl(folder / "long.jsonl", [{"prompt": "1" * size, "answer": "a"}] * 4)
        places: dict[str, Any] = {
            "prompts.path": str(prompts),
            "evaluation": None,
            "sampling.overflow": "cut",
            "stop.max_steps": 1,
        }
        assert oat("train", world.config(algorithm, folder, settings_of(algorithm, places))) == code
        if code:
            assert (
                f"{prompts}:1: the prompt has 65 tokens, and the model's context leaves room for 64"
                in capsys.readouterr().err
            )
        else:
            rows = [
                json.loads(line) for line in (folder / algorithm / "metrics.jsonl").read_text().splitlines()
            ]
            assert rows[1]["response/length"] == 0
            assert all(math.isfinite(value) for value in rows[1].values())
