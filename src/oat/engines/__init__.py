"""Engines sample responses and compute log-probabilities, for the slots of a run."""
