"""Parts by name: the registry of `oat`'s own parts, and the code that finds and calls users' parts."""
