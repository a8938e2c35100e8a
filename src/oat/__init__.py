"""Online alignment of language models: sample, choose, ask, learn, repeat."""
