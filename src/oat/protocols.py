"""The protocols of the boxes that the loop drives. Engines, explorers, oracles, objectives and environments
have their protocols in their own packages."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from oat.algorithms.base import Objective
from oat.types import (
    Batch,
    Branching,
    Feedback,
    Group,
    IsUsable,
    Item,
    Plan,
    Price,
    Prompt,
    Question,
    Sampling,
    Spent,
    Trajectory,
    Work,
)
from oat.types.questions import Budget


class Stateful(Protocol):
    """A part with a state: a flat dict of tensors and JSON values. A checkpoint stores the state, and a
    continued run loads it."""

    @property
    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class PromptSource(Stateful, Protocol):
    """The source of a run's prompts, in a fixed order."""

    def take(self, n: int) -> list[Prompt]:
        """Return the next n prompts of the run. If fewer than n are left, return these."""

    @property
    def is_used_up(self) -> bool:
        """True if no prompt is left."""


class Actor(Protocol):
    """The maker of trajectories. The response in a trajectory is sampled or recorded."""

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
            address: words and numbers from which the random numbers of the call are derived. In training
                these are the purpose, the step and the round.
            sampling: the settings of sampling; None: those of training.
        """

    def branch(
        self, groups: Sequence[Group], branching: Branching, address: Sequence[str | int]
    ) -> list[Group]:
        """Return groups with branches after their responses. An actor of recorded responses has no
        branches.

        Args:
            address: that with which the groups were sampled.
        """

    def score(self, groups: Sequence[Group], needs: Sequence[str]) -> dict[str, list[np.ndarray]]:
        """Return scores of the samples, by name. For each name in `needs` there is one array per group."""

    def work(self) -> Work:
        """Return the work that sampling has taken since the first call of this method."""


class Collector(Protocol):
    """The box that fills the ledger with the questions of training.

    Attributes:
        is_usable: with dynamic sampling, the function that decides which questions a step learns from; None
            without it.
    """

    is_usable: IsUsable | None

    def fill(self, step: int, plan: Plan) -> dict[str, float]:
        """Ask the questions that the ledger lacks for this step and earlier ones, or fewer if the prompts or
        the budget are used up. Return metrics of sampling."""

    def metrics(self, feedback: Feedback) -> Mapping[str, float]:
        """Return the explorer's metrics of the questions that a step took."""

    @property
    def ended(self) -> str | None:
        """The reason why no further step can be filled; None if there is none."""

    def states_at(self, step: int) -> dict[str, dict[str, Any]]:
        """Return where the prompts and the collector stood before `step`, by their names among the parts of a
        run. Steps after it may have been filled already. If the step itself has not begun, no later one has.
        What is known of earlier steps is forgotten, since checkpoints are written in the order of steps."""


class Ledger(Protocol):
    """The record of every question, answer and price of a run."""

    @property
    def reasked(self) -> int:
        """How many questions the run has submitted once more: after a restart, a broken answer, or a
        submission that failed."""

    @property
    def reported(self) -> Mapping[str, float]:
        """The metrics that the oracles report about themselves."""

    def asked(self, step: int, round: int, purpose: str = "train") -> int:
        """Return the number of questions in the recorded rounds that come before this round of this step."""

    def recalls(self, step: int, round: int, purpose: str = "train") -> bool:
        """Return True if this round is recorded."""

    def has_taken(self, step: int, purpose: str = "train") -> bool:
        """Return True if the ledger has recorded the take of this step."""

    def ask(
        self,
        step: int,
        round: int,
        groups: Sequence[Group],
        questions: Sequence[Question],
        purpose: str = "train",
    ) -> None:
        """Record a round, then submit its questions."""

    def take_feedback(
        self, step: int, count: int, *, purpose: str = "train", is_usable: IsUsable | None = None
    ) -> Feedback:
        """Record the feedback of a step, and then return it.

        Args:
            count: number of questions that the step learns from.
            is_usable: with dynamic sampling, the step learns from the first `count` usable questions that it
                has asked, and throws the others away. None: no question is thrown away.
        """

    def answered(self, step: int, round: int) -> list[Item]:
        """Wait until all questions that a step has asked are answered or have failed. Return those of its
        rounds up to this one, in the order in which they were asked. Nothing is recorded as taken."""

    def num_prompts(self, step: int, round: int) -> int:
        """Return the number of prompts in a recorded round of training."""

    def give_up(self, step: int, purpose: str) -> None:
        """Close a step or an evaluation that failed. Record that it took no answers. The ledger waits no
        longer for answers of this purpose."""

    def is_spent(self, step: int, *, ahead: bool = False) -> bool:
        """Return True if the budget of training was used up when step `step - 1` had taken its answers.

        Args:
            ahead: True if the new questions would be asked ahead of the step. If training asks in waves,
                questions without an answer count only in this case, each at its highest price.
        """

    def price(self, questions: Sequence[Question]) -> Price:
        """Return the most that these questions would cost if they were asked now."""

    def refuse(self, step: int, purpose: str, price: Price) -> None:
        """Record that a step asks nothing because the budget does not allow this price."""

    def refused(self, step: int, purpose: str) -> Price | None:
        """Return the lowest price that the budget did not allow in a purpose's newest take. Takes of steps
        after `step` are ignored. Return None if there is no take, or if the budget allowed everything in it.
        What `refuse` recorded counts as a take."""

    def committed(self, purpose: str) -> Price:
        """Return the price of all answers that steps have taken, plus the highest price of every question
        that no step has taken."""

    def spent_before(self, step: int) -> Spent:
        """Return the spending at the time when step `step - 1` had taken its answers. Return an empty `Spent`
        if step `step - 1` has no take, or if step `step` has already asked or taken questions."""

    def changes(self, row: int, *, is_evaluated: bool) -> int:
        """Return the number of changes of oracle versions that affect a row of metrics. A change counts if
        the row contains answers that were taken after the change.

        Args:
            row: number of the row.
            is_evaluated: True if the row has an evaluation. Then the evaluation's answers count too.
        """

    def pairs_before(self, step: int) -> int:
        """Return the number of compared pairs for which the steps of training before `step` took paid
        answers."""

    def drop(self, step: int) -> None:
        """Delete trajectories that the run does not need if it continues from `step` or a later step."""

    def close(self) -> None: ...


