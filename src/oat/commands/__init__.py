"""What the command line does, one module a command, and what several of them share."""
