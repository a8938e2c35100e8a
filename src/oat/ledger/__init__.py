"""The record of every question, answer and price of a run, in SQLite: what a run that goes on never asks
again."""
