"""How many actors a run shall have, which may change while it works."""

from contextlib import suppress
from pathlib import Path

from oat.errors import ConfigError
from oat.files import write_atomically

FILE = "actors"
"""The file of a run directory in which the number stands. Each process of the run begins without it."""


class Wanted:
    """The number of actors.

    Args:
        run_dir: directory of the run.
        first: the number with which the process of the run begins.
        is_new: False: this process has opened the run before, and goes on with what it was asked for.
    """

    def __init__(self, run_dir: Path, first: int, *, is_new: bool = True):
        self._file, self._number = run_dir / FILE, first
        if is_new:
            self._file.unlink(missing_ok=True)

    def __call__(self) -> int:
        """Return the number that was asked for last."""
        with suppress(OSError, ValueError):
            self._number = max(1, int(self._file.read_text(encoding="ascii")))
        return self._number


def want(run_dir: Path, number: int) -> None:
    """Ask a run for another number of actors.

    Raises:
        ConfigError: the number is below 1.
    """
    if number < 1:
        raise ConfigError(f"a run needs at least one actor, and {number} are asked for; give another number")
    write_atomically(run_dir / FILE, str(number))
