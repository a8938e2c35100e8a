"""The standard streams, which users' code may close."""

import io
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

NAMES = ("stdin", "stdout", "stderr")
_SETTINGS = ("encoding", "errors", "line_buffering", "write_through")


@dataclass
class _Text:
    """A stream of text that is open.

    Attributes:
        number: its file descriptor.
        copy: another descriptor of its file.
        settings: the arguments of its constructor.
    """

    stream: io.TextIOWrapper
    number: int
    copy: int
    settings: dict[str, Any]


class StandardStreams:
    """The standard streams and their files when this object is made. Those that are closed later can be
    opened again. The streams stay the same objects, since others know them, such as logging.

    Attributes:
        were_open: the names of the streams that were open.

    Args:
        is_alone: True: no other call is in progress, so a file that was put in the place of another is seen.
    """

    def __init__(self, is_alone: bool):
        self._is_alone = is_alone
        self._files: dict[int, int] = {}
        for number in range(len(NAMES)):
            with suppress(OSError):
                self._files[number] = os.dup(number)
        self._texts: dict[str, _Text] = {}
        self.were_open = {name for name in NAMES if not is_closed(getattr(sys, name))}
        for name in NAMES:
            for stream in {getattr(sys, name), getattr(sys, f"__{name}__")}:
                with suppress(OSError, ValueError):
                    self._keep(name, stream)

    def _keep(self, name: str, stream: Any) -> None:
        if isinstance(stream, io.TextIOWrapper) and not is_closed(stream):
            settings = {each: getattr(stream, each) for each in _SETTINGS}
            number = stream.fileno()
            copy = self._files[number] if number in self._files else os.dup(number)
            self._texts[f"{name} {id(stream)}"] = _Text(stream, number, copy, settings)

    def mended(self) -> list[str]:
        """Open again what was closed, and return what that is, for a message."""
        found = []
        for number, copy in self._files.items():
            if not _has_same_file(number, copy, self._is_alone):
                os.dup2(copy, number)
                found.append(f"the file descriptor {number}")
        for name, text in self._texts.items():
            if is_closed(text.stream):
                number = text.number if text.number in self._files else os.dup(text.copy)
                mode = "rb" if name.startswith("stdin") else "wb"
                is_owned = number != text.number
                text.stream.__init__(open(number, mode, closefd=is_owned), **text.settings)  # type: ignore[misc]  # noqa: SIM115
                found.append(f"sys.{name.split()[0]}")
        self.drop()
        return found

    def drop(self) -> None:
        """Close the copies of the files."""
        for copy in {*self._files.values(), *(each.copy for each in self._texts.values())}:
            with suppress(OSError):
                os.close(copy)
        self._files, self._texts = {}, {}


def is_closed(stream: Any) -> bool:
    """Return True if a stream is closed, or was parted from its file."""
    try:
        return bool(getattr(stream, "closed", False))
    except ValueError:
        return True


def _has_same_file(number: int, copy: int, is_compared: bool) -> bool:
    try:
        found = os.fstat(number)
    except OSError:
        return False
    wanted = os.fstat(copy)
    return not is_compared or (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)
