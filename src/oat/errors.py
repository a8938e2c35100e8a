"""Errors and warnings of the package.

* Every message says what happened, where, and what to do.
* Each class is also a subclass of the nearest class of the standard library, so `except ValueError` works.
* Errors can be pickled, because their arguments are their complete state.
* `warn` attributes a warning to the user's line that called the package. A fixed `stacklevel` would not do
  this, because decorators and threads change the number of frames. The command line prints only the text.
* `printable` escapes dangerous characters when a text is shown. Files, data and the ledger keep the original
  text. `escape_streams` lets the standard streams escape what their encoding lacks.
"""

import codecs
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
"""Largest number of characters in a message. A longer message loses its middle, because its end says what to
do."""
_MAX_ERROR = 300
"""Largest number of characters that are quoted from an error in a user's or a library's code."""
_MOST_NAMES, _LONGEST_NAME = 200, 1000
"""Limits of `did_you_mean`: the largest number of names that it lists, and the largest length, in characters,
of a name for which it seeks a similar name."""
FEW_NAMES, _GOOD = 8, 0.75
"""Number of names that stand behind a similar one in any case, and the ratio of `difflib` from which on more
names are left out there."""
_PACKAGE = f"{Path(__file__).parent}{os.sep}"


class OatError(Exception):
    """The base class of the package's exceptions. The command line prints the message without a traceback
    and exits with `exit_code`."""

    exit_code = 2

    def __str__(self) -> str:
        return printable(_bounded(super().__str__()))


class ConfigError(OatError, ValueError):
    """A configuration or an argument cannot be used, or names a file that cannot be used. For example, a
    field is unknown, is not read, has the wrong type, or contradicts another field."""


class DataError(OatError, ValueError):
    """A record or a file of data cannot be used."""


class TemplateError(OatError, ValueError):
    """A conversation cannot be rendered correctly: for example, the chat template is missing, fails, or
    changes earlier messages."""


class ShapeError(OatError, ValueError):
    """The arguments of a function of `functional/` have wrong or contradictory shapes."""


class ModelError(OatError, ValueError):
    """A model or tokenizer cannot be loaded, or the package does not support its computation."""


class EngineError(OatError, ValueError):
    """The engine refuses a request or a setting, or cannot complete a request."""


class OracleError(OatError, RuntimeError):
    """An oracle failed, or broke its contract."""

    exit_code = 1


class NoReplyError(OracleError):
    """A service gave no usable reply to one question. Its replies to other questions may be usable."""


class RefusalError(OracleError):
    """A service refused a request.

    Attributes:
        status: HTTP status of the service's reply.
        said: beginning of the reply's text.
        names_logprobs: True if the reply names log-probabilities.
        is_of_one: True if the error is certainly about this request alone.
    """

    def __init__(
        self,
        message: str,
        status: int,
        said: str,
        names_logprobs: bool = False,
        is_of_one: bool = False,
    ):
        super().__init__(message, status, said, names_logprobs, is_of_one)
        self.status, self.said = status, said
        self.names_logprobs, self.is_of_one = names_logprobs, is_of_one

    def __str__(self) -> str:
        return printable(_bounded(str(self.args[0])))


class OutageError(OracleError):
    """An oracle's service has not answered for longer than the run may wait."""

    exit_code = 4


class ClosedError(RefusalError, OutageError):
    """A service refuses every request: for example, the credit is used up, or the key or the model is not
    known. A run ends as in an outage."""


class EpisodeError(OatError, RuntimeError):
    """An environment failed within an episode."""

    exit_code = 1


class RecordError(OatError, OSError):
    """The records of an evaluation cannot be written to disk."""

    exit_code = 1


class DirectoryError(OatError, OSError):
    """The directory of a run was moved, removed or replaced while the run worked in it."""

    exit_code = 1


class ExportError(OatError, OSError):
    """The model of a run cannot be exported, that is, written to a folder."""

    exit_code = 1


class LedgerError(OatError, RuntimeError):
    """The ledger cannot be opened, read or written, or its content contradicts the run."""

    exit_code = 1


class CheckpointError(OatError, RuntimeError):
    """No checkpoint of the run can be used, or a checkpoint could not be written."""

    exit_code = 1


class WeightsError(OatError, RuntimeError):
    """A box, such as an engine, does not hold the weights that the learner sent to it."""

    exit_code = 1


class ActorError(OatError, RuntimeError):
    """A process that works for a run has failed, and is not replaced."""

    exit_code = 1


class LostError(ActorError):
    """A process that works for a run has ended, or did not reply in time. The run replaces it if it may."""


class LearnerLostError(OatError, RuntimeError):
    """The process that learns has ended, or did not reply in time. The run can begin again from its newest
    checkpoint."""

    exit_code = 1


