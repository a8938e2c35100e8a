"""The protocols of the boxes that the loop drives. Engines, explorers, oracles, objectives and environments
have their protocols in their own packages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from oat.algorithms.base import Objective
from oat.types import Batch, Feedback, Group, Plan, Price, Prompt, Question, Sampling, Spent, Trajectory, Work
from oat.types.budget import Budget


class Stateful(Protocol):
    """A part with a state, from which a run can be continued: a flat dict of tensors and JSON values."""

    @property
    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class PromptSource(Protocol):
    """Gives a run its prompts, in a fixed order."""

    def take(self, n: int) -> list[Prompt]:
        """Return the next n prompts of the run; fewer, or none, if the prompts are used up."""


class Actor(Protocol):
    """Makes trajectories from prompts."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        samples: Mapping[str, int],
        address: Sequence[str | int],
        sampling: Sampling | None = None,
    ) -> list[Group]:
        """Return one group per prompt.

        Args:
            samples: number of responses per prompt, by slot.
            address: the beginning of the address of the random numbers; in training purpose, step and round.
            sampling: the settings of sampling; None: those of training.
        """

    def score(self, groups: Sequence[Group], needs: Sequence[str]) -> dict[str, list[np.ndarray]]:
        """Return the scores of the samples that an explorer needs, by name; one array per group."""

    def work(self) -> Work:
        """Return the work of sampling since the first call of this method."""


class Collector(Protocol):
    """Fills the ledger."""

    def fill(self, step: int, plan: Plan) -> dict[str, float]:
        """Ask until the questions of the steps up to this one are on disk. Return metrics of sampling."""


class Ledger(Protocol):
    """The record of every question, answer and price of a run."""

    @property
    def reasked(self) -> int:
        """The number of questions that this process asked again, since a kill came before their answers."""

    @property
    def reported(self) -> Mapping[str, float]:
        """The metrics that the oracles report about themselves."""

    def asked(self, step: int, round: int, purpose: str = "train") -> int:
        """Return the number of questions in the recorded rounds before (step, round)."""

    def recalls(self, step: int, round: int, purpose: str = "train") -> bool:
        """Return True if this round is recorded."""

    def has_taken(self, step: int, purpose: str = "train") -> bool:
        """Return True if the feedback of this step is recorded."""

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
        """Return the feedback of a step, which is recorded first.

        Args:
            count: number of questions that the step learns from.
        """

    def give_up(self, step: int, purpose: str) -> None:
        """Close a step that failed: nobody waits for its answers any longer, and the step is recorded as
        having taken no answers."""

    def is_spent(self, step: int, *, ahead: bool = False) -> bool:
        """Return True if training could buy nothing more at the moment when the step before had taken its
        answers.

        Args:
            ahead: True if the questions would be asked ahead of the step. Then questions that are still open
                count at their highest price.
        """

    def price(self, questions: Sequence[Question]) -> Price:
        """Return the most that these questions would cost if they were asked now."""

    def refuse(self, step: int, purpose: str, price: Price) -> None:
        """Record that a step asks nothing, since the budget does not allow this price."""

    def refused(self, step: int, purpose: str) -> Price | None:
        """Return the price that the budget did not allow in the newest recorded step of a purpose, up to this
        step; None if the budget allowed everything, or no step is recorded."""

    def committed(self, purpose: str) -> Price:
        """Return the price of the answers that steps have taken, plus the highest price of every question
        that still waits."""

    def spent_before(self, step: int) -> Spent:
        """Return what was spent at the moment when the step before had taken its answers; an empty `Spent` if
        `step` itself has already asked or taken, which shows that the run went on."""

    def changes(self, row: int, *, is_evaluated: bool) -> int:
        """Return how often the version of any oracle had changed before the steps took the answers that a row
        of metrics counts.

        Args:
            row: number of the row.
            is_evaluated: True if the row has an evaluation, whose answers then count too.
        """

    def drop(self, step: int) -> None:
        """Drop the trajectories that only a replay of the steps before this one would read."""

    def close(self) -> None: ...


class Holdings(Protocol):
    """States what the ledger must hold if a run is to be continued from a checkpoint."""

    def before(self, step: int, *, evaluated: bool) -> Mapping[str, Any]:
        """Return facts about the answers that the ledger has before a step. A checkpoint stores these facts
        beside the states of the parts.

        Args:
            evaluated: True if the evaluation after `step` steps is over, so that its answers count.
        """


class Buffer(Protocol):
    """The replay buffer."""

    def fill(self, feedback: Feedback) -> Feedback:
        """Return a step's feedback, with the older items that the step learns from again."""

    def share_out(self, objective: Objective, batch: Batch, feedback: Feedback) -> Batch:
        """Return an objective's batch of this feedback. If older items made it larger, it has more
        mini-batches."""

    def metrics(self, feedback: Feedback) -> Mapping[str, float]: ...

    def reach(self, step: int) -> int:
        """Return the first step whose feedback is learned from in this step or in a later one."""


