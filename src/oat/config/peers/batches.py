"""Settings that several names of TRL decide together: the size of a step, its optimiser steps, and betas."""

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
BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999}
"""TRL's names for the betas of AdamW, and their defaults."""
_DEFAULT = 8
"""TRL's default of per_device_train_batch_size, and of num_generations."""


def step_of(given: Mapping[str, Any], algorithm: str | None) -> dict[str, int] | None:
    """Return our settings for the size of a step on one device; None: the numbers do not divide, or are none.

    Args:
        given: the names of TRL that are set, with their values; `num_generations` is read too.
        algorithm: name of the run's algorithm.
    """
    numbers = _counts(given)
    if numbers is None:
        return None
    rows = numbers.get("per_device_train_batch_size", _DEFAULT)
    passes = numbers.get("gradient_accumulation_steps", 1)
    if family_of(algorithm) != "group":
        return {"algorithm.prompts": rows * passes}
    prompts, rest = divmod(_responses(numbers), numbers.get("num_generations", _DEFAULT))
    minibatches = _minibatches(numbers)
    if rest or not prompts or not minibatches:
        return None
    return {"algorithm.prompts": prompts} | (
        {"algorithm.minibatches": minibatches} if minibatches > 1 else {}
    )


def optimiser_steps(given: Mapping[str, Any]) -> int | None:
    """Return the number of optimiser steps in one of our steps; None: the numbers do not divide, or are none.

    Args:
        given: the names of TRL that are set, with their values; `num_iterations` is read too.
    """
    numbers = _counts(given)
    minibatches = None if numbers is None else _minibatches(numbers)
    return None if numbers is None or minibatches is None else minibatches * numbers.get("num_iterations", 1)


def betas(given: Mapping[str, Any]) -> dict[str, list[float]] | None:
    """Return our setting for the betas of AdamW; None: TRL's names do not give them as numbers."""
    both = [given.get(name, default) for name, default in BETAS.items()]
    are_given = any(name in given for name in BETAS) and all(isinstance(beta, float) for beta in both)
    return {"learner.betas": both} if are_given else None


def _counts(given: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the fields that decide the size of a step and have a value; None: one is no positive number."""
    numbers = {name: given[name] for name in _READ if given.get(name) is not None}
    return numbers if all(type(value) is int and value > 0 for value in numbers.values()) else None


def _responses(numbers: Mapping[str, int]) -> int:
    """Return the number of responses of one of our steps."""
    rows = numbers.get("per_device_train_batch_size", _DEFAULT)
    passes = numbers.get("steps_per_generation", numbers.get("gradient_accumulation_steps", 1))
    return numbers.get("generation_batch_size", rows * passes)


def _minibatches(numbers: Mapping[str, int]) -> int | None:
    """Return the optimiser steps of one pass over the responses of a step; None: they do not divide."""
    rows = numbers.get("per_device_train_batch_size", _DEFAULT)
    of_one = rows * numbers.get("gradient_accumulation_steps", 1)
    minibatches, rest = divmod(_responses(numbers), of_one)
    return None if rest or not minibatches else minibatches


_READ = (*SIZES, "num_generations", "num_iterations")
