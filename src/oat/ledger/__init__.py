"""The record of every question, answer and price of a run, in SQLite. So a continued run asks no answered
question again."""
