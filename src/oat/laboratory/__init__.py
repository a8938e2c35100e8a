"""A duelling-bandit laboratory: worlds, agents and rules of exploration, without a language model."""
