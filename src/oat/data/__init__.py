"""Records read from files, hubs and functions; prompts are made of them, some with recorded responses."""
