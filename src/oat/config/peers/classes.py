"""What stands here for a class of another library that a user looks for in `oat`, such as GRPOTrainer."""

from oat.config.peers.table import algorithm_of
from oat.plugins.registry import ALGORITHMS

ENDS = ("Trainer", "Config")
"""The ends of the names of such classes."""


def advice_on_class(name: str) -> str:
    """Return what to write in place of a class, as the end of a message; "": the name is of no such class."""
    end = next((end for end in ENDS if name.endswith(end)), None)
    if end is None:
        return ""
    own = name.removesuffix(end).lower()
    algorithm = algorithm_of([name]) or (own if own in ALGORITHMS else None)
    if algorithm is None:
        return "; the only class is oat.Trainer (docs/python.md), and docs/names.md has the names of TRL"
    here = f'oat.Trainer(algorithm="{algorithm}", ...)'
    if end == "Config":
        return f"; its fields are arguments of {here}, and docs/names.md says what each is called"
    return f"; it is {here} here, and docs/names.md says what its arguments are called"
