"""Explorers choose which of the sampled responses the oracle is asked about."""
