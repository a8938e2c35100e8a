"""What a setting says of itself beside its type, its default and its docstring: when a run reads it, and when
it may change.

    critic: str | None = setting(None, read_if=HAS_CRITIC)
    learning_rate: NonNegative = setting(1e-6, may_change="fork")

A field that says nothing has what its section says, and a section what the section around it says.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args, get_type_hints

from oat.errors import ConfigError, did_you_mean

Change = Literal["never", "fork", "always"]
"""When a setting may change. `never`: a run keeps the value with which it began, and so do its forks. `fork`:
a fork may have another value. `always`: a continued run may have another value too."""

CHANGES: tuple[Change, ...] = ("never", "fork", "always")
UNSAID: Any = type("Unsaid", (), {"__repr__": lambda self: "unsaid"})()
"""In place of a value that a field does not state."""

_KEY = "oat"


class Reader(Protocol):
    """What the conditions of settings ask of a run. `oat.resolve.resolved.Resolved` answers."""

    config: Any

    @property
    def asked(self) -> frozenset[str]:
        """Names of the oracles of training and of evaluations, without those that cost nothing."""

    @property
    def learns_pairs(self) -> bool: ...

    @property
    def has_critic(self) -> bool: ...

    @property
    def has_reference(self) -> bool: ...

    @property
    def learns_with_reference(self) -> bool: ...

    @property
    def learns_reward(self) -> bool: ...

    @property
    def shows_groups(self) -> bool:
        """True if a reward function may read whole groups of responses."""

    @property
    def origins(self) -> Mapping[tuple[str, ...], str]:
        """The place where each setting was set."""

    @property
    def has_own_reference(self) -> bool:
        """True if the reference has weights of its own."""

    @property
    def question_stop(self) -> tuple[str, ...] | None:
        """The strings at which a further question of `render.question` would begin; None: it is not set."""

    @property
    def placed_actors(self) -> int | None:
        """The number of GPUs that actors have; None: `compute.gpus` is not set."""

    @property
    def policy_steps(self) -> int | None:
        """The number of optimiser steps of the run in which the policy learns; None if its schedule does not
        fall."""

    @property
    def critic_steps(self) -> int | None:
        """The number of the critic's optimiser steps; None if its schedule does not fall."""

    @property
    def waits_for_environment(self) -> bool:
        """True if a method of the environment is `async`, so that a deadline can end it."""


class ReadIf(NamedTuple):
    """When a run reads a setting.

    Attributes:
        words: the condition for people, after "it is read only if".
        holds: True if a run reads the setting.
    """

    words: str
    holds: Callable[[Reader], bool]


class Follows(NamedTuple):
    """The value that a setting gets from other settings if it is left open.

    Attributes:
        words: returns the settings from which it follows, for people, such as "as learner.learning_rate".
        value: returns the value; None: nothing follows in this run.
        fills: when the value becomes that of the setting: "first", before settings are checked against each
            other; "last", after that; or "never": the setting stays open, and people are told what holds.
    """

    words: Callable[[Reader], str]
    value: Callable[[Reader], Any]
    fills: Literal["first", "last", "never"] = "never"


class Said(NamedTuple):
    """What a field says of itself; `UNSAID` where it says nothing.

    Attributes:
        read_if: when the run reads it; None: always.
        may_change: when it may change.
        open: the value that leaves the field open. A run fixes the value of an open field when it is created.
        follows: the value that it gets from other settings if it is left open.
        earlier: what runs did whose configuration lacks the field, since an earlier version began them.
    """

    read_if: Any = UNSAID
    may_change: Any = UNSAID
    open: Any = UNSAID
    follows: Any = UNSAID
    earlier: Any = UNSAID


def setting(
    default: Any = dataclasses.MISSING,
    *,
    default_factory: Any = dataclasses.MISSING,
    read_if: ReadIf | None = UNSAID,
    may_change: Change = UNSAID,
    open: Any = UNSAID,
    follows: Follows = UNSAID,
    earlier: Any = UNSAID,
) -> Any:
    """Return the field of a setting. See `Said` for the last five arguments. A setting of a user's part says
    only `read_if` and `may_change`.

    Raises:
        ConfigError: `read_if` or `may_change` has no such value.
        ValueError: there are two defaults.
    """
    said = Said(read_if, may_change, open, follows, earlier)
    if may_change is not UNSAID and may_change not in CHANGES:
        raise ConfigError(f"may_change is {may_change!r}: {did_you_mean(str(may_change), CHANGES)}")
    if not (read_if in (UNSAID, None) or _is_condition(read_if)):
        raise ConfigError(
            f"read_if is {read_if!r}; give a ReadIf: words for people, and a function that gets the run "
            "and returns True if it reads the setting"
        )
    factory = {} if default_factory is dataclasses.MISSING else {"default_factory": default_factory}
    return dataclasses.field(default=default, metadata={_KEY: said}, **factory)


def _is_condition(read_if: Any) -> bool:
    """Return True for a `ReadIf` whose function takes one argument."""
    if not (isinstance(read_if, ReadIf) and isinstance(read_if.words, str) and callable(read_if.holds)):
        return False
    try:
        inspect.signature(read_if.holds).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def said(field: "dataclasses.Field[Any]") -> Said:
    """Return what a field says of itself."""
    found = field.metadata.get(_KEY)
    return found if isinstance(found, Said) else Said()


def within(inner: Said, outer: Said) -> Said:
    """Return what holds of a field that says `inner`, in a section of which `outer` holds."""
    of_section = Said(outer.read_if, outer.may_change)
    return Said(*(own if own is not UNSAID else above for own, above in zip(inner, of_section, strict=True)))


def settings_below(values: Any, above: Said = Said(), path: tuple[str, ...] = ()) -> Iterator["Setting"]:
    """Yield each setting of a section, and the sections in it, each before its own settings. The options of a
    component, which are arguments of its constructor, are no settings."""
    for field in dataclasses.fields(values):
        own, value = within(said(field), above), getattr(values, field.name)
        if field.name == "settings" and dataclasses.is_dataclass(value):  # of a part, written beside its name
            yield from settings_below(value, above, path)
        elif dataclasses.is_dataclass(value):
            yield Setting((*path, field.name), value, field.default, own)
            yield from settings_below(value, own, (*path, field.name))
        elif field.name not in ("options", "settings"):
            yield Setting((*path, field.name), value, default_of(field), own)


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """Return the default of a field; `dataclasses.MISSING` if it has none."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


class Setting(NamedTuple):
    """A setting in a configuration.

    Attributes:
        default: `dataclasses.MISSING` if it has none.
        said: what holds of it, also by the sections around it.
    """

    path: tuple[str, ...]
    value: Any
    default: Any
    said: Said


def said_at(values: Any, names: Sequence[str], above: Said = Said()) -> Said:
    """Return what holds of a setting or a section.

    Args:
        values: a section around it, and `names` the path from there. Where the path leaves the sections that
            have values, its types are followed; where it leaves the fields, as in the options of a component,
            the last field counts.
    """
    kind: Any = values if isinstance(values, type) else type(values)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if not names:
        return above
    if names[0] not in fields:
        part = getattr(values, "settings", None)
        return said_at(part, names, above) if dataclasses.is_dataclass(part) else above
    own = within(said(fields[names[0]]), above)
    inner = None if isinstance(values, type) else getattr(values, names[0])
    if not dataclasses.is_dataclass(inner):
        hint = get_type_hints(kind)[names[0]]
        inner = next((each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)), None)
    return own if inner is None else said_at(inner, names[1:], own)
