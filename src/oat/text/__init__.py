"""Messages become tokens, and tokens text."""
