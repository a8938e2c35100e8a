"""Settings that several names of TRL decide together: the size of a step, its optimiser steps, and betas."""

import math
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
_SHARES = ("warmup_ratio", "warmup_steps", "eval_steps", "save_steps")
"""Fields whose numbers below 1 are shares of the run's optimiser steps."""
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
    if family_of(algorithm) != "group":
        return {"algorithm.prompts": _rows(numbers)}
    prompts, rest = divmod(_responses(numbers), numbers.get("num_generations", _DEFAULT))
    minibatches = _minibatches(numbers)
    if rest or not prompts or not minibatches:
        return None
    return {"algorithm.prompts": prompts} | (
        {"algorithm.minibatches": minibatches} if minibatches > 1 else {}
    )


def undivided(given: Mapping[str, Any], algorithm: str | None) -> str:
    """Return why TRL's numbers give no size of a step: what is no multiple of what; "": they give one, or are
    no numbers.

    Args:
        given, algorithm: as for `step_of`.
    """
    numbers = _counts(given)
    if numbers is None or family_of(algorithm) != "group":
        return ""
    responses, group = _responses(numbers), numbers.get("num_generations", _DEFAULT)
    of = f"{_product(numbers)} responses on one device, no multiple of"
    if responses % group:
        by_default = "" if "num_generations" in numbers else ", its default"
        return f"{of} num_generations {group}{by_default}; TRL refuses that"
    if _minibatches(numbers) is None:
        return f"{of} the {_rows(numbers)} of an optimiser step"
    return ""


def rounded(value: Any, steps: int | None) -> str:
    """Return how a number of optimiser steps was rounded; "": it was not.

    Args:
        steps: optimiser steps in one of our steps.
    """
    is_whole = steps is None or not isinstance(value, int | float) or value % steps == 0
    return "" if is_whole else f"{value:g} / {steps} is rounded up"


def part_of(field: str, value: Any, given: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the number of TRL's optimiser steps that a share of the run is, and how it comes about; None:
    the field is no share of a known number.

    Args:
        given: the names of TRL that are set, with their values; `max_steps` is read.
    """
    whole = given.get("max_steps")
    is_share = field in _SHARES and type(value) is float and 0 < value < 1
    if not is_share or type(whole) is not int or whole < 1:
        return None
    return math.ceil(whole * value), f"{value:g} x max_steps {whole}"


def optimiser_steps(given: Mapping[str, Any]) -> int | None:
    """Return the number of optimiser steps in one of our steps; None: the numbers do not divide, or are none.

    Args:
        given: the names of TRL that are set, with their values; `num_iterations` is read too.
    """
    numbers = _counts(given)
    minibatches = None if numbers is None else _minibatches(numbers)
    return None if numbers is None or minibatches is None else minibatches * numbers.get("num_iterations", 1)


def betas(given: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return our setting for the betas of AdamW, and what is wrong with them; None: TRL's names do not give
    them as numbers."""
    both = [given.get(name, default) for name, default in BETAS.items()]
    if not any(name in given for name in BETAS) or not all(type(beta) in (int, float) for beta in both):
        return None
    are_right = all(0 <= beta < 1 for beta in both)
    return ({"learner.betas": both}, "") if are_right else ({"learner.betas": ...}, "at least 0 and below 1")


def _counts(given: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the fields that decide the size of a step and have a value; None: one is no positive number."""
    numbers = {name: given[name] for name in _READ if given.get(name) is not None}
    return numbers if all(type(value) is int and value > 0 for value in numbers.values()) else None


def _rows(numbers: Mapping[str, int]) -> int:
    """Return the number of rows of one of TRL's optimiser steps."""
    rows = numbers.get("per_device_train_batch_size", _DEFAULT)
    return rows * numbers.get("gradient_accumulation_steps", 1)


def _passes(numbers: Mapping[str, int]) -> int:
    """Return the number of TRL's passes for which responses are sampled at once."""
    return numbers.get("steps_per_generation", numbers.get("gradient_accumulation_steps", 1))


def _responses(numbers: Mapping[str, int]) -> int:
    """Return the number of responses of one of our steps."""
    rows = numbers.get("per_device_train_batch_size", _DEFAULT)
    return numbers.get("generation_batch_size", rows * _passes(numbers))


def _product(numbers: Mapping[str, int]) -> str:
    """Return how TRL's fields give the number of responses, such as `a 4 x b 2 = 8`."""
    if "generation_batch_size" in numbers:
        return f"generation_batch_size = {_responses(numbers)}"
    rows = numbers.get("per_device_train_batch_size", _DEFAULT)
    passes = "steps_per_generation" if "steps_per_generation" in numbers else "gradient_accumulation_steps"
    return f"per_device_train_batch_size {rows} x {passes} {_passes(numbers)} = {_responses(numbers)}"


def _minibatches(numbers: Mapping[str, int]) -> int | None:
    """Return the optimiser steps of one pass over the responses of a step; None: they do not divide."""
    minibatches, rest = divmod(_responses(numbers), _rows(numbers))
    return None if rest or not minibatches else minibatches


_READ = (*SIZES, "num_generations", "num_iterations")
