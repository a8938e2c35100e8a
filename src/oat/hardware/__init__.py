"""The machine: its limits of speed, and the use of its memory and threads."""
