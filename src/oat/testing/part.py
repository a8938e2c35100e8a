"""The base of the checks of users' parts."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oat
from oat.errors import ContractError, OatError, described, is_signal

_OURS = Path(oat.__file__).parent


class Part:
    """A user's part under check. Every finding becomes a ContractError.

    Args:
        name: the part's name, with which every message begins.
    """

    def __init__(self, name: str):
        self.name = name

    def require(self, holds: object, what: str) -> None:
        """Raise a ContractError unless a condition holds."""
        if not holds:
            raise ContractError(f"{self.name}: {what}")

    def call(self, method: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the part. An exception becomes a ContractError that names its place; our own
        errors and Ctrl-C pass through."""
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
    """Return the place of an error in brackets: the first file of its traceback that is outside this package,
    and the last line of the traceback in that file. Return "" if there is no such file."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(_OURS)
    ]
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    return f" ({frames[0].filename}:{lines[-1]})" if lines else ""
