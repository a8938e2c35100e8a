"""Finds a selection rule by its name or a user's path, and calls it."""

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from oat.errors import ConfigError, ContractError, did_you_mean, shown
from oat.explore.rules import RULES
from oat.plugins.calls import guarded
from oat.plugins.loading import load_symbol

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
Chooser = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]
"""A rule with its options: `(rewards_MBG, valid_BG, generator) -> pairs_B2`."""


def find_rule(name: str, options: Mapping[str, Any]) -> Chooser:
    """Return the rule of this name with its options.

    Args:
        name: a name of `RULES`, `path/to/file.py:function` or `package.module:function`.

    Raises:
        ConfigError: there is no such rule, or it takes no such option.
        ContractError (the rule): a user's rule raises an exception, or returns something else than two
            different candidates for each prompt.
    """
    if name in RULES:
        _check_options(name, RULES[name], options)
        return partial(RULES[name], **options)
    if ":" not in name:
        raise ConfigError(
            f"explorer.rule: there is no rule {name!r}; {did_you_mean(name, RULES)}, or your own as "
            "path/to/file.py:function"
        )
    function = load_symbol(name)
    if not callable(function):
        raise ConfigError(
            f"explorer.rule: {name} is {shown(function)}; name a function of rewards_MBG, valid_BG and "
            "generator (oat/explore/rules.py)"
        )
    _check_options(name, function, options)
    return partial(_call_users, name, partial(function, **options))


def checksum_of_rule(name: str) -> str:
    """Return a checksum of the file of a user's rule, a function or another object that can be called; "" if
    it has none.

    Args:
        name: as in `find_rule`.
    """
    rule = load_symbol(name)
    source = inspect.getsourcefile(rule if inspect.isroutine(rule) else type(rule))
    return hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""


def call_rule(
    rule: Chooser, rewards_MBG: np.ndarray, valid_BG: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Return the pairs that a rule chooses, (B, 2). Prompts with fewer than two candidates are left out of
    the call; their pair is (0, 0). The rule gets rewards of 0 for samples that are no candidates."""
    pairs_B2 = np.zeros((len(valid_BG), 2), dtype=np.int64)
    can_B = valid_BG.sum(axis=1) >= 2
    if can_B.any():
        given = np.where(valid_BG, rewards_MBG, np.float32(0.0))[:, can_B]
        pairs_B2[can_B] = rule(given, valid_BG[can_B], generator)
    return pairs_B2


def _call_users(
    name: str,
    function: Chooser,
    rewards_MBG: np.ndarray,
    valid_BG: np.ndarray,
    generator: np.random.Generator,
) -> np.ndarray:
    def refuse(fault: str) -> ContractError:
        return ContractError(f"explorer.rule: {name} {fault}; repair it, and run the same command again")

    with guarded(name, refuse):
        found = function(rewards_MBG.copy(), valid_BG.copy(), generator)
        pairs_B2 = np.asarray(found)
    prompts, size = valid_BG.shape
    if pairs_B2.shape != (prompts, 2) or not np.issubdtype(pairs_B2.dtype, np.integer):
        raise refuse(
            f"returned {shown(found)} for {prompts} prompts; return the indices of two candidates of each, "
            f"an integer array of shape ({prompts}, 2)"
        )
    is_wrong_B2 = (pairs_B2 < 0) | (pairs_B2 >= size)
    is_wrong_B2 |= ~np.take_along_axis(valid_BG, np.where(is_wrong_B2, 0, pairs_B2), axis=1)
    if is_wrong_B2.any():
        place = int(np.flatnonzero(is_wrong_B2.any(axis=1))[0])
        raise refuse(
            f"chose {tuple(pairs_B2[place].tolist())} for a prompt whose candidates are "
            f"{np.flatnonzero(valid_BG[place]).tolist()}; choose among those for which valid_BG is true"
        )
    is_same_B = pairs_B2[:, 0] == pairs_B2[:, 1]
    if is_same_B.any():
        place = int(np.flatnonzero(is_same_B)[0])
        raise refuse(
            f"chose candidate {pairs_B2[place, 0]} twice for a prompt whose candidates are "
            f"{np.flatnonzero(valid_BG[place]).tolist()}; return two different candidates"
        )
    return pairs_B2


def _check_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse a function that does not take a rule's arguments, and options that it does not take.

    Raises:
        ConfigError: it takes too few arguments, there is such an option, or a required one is missing.
    """
    parameters = inspect.signature(function).parameters
    positional = [each for each in parameters.values() if each.kind in _POSITIONAL]
    if len(positional) < 3 and not any(each.kind == each.VAR_POSITIONAL for each in positional):
        taken = ", ".join(each.name for each in positional) or "nothing"
        raise ConfigError(
            f"explorer.rule: the rule {name} takes {taken}; it is called with rewards_MBG, valid_BG "
            "and generator, so take these three"
        )
    takes = {each.name: each for each in parameters.values() if each.kind == each.KEYWORD_ONLY}
    for option, value in options.items():
        if option not in takes:
            hint = did_you_mean(option, takes) if takes else "it has none; remove it"
            raise ConfigError(f"explorer.rule: the rule {name} has no option {option!r}; {hint}")
        _check_value(name, takes[option], value)
    for each in takes.values():
        if each.default is each.empty and each.name not in options:
            raise ConfigError(
                f"explorer.rule: the rule {name} needs the option {each.name!r}; add it beside `name`"
            )


def _check_value(name: str, parameter: inspect.Parameter, value: Any) -> None:
    """Refuse a value that an annotation such as `Literal["a", "b"]` excludes, a number that is not finite,
    and for a rule of ours a value of another type than its default's. All numbers of our rules are counts."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(
            f"explorer.rule: {parameter.name} of the rule {name} is {value}; give a finite number"
        )
    is_ours, takes_bool = name in RULES, isinstance(parameter.default, bool)
    if is_ours and takes_bool != isinstance(value, bool):
        wanted = "true or false" if takes_bool else "a value that is neither true nor false"
        raise ConfigError(f"explorer.rule: {parameter.name} of the rule {name} is {value!r}; give {wanted}")
    is_count = is_ours and isinstance(value, (int, float)) and not takes_bool
    if is_count and (not isinstance(value, int) or value < 1):
        raise ConfigError(
            f"explorer.rule: {parameter.name} of the rule {name} is {value!r}; give a whole number above 0, "
            "or leave it out"
        )
    literal = [each for each in getattr(parameter.annotation, "__args__", ()) if isinstance(each, str)]
    if literal and value not in literal:
        raise ConfigError(
            f"explorer.rule: {parameter.name} of the rule {name} is {value!r}; give one of "
            f"{', '.join(literal)}"
        )
