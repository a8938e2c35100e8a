"""Every setting of every policy gradient acts: its values change what the algorithm learns of a step, at the
place that the table `FIELDS` names. A new setting needs an entry there."""

from itertools import combinations
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from wiring import FIELDS, OWN, REFUSED, UNSET, Acts, are_equal, made, merged, nested, paths_of, seen

from oat.algorithms.group import ReducedPolicyGradient
from oat.algorithms.policy_gradient import PolicyGradient
from oat.errors import ConfigError
from oat.plugins.registry import ALGORITHMS

FAMILY: dict[str, Any] = {name: cls for name, cls in ALGORITHMS.items() if issubclass(cls, PolicyGradient)}
TRIED = ("grpo", "ppo")
"""Algorithms of which every setting is tried. The others have the code of `grpo`, except the reduction of
`dr_grpo`."""


def table(name: str) -> dict[str, tuple[Acts, ...]]:
    """Return where each setting of an algorithm acts."""
    found = {path: acts for path, acts in FIELDS.items() if path not in REFUSED.get(name, {})}
    return {**found, **OWN[name if name in OWN else "grpo"]}


def settings(name: str, path: str, acts: Acts, value: Any) -> dict[str, Any]:
    """Return the settings with one value tried. PPO has no estimators of groups."""
    kept = {key: other for key, other in acts.beside.items() if (name, key) != ("ppo", "advantage")}
    if acts.beside.get("advantage") == "vtrace":
        kept["advantage"] = "vtrace"
    return merged(kept, nested(path, value))


@pytest.mark.parametrize(
    ("name", "path"), [(name, path) for name in TRIED for path in table(name)] + [("dr_grpo", "max_length")]
)
def test_a_setting_acts(name: str, path: str) -> None:
    for acts in table(name)[path]:
        found = [seen(name, settings(name, path, acts, value), acts) for value in acts.values]
        for one, other in combinations(range(len(found)), 2):
            assert not are_equal(found[one], found[other]), (
                f"{acts.on} is the same with {path} {acts.values[one]} and {acts.values[other]}, beside "
                f"{acts.beside}"
            )


@pytest.mark.parametrize("name", FAMILY)
def test_every_setting_has_an_entry(name: str) -> None:
    """The algorithms that are not tried have no code of their own that reads other settings."""
    cls = FAMILY[name]
    assert set(paths_of(cls.Config())) == table(name).keys() | REFUSED.get(name, {}).keys()
    own = {key for key in vars(cls) if not key.startswith("_")}
    if name == "dr_grpo":
        assert (cls.__bases__, own) == ((PolicyGradient,), {"name", "Config", "defaults", "reduced"})
    elif name not in TRIED:
        assert (cls.__bases__, own) == ((ReducedPolicyGradient,), {"name", "Config"})


@pytest.mark.parametrize("name", TRIED)
def test_every_choice_has_an_entry(name: str) -> None:
    """All names of a choice, both truth values, and None where it is allowed."""
    for path, all_acts in table(name).items():
        if path in UNSET:
            continue
        tried = {repr(value) for acts in all_acts for value in acts.values}
        assert {repr(choice) for choice in choices(FAMILY[name].Config, path)} <= tried, path


def choices(config: type, path: str) -> set[Any]:
    """Return the values that a field's type lists."""
    first, _, rest = path.partition(".")
    kind = get_type_hints(config)[first]
    if rest:
        return choices(kind, rest)
    if get_origin(kind) is Literal:
        return set(get_args(kind))
    if kind is bool:
        return {False, True}
    return {None} if type(None) in get_args(kind) else set()


@pytest.mark.parametrize(("name", "path"), [(name, path) for name in REFUSED for path in REFUSED[name]])
def test_what_cannot_act_is_refused(name: str, path: str) -> None:
    value = FIELDS[path][-1].values[0 if path == "vine.branches" or path == "vine.most_steps" else 1]
    with pytest.raises(ConfigError, match=path.split(".")[0]):
        made(name, nested(path, value))
