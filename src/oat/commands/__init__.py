"""The work of each command, one module a command, and modules that several commands share."""
