"""The passes of an update over its batch: which rows each mini-batch has, and in which order."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from objectives import VOCABULARY, compared_feedback, scored_feedback
from tiny_models import save_llama

from oat.algorithms.base import Objective
from oat.algorithms.direct import DPO, DPOConfig
from oat.algorithms.group import GRPO, GRPOConfig
from oat.errors import ContractError
from oat.learner.learner import Learner
from oat.learner.models import LanguageModel
from oat.learner.optimiser import OptimiserSettings
from oat.models.loading import load_lm
from oat.seeds import Seeds
from oat.types import Batch

EPOCHS, MINIBATCHES = 3, 2


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return save_llama(path, vocab_size=VOCABULARY, hidden=16, inner=24, spread=0.3)


class Recording(Learner):
    """A learner that keeps the rows of each of its mini-batches."""

    def __init__(self, path: Path, *, micro_batch_size: int | None = None, seed: int = 0):
        lms = {name: load_lm(str(path)) for name in ("policy", "reference")}
        models = {name: LanguageModel(lm, num_tokens=VOCABULARY, chunk=4096) for name, lm in lms.items()}
        settings = {"policy": OptimiserSettings(1e-3)}
        super().__init__(models, settings, micro_batch_size=micro_batch_size, seeds=Seeds(seed))
        self.seen: list[list[int]] = []

    def _step(self, objective: Objective, step: Batch) -> tuple[dict[str, float], bool]:
        self.seen.append([id(row) for row in step.rows])
        return super()._step(objective, step)

    def rows(self, objective: Objective, batch: Batch) -> list[list[int]]:
        """Learn from a batch, and return the indices of the rows of each mini-batch."""
        self.seen = []
        self.update(objective, batch)
        index = {id(row): number for number, row in enumerate(batch.rows)}
        return [[index[each] for each in rows] for rows in self.seen]


def batch_of(objective: Objective, learner: Learner) -> Batch:
    feedback = compared_feedback() if objective.requires.feedback == "compare" else scored_feedback()
    return objective.prepare(feedback, learner.forward, np.random.default_rng(0))


def grpo(**changes: Any) -> GRPO:
    return GRPO(GRPOConfig(prompts=4, samples=4, epochs=EPOCHS, minibatches=MINIBATCHES, **changes))


def test_each_pass_has_all_rows_once_in_an_order_of_its_own(model_path: Path) -> None:
    objective, learner = grpo(), Recording(model_path)
    batch = batch_of(objective, learner)
    updates = [learner.rows(objective, batch) for _ in range(2)]
    passes = [
        tuple(map(tuple, update[first : first + MINIBATCHES]))
        for update in updates
        for first in range(0, EPOCHS * MINIBATCHES, MINIBATCHES)
    ]
    assert all(sorted(sum(rows, ())) == [*range(batch.size)] for rows in passes)
    assert len({*passes}) == 2 * EPOCHS
    assert Recording(model_path, seed=1).rows(objective, batch) not in updates


def test_the_two_rows_of_a_pair_stay_together(model_path: Path) -> None:
    objective, learner = DPO(DPOConfig(prompts=6, epochs=2, minibatches=3)), Recording(model_path)
    batch = batch_of(objective, learner)
    seen = learner.rows(objective, batch)
    units = [batch.unit_of_N[rows].tolist() for rows in seen]
    assert all(unit[::2] == unit[1::2] for unit in units)
    assert len({tuple(rows) for rows in seen}) > 3


def test_the_order_depends_on_neither_micro_batches_nor_kills(model_path: Path) -> None:
    """A process that is killed inside an update begins this update again, from its learner's last state."""
    objective, learner = grpo(), Recording(model_path)
    batch = batch_of(objective, learner)
    first = learner.rows(objective, batch)
    state: Mapping[str, Any] = {
        name: value.clone() if hasattr(value, "clone") else value for name, value in learner.state.items()
    }
    second = learner.rows(objective, batch)
    assert first != second
    assert Recording(model_path, micro_batch_size=3).rows(objective, batch) == first
    for size in (None, 1):
        continued = Recording(model_path, micro_batch_size=size)
        continued.load_state(state)
        assert continued.rows(objective, batch) == second


def test_an_update_that_ends_early_moves_no_later_order(model_path: Path) -> None:
    objective, whole, cut = grpo(), Recording(model_path), Recording(model_path)
    batch = batch_of(objective, whole)
    first, second = (whole.rows(objective, batch) for _ in range(2))
    assert cut.rows(grpo(target_kl=1e-12), batch) == first[:2]
    assert cut.left_out == {"policy": EPOCHS * MINIBATCHES - 1}
    assert cut.rows(objective, batch) == second


class Unsure(GRPO):
    def ends_passes(self, values: Mapping[str, float]) -> Any:
        return None


def test_an_end_that_is_no_bool_is_refused(model_path: Path) -> None:
    objective, learner = Unsure(GRPOConfig(prompts=4, samples=4)), Recording(model_path)
    with pytest.raises(ContractError, match="`ends_passes` of grpo returned None; return True or False"):
        learner.update(objective, batch_of(objective, learner))
