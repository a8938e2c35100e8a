"""The parts of `benchmarks/compare.py`: algorithms, plan, one run, records, page, picture."""
