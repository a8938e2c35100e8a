"""The work of each command, one module for each, and modules that several commands share."""
