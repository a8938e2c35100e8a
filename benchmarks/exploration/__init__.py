"""The comparison of exploration with a language model (benchmarks/explore.py)."""
