"""The names that settings have in other libraries, and what they are called here."""
