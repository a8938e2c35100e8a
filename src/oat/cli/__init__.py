"""The command line: one module a command, which declares its arguments and calls what does the work."""

from oat.cli.entry import main

__all__ = ["main"]
