"""The protocols of the boxes that the loop drives; those of engines, explorers, oracles and objectives stand
in their packages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from oat.algorithms.base import Objective
from oat.types import Batch, Feedback, Group, Plan, Price, Prompt, Question, Sampling, Spent, Trajectory, Work
from oat.types.budget import Budget


class Stateful(Protocol):
    """A part with a state that decides the future: a flat dict of tensors and JSON values."""

    @property
    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class PromptSource(Protocol):
    """The order in which a run takes its prompts."""

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts of the run; fewer, or none, when they are used up."""


class Actor(Protocol):
    """Makes trajectories of prompts."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        samples: Mapping[str, int],
        address: Sequence[str | int],
        sampling: Sampling | None = None,
    ) -> list[Group]:
        """One group a prompt.

        Args:
            samples: responses a prompt, by slot.
            address: purpose, step and round, for the random numbers.
            sampling: if it is not that of training.
        """

    def score(self, groups: Sequence[Group], needs: Sequence[str]) -> dict[str, list[np.ndarray]]:
        """The scores of samples that an explorer needs, by name; one array a group."""

    def work(self) -> Work:
        """What was computed to sample since this was first called."""


class Collector(Protocol):
    """Fills the ledger."""

    def fill(self, step: int, plan: Plan) -> dict[str, float]:
        """Ask until the questions of the steps up to this one are on disk; returns metrics of sampling."""


class Ledger(Protocol):
    """The record of every question, answer and price of a run."""

    @property
    def reasked(self) -> int:
        """Questions that were asked once more after a kill."""

    @property
    def reported(self) -> Mapping[str, float]:
        """The metrics that its oracles report of themselves."""

    def asked(self, step: int, round: int, purpose: str = "train") -> int:
        """The number of questions in recorded rounds before (step, round)."""

    def recalls(self, step: int, round: int, purpose: str = "train") -> bool:
        """True if this round is on disk."""

    def has_taken(self, step: int, purpose: str = "train") -> bool:
        """True if the feedback of this step is recorded."""

    def ask(
        self,
        step: int,
        round: int,
        groups: Sequence[Group],
        questions: Sequence[Question],
        purpose: str = "train",
    ) -> None:
        """Record a round, then submit its questions."""

    def take_feedback(self, step: int, count: int, *, purpose: str = "train") -> Feedback:
        """The feedback of a step, recorded before it is handed out.

        Args:
            count: questions that the step learns from.
        """

    def give_up(self, step: int, purpose: str) -> None:
        """Close a step that failed: its answers are not awaited any more, and its record has none."""

    def is_spent(self, step: int, *, ahead: bool = False) -> bool:
        """True if training could buy nothing more when the step before had taken its answers.

        Args:
            ahead: beside the highest price of the questions that are still open.
        """

    def price(self, questions: Sequence[Question]) -> Price:
        """The most that questions would cost if they were asked now."""

    def refuse(self, step: int, purpose: str, price: Price) -> None:
        """Record that a step asks nothing, since the budget does not allow this price."""

    def refused(self, step: int, purpose: str) -> Price | None:
        """The price that the budget of a purpose did not allow, by the newest record up to this step."""

    def committed(self, purpose: str) -> Price:
        """The price of the answers that were taken, and the highest price of everything asked since."""

    def spent_before(self, step: int) -> Spent:
        """What was spent when the step before had taken its answers."""

    def changes(self, row: int, *, is_evaluated: bool) -> int:
        """The number of changes of an oracle before the questions of which a row of metrics tells.

        Args:
            is_evaluated: the row has an evaluation.
        """

    def drop(self, step: int) -> None:
        """Drop what only a replay of the steps before this one would need."""

    def close(self) -> None: ...


class Holdings(Protocol):
    """Says what a checkpoint's ledger must hold."""

    def before(self, step: int, *, evaluated: bool) -> Mapping[str, Any]:
        """What the ledger holds before a step; a checkpoint keeps it beside the parts."""


class Buffer(Protocol):
    """The replay buffer."""

    def fill(self, feedback: Feedback) -> Feedback:
        """A step's feedback, with the older items that it learns from again."""

    def share_out(self, objective: Objective, batch: Batch, feedback: Feedback) -> Batch:
        """The batch, with as many mini-batches as older items make necessary."""

    def metrics(self, feedback: Feedback) -> Mapping[str, float]: ...

    def reach(self, step: int) -> int:
        """The first step whose feedback this step, or a later one, learns from."""


