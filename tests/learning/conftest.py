"""The fixture of the learning tests."""

from learning_runs import root  # noqa: F401
