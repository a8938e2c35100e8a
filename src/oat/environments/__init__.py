"""Environments answer the responses within an episode."""
