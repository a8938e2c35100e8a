"""Lines that tell a waiting user what is done before the first line of a run."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from oat.errors import printable

_LEAST = 20_000_000
"""With a model of fewer weights, no stage takes a user's time."""
_speaker: ContextVar[str] = ContextVar("_speaker", default="")


@contextmanager
def telling(speaker: str) -> Iterator[None]:
    """Tell, within this context, the stages of what is opened. Elsewhere nobody hears of them.

    Args:
        speaker: who speaks, such as "oat train"; "": nothing is told.
    """
    token = _speaker.set(speaker)
    try:
        yield
    finally:
        _speaker.reset(token)


def tell_stage(doing: str, weights: int) -> None:
    """Say what begins now, if the model is so large that it takes time.

    Args:
        doing: what is done, such as "reading the weights".
        weights: number of the model's weights.
    """
    if weights >= _LEAST:
        tell(doing)


def tell(doing: str) -> None:
    """Say on stderr what begins now. It need not be stdout that a terminal shows, and what is printed there
    may be data."""
    speaker = _speaker.get()
    if not speaker or sys.stderr is None:
        return
    with suppress(OSError, ValueError):  # a closed stream, or a pipe that nobody reads
        print(printable(f"{speaker}: {doing} ..."), file=sys.stderr, flush=True)
