"""Errors and warnings: what a user can do wrong, and what can go wrong around a run.

Every message says what happened, where, and what to do. Each class is also the nearest class of the standard
library, so that `except ValueError` works. Each survives pickling, since its arguments are its state.

`warn` places a warning at the line outside the package that led to it, however deep it arose; a fixed
`stacklevel` would count frames that decorators and threads change. The command line prints the sentence
alone. `printable` makes text harmless where it is shown, as JSON writes it, so files, data and the ledger
keep what was said.
"""

import difflib
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path

MAX_MESSAGE = 10_000
"""Most characters of a message. A longer one loses its middle, since its end says what to do."""
_MAX_ERROR = 300
"""Most characters that are quoted of an error in a user's or a library's code."""
_MOST_NAMES, _LONGEST_NAME = 200, 1000
"""Most names that are listed, and the longest name for which a near one is looked for."""
_PACKAGE = f"{Path(__file__).parent}{os.sep}"


class OatError(Exception):
    """The base of all our exceptions. The command line prints its message without a traceback and exits with
    `exit_code`."""

    exit_code = 2

    def __str__(self) -> str:
        return printable(_bounded(super().__str__()))


class ConfigError(OatError, ValueError):
    """A field of the configuration is unknown, unread, of the wrong type, or contradicts another."""


class DataError(OatError, ValueError):
    """A record of a data file cannot be used."""


class TemplateError(OatError, ValueError):
    """A chat template is missing, or changes earlier messages of a conversation."""


class ShapeError(OatError, ValueError):
    """Tensors handed to a function of `functional/` disagree in shape."""


class ModelError(OatError, ValueError):
    """A model or tokenizer cannot be loaded, or computes in a way that this code does not support."""


class EngineError(OatError, ValueError):
    """The engine refuses a request or a setting."""


class OracleError(OatError, RuntimeError):
    """An oracle failed, or broke its contract."""

    exit_code = 1


class NoReplyError(OracleError):
    """A service gave no usable reply to a question; the replies to others may be usable."""


class RefusalError(OracleError):
    """A service refused a request.

    Attributes:
        status: HTTP status of its reply.
        said: the beginning of the reply.
    """

    def __init__(self, message: str, status: int, said: str):
        super().__init__(message, status, said)
        self.status, self.said = status, said

    def __str__(self) -> str:
        return printable(_bounded(str(self.args[0])))


class OutageError(OracleError):
    """No oracle's service has answered for longer than the run may wait; the run's state is on disk."""

    exit_code = 4


class EpisodeError(OatError, RuntimeError):
    """An environment failed within an episode."""

    exit_code = 1


class RecordError(OatError, OSError):
    """The records of an evaluation cannot be written."""

    exit_code = 1


class DirectoryError(OatError, OSError):
    """The directory of a run was moved, removed or replaced under it."""

    exit_code = 1


class ExportError(OatError, OSError):
    """The model of a run cannot be written."""

    exit_code = 1


class LedgerError(OatError, RuntimeError):
    """The ledger cannot be opened or written, or contradicts the run."""

    exit_code = 1


class CheckpointError(OatError, RuntimeError):
    """No checkpoint of the run can be used, or one could not be written."""

    exit_code = 1


class WeightsError(OatError, RuntimeError):
    """The engine does not hold the weights that the learner sent."""

    exit_code = 1


class NonFiniteError(OatError, ArithmeticError):
    """A number that sampling or learning depends on is not finite; raised before the optimiser moves."""

    exit_code = 1


class AlarmError(OatError, RuntimeError):
    """An alarm ended the run; its state is on disk."""

    exit_code = 3


class WireError(OatError, ValueError):
    """Bytes that are not an encoded value of ours."""


class ContractError(OatError, AssertionError):
    """An oracle, explorer or algorithm does not keep its protocol."""


class Interrupted(KeyboardInterrupt):
    """A signal ends the run; its state is on disk.

    Attributes:
        exit_code: 75 for SIGTERM ("try again"), 130 for Ctrl-C.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.name, self.exit_code = signal.Signals(number).name, 75 if number == signal.SIGTERM else 130


class Again(KeyboardInterrupt):
    """A second Ctrl-C: the process ends where it stands."""


class OatWarning(UserWarning):
    """A warning of a run that goes on; the command line prints it as one line on stderr."""


def warn(text: str) -> None:
    """Warn through the `warnings` module, at the outermost call from outside this package into it."""
    ours, frame = sys._getframe(1), sys._getframe(1).f_back
    while frame is not None:
        ours = frame if frame.f_code.co_filename.startswith(_PACKAGE) else ours
        frame = frame.f_back
    theirs = ours.f_back or ours
    known = theirs.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        printable(_bounded(text)),
        OatWarning,
        theirs.f_code.co_filename,
        theirs.f_lineno,
        theirs.f_globals.get("__name__"),
        known,
    )


def printable(text: str) -> str:
    """Text for a terminal or a page. Characters that a terminal would obey, or that change the order of
    letters (control codes, escapes, marks of direction), are written as JSON escapes, `\\u001b`; line breaks,
    tabs and everything visible stay."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else json.dumps(c)[1:-1] if ord(c) != 0x7F else "\\u007f"
        for c in text
    )


def is_signal(error: BaseException) -> bool:
    """True if an error is a person's Ctrl-C or a signal to the run, and no KeyboardInterrupt that users' code
    raised itself."""
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    return (
        isinstance(error, Interrupted | Again)
        or signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def described(error: BaseException) -> str:
    """The class and the beginning of the text of an error in a user's or a library's code, in one line; the
    class alone if its text cannot be made."""
    kind = shortened(type(error).__name__)
    try:
        text = " ".join(shortened(str(error), _MAX_ERROR).split())
    except BaseException as worse:
        if is_signal(worse):
            raise
        text = ""
    return f"{kind}: {text}" if text else kind


def shown(value: object, most: int = 80) -> str:
    """The beginning of a value's repr; its class if the repr fails."""
    if isinstance(value, str):
        return repr(shortened(value, most))
    try:
        return shortened(repr(value), most)
    except BaseException as worse:
        if is_signal(worse):
            raise
        return f"a {shortened(type(value).__name__)} whose repr fails"


def shortened(text: str, most: int = 80) -> str:
    """The first `most` characters of a text, with three dots if there are more. A subclass's own methods are
    not called."""
    return str.__getitem__(text, slice(0, most)) + ("..." if str.__len__(text) > most else "")


def _bounded(text: str) -> str:
    left_out = len(text) - MAX_MESSAGE
    return (
        text
        if left_out <= 0
        else (
            f"{text[: MAX_MESSAGE * 3 // 4]} [... {left_out:,} characters are left out ...] "
            f"{text[-MAX_MESSAGE // 4 :]}"
        )
    )


def many(count: int, noun: str) -> str:
    """Return a count with its noun: "1 batch", "2 batches"."""
    return (
        f"{count} {noun}"
        if count == 1
        else f"{count} {noun}es"
        if noun.endswith("ch")
        else f"{count} {noun}s"
    )


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """A sentence that names the nearest valid name, or lists the valid ones.

    Returns:
        For example "did you mean `beta`? valid: beta, label_smoothing".
    """
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6) if len(name) <= _LONGEST_NAME else []
    more = f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else ""
    listed = "valid: " + (", ".join(map(shortened, names[:_MOST_NAMES])) or "none") + more
    return f"did you mean `{near[0]}`? {listed}" if near else listed
