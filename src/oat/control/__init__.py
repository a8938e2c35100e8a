"""What may end a run, or turn it back: stop conditions, alarms, signals, and answers that stay away."""
