"""The local runtime: every box in this process.

With `compute.serialise` each call into a box goes through the wire encoding and back, as it would to
another process. So values that cannot be encoded are found on a laptop.

An objective is not sent. The learner's side makes an objective of its own from the configuration, and gets
the batch that the loop's objective made in `prepare`. So `losses` and `metrics` may read only what is in the
batch or in the settings.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

from oat import wire

Box = TypeVar("Box")


def over_wire(box: Box, *, own: Sequence[Any] = ()) -> Box:
    """Return a box that encodes and decodes the arguments and the result of every method call.

    Args:
        own: values that the box's side already has, such as an objective. If an argument has the type of one
            of these values, the argument is not sent; the box gets a copy of that value.
    """
    return cast(Box, _Wired(box, {type(value): value for value in own}))


class _Wired:
    def __init__(self, box: Any, own: dict[type, Any]):
        self._box, self._own = box, own

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._box, name)
        return self._call(found) if callable(found) else found

    def _call(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = [self._sent(arg) for arg in args]
            result = method(*sent, **{name: self._sent(arg) for name, arg in kwargs.items()})
            return map(wire.roundtrip, result) if isinstance(result, Iterator) else wire.roundtrip(result)

        return call

    def _sent(self, value: Any) -> Any:
        """Return an argument in the form in which it arrives on the box's side."""
        own = self._own.get(type(value))
        return wire.roundtrip(value) if own is None else copy.deepcopy(own)
