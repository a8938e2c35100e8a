"""Adds to a user's oracle the members of `Oracle` that it lacks.

The user's object must have `answers`, `durable`, `submit` and `collect`; every other member is optional. A
missing member gets the default of `Oracle`. If a member has a wrong type, or raises when a run reads it, the
run gets an `OracleError` that names the member.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Number, Real
from typing import Any

import numpy as np

from oat.errors import OatError, OracleError, shown, warn
from oat.oracles.base import Oracle, Wrapper
from oat.oracles.steps import UNITS
from oat.plugins.calls import bare, raising
from oat.plugins.loading import given
from oat.types import Message, Opening, Price, Question
from oat.types.part import RunFacts

_MISSING = object()


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, Number | np.bool_)


def _is_seconds(value: Any) -> bool:
    return value is None or isinstance(value, Real)


def _is_text(value: Any) -> bool:
    return not callable(value)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _as_text(value: Any) -> str | None:
    return None if value is None else str(value)


def _is_step_unit(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value in UNITS)


_FLAG = (_is_flag, bool, "True or False")
_KINDS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], Any], str]] = {
    "cacheable": _FLAG,
    "reads_group": _FLAG,
    "gives_steps": (_is_step_unit, _as_text, '"characters" or "tokens"'),
    "is_relative": _FLAG,
    "names_cost": _FLAG,
    "names_price": _FLAG,
    "max_outage_s": (_is_seconds, lambda seconds: seconds, "seconds"),
    "version": (_is_text, _as_text, "a text"),
    "made_of": (_is_mapping, dict, "a dict of plain values by file and field"),
    "metrics": (_is_mapping, dict, "numbers by name"),
}
"""The optional attributes of a user's oracle, except methods and `name`. For each attribute: a check of its
type, a conversion to the type that a run reads, and the type in words."""


class UsersOracle(Wrapper):
    """A user's oracle. Optional members that it lacks get their defaults.

    Args:
        oracle: the user's object; it has `answers`, `durable`, `submit` and `collect`.

    Its answers may have scores of sources. If the object does not declare their labels (`sources`, a
    list of texts), they are not known.

    Raises (each optional member):
        OracleError: the user's code raised, or a value has a wrong type. But an error in
            `drop` or `close` only gives a warning, and a wrong `name` counts as missing.
    """

    oracle: Any
    where_asked = Oracle.where_asked
    when_it_abstains = Oracle.when_it_abstains

    def read(self, member: str) -> Any:
        """Return an attribute of the user's object, converted to the type that a run reads. If the object
        lacks an optional attribute, return its default.

        Args:
            member: the attribute's name.
        """
        if member == "name":
            found = self._own(member)
            return found if isinstance(found, str) and found else self._class
        if member == "sources":
            labels = self._own(member)
            are_texts = isinstance(labels, list | tuple) and all(isinstance(each, str) for each in labels)
            return tuple(labels) or None if are_texts else None
        if member not in _KINDS:
            return super().read(member)
        is_right, plain, kind = _KINDS[member]
        with self._reading(member):
            value = getattr(self.oracle, member, _MISSING)
            if value is _MISSING:
                return self._default(member)
            if is_right(value):
                return plain(value)
        raise self._wrong(member, value, f"give {kind}")

    def price(self, question: Question) -> Price:
        own = self._method("price")
        if own is None:
            return Oracle.price(self, question)

        def refuse(what: str) -> OracleError:
            return OracleError(
                f"`price` of oracle {question.oracle} {what}, asked about {question.key}; repair it, and run "
                "the same command again"
            )

        with raising(refuse):
            price: Price = own(question)
        if not isinstance(price, Price):
            raise OracleError(
                f"`price` of oracle {question.oracle} returned {shown(price)}; return an oat.types.Price"
            )
        return price

    def check_columns(self, columns: Collection[str], has_reference: bool) -> None:
        check = self._method("check_columns")
        if check is None:
            return
        with raising(
            lambda what: OracleError(
                f"`check_columns` of oracle {self._class} {what}; repair it, or refuse the data with a "
                "ConfigError (oat.errors)"
            )
        ):
            check(columns, has_reference)

    def tell(self, run: RunFacts) -> None:
        """Tell the user's object about the run if it is a subclass of `Oracle`. In any other class, a method
        of this name may be something else."""
        if isinstance(self.oracle, Oracle):
            with raising(
                lambda what: OracleError(
                    f"`tell` of oracle {self._class} {what}; repair it, and run the same command again"
                )
            ):
                self.oracle.tell(run)

    def tell_opening(self, opening: Callable[[Sequence[Message]], Opening]) -> None:
        tell = self._method("tell_opening")
        if tell is None:
            return
        with raising(lambda what: OracleError(f"`tell_opening` of oracle {self._class} {what}; repair it")):
            tell(opening)

    def bind(self) -> None:
        tell = self._method("bind")
        if tell is None:
            return
        with raising(
            lambda what: OracleError(
                f"`bind` of oracle {self._class} {what}; repair it, and run the same command again"
            )
        ):
            tell()

    def drop(self, tickets: Sequence[str]) -> None:
        """Tell the user's object what is not waited for, if it is a subclass of `Oracle`; see `tell`. If its
        `drop` raises, warn."""
        if isinstance(self.oracle, Oracle):
            try:
                with raising(lambda what: OracleError(bare(what))):
                    self.oracle.drop(tickets)
            except OatError as error:
                warn(f"`drop` of oracle {self._class}: {error}")

    def close(self) -> None:
        """Close the user's oracle. If its `close` raises, warn. An object that was given from Python is not
        closed."""
        close = self._method("close")
        if close is None or any(self.oracle is each for each in given.values()):
            return
        try:
            with raising(lambda what: OracleError(bare(what))):
                close()
        except OatError as error:
            warn(f"oracle {self.name} could not be closed: {error}")

    @property
    def _class(self) -> str:
        return type(self.oracle).__name__

    def _default(self, member: str) -> Any:
        if member == "names_price":
            return self._method("price") is not None
        return {} if member == "metrics" else getattr(Oracle, member)

    def _method(self, name: str) -> Callable[..., Any] | None:
        found: Callable[..., Any] | None = self._own(name)
        if found is not None and not callable(found):
            raise self._wrong(name, found, "make it a method")
        return found

    def _own(self, member: str) -> Any:
        """Return the member of the user's object; None if the object has no such member."""
        with self._reading(member):
            return getattr(self.oracle, member, None)

    def _reading(self, member: str) -> AbstractContextManager[None, None]:
        meant = "numbers by name" if member == "metrics" else "a value"
        return raising(
            lambda what: OracleError(
                f"`{member}` of oracle {self._class} {what}; give {meant}, or leave it out"
            )
        )

    def _wrong(self, member: str, value: Any, advice: str) -> OracleError:
        return OracleError(f"`{member}` of oracle {self._class} is {shown(value)}; {advice}, or leave it out")
