"""Parts by name: the registry of ours, and users' code, which is found, called and kept apart here."""
