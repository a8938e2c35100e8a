"""A user's part under check."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oat
from oat.errors import ContractError, OatError, described, is_signal

_OURS = Path(oat.__file__).parent


class Part:
    """A part under check, and the form of what is wrong with it.

    Args:
        name: of the part, at the head of every message.
    """

    def __init__(self, name: str):
        self.name = name

    def require(self, holds: object, what: str) -> None:
        """Raise a ContractError unless a condition holds."""
        if not holds:
            raise ContractError(f"{self.name}: {what}")

    def call(self, method: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the part. An error that is not one of ours becomes a ContractError with its
        place."""
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
    """The line of the first file outside this package through which an error came, in brackets."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(_OURS)
    ]
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    return f" ({frames[0].filename}:{lines[-1]})" if lines else ""
