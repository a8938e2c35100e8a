"""What makes a run of a configuration: defaults, cross-checks, models, parts, and the run directory opened or
forked."""
