"""The run directory of a run: begun, continued or forked, and locked for one process."""