class Learner(Protocol):
    """The models, their optimisers, and the update.

    Attributes:
        micro_batch_tokens: most tokens of one forward pass; None: no limit.
    """

    micro_batch_tokens: int | None

    def forward(self, model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        """The wanted outputs of a model for the trained tokens of rows, (K,) each, without gradient."""

    def update(self, objective: Objective, batch: Batch) -> dict[str, float]:
        """Learn from a batch; returns metrics."""

    def measure(self, objective: Objective, batch: Batch) -> dict[str, float]:
        """The losses and metrics of a batch from which nothing is learned."""

    def tensors(self, model: str) -> dict[str, torch.Tensor]:
        """The weights of a model, by name."""

    def version(self, model: str) -> int:
        """How often a model has changed that is not trained."""

    def trainable(self, model: str) -> list[str]:
        """The names of the weights that learning changes."""

    def load_weights(self, model: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite a model's weights, in place."""


class Weights(Protocol):
    """The transfer of weights to engines, with proof.

    Attributes:
        sampler_version: version of the policy's weights in the slot `sampler`.
    """

    sampler_version: int

    def due(self, step: int) -> bool:
        """True if the sampler gets new weights after this step."""

    def sync(self, learner: Learner, version: int) -> None:
        """Give the sampler the policy's weights, with proof."""

    def push(self, slot: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give a slot these weights, with proof."""

    def follow(self, learner: Learner) -> None:
        """Give the slot `reference` the learner's reference, if it has moved, with proof."""

    def restore(self, learner: Learner) -> None:
        """Give every slot the weights that it held at the checkpoint."""


class Evaluation(Protocol):
    """Held-out prompts and pairs.

    Attributes:
        slot: whose weights answer the prompts.
    """

    slot: str

    def due(self, step: int, queries: int) -> bool:
        """True if an evaluation is due after `step` updates and so many queries."""

    def measure(self) -> dict[str, float]:
        """The metrics that need no oracle: of held-out pairs under the learner's weights."""

    def run(self, step: int, queries: int = 0, feedback: Feedback | None = None) -> dict[str, float]:
        """Evaluate the slot's weights, and the feedback of a step; returns metrics."""


class Stop(Protocol):
    """The stop conditions.

    Attributes:
        last: the number of steps; None: no limit.
    """

    last: int | None
    budget: Budget
    max_hours: float | None

    def reason(self, step: int, spent: Spent) -> str | None:
        """Why the run ends before this step, or None."""

    def steps_done(self, step: int) -> str | None:
        """Why the run ends before this step, if all steps are done; otherwise None."""


class Alarms(Protocol):
    """The alarms that watch a run.

    Attributes:
        raised: alarms so far.
        back: the step of the checkpoint to which a roll back would lead; None: nothing rolls back.
    """

    raised: int
    back: int | None

    @property
    def ended(self) -> str | None:
        """Why an alarm ends the run here, or None."""

    def begin(self, step: int) -> bool:
        """True if the state of this step has to be on disk, since a roll back would lead to it."""

    def note_evaluation(self, values: Mapping[str, float]) -> None:
        """Keep the metrics of an evaluation for the check of the next step."""

    def check(self, step: int, values: Mapping[str, float], *, is_saved: bool) -> int | None:
        """Hold a step's metrics against the alarms.

        Args:
            is_saved: a checkpoint was due before the step.
        Returns:
            The step of the checkpoint to which the run goes back, or None.
        """


class Checkpoints(Protocol):
    """The checkpoints of a run.

    Attributes:
        saved: the step of the newest one that was saved or loaded.
    """

    saved: int

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints on disk, ascending."""

    @property
    def next_loaded(self) -> int | None:
        """The step of the checkpoint that `load` tries first; None: there is none."""

    @property
    def oldest(self) -> int | None:
        """The step of the oldest checkpoint on disk; None: there is none."""

    def due(self, step: int) -> bool:
        """True if a checkpoint is due after `step` updates."""

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
        """Let a checkpoint be written while the caller goes on. Unless it is the last one, the caller may
        change the tensors at once.

        Args:
            tensors, state: everything that the checkpoint holds.
            metrics: of the row after which it stands, if that is closed.
            keep: the step of an older checkpoint that stays.
            is_last: nothing is learned after it.
        """

    def wait(self) -> None:
        """Return when everything that was saved is on disk."""

    def load(self) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]] | None:
        """Step, tensors and state of the newest checkpoint that can be used; None: there is none."""

    def load_back(self, step: int) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]]:
        """The checkpoint of a step, or the newest one before it that can be used."""


class Tracking(Protocol):
    """The rows of metrics, and those to whom they go."""

    def open(self, step: int, *, is_closed: bool = True) -> None:
        """Drop the rows after row `step`.

        Args:
            is_closed: row `step` stays too; otherwise it is written next.
        """

    def row(self, step: int, values: Mapping[str, float], feedback: Feedback | None = None) -> None:
        """Write a row, and samples of the feedback of its step."""

    def flush(self) -> None:
        """Bring the rows so far to disk."""

    def close(self) -> None: ...


Plans = Callable[[int], Plan]
"""The plan of each step, a function of its number."""
