"""A reward model behind HTTP: the client that is an oracle, and the server it asks."""
