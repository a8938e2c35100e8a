"""The learner turns an objective's batch into updates of its models."""