class Learner(Protocol):
    """The models, their optimisers, and the update.

    Attributes:
        micro_batch_tokens: largest number of tokens in one forward pass; a single unit may have more. None:
            no limit.
    """

    micro_batch_tokens: int | None

    def forward(self, model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        """Return the wanted outputs of a model for rows, without gradient: (K,) for the trained tokens, or
        (N,) from a reward model."""

    def update(self, objective: Objective, batch: Batch) -> dict[str, float]:
        """Learn from a batch. Return metrics."""

    def measure(self, objective: Objective, batch: Batch) -> dict[str, float]:
        """Return the losses and metrics of a batch without learning from it."""

    def tensors(self, model: str) -> dict[str, torch.Tensor]:
        """Return the weights of a model, by name."""

    def version(self, model: str) -> int:
        """Return how often a reference that follows the policy has been updated; 0 for any other model."""

    def trainable(self, model: str) -> list[str]:
        """Return the names of the weights of a model that learning changes."""

    def load_weights(self, model: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite, in place, the weights of a model that learning changes."""


class Weights(Protocol):
    """The transfer of weights to the boxes that hold a slot. After every load it compares the weights that a
    box holds with those that were sent.

    Attributes:
        sampler_version: version of the policy's weights in the slot `sampler`.
    """

    sampler_version: int

    def due(self, step: int) -> bool:
        """Return True if the sampler gets new weights after this step."""

    def sync(self, learner: Learner, version: int) -> None:
        """Load the learner's weights as `version` into every slot but `policy` and `reference`."""

    def push(self, slot: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load these weights into a slot."""

    def follow(self, learner: Learner) -> None:
        """Load the learner's reference into the slot `reference`, if the reference has moved."""

    def restore(self, learner: Learner) -> None:
        """Load into every slot but `policy` the weights that the slot held at the checkpoint."""


class Evaluation(Protocol):
    """Evaluates the policy on held-out prompts and pairs.

    Attributes:
        slot: the slot whose weights answer the prompts.
    """

    slot: str

    def due(self, step: int, queries: int) -> bool:
        """Return True if an evaluation is due after `step` updates and this many queries of training."""

    def measure(self) -> dict[str, float]:
        """Return the metrics of held-out pairs under the learner's weights; no oracle is asked."""

    def run(self, step: int, queries: int = 0, feedback: Feedback | None = None) -> dict[str, float]:
        """Evaluate the slot's weights on the held-out prompts. Return metrics.

        Args:
            step: number of updates so far.
            queries: number of queries that training has made so far.
            feedback: the last step's feedback, whose responses may be evaluated too.
        """


class Stop(Protocol):
    """The stop conditions.

    Attributes:
        last: the number of steps; None: no limit.
    """

    last: int | None
    budget: Budget
    max_hours: float | None

    def reason(self, step: int, spent: Spent) -> str | None:
        """Return the reason why the run ends before this step, or None."""

    def steps_done(self, step: int) -> str | None:
        """Return the reason why the run ends before this step if all of its steps are done; else None."""


class Alarms(Protocol):
    """The alarms that watch a run.

    Attributes:
        raised: number of alarms raised so far.
        back: the step of the checkpoint to which a roll back would lead; None if no alarm rolls back.
    """

    raised: int
    back: int | None

    @property
    def ended(self) -> str | None:
        """The reason why an alarm has ended the run, or None."""

    def begin(self, step: int) -> bool:
        """Set `back` to this step, with whose state the process begins, if an alarm can roll back and `back`
        is None. Return True if this call set it: the state must then be on disk."""

    def note_evaluation(self, values: Mapping[str, float]) -> None:
        """Keep the metrics of an evaluation for the check of the next step."""

    def check(self, step: int, values: Mapping[str, float], *, is_saved: bool) -> int | None:
        """Check a step's metrics against the alarms.

        Args:
            step: number of steps that are done, this one included.
            is_saved: True if a checkpoint was due before the step.
        Returns:
            The step of the checkpoint to which the run goes back, or None.
        """


class Checkpoints(Protocol):
    """The checkpoints of a run.

    Attributes:
        saved: the step of the checkpoint that this process saved or loaded last; 0 if there is none.
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
        """Return True if a checkpoint is due after `step` updates."""

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
        """Start to write a checkpoint. The caller may go on, and may change the tensors at once unless
        `is_last` is set.

        Args:
            tensors: tensors by name.
            state: the remaining content, as JSON values.
            metrics: metrics of the row that precedes the checkpoint, if this row is closed.
            keep: the step of an older checkpoint that must not be deleted.
            is_last: True if nothing is learned after the checkpoint.
        """

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""

    def load(self) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]] | None:
        """Return step, tensors and state of the newest checkpoint that can be used; None if the run has no
        checkpoints."""

    def load_back(self, step: int) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]]:
        """Return the checkpoint of a step or, if it cannot be used, the newest one before it that can."""


class Tracking(Protocol):
    """Writes the rows of metrics, and sends them to the trackers of the run."""

    def open(self, step: int, *, is_closed: bool = True) -> None:
        """Begin to write after row `step`, and drop the rows that an earlier process wrote beyond it. At step
        0 every row is dropped.

        Args:
            is_closed: True if row `step` stays; otherwise it is dropped too, and written next.
        """

    def row(self, step: int, values: Mapping[str, float], feedback: Feedback | None = None) -> None:
        """Write a row, and some samples of the feedback of its step."""

    def flush(self) -> None:
        """Bring the rows written so far to disk."""

    def close(self) -> None: ...


Plans = Callable[[int], Plan]
"""A function from the number of a step to its plan."""
