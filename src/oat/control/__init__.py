"""Conditions that end a run, or turn it back, and the lines that tell what a start is doing."""
