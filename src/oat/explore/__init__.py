"""Explorers choose the sampled responses that the oracle is asked about."""
