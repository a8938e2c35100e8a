"""The local runtime: every box in this process.

With `compute.serialise` each call into a box goes through the wire encoding and back, as it would on a
cluster, so that a value that does not travel, or travels badly, is found on a laptop.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from oat import wire

Box = TypeVar("Box")


def over_wire(box: Box, *, local: tuple[type, ...] = ()) -> Box:
    """The box as seen through a wire: arguments and results of its methods are encoded and decoded.

    Args:
        local: types of arguments that stay on the caller's side.
    """
    return cast(Box, _Wired(box, local))


class _Wired:
    def __init__(self, box: Any, local: tuple[type, ...]):
        self._box, self._local = box, local

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._box, name)
        return self._call(found) if callable(found) else found

    def _call(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = [arg if isinstance(arg, self._local) else wire.roundtrip(arg) for arg in args]
            result = method(*sent, **{name: wire.roundtrip(arg) for name, arg in kwargs.items()})
            return map(wire.roundtrip, result) if isinstance(result, Iterator) else wire.roundtrip(result)

        return call
