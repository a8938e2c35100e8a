"""The learner in a process of its own, behind the protocol of a learner.

Tensors travel some at a time, so no message is larger than a bucket, or than the largest tensor.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from oat.algorithms.base import Objective
from oat.errors import LearnerLostError, LostError
from oat.runtime.calls import call_of
from oat.runtime.transfer import in_shares
from oat.runtime.worker_group import WorkerProcess
from oat.types import Batch, Trajectory


class RemoteLearner:
    """The learner of another process (`protocols.Learner`). An objective is not sent: that process has its
    own.

    Every method raises LearnerLostError if the process has ended, or has not replied in time.
    """

    def __init__(self, member: WorkerProcess):
        self._member = member
        self.facts: dict[str, Any] = self._ask("facts")
        self.micro_batch_tokens: int | None = self.facts["micro_batch_tokens"]
        self._sizes: dict[str, list[tuple[str, int]]] = {}

    def forward(self, model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, Tensor]:
        """Return outputs of a model; see `protocols.Learner`."""
        found: dict[str, Tensor] = self._ask("forward", model, list(rows), wants)
        return found

    def update(self, objective: Objective, batch: Batch) -> dict[str, float]:
        """Learn from a batch; see `protocols.Learner`."""
        found: dict[str, float] = self._ask("update", objective.name, batch)
        return found

    def measure(self, objective: Objective, batch: Batch) -> dict[str, float]:
        """Return losses and metrics of a batch; see `protocols.Learner`."""
        found: dict[str, float] = self._ask("measure", objective.name, batch)
        return found

    def sizes(self, model: str) -> list[tuple[str, int]]:
        """Return the names of the weights of a model, and their bytes."""
        if model not in self._sizes:
            self._sizes[model] = self._ask("sizes", model)
        return self._sizes[model]

    def named_tensors(self, model: str, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of a model with their names; they are fetched a bucket at a time."""
        sizes = [(name, size) for name, size in self.sizes(model) if names is None or name in names]
        yield from self._fetched(sizes, "some", model)

    def trainable(self, model: str) -> list[str]:
        """Return the names of the weights of a model that learning changes."""
        found: list[str] = self._ask("trainable", model)
        return found

    def version(self, model: str) -> int:
        """Return how often a reference that follows the policy has been updated."""
        found: int = self._ask("version", model)
        return found

    @property
    def state(self) -> "RemoteState":
        """The learner's state. Its tensors are fetched when they are first read; so read them before the next
        update."""
        sizes: list[tuple[str, int]] = self._ask("state_sizes")
        return RemoteState(self._ask("plain_state"), lambda: dict(self._fetched(sizes, "some_state")))

    def load_weights(self, model: str, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite those weights of a model that learning changes."""
        self._send(tensors)
        self._ask("load_weights", model)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self._send(tensors)
        self._ask("load_state", {name: value for name, value in state.items() if name not in tensors})

    def _send(self, tensors: Mapping[str, Tensor]) -> None:
        for names in in_shares([(name, tensor.nbytes) for name, tensor in tensors.items()]):
            self._ask("stage", {name: tensors[name] for name in names})

    def _fetched(
        self, sizes: Iterable[tuple[str, int]], what: str, *place: str
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of the other process, by the names and bytes in `sizes`."""
        for names in in_shares(sizes):
            some: dict[str, Tensor] = self._ask(what, names, *place)
            for name in names:
                yield name, some.pop(name)

    def _ask(self, what: str, *arguments: Any) -> Any:
        try:
            return self._member.ask(what, call_of(what, *arguments))()
        except LostError as lost:
            raise LearnerLostError(str(lost)) from None


class RemoteState(Mapping[str, Any]):
    """The state of a learner in another process.

    Args:
        plain: the values that are no tensors.
        fetch: function that returns the tensors.
    """

    def __init__(self, plain: Mapping[str, Any], fetch: Callable[[], dict[str, Tensor]]):
        self._plain, self._fetch = plain, fetch

    @cached_property
    def _all(self) -> dict[str, Any]:
        return {**self._plain, **self._fetch()}

    def __getitem__(self, name: str) -> Any:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
