"""Where somebody looks, and how they get more than a screen of text."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, islice


def is_terminal() -> bool:
    """Whether somebody looks at the standard output who can see lines change."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb", "unknown")


def show_pages(pages: Iterable[str]) -> None:
    """Print texts with a blank line behind each, in a terminal through the pager: `$PAGER`, or less."""
    rest = iter(pages)
    pages = chain([*islice(rest, 1)], rest)  # what is wrong is said before a pager has the screen
    if (pager := _pager()) is None:
        for page in pages:
            print(page, end="\n\n")
        sys.stdout.flush()
        return
    with subprocess.Popen(pager, stdin=subprocess.PIPE, encoding="utf-8", errors="backslashreplace") as process:
        assert process.stdin is not None, "it has a pipe"
        with suppress(BrokenPipeError, KeyboardInterrupt):  # who has read enough leaves the pager, and Ctrl-C belongs to it
            for page in pages:
                process.stdin.write(f"{page}\n\n")
        with suppress(BrokenPipeError):
            process.stdin.close()
        while process.poll() is None:
            with suppress(KeyboardInterrupt):
                process.wait()


def _pager() -> list[str] | None:
    """The program that shows one screen after the other, with its arguments; None where nobody looks, or there is none."""
    if not is_terminal():
        return None
    words = shlex.split(os.environ.get("PAGER", "")) or ["less", "-FX"]
    return words if shutil.which(words[0]) else None