class NonFiniteError(OatError, ArithmeticError):
    """A number that sampling or learning depends on is not finite. The error is raised before the optimiser
    changes a weight."""

    exit_code = 1


class AlarmError(OatError, RuntimeError):
    """An alarm ended the run. The run's state is on disk."""

    exit_code = 3


class WireError(OatError, ValueError):
    """`oat.wire` cannot encode a value, or cannot decode bytes."""


class ContractError(OatError, AssertionError):
    """A user's code, such as an explorer, an algorithm or a callback, fails or breaks its protocol."""

    exit_code = 1


class Interrupted(KeyboardInterrupt):
    """A signal or a callback ends the run. The loop saves the run's state.

    Attributes:
        exit_code: 75 for SIGTERM ("try again"), 130 for Ctrl-C.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.name, self.exit_code = signal.Signals(number).name, 75 if number == signal.SIGTERM else 130

    def __str__(self) -> str:
        return f"{self.name} ended it"


ENDING = (ActorError, DirectoryError, LearnerLostError, LedgerError, WeightsError)
"""The errors that end a run also during an evaluation, since training would meet them too."""


class Again(KeyboardInterrupt):
    """A second Ctrl-C was pressed. The process ends without saving the run's state."""


class OatWarning(UserWarning):
    """A warning; the run goes on. The command line prints it as one line on stderr."""


_warned = 0


def warned() -> int:
    """Return how many times this process has called `warn`."""
    return _warned


def warn(text: str) -> None:
    """Issue an `OatWarning` and attribute it to the line outside this package that called the package."""
    global _warned
    _warned += 1
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
    """Return text that is safe in a terminal or a page. Characters that a terminal would obey, such as
    control codes, and characters that change the order of letters become JSON escapes such as `\\u001b`. Line
    breaks, tabs and visible characters stay."""
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else json.dumps(c)[1:-1] if ord(c) != 0x7F else "\\u007f"
        for c in text
    )


def escape_streams() -> None:
    """Let the standard streams of this process escape characters that their encoding does not have, as JSON
    does (`\\u00e9`), in place of an exception. Bytes on stdin that are no text become surrogates. A stream
    that is closed becomes an empty one. A process that shows text calls this where it starts."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=ESCAPES if mode == "w" else "surrogateescape")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


ESCAPES = "oat.escapes"
"""The name of the error handler of `codecs` that escapes as JSON does."""
codecs.register_error(ESCAPES, _escaped)


def is_signal(error: BaseException) -> bool:
    """Return True if an error comes from Ctrl-C or from a signal to the run. Return False for other errors,
    also for a KeyboardInterrupt that user code raised itself."""
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    return (
        isinstance(error, Interrupted | Again)
        or signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def described(error: BaseException) -> str:
    """Return the class of an error and the beginning of its text, in one line. If the text is empty or cannot
    be made, return only the class."""
    kind = shortened(type(error).__name__)
    try:
        text = " ".join(shortened(str(error), _MAX_ERROR).split())
    except BaseException as worse:
        if is_signal(worse):
            raise
        text = ""
    return f"{kind}: {text}" if text else kind


def shown(value: object, most: int = 80) -> str:
    """Return the beginning of a value's repr. If the repr fails, return a phrase that names the value's
    class."""
    if isinstance(value, str):
        return repr(shortened(value, most))
    try:
        return shortened(repr(value), most)
    except BaseException as worse:
        if is_signal(worse):
            raise
        return f"a {shortened(type(value).__name__)} whose repr fails"


def shortened(text: str, most: int = 80) -> str:
    """Return the first `most` characters of a text, followed by three dots if the text is longer. Only
    methods of `str` itself are called, even if the class of `text` overrides them."""
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


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: "1 batch", "2 batches", "2 epochs"."""
    plural = f"{noun}es" if noun.endswith(("tch", "nch")) else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return a hint that lists the valid names. If a valid name is similar to `name`, the hint begins with
    the valid name, and has the list only if it is short or the similarity is small.

    Returns:
        For example "did you mean `beta`? valid: beta, label_smoothing".
    """
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6) if len(name) <= _LONGEST_NAME else []
    # letters in another order are likelier than another letter: gpro is grpo, not gspo
    near = [other for other in names if sorted(other) == sorted(name)][:1] or near
    more = f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else ""
    listed = "valid: " + (", ".join(map(shortened, names[:_MOST_NAMES])) or "none") + more
    if not near:
        return listed
    is_good = sorted(near[0]) == sorted(name) or difflib.SequenceMatcher(None, near[0], name).ratio() >= _GOOD
    return f"did you mean `{near[0]}`?" + (f" {listed}" if not is_good or len(names) <= FEW_NAMES else "")
