"""The terminal: detects it, and shows tables and long texts."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import chain, islice

from oat.errors import ESCAPES, printable


def is_terminal() -> bool:
    """Return True if the standard output is a terminal that can redraw lines."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb", "unknown")


def numbers_table(title: str, numbers: Mapping[str, float]) -> str:
    """Return a table of numbers by name, below a title. If a metric has an interval, its ends (`..._low` and
    `..._high`) are shown in the metric's line."""
    ends = {
        name: (numbers[f"{name}_low"], numbers[f"{name}_high"])
        for name in numbers
        if f"{name}_low" in numbers and f"{name}_high" in numbers
    }
    inner = {f"{name}{end}" for name in ends for end in ("_low", "_high")}
    rows = [
        (name, f"{value:.4g}", "{:.4g} to {:.4g}".format(*ends[name]) if name in ends else "")
        for name, value in numbers.items()
    ]
    rows = [("", "value", "95 % interval" if ends else ""), *(row for row in rows if row[0] not in inner)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [
        f"{name:<{widths[0]}}  {value:>{widths[1]}}  {interval}".rstrip() for name, value, interval in rows
    ]
    return printable("\n".join([title, *lines]))


def show_pages(pages: Iterable[str]) -> None:
    """Print texts with a blank line after each. In a terminal they go through the pager: `$PAGER`, or
    less."""
    rest = iter(pages)
    pages = chain([*islice(rest, 1)], rest)  # an error of the first page is raised before a pager starts
    if (pager := _pager()) is None:
        for page in pages:
            print(page, end="\n\n")
        sys.stdout.flush()
        return
    encoding = sys.stdout.encoding
    with subprocess.Popen(pager, stdin=subprocess.PIPE, encoding=encoding, errors=ESCAPES) as process:
        assert process.stdin is not None, "it has a pipe"
        # the reader may quit the pager early, and Ctrl-C is for the pager
        with suppress(BrokenPipeError, KeyboardInterrupt):
            for page in pages:
                process.stdin.write(f"{page}\n\n")
        with suppress(BrokenPipeError):
            process.stdin.close()
        while process.poll() is None:
            with suppress(KeyboardInterrupt):
                process.wait()


def _pager() -> list[str] | None:
    """Return the pager's command and arguments. Return None if the output is not a terminal, or if the pager
    is not installed."""
    if not is_terminal():
        return None
    words: list[str] = []
    with suppress(ValueError):  # a quote that is not closed
        words = shlex.split(os.environ.get("PAGER", ""))
    words = words or ["less", "-FX"]
    return words if shutil.which(words[0]) else None
