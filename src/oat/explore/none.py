"""The explorer that asks about every group."""

from oat.errors import ConfigError
from oat.explore.base import Round, is_same
from oat.types import UNASKED, Feedback, Group, Key, Kind, Plan, Question


class NoExploration:
    """An explorer that asks one question about every group: to score all responses, or to compare the two.

    If the two responses of a comparison are equal (`is_same`), the question goes to the oracle "none" and
    costs nothing.

    Args:
        reads_text: as in `is_same`.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, kind: Kind, *, reads_text: bool = True):
        self.kind: Kind = kind
        self.reads_text = reads_text

    def widen(self, plan: Plan) -> Plan:
        """Return the plan unchanged."""
        return plan

    def choose(self, round: Round) -> list[Question]:
        """Return one question for each group, about all of its samples in their order.

        Raises:
            ConfigError: the kind of question is "compare", and a group does not have two samples.
        """
        return [self.ask(group, key) for group, key in zip(round.groups, round.keys, strict=True)]

    def metrics(self, feedback: Feedback) -> dict[str, float]:
        """Return no metrics, since the questions have no notes."""
        return {}

    def ask(self, group: Group, key: Key) -> Question:
        """Return the question about one group.

        Raises:
            ConfigError: as in `choose`.
        """
        size = len(group.trajectories)
        if self.kind == "compare" and size != 2:
            raise ConfigError(
                f"a comparison without an explorer needs 2 samples a prompt, not {size}; set 2 samples, "
                "or choose an explorer"
            )
        unaskable = self.kind == "compare" and is_same(*group.trajectories, reads_text=self.reads_text)
        return Question.about(group, key, self.kind, tuple(range(size)), oracle=UNASKED if unaskable else "")
