"""Objectives: what is learned from which feedback, one file a family."""
