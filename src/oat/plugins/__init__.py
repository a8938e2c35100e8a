"""Parts by name: the registry of ours, and code of users: how it is found, called and kept apart."""
