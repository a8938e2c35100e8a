"""A wrapper that checks a user's explorer."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from oat.errors import ContractError
from oat.explore.base import Explorer, Round
from oat.explore.contract import choose_of, needs_faults, plan_faults, question_faults
from oat.explore.metrics import users_metrics
from oat.plugins.calls import raising, restoring
from oat.types import Feedback, Group, Kind, Plan, Question


class GuardedExplorer:
    """A wrapper of a user's explorer. It checks each result against the protocol. After each call it restores
    the state of the process (`plugins.calls.restoring`). Exceptions of `widen` and `choose` pass through.

    Without the checks, the ledger would record a wrong question, for example one with a negative index, an
    invented text or a changed token. The run would then learn from it. `oat.testing.check_explorer` makes the
    same checks.

    Args:
        kind: the kind of questions that the algorithm learns from.
        name: the explorer's name in the configuration, for messages.

    Attributes:
        config: the explorer's settings; None if it has none.

    Raises:
        ContractError: `needs` is not a set of names from `contract.SCORED`.
    """

    def __init__(self, explorer: Explorer, kind: Kind, name: str):
        self._explorer = explorer
        self._kind = kind
        self._name = name
        self._refuse(needs_faults(getattr(explorer, "needs", None)))
        self.needs = frozenset(explorer.needs)
        self.config = getattr(explorer, "config", None)

    def widen(self, plan: Plan) -> Plan:
        """Return the plan that the explorer makes of the algorithm's plan.

        Raises:
            ContractError: the result is not a plan of whole numbers above 0, or the explorer changed the
                process in a way that cannot be undone.
        """
        with restoring(self._name, self._failed):
            widened = self._explorer.widen(plan)
        self._refuse(plan_faults(widened), "widen ")
        return widened

    def choose(self, round: Round) -> list[Question]:
        """Return the questions that the explorer chooses.

        Raises:
            ContractError: the result is not a sequence of questions about these groups, or the explorer
                changed the groups' tokens, or changed the process in a way that cannot be undone.
        """
        before = _checksum(round.groups)
        given = replace(round, groups=list(round.groups), keys=list(round.keys))
        with restoring(self._name, self._failed):
            chosen = choose_of(self._explorer)(given)
            questions = list(chosen) if isinstance(chosen, Sequence | Iterator) else chosen
        self._refuse(
            question_faults(
                questions, dict(zip(round.keys, round.groups, strict=True)), self._kind, self.needs
            ),
            "choose ",
        )
        if _checksum(round.groups) != before:
            raise self._failed("choose changed the tokens that it was given")
        return questions

    def metrics(self, feedback: Feedback) -> dict[str, float]:
        """Return the means of the notes of the explorer's questions."""
        return users_metrics(feedback)

    def _refuse(self, faults: Iterator[str], method: str = "") -> None:
        with raising(lambda what: self._failed(f"{method}returned what cannot be looked at: it {what}")):
            for fault in faults:
                raise self._failed(method + fault)

    def _failed(self, what: str) -> ContractError:
        return ContractError(f"explorer {self._name}: {what}; mend it, and run the same command again")


def _checksum(groups: Sequence[Group]) -> int:
    """Return a checksum of the segments' tokens, masks, versions and log-probabilities."""
    found = 0
    for segment in (
        segment for group in groups for trajectory in group.trajectories for segment in trajectory.segments
    ):
        for array in (segment.ids, segment.mask, segment.versions, segment.raw_logps, segment.sampled_logps):
            found = found if array is None else zlib.crc32(np.ascontiguousarray(array).data, found)
    return found
