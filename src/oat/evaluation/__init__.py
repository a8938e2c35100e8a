"""Held-out prompts and pairs, measured."""
