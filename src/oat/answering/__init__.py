"""Learned models that answer outside of training, alone or compared with another."""
