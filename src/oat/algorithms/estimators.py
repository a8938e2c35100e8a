"""Estimators of advantages by name: from the rewards of a step to one number for each response."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from oat.errors import ConfigError, ContractError, shown
from oat.functional.advantages import (
    batch_scaled,
    best_of_group,
    group_advantages,
    leave_one_out,
    leave_one_out_max,
    leave_responses_out,
    length_weighted,
)
from oat.functional.values import step_advantages
from oat.plugins.calls import guarded
from oat.plugins.loading import load_symbol


@dataclass(frozen=True, eq=False)
class Rewards:
    """The rewards of a step, as estimators get them.

    Attributes:
        rewards_N: the reward of each response, or each of its rewards (`credit`, `vine`); 0 where there is
            none.
        lengths_N: number of trained tokens of each response.
        group_of_N: index of each response's group, in [0, num_groups).
        valid_N: False where there is no reward.
        std_eps: number that is added to a standard deviation before the division, in units of reward.
        values_N: the value of the state before each reward's step; NaN where there is none. None except with
            `vine`.
        row_of_N: index of the response to which each reward belongs; None if each response has one.
    """

    rewards_N: torch.Tensor
    lengths_N: torch.Tensor
    group_of_N: torch.Tensor
    num_groups: int
    valid_N: torch.Tensor
    std_eps: float
    values_N: torch.Tensor | None = None
    row_of_N: torch.Tensor | None = None


Estimator = Callable[[Rewards], torch.Tensor]
"""Makes the (N,) advantages of rewards; 0 where a reward is missing."""


def _none(given: Rewards) -> torch.Tensor:
    return torch.where(given.valid_N, given.rewards_N, 0.0)


def _group(given: Rewards, *, normalise: bool) -> torch.Tensor:
    place = (given.rewards_N, given.group_of_N, given.num_groups)
    return group_advantages(*place, valid_N=given.valid_N, normalise=normalise, eps=given.std_eps)


def _plain(function: Callable[..., torch.Tensor]) -> Estimator:
    """Return an estimator of a function that needs rewards, groups and `valid_N` only."""
    return lambda given: function(given.rewards_N, given.group_of_N, given.num_groups, valid_N=given.valid_N)


def _without_own(given: Rewards, *, largest: bool) -> torch.Tensor:
    """Compare rewards with those of the group's other responses."""
    if given.row_of_N is None:
        return _plain(leave_one_out_max if largest else leave_one_out)(given)
    place = (given.rewards_N, given.row_of_N, given.group_of_N, given.num_groups)
    return leave_responses_out(*place, valid_E=given.valid_N, largest=largest)


def _batch_norm(given: Rewards) -> torch.Tensor:
    place = (given.rewards_N, given.group_of_N, given.num_groups)
    return batch_scaled(*place, valid_N=given.valid_N, eps=given.std_eps)


def _length_weighted(given: Rewards) -> torch.Tensor:
    place = (given.rewards_N, given.lengths_N, given.group_of_N, given.num_groups)
    return length_weighted(*place, valid_N=given.valid_N)


def _vine(given: Rewards) -> torch.Tensor:
    assert given.values_N is not None, "with `vine`, each reward has the value before its step"
    assert given.row_of_N is not None, "with `vine`, each reward belongs to a response"
    return step_advantages(given.rewards_N, given.values_N, given.row_of_N).nan_to_num(0.0)


ESTIMATORS: Mapping[str, Estimator] = {
    "none": _none,
    "group_mean": lambda given: _group(given, normalise=False),
    "group_norm": lambda given: _group(given, normalise=True),
    "batch_norm": _batch_norm,
    "leave_one_out": lambda given: _without_own(given, largest=False),
    "leave_one_out_max": lambda given: _without_own(given, largest=True),
    "length_weighted": _length_weighted,
    "best_of_group": _plain(best_of_group),
    "vine": _vine,
}
"""The estimator of each name that `algorithm.advantage` may have."""


def find_estimator(name: str) -> Estimator:
    """Return the estimator that `algorithm.advantage` names: one of `ESTIMATORS`, or a user's function.

    Args:
        name: a name of `ESTIMATORS`, `path/to/file.py:name` or `package.module:name`.

    Raises:
        ConfigError: a user's function cannot be loaded, or is no function.
        ContractError (the estimator): the user's function raises an exception, or returns something else than
            one finite number for each reward.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    found = load_symbol(name)
    if not callable(found):
        raise ConfigError(
            f"algorithm.advantage: {name} is {shown(found)}; name a function of one argument, an "
            "oat.algorithms.estimators.Rewards"
        )

    def refuse(what: str) -> ContractError:
        return ContractError(f"algorithm.advantage: {name} {what}; repair it, and run the same command again")

    def estimate(given: Rewards) -> torch.Tensor:
        with guarded(name, refuse):
            advantages_N = found(given)
        count = len(given.rewards_N)
        is_right = (
            isinstance(advantages_N, torch.Tensor)
            and advantages_N.shape == (count,)
            and not advantages_N.is_complex()
            and bool(advantages_N.to(given.rewards_N.dtype).isfinite().all())
        )
        if not is_right:
            raise ContractError(
                f"algorithm.advantage: {name} returned {shown(advantages_N)} for {count} rewards; return a "
                "tensor with one finite number for each"
            )
        return advantages_N.detach().to(given.rewards_N.dtype)

    return estimate
