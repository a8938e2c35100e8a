"""How actor and learner are joined, and how new weights reach the engine."""
