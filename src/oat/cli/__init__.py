"""The entry of the command line: it finds the command, and turns errors and signals into a line of text and
an exit code."""

from oat.cli.entry import main

__all__ = ["main"]
