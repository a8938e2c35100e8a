"""The files of a run directory: checkpoints, provenance, and how they are read."""
