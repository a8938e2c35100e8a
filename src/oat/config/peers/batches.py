"""The size of a step, from the names by which TRL gives it."""

from collections.abc import Mapping
from typing import Any

from oat.config.peers.table import family_of

SIZES = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
)
"""TRL's names for the size of a step. With one device they decide it together."""
_DEFAULT = 8
"""TRL's default of per_device_train_batch_size, and of num_generations."""


def step_of(given: Mapping[str, Any], algorithm: str | None) -> dict[str, int] | None:
    """Return our settings for the size of a step on one device; None: the numbers do not divide, or are none.

    Args:
        given: the names of TRL that are set, with their values; `num_generations` is read too.
        algorithm: name of the run's algorithm.
    """
    numbers = {name: value for name, value in given.items() if value is not None}
    if any(type(numbers.get(name, 1)) is not int or numbers.get(name, 1) < 1 for name in _READ):
        return None
    rows = numbers.get("per_device_train_batch_size", _DEFAULT)
    passes = numbers.get("gradient_accumulation_steps", 1)
    if family_of(algorithm) != "group":
        return {"algorithm.prompts": rows * passes}
    responses = numbers.get("generation_batch_size", rows * numbers.get("steps_per_generation", passes))
    prompts, rest = divmod(responses, numbers.get("num_generations", _DEFAULT))
    minibatches, rest_of_pass = divmod(responses, rows * passes)
    if rest or rest_of_pass or not prompts or not minibatches:
        return None
    return {"algorithm.prompts": prompts} | (
        {"algorithm.minibatches": minibatches} if minibatches > 1 else {}
    )


_READ = (*SIZES, "num_generations")
