"""The way from a configuration to a run: defaults, cross-checks, models, parts, and the run directory opened
or forked."""
