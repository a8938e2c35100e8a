"""Code of users: how it is found, called and kept apart."""
