"""Oracles answer questions about responses: rules, models, judges, servers, users' functions."""
