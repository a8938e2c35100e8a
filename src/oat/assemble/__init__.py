"""From a resolved configuration to the boxes of a run: models, parts, inputs and processes."""