class LedgerRequirements(Protocol):
    """A part that states what the ledger must contain before a run can continue from a checkpoint."""

    def before(self, step: int, *, evaluated: bool) -> Mapping[str, Any]:
        """Return facts about the answers that the ledger contains before a step. A checkpoint stores these
        facts beside the states of the parts.

        Args:
            evaluated: True if the evaluation after `step` steps is over. Then its answers count too.
        """


class Buffer(Protocol):
    """The replay buffer."""

    def fill(self, feedback: Feedback) -> Feedback:
        """Return a step's feedback together with the older feedback that the step learns from again."""

    def split(self, objective: Objective, batch: Batch, feedback: Feedback) -> Batch:
        """Return `batch`, which the objective prepared of `feedback`. If `feedback` has questions of earlier
        steps and the objective learns from them, the returned batch has more mini-batches."""

    def metrics(self, feedback: Feedback) -> Mapping[str, float]: ...

    def oldest_needed(self, step: int) -> int:
        """Return the oldest step whose feedback this step or a later step learns from."""


class Learner(Protocol):
    """The models, their optimisers, and the update.

    Attributes:
        micro_batch_tokens: largest number of tokens in one forward pass; None: no limit. A unit
            with more tokens has a forward pass of its own.
    """

    micro_batch_tokens: int | None

    def forward(self, model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        """Return the wanted outputs of a model for rows, without gradient: (K,) for the trained tokens, or
        (N,) from a reward model."""

    def update(self, objective: Objective, batch: Batch) -> dict[str, float]:
        """Learn from a batch. Return the metrics of the batch and of its optimiser steps."""

    def measure(self, objective: Objective, batch: Batch) -> dict[str, float]:
        """Return the losses and metrics of a batch without learning from it."""

    def sizes(self, model: str) -> list[tuple[str, int]]:
        """Return the names of the weights of a model, in the order of `named_tensors`, and their bytes."""

    def named_tensors(
        self, model: str, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of a model with their names; with `names`, only these. Who keeps none has one
        bucket of them in memory at a time, beside those that the learner has."""

    def version(self, model: str) -> int:
        """Return how often a reference that follows the policy has been updated; 0 for any other model."""

    def trainable(self, model: str) -> list[str]:
        """Return the names of those weights of a model that learning changes."""

    def load_weights(self, model: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite a model's trained weights in place. Its frozen weights stay."""


class Weights(Protocol):
    """The transfer of weights to the boxes that hold a slot. After every load, a box proves that it computes
    with the weights that were sent.

    Attributes:
        sampler_version: version of the policy's weights in the slot `sampler`.
    """

    sampler_version: int

    def due(self, step: int) -> bool:
        """Return True if the sampler gets new weights after this step."""

    def take(self, learner: Learner, version: int) -> None:
        """Take the learner's weights, as `version`, for every slot except `policy` and `reference`. The state
        then says that these slots get them."""

    def load(self, learner: Learner) -> None:
        """Load the weights that were taken."""

    def push(self, slot: str, version: int, learner: Learner) -> None:
        """Load the learner's weights of the slot's model, as `version`, into the slot."""

    def follow(self, learner: Learner) -> None:
        """If the learner's reference has changed since the last load, load it into the slot `reference`."""

    def restore(self, learner: Learner) -> None:
        """Load into every slot except `policy` the weights that it had at the checkpoint. In a new run, load
        the learner's first weights."""


class Evaluation(Protocol):
    """The evaluation of the policy on held-out prompts and pairs.

    Attributes:
        slot: the slot whose weights answer the prompts.
    """

    slot: str

    def due(self, step: int, queries: int) -> bool:
        """Return True if an evaluation is due after `step` updates and this many queries of training."""

    def measure(self) -> dict[str, float]:
        """Return the metrics of held-out pairs under the learner's weights. This asks no oracle."""

    def run(self, step: int, queries: int = 0, feedback: Feedback | None = None) -> dict[str, float]:
        """Evaluate the weights in `slot` on the held-out prompts. Return metrics.

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
        """Return the reason why the run ends before this step; None if it goes on."""

    def note(self, values: Mapping[str, float]) -> str | None:
        """Return the reason why the run ends after a step with these metrics; None if it goes on."""

    def steps_done(self, step: int) -> str | None:
        """Return the reason why no steps are left after `step` steps; None if steps are left."""


class Alarms(Protocol):
    """The alarms that watch a run.

    Attributes:
        raised: number of alarms raised so far.
        back: the step of the checkpoint that a roll back would load; None if there is no such checkpoint.
    """

    raised: int
    back: int | None

    @property
    def ended(self) -> str | None:
        """The reason why an alarm has ended the run, or None."""

    def begin(self, step: int) -> bool:
        """Set `back` to `step`, the first step of this process, and return True. The caller must then make
        sure that a checkpoint of the state before this step is on disk. If no alarm can roll back, or `back`
        is set already, do nothing and return False."""

    def note_evaluation(self, values: Mapping[str, float]) -> None:
        """Keep the metrics of an evaluation until the next step is checked."""

    def check(self, step: int, values: Mapping[str, float], *, is_saved: bool) -> int | None:
        """Check a step's metrics against the alarms.

        Args:
            step: number of steps that are done, this one included.
            is_saved: True if a checkpoint was due before the step.

        Returns:
            The step of the checkpoint that the run rolls back to; None if it goes on.
        """


class Checkpoints(Protocol):
    """The checkpoints of a run.

    Attributes:
        saved: the step of the checkpoint that this process last saved, or loaded with `load`; 0 if there is
            none.
    """

    saved: int

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints on disk, ascending."""

    @property
    def next_loaded(self) -> int | None:
        """The step of the checkpoint that `load` tries first; None if there are no checkpoints."""

    @property
    def oldest(self) -> int | None:
        """The step of the oldest checkpoint on disk; None if there are no checkpoints."""

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
        """Start to write a checkpoint. The caller may change the tensors at once; if `is_last` is True, only
        after `wait`.

        Args:
            tensors: tensors by name.
            state: the remaining content, as JSON values.
            metrics: metrics of the row before the checkpoint; None if this row is not complete yet.
            keep: the step of an older checkpoint that must not be deleted.
            is_last: True if nothing is learned after the checkpoint.
        """

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk."""

    def load(self) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]] | None:
        """Return step, tensors and state of the newest checkpoint that can be used; None if the run has no
        checkpoints."""

    def load_back(self, step: int) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]]:
        """Return the checkpoint of a step. If it cannot be used, return the newest earlier checkpoint that
        can be used."""


class Tracking(Protocol):
    """The writer of metrics: it writes each row, and sends it to the trackers of the run."""

    def open(self, step: int, *, is_closed: bool = True) -> None:
        """Delete the rows that the run will write again, and prepare to write the first of them.

        Args:
            step: number of steps that are done. If it is 0, every row is deleted.
            is_closed: True: rows 0 to `step` stay. False: row `step` is deleted too. Without effect if `step`
                is 0.
        """

    def row(self, step: int, values: Mapping[str, float], feedback: Feedback | None = None) -> None:
        """Write a row of metrics, and some samples of the feedback that the step learned from."""

    def advantages(self, step: int, values: Sequence[Sequence[float | None]]) -> None:
        """Write the advantages of the responses of a step's questions. The step's row comes later, maybe in
        another process."""

    def flush(self) -> None:
        """Make sure that the rows written so far are on disk."""

    def close(self) -> None: ...


Plans = Callable[[int], Plan]
"""A function from the number of a step to its plan."""
