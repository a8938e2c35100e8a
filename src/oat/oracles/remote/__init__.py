"""A reward model behind HTTP: the client, which is an oracle, and the server that it asks."""
