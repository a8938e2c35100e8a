"""Notes on values that a setting may have, and that are hardly meant, such as a learning rate of 1e5."""

from collections.abc import Iterator

from oat.resolve.parts import setting
from oat.resolve.resolved import Resolved
from oat.types.part import Check

HIGHEST = {
    "learner.learning_rate": (0.1, "1e-7 to 1e-3 are usual"),
    "learner.critic_learning_rate": (0.1, "1e-7 to 1e-3 are usual"),
    "learner.weight_decay": (1.0, "0 to 0.1 is usual"),
    "sampling.temperature": (2.0, "0.6 to 1.2 is usual, and above 2 most models write noise"),
    "algorithm.kl_coef": (1.0, "0 to 0.1 is usual"),
}
"""For a setting the largest value that somebody may mean, and what is usual."""


def values(resolved: Resolved) -> Iterator[Check]:
    """Check that values of settings are plausible. Nothing is refused: a new run gets a warning."""
    for field, (highest, usual) in HIGHEST.items():
        try:
            value = setting(resolved.config, tuple(field.split(".")))
        except LookupError:  # the algorithm has no such setting
            continue
        is_wrong = isinstance(value, int | float) and value > highest
        meant = f"; did you mean {1 / value:g}?" if is_wrong and value >= 100 else ""
        yield Check(field, is_wrong, f"{usual}{meant}", refuses="never")
