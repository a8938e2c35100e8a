"""The command line: one module for each command, which declares its arguments and calls the code that does
the work."""

from oat.cli.entry import main

__all__ = ["main"]
