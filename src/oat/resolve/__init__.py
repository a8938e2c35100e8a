"""From the settings of a run to a resolved configuration: defaults, and the rules between settings."""
