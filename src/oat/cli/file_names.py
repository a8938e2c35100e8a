"""File names in a locale without an encoding of its own, such as `LC_ALL=C`.

There Python reads and writes file names in ASCII. A name such as `runs/é` could be neither read from the
command line, nor given to a library that is written in another language. So `oat` starts again in Python's
UTF-8 mode. The standard streams keep their encoding.
"""

import codecs
import os
import sys
from collections.abc import Sequence

_SWITCH = "PYTHONUTF8"


def read_in_utf8(argv: Sequence[str] | None) -> None:
    """Start this program again in UTF-8 mode, if file names are in ASCII. Otherwise do nothing.

    Args:
        argv: the words of a call from Python, for which nothing is done; None: the command line is read.
    """
    if (
        argv is not None
        or codecs.lookup(sys.getfilesystemencoding()).name != "ascii"
        or os.environ.get(_SWITCH) == "1"
    ):
        return
    os.environ[_SWITCH] = "1"
    os.environ.setdefault("PYTHONIOENCODING", f"{sys.stdout.encoding}:backslashreplace")
    os.execv(sys.executable, sys.orig_argv)
