"""Conditions that end a run, or turn it back: stop conditions, alarms, signals, and missing answers."""
