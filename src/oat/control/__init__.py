"""What may end a run, or hold it up: stop conditions, signals, and answers that stay away."""
