"""Checks between settings, one file for each section whose settings they refuse.

A part's checks of its own settings are in the part's own file (`oat.types.part`).
"""
