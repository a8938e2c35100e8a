"""The hashes of texts, which Python makes anew in each process. The order of a set of texts depends on them.

Users' tools, environments and reward functions make texts and numbers from sets, as `", ".join(words)` does.
Such a text does not show that another process would make another one. So the commands that call them start
again with fixed hashes, unless `PYTHONHASHSEED` is set. Programs that a tool starts have these hashes too.

Only hashes of texts, bytes and dates are fixed. Objects without a hash of their own have their address as
one, which differs from process to process. A set of such objects has no fixed order.
"""

import os
import sys
from collections.abc import Sequence

_SWITCH = "PYTHONHASHSEED"
_COMMANDS = ("train", "eval")


def fix_hashes(argv: Sequence[str] | None) -> None:
    """Start this program again with fixed hashes of texts, if it runs one of these commands. Do nothing if
    the environment variable `PYTHONHASHSEED` is set, to a number or to `random`.

    Args:
        argv: the words of a call from Python, for which nothing is done; None: the command line is read.
    """
    if argv is not None or os.environ.get(_SWITCH) or not sys.executable:
        return
    if next((word for word in sys.argv[1:] if not word.startswith("-")), None) in _COMMANDS:
        os.environ[_SWITCH] = "0"
        os.execv(sys.executable, sys.orig_argv)
