"""Checks between settings, one file for each section whose settings they refuse.

A check that a part makes of its own settings stands with the part (`oat.types.part`).
"""
