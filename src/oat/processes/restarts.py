"""How often the processes of a run may be replaced."""

from threading import RLock

from oat.errors import ActorError, OatError, warn


class Restarts:
    """Counts the processes that were replaced in a run.

    Args:
        most: how many may be replaced.
    """

    def __init__(self, most: int):
        self.most = most
        self.count = 0
        self._lock = RLock()

    def use(self, lost: OatError, then: str = "it is replaced") -> None:
        """Count a process that will be replaced.

        Args:
            then: what the run does, for the warning.

        Raises:
            ActorError: no further process may be replaced.
        """
        with self._lock:
            if self.count == self.most:
                raise ActorError(
                    f"{lost}; compute.max_restarts ({self.most}) allows no further replacement; the "
                    "folder `logs` of the run may say why it ended. The run continues with the same command"
                ) from None
            self.count += 1
            count = self.count
        warn(f"{lost}; {then} ({count} of compute.max_restarts {self.most})")
