"""Environments answer the responses of an episode."""
