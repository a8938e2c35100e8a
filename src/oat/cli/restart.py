"""A command may have to start again, since Python decides some things only when a process begins.

**File names** in a locale without an encoding of its own, such as `LC_ALL=C`. There Python reads and writes
file names in ASCII. A name such as `runs/é` could be neither read from the command line, nor given to a
library that is written in another language. So `oat` starts again in Python's UTF-8 mode. The standard
streams keep their encoding.

**Hashes of texts**, which Python makes anew in each process. The order of a set of texts depends on them.
Users' tools, environments and reward functions make texts and numbers from sets, as `", ".join(words)` does.
Such a text does not show that another process would make another one. So the commands that call them start
again with fixed hashes, unless `PYTHONHASHSEED` is set. Programs that a tool starts have these hashes too.

Only hashes of texts, bytes and dates are fixed. Objects without a hash of their own have their address as
one, which differs from process to process. A set of such objects has no fixed order.
"""

import codecs
import os
import sys
from collections.abc import Sequence

_UTF8, _HASHES = "PYTHONUTF8", "PYTHONHASHSEED"
_COMMANDS = ("train", "eval")
"""The commands that call users' code."""


def read_in_utf8(argv: Sequence[str] | None) -> None:
    """Start this program again in UTF-8 mode, if file names are in ASCII. Otherwise do nothing.

    Args:
        argv: the words of a call from Python, for which nothing is done; None: the command line is read.
    """
    if (
        argv is not None
        or codecs.lookup(sys.getfilesystemencoding()).name != "ascii"
        or os.environ.get(_UTF8) == "1"
    ):
        return
    os.environ[_UTF8] = "1"
    os.environ.setdefault("PYTHONIOENCODING", f"{sys.stdout.encoding}:backslashreplace")
    os.execv(sys.executable, sys.orig_argv)


def fix_hashes(argv: Sequence[str] | None) -> None:
    """Start this program again with fixed hashes of texts, if it runs one of these commands. Do nothing if
    the environment variable `PYTHONHASHSEED` is set, to a number or to `random`.

    Args:
        argv: the words of a call from Python, for which nothing is done; None: the command line is read.
    """
    if argv is not None or os.environ.get(_HASHES) or not sys.executable:
        return
    if next((word for word in sys.argv[1:] if not word.startswith("-")), None) in _COMMANDS:
        os.environ[_HASHES] = "0"
        os.execv(sys.executable, sys.orig_argv)
