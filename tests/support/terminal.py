"""A command in a simulated terminal, and the lines that the terminal shows."""

import os
import pty
import re
import termios
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fixtures import forked

CONTROL = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")


@dataclass(frozen=True)
class Seen:
    """The output of a command in a terminal.

    Attributes:
        code: the command's exit code.
        raw: everything that was written to the terminal.
        lines: the lines that the terminal shows at the end.
        cursor: the codes that hid or showed the cursor.
        is_whole: the terminal's settings are the same as before the command.
    """

    code: int
    raw: str
    lines: Sequence[str]
    cursor: Sequence[str]
    is_whole: bool


def in_a_terminal(action: Callable[[], int]) -> Seen:
    """Run `action` in a child whose output is a terminal of 100 columns."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, 100))
    before, parts = termios.tcgetattr(slave), list[bytes]()

    def read() -> None:
        with suppress(OSError):  # nobody has the other end open any more
            while data := os.read(master, 65536):
                parts.append(data)

    def child() -> int:
        os.environ["TERM"] = "xterm"
        return action()

    reader = threading.Thread(target=read)
    reader.start()
    code = forked(child, Path(os.ttyname(slave)))
    is_whole = termios.tcgetattr(slave) == before
    os.close(slave)
    reader.join()
    os.close(master)
    raw = b"".join(parts).decode("utf-8")
    return Seen(code, raw, screen(raw), re.findall(r"\x1b\[\?25([lh])", raw), is_whole)


def screen(raw: str) -> list[str]:
    """Return the lines that a terminal shows after `raw` was written. Only rich's codes are handled: colours,
    erasing a line, moving up."""
    lines = [""]
    row = 0
    column = 0
    place = 0
    while place < len(raw):
        if match := CONTROL.match(raw, place):
            place = match.end()
            if match[3] == "K":
                lines[row] = ""
            elif match[3] == "A":
                row -= int(match[2] or 1)
            else:
                assert match[3] in "mhl", match[0]
            continue
        character, place = raw[place], place + 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]
