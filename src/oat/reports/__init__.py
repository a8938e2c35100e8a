"""Reports on a run for people: progress, curves, accounts, samples, cards."""
