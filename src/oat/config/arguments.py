"""What is wrong with arguments of `oat.Trainer` that no configuration has, such as those of TRL's
trainers."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oat.errors import ConfigError, is_signal

_DEEPEST = 3
"""Largest number of sections around an object of another library's that is found."""


def faults(given: Mapping[str, Any], unknown: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    """Return the messages about arguments.

    Args:
        given: the arguments that there are, with their values; `...` is one that is missing.
        unknown: all others. Those that the tables of names have get one message together, which works out
            what they say together; each other one gets a message of its own.
        known: the names of all arguments that there are.
    """
    from oat.config.load import algorithm_in
    from oat.config.unknown import SECTIONS_OF_ARGUMENTS, described, described_object, is_answered

    found = [each for name, argument in given.items() for each in _read(name, argument)]
    algorithm = algorithm_in(given)
    objects = [
        described_object(f"oat.Trainer({path[0]}=...)", path, value, algorithm) for path, value in found
    ]
    listed = {name: value for name, value in unknown.items() if is_answered(name, value, known, algorithm)}
    groups = ([listed] if listed else []) + [{name: unknown[name]} for name in unknown if name not in listed]
    around = {**given, **unknown}
    return objects + [
        described(f"oat.Trainer({first}=...)", (first,), sorted(known), "", group, algorithm, around, given)
        for group in groups
        for first in sorted(group, key=lambda name: name not in SECTIONS_OF_ARGUMENTS)[:1]
    ]


def _read(name: str, value: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Return the places and values of objects of other libraries' configurations in an argument.

    Raises:
        ConfigError: a value raises when it is read.
    """
    try:
        return list(_objects({name: value}))
    except BaseException as error:  # a user's object may raise anything
        if is_signal(error):
            raise
        raise ConfigError(
            f"oat.Trainer({name}=...): it cannot be read, since it raises {type(error).__name__}; give plain "
            "values, functions or classes"
        ) from error


def _objects(given: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the places and values of objects of other libraries' configurations."""
    from oat.config.peers.objects import is_peers

    for name, value in given.items():
        path = (*above, str(name))
        if dataclasses.is_dataclass(type(value)) and is_peers(value):
            yield path, value
        elif isinstance(value, Mapping) and len(path) < _DEEPEST:
            yield from _objects(value, path)
