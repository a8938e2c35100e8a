"""The record of every question, answer and price of a run, in SQLite: a continued run asks none of it
again."""
