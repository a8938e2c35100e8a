"""What people read of a run: progress, curves, accounts, samples, cards."""
