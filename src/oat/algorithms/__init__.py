"""Objectives: what is learned from which feedback, one file for each family of algorithms."""
