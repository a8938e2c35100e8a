"""Prompts become trajectories: sampled by an engine, played in an environment, or recorded."""
