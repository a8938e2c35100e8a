"""Language models, their adapters, and the networks beside them."""
