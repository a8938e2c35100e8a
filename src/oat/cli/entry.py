"""The entry of the command line. It finds the command. Errors that a user can repair become one line of text
and an exit code."""

import argparse
import importlib
import os
import sqlite3
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from oat.cli.restart import fix_hashes, read_in_utf8
from oat.control.stages import telling
from oat.errors import Interrupted, OatError, OatWarning, described, escape_streams, printable
from oat.files import seen_from
from oat.plugins.loading import naming, place_of
from oat.plugins.streams import is_closed

COMMANDS = {
    "train": "start a run, or continue the one in its directory",
    "check": (
        "say what a configuration would run, and refuse what `oat train` would refuse; it loads weights only "
        "for --show-tokens and --time"
    ),
    "eval": "evaluate a run's newest checkpoint, or the start model of a configuration",
    "export": "write the model that a run trained as a model directory that transformers loads",
    "generate": "write responses to the prompts of a file, as lines of JSON",
    "chat": "talk to a run's policy, or to a model; through a pipe, lines in and answers out",
    "samples": "show prompts, responses and the oracle's answers about them, newest first",
    "ledger": "say what a run asked, of whom, and what came back; or write its answers as a data set",
    "actors": "say or change the number of actors of a run on a cluster while it works",
    "plot": "plot a metric of runs; runs that differ only in their seed become one line with a band",
    "digest": "print hashes of a run; two runs with equal hashes are equal",
    "bench": "measure bandwidth and matrix products of this machine, and compute the limits of a model on it",
    "features": "say how much the features of an explorer tell about the oracle, before a run is paid for",
    "serve": "serve a reward model over HTTP, for the oracle `remote`",
    "quickstart": "train, align and compare a tiny model on this machine in a few minutes",
}
"""The summary of each command, by its name; its module is the one of this name in `oat.commands`."""

_ELSEWHERE = {"quickstart": "oat.quickstart"}
"""The modules of the other commands."""

_WITHOUT_NOTES = {"train": "nothing was begun; give the same command again"}
"""What an interrupted command that added no note has done. A run adds its note as soon as it is opened."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code (docs/exit-codes.md)."""
    escape_streams()
    read_in_utf8(argv)
    fix_hashes(argv)
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            if not is_closed(sys.stdout):  # a thread that users' code has left may close it
                sys.stdout.flush()
    except BrokenPipeError:  # the program that read our lines has ended, as `head` does
        return _without_output(141)
    except OSError as error:
        with suppress(OSError):
            print(f"oat: the output cannot be written: {printable(described(error))}", file=sys.stderr)
        return _without_output(1)


def _without_output(code: int) -> int:
    """Return an exit code. Let what the standard streams still hold be lost, where they cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _run(words: Sequence[str]) -> int:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    command = next((word for word in words if not word.startswith("-")), None)
    arguments, rest = parser(command, words).parse_known_args(words)
    if rest and not hasattr(arguments, "target"):
        print(
            (
                f"oat {arguments.command}: {_masked(repr(rest[0]), words)} is not an argument of it; see oat "
                f"{arguments.command} --help"
            ),
            file=sys.stderr,
        )
        return 2
    try:
        with seen_from(), _short_warnings(), naming({}), telling(f"oat {arguments.command}"):
            code: int = arguments.call(arguments, rest)
        return code
    except OatError as error:
        if error.__cause__ is not None and os.environ.get("OAT_TRACEBACK"):
            print(printable("".join(traceback.format_exception(error.__cause__))), end="", file=sys.stderr)
        print(f"oat {arguments.command}: {_masked(str(error), words)}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        raise
    except (sqlite3.DatabaseError, OSError) as error:
        what = printable(f"{type(error).__name__}: {error}")
        print(f"oat {arguments.command}: {what}; mend this and run the same command again", file=sys.stderr)
        return 1
    except Interrupted as end:
        what = _notes(end) or f"; {_WITHOUT_NOTES.get(arguments.command, 'the same command begins anew')}"
        print(f"oat {arguments.command}: {end.name} ended it{what}", file=sys.stderr)
        return end.exit_code
    except KeyboardInterrupt as end:
        print(f"oat {arguments.command}: stopped{_notes(end)}", file=sys.stderr)
        return 130
    except BaseException as error:  # for example from a user's algorithm or explorer
        place = place_of(error)
        if place is None or os.environ.get("OAT_TRACEBACK"):
            raise
        what = f"{place} raised {printable(described(error))}"
        print(
            (
                f"oat {arguments.command}: {what}; mend it and run the same command again (OAT_TRACEBACK=1 "
                "shows all of it)"
            ),
            file=sys.stderr,
        )
        return 1


def _notes(end: KeyboardInterrupt) -> str:
    """Return the notes of an interrupt, each after a semicolon: which step of a run is saved."""
    return "".join(f"; {printable(note)}" for note in getattr(end, "__notes__", []))


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Within this context, print each of oat's warnings as one line, without its place in the source."""
    before = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, OatWarning):
            return f"oat: warning: {' '.join(str(message).splitlines())}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


def _masked(text: str, words: Sequence[str]) -> str:
    """Return a refusal of a command line without the words that may be secrets."""
    from oat.config.flags import masked

    return masked(text, words)


class _Parser(argparse.ArgumentParser):
    """A parser whose refusals show no word that may be a secret.

    Attributes:
        words: the words of the command line.
    """

    words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        super().error(_masked(message, self.words))


def parser(command: str | None = None, words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        command: the command whose arguments the parser gets. Only this command's module is imported, since
            importing all of them takes time.
        words: the words of the command line, of which refusals show none that may be a secret.
    """
    found = _Parser(
        prog="oat",
        description="Align language models online: sample, ask, learn, repeat.",
        allow_abbrev=False,
    )
    found.words = words
    choices = found.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # what stands before the command may ask for the help of `oat`, which lists all
    needs_one = command in COMMANDS and list(words[:1]) == [command]
    for name, summary in COMMANDS.items():
        if needs_one and name != command:
            continue
        one = choices.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        one.words = words
        if name == command:
            module = importlib.import_module(_ELSEWHERE.get(name, f"oat.commands.{name}"))
            module.add_arguments(one)
            one.set_defaults(call=module.call)
    return found
