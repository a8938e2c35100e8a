"""The base class for the checks of users' parts."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oat
from oat.errors import ContractError, OatError, described, is_signal

_OURS = Path(oat.__file__).parent


class Part:
    """A user's part that is checked. Every fault that is found raises a ContractError.

    Args:
        name: the part's name. Every message begins with it.
    """

    def __init__(self, name: str):
        self.name = name

    def require(self, holds: object, what: str) -> None:
        """Raise a ContractError with the description `what` if `holds` is false."""
        if not holds:
            raise ContractError(f"{self.name}: {what}")

    def call(self, method: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the part. If the function raises an exception, raise a ContractError that names
        the exception's place. An `OatError` and Ctrl-C pass through unchanged."""
        try:
            return function(*arguments)
        except OatError:
            raise
        except BaseException as error:
            if is_signal(error):
                raise
            raise ContractError(
                f"{self.name}: {method} raised {described(error)}{_place(error)}; repair that, the error is "
                "above"
            ) from error


def _place(error: BaseException) -> str:
    """Return the place of an error, such as " (reward.py:7)". The file is the first file of the traceback
    outside this package, and the line is the traceback's last line in this file. Return "" if all files are
    in this package."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(_OURS)
    ]
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    return f" ({frames[0].filename}:{lines[-1]})" if lines else ""
