"""Estimators of advantages: from the rewards of a step to one number for each response, by name or by path;
and those by path that see a critic's values, with one number for each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from oat.errors import ConfigError, ContractError, shown
from oat.lazy import lazily
from oat.plugins.calls import guarded
from oat.plugins.loading import load_symbol

if TYPE_CHECKING:
    import torch

    from oat import functional as F
else:
    torch, F = lazily("torch"), lazily("oat.functional")


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


Estimator: TypeAlias = "Callable[[Rewards], torch.Tensor]"
"""Makes the (N,) advantages of rewards; 0 where a reward is missing."""


@dataclass(frozen=True, eq=False)
class Places:
    """The rewards and values of a step's L places, as estimators of `ppo` get them: response after response,
    the trained tokens of each, and then its final state if it has one (`end: final_state`).

    Attributes:
        rewards_L: the reward at each place: the charge for the KL, and at a response's last place its score.
        values_L: the critic's value of the state before each token, or of the final state.
        next_values_L: the value at the next place of the same response; 0 at its last one.
        discounts_L: the discount of the next place, from `gamma` and `turn_gamma`; 0 at a response's last
            place, so that a sum that runs over all places mixes no responses.
        ratios_L: old probability of each token, divided by that with which it was sampled; 1 at final states,
            and where the latter is not known, as in recorded data.
        lam: the setting `algorithm.lam`.
        row_of_L: index of the response that each place belongs to.
        num_rows: number of responses.
    """

    rewards_L: torch.Tensor
    values_L: torch.Tensor
    next_values_L: torch.Tensor
    discounts_L: torch.Tensor
    ratios_L: torch.Tensor
    lam: float
    row_of_L: torch.Tensor
    num_rows: int


TokenEstimator: TypeAlias = "Callable[[Places], torch.Tensor]"
"""Makes the (L,) advantages of places. The critic's targets are these plus the values."""


def _none(given: Rewards) -> torch.Tensor:
    return torch.where(given.valid_N, given.rewards_N, 0.0)


def _group(given: Rewards, *, normalise: bool) -> torch.Tensor:
    place = (given.rewards_N, given.group_of_N, given.num_groups)
    return F.advantages.group_advantages(
        *place, valid_N=given.valid_N, normalise=normalise, eps=given.std_eps
    )


def _plain(function: Callable[..., torch.Tensor]) -> Estimator:
    """Return an estimator of a function that needs rewards, groups and `valid_N` only."""
    return lambda given: function(given.rewards_N, given.group_of_N, given.num_groups, valid_N=given.valid_N)


def _without_own(given: Rewards, *, largest: bool) -> torch.Tensor:
    """Compare rewards with those of the group's other responses."""
    if given.row_of_N is None:
        return _plain(F.advantages.leave_one_out_max if largest else F.advantages.leave_one_out)(given)
    place = (given.rewards_N, given.row_of_N, given.group_of_N, given.num_groups)
    return F.advantages.leave_responses_out(*place, valid_E=given.valid_N, largest=largest)


def _batch_norm(given: Rewards) -> torch.Tensor:
    place = (given.rewards_N, given.group_of_N, given.num_groups)
    return F.advantages.batch_scaled(*place, valid_N=given.valid_N, eps=given.std_eps)


def _batch_mean(given: Rewards) -> torch.Tensor:
    return F.advantages.batch_centred(given.rewards_N, valid_N=given.valid_N)


def _length_weighted(given: Rewards) -> torch.Tensor:
    place = (given.rewards_N, given.lengths_N, given.group_of_N, given.num_groups)
    return F.advantages.length_weighted(*place, valid_N=given.valid_N)


def _vine(given: Rewards) -> torch.Tensor:
    assert given.values_N is not None, "with `vine`, each reward has the value before its step"
    assert given.row_of_N is not None, "with `vine`, each reward belongs to a response"
    return F.values.step_advantages(given.rewards_N, given.values_N, given.row_of_N).nan_to_num(0.0)


ESTIMATORS: Mapping[str, Estimator] = {
    "none": _none,
    "group_mean": lambda given: _group(given, normalise=False),
    "group_norm": lambda given: _group(given, normalise=True),
    "batch_mean": _batch_mean,
    "batch_norm": _batch_norm,
    "leave_one_out": lambda given: _without_own(given, largest=False),
    "leave_one_out_max": lambda given: _without_own(given, largest=True),
    "length_weighted": _length_weighted,
    "best_of_group": lambda given: _plain(F.advantages.best_of_group)(given),
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
    function = _users_function(name, "Rewards")
    return lambda given: _checked(name, function, given, given.rewards_N, "rewards")


def find_token_estimator(name: str) -> TokenEstimator:
    """Return the estimator of tokens that `algorithm.advantage` of `ppo` names: a user's function.

    Args:
        name: `path/to/file.py:name` or `package.module:name`.

    Raises:
        ConfigError: it cannot be loaded, or is no function.
        ContractError (the estimator): the function raises an exception, or returns something else than one
            finite number for each place.
    """
    function = _users_function(name, "Places")
    return lambda given: _checked(name, function, given, given.rewards_L, "places")


def _users_function(name: str, argument: str) -> Callable[[Any], Any]:
    found = load_symbol(name)
    if not callable(found):
        raise ConfigError(
            f"algorithm.advantage: {name} is {shown(found)}; name a function of one argument, an "
            f"oat.algorithms.estimators.{argument}"
        )
    return found


def _checked(
    name: str, function: Callable[[Any], Any], given: Any, like: torch.Tensor, what: str
) -> torch.Tensor:
    """Call a user's function, and return its result in the dtype of `like`, which has the same shape."""

    def refuse(fault: str) -> ContractError:
        return ContractError(
            f"algorithm.advantage: {name} {fault}; repair it, and run the same command again"
        )

    with guarded(name, refuse):
        advantages = function(given)
    is_right = (
        isinstance(advantages, torch.Tensor)
        and advantages.shape == like.shape
        and not advantages.is_complex()
        and bool(advantages.to(like.dtype).isfinite().all())
    )
    if not is_right:
        raise ContractError(
            f"algorithm.advantage: {name} returned {shown(advantages)} for {len(like)} {what}; return a "
            "tensor with one finite number for each"
        )
    return advantages.detach().to(like.dtype)
