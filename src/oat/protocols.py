"""The protocols of the boxes that the loop drives. Those of engines, explorers, oracles and objectives stand
beside their families."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from oat.algorithms.base import Objective
from oat.types import Batch, Feedback, Group, Plan, Price, Prompt, Question, Sampling, Spent, Trajectory, Work


class Stateful(Protocol):
    """A part whose state decides the future: a flat dict of tensors and JSON values."""

    @property
    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class PromptSource(Protocol):
    def take(self, n: int) -> list[Prompt]:
        """The next prompts of the run; fewer, or none, when they are used up."""


class Actor(Protocol):
    def sample(
        self,
        prompts: Sequence[Prompt],
        samples: Mapping[str, int],
        address: Sequence[str | int],
        sampling: Sampling | None = None,
    ) -> list[Group]:
        """One group a prompt, with so many responses of each slot."""

    def score(self, groups: Sequence[Group], needs: Sequence[str]) -> dict[str, list[np.ndarray]]:
        """What an explorer needs to know of the groups."""

    def work(self) -> Work:
        """What was computed to sample, since this was first called."""


class Collector(Protocol):
    def fill(self, step: int, plan: Plan) -> dict[str, float]:
        """Ask until the questions of the steps up to this one are on disk; returns metrics of the
        sampling."""


class Ledger(Protocol):
    @property
    def reasked(self) -> int:
        """Questions that were asked once more after a kill."""

    @property
    def reported(self) -> Mapping[str, float]:
        """What its oracles say of themselves, as metrics."""

    def asked(self, step: int, round: int, purpose: str = "train") -> int:
        """Questions in recorded rounds before (step, round)."""

    def recalls(self, step: int, round: int, purpose: str = "train") -> bool:
        """Whether this round is on disk."""

    def has_taken(self, step: int, purpose: str = "train") -> bool:
        """Whether what this step learns from is recorded."""

    def ask(
        self,
        step: int,
        round: int,
        groups: Sequence[Group],
        questions: Sequence[Question],
        purpose: str = "train",
    ) -> None:
        """Record a round, then submit it."""

    def take(self, step: int, count: int, *, purpose: str = "train") -> Feedback:
        """What a step learns from, recorded before it is handed out."""

    def give_up(self, step: int, purpose: str) -> None:
        """Close a step that failed: nobody waits for its answers any more, and its record has none."""

    def is_spent(self, step: int, *, ahead: bool = False) -> bool:
        """Whether training could buy nothing more when the step before had taken its answers; ahead: beside
        the most that waits may take."""

    def price(self, questions: Sequence[Question]) -> Price:
        """The most that questions would cost if they were asked now."""

    def refuse(self, step: int, purpose: str, price: Price) -> None:
        """Record that a step asks nothing, since so much cannot be paid."""

    def refused(self, step: int, purpose: str) -> Price | None:
        """What could not be paid by the newest record of a purpose up to this step."""

    def committed(self, purpose: str) -> Price:
        """What was taken, and the most that everything asked since may still take."""

    def spent_before(self, step: int) -> Spent:
        """What was spent at the take of the step before."""

    def changes(self, row: int, *, is_evaluated: bool) -> int:
        """How many changes of an oracle came before what a row of metrics tells of."""

    def drop(self, step: int) -> None:
        """No step before this one will be replayed."""

    def close(self) -> None: ...


class Holdings(Protocol):
    def before(self, step: int, *, evaluated: bool) -> Mapping[str, Any]:
        """What a checkpoint keeps, beside the parts, of what the ledger holds before a step."""


class Buffer(Protocol):
    def fill(self, feedback: Feedback) -> Feedback:
        """A step's take, with those before it that are learned again."""

    def share_out(self, objective: Objective, batch: Batch, feedback: Feedback) -> Batch:
        """The batch, with as many mini-batches as older takes make necessary."""

    def metrics(self, feedback: Feedback) -> Mapping[str, float]: ...

    def reach(self, step: int) -> int:
        """The first step whose take is read by this step, or by a later one."""


class Learner(Protocol):
    micro_batch_tokens: int | None

    def forward(self, model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        """What is wanted of a model for the trained tokens of rows, without gradient."""

    def update(self, objective: Objective, batch: Batch) -> dict[str, float]:
        """Learn from a batch; returns metrics."""

    def measure(self, objective: Objective, batch: Batch) -> dict[str, float]:
        """The same numbers of a batch that nothing is learned from."""

    def tensors(self, model: str) -> dict[str, torch.Tensor]:
        """The weights of a model, by name."""

    def version(self, model: str) -> int:
        """How often a model has changed that is not trained."""

    def trainable(self, model: str) -> list[str]:
        """The names of those weights that learning changes."""

    def load_weights(self, model: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite a model's weights, in place."""


class Weights(Protocol):
    sampler_version: int

    def due(self, step: int) -> bool: ...

    def sync(self, learner: Learner, version: int) -> None:
        """Give the sampler the policy's weights, with proof."""

    def push(self, slot: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give a slot these weights, with proof."""

    def follow(self, learner: Learner) -> None:
        """Give the slot `reference` the learner's, if that has moved, with proof."""

    def restore(self, learner: Learner) -> None:
        """Give every slot the weights that it held at the checkpoint."""


class Evaluation(Protocol):
    slot: str

    def due(self, step: int, queries: int) -> bool:
        """Whether one is due after `step` updates and so many queries."""

    def measure(self) -> dict[str, float]:
        """What needs no oracle: the held-out pairs under the learner's weights, as metrics."""

    def run(self, step: int, queries: int = 0, feedback: Feedback | None = None) -> dict[str, float]:
        """Evaluate the slot's weights, and what a step took; returns metrics."""


class Stop(Protocol):
    last: int | None

    def reason(self, step: int, spent: Spent) -> str | None:
        """Why the run ends before this step, or None."""

    def steps_done(self, step: int) -> str | None:
        """The same where it is that so many steps are all, or more than all."""


class Alarms(Protocol):
    raised: int
    back: int | None

    @property
    def ended(self) -> str | None:
        """Why an alarm ends the run here, or None."""

    def begin(self, step: int) -> bool:
        """Whether the state of this step has to be on disk, since a roll back would lead to it."""

    def note_evaluation(self, values: Mapping[str, float]) -> None:
        """Keep what an evaluation says for the check of the next step."""

    def check(self, step: int, values: Mapping[str, float], *, is_saved: bool) -> int | None:
        """Hold a step's metrics against the rules; the step whose checkpoint the run goes back to, or
        None."""


class Checkpoints(Protocol):
    saved: int

    @property
    def steps(self) -> list[int]:
        """The steps of those on disk, ascending."""

    @property
    def next_loaded(self) -> int | None:
        """The step of the checkpoint that `load` tries first, None for none."""

    @property
    def oldest(self) -> int | None:
        """The step of the oldest one on disk."""

    def due(self, step: int) -> bool: ...

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        keep: int | None = None,
        is_last: bool = False,
    ) -> None:
        """Have it written while the caller goes on; unless it is the last, the caller may change what it
        gave."""

    def wait(self) -> None:
        """Return when everything saved is on disk."""

    def load(self) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]] | None: ...

    def load_back(self, step: int) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]]:
        """The one of a step, or the newest before it that can be used."""


class Tracking(Protocol):
    def open(self, step: int, *, is_closed: bool = True) -> None:
        """Cut what is written back to the cursor, whose own row may still have to come."""

    def row(self, step: int, values: Mapping[str, float], feedback: Feedback | None = None) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


Plans = Callable[[int], Plan]
"""The plan of each step, pure."""
