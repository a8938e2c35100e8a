"""The settings of a run: their types and ranges, and how files and flags become them. Nothing here loads
torch."""
