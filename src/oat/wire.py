"""The encoding of values between processes as bytes. Only our own types of values can be encoded.

The encoding covers numbers, strings, bytes, None, lists, tuples, sets, dicts with string keys, numpy arrays,
tensors, and the dataclasses that `oat.types` exports. Values of other classes are refused. The decoder builds
only values of these types, so hostile bytes cannot run code. It does not check the types of a dataclass's
fields.

Bytes of a second form (`encode_parts`) are for weights and for replies: `_APART`, the size of a head, the
head, and large arrays one after another. The head is a value in the first form, in which a large array is a
place.
"""

import dataclasses
import functools
import struct
import sys
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from oat import types
from oat.errors import WireError

_TAG = "!"
_APART = b"\xc1oatpart"
"""The first bytes of the second form. No encoded value of the first form begins so."""
_PLACE = 1
"""The kind of a place: where an array begins, counted from the first one, and its size in bytes."""
_LARGE = 4096
"""Fewest bytes of a large array."""
_ALIGNED = 64
"""Large arrays begin at a multiple of this number of bytes."""
_CLASSES = {
    cls.__name__: cls
    for cls in vars(types).values()
    if dataclasses.is_dataclass(cls) and isinstance(cls, type)
}
_COLLECTIONS = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DTYPES = {
    "bool",
    "int8",
    "uint8",
    "int16",
    "int32",
    "int64",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
}


def encode(value: Any) -> bytes:
    """Return a value as bytes.

    Raises:
        WireError: the value, or a part of it, cannot be encoded. Examples: a type that the encoding does not
            cover, a whole number beyond 64 bits, a string that is not Unicode, a value that contains itself.
    """
    return _encoded(value, lambda array: array.data)


def encode_parts(value: Any) -> list[bytes | memoryview]:
    """Return a value as parts, whose bytes together are an encoded value. Large arrays and tensors are parts
    of their own, and share their memory with the value.

    Raises:
        WireError: see `encode`.
    """
    parts: list[bytes | memoryview] = []
    end = 0

    def placed(array: np.ndarray) -> msgspec.msgpack.Ext:
        nonlocal end
        place = struct.pack("<QQ", end, array.nbytes)
        gap = -array.nbytes % _ALIGNED
        parts.extend([array.data, bytes(gap)])
        end += array.nbytes + gap
        return msgspec.msgpack.Ext(_PLACE, place)

    head = _encoded(value, placed)
    return [b"".join([_APART, struct.pack("<Q", len(head)), head, bytes(_gap(len(head)))]), *parts]


def decode(data: bytes | memoryview) -> Any:
    """Return the value from bytes that `encode` made, or from the joined parts of `encode_parts`. Tensors are
    on the CPU. Arrays are writable, except those that were parts of their own: they share the memory of
    `data`, and are writable if it is.

    Raises:
        WireError: the bytes are no encoded value. Examples: bytes are missing at the end, or a class, a field
            or a dtype is unknown.
    """
    try:
        whole = memoryview(data)
        if whole[: len(_APART)] != _APART:
            return _lift(msgspec.msgpack.decode(whole))
        start = len(_APART) + 8
        end = start + struct.unpack("<Q", whole[len(_APART) : start])[0]
        at = functools.partial(_at, whole[end + _gap(end - start) :])
        return _lift(msgspec.msgpack.decode(whole[start:end], ext_hook=at))
    except (TypeError, KeyError, ValueError, OverflowError, RecursionError, struct.error) as error:
        raise WireError(
            f"these bytes are not an encoded value ({error}); they were cut or made by another program"
        ) from error


def _gap(head: int) -> int:
    """Return the number of bytes between a head of this size and the first large array."""
    return -(len(_APART) + 8 + head) % _ALIGNED


def roundtrip(value: Any) -> Any:
    """Encode and decode a value: return it as it arrives in another process."""
    return decode(encode(value))


def _encoded(value: Any, large: Callable[[np.ndarray], Any]) -> bytes:
    """Encode a value.

    Args:
        large: function that returns what stands for the bytes of a large array, given as a flat array.
    """
    try:
        return msgspec.msgpack.encode(_lower(value), enc_hook=large)
    except WireError:
        raise
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise WireError(
            f"a value does not travel ({error}); send 64-bit numbers, Unicode strings, arrays or the types "
            "of oat.types"
        ) from error


def _lower(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, np.ndarray):
        return _lower_array(value)
    if isinstance(value, list):
        return [_lower(item) for item in value]
    if isinstance(value, tuple | set | frozenset):
        return _lower_collection(value)
    if isinstance(value, dict):
        if _TAG in value or not all(isinstance(key, str) for key in value):
            raise WireError("a dict travels only with string keys other than '!'; rename its keys")
        return {key: _lower(item) for key, item in value.items()}
    if _CLASSES.get(type(value).__name__) is type(value):
        fields = {f.name: _lower(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {_TAG: type(value).__name__, **fields}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _lower_tensor(value.detach().cpu(), torch.bfloat16, torch.int16)
    raise WireError(
        f"a value of type {type(value).__name__} does not travel; send numbers, strings, arrays or the types "
        "of oat.types"
    )


def _lower_collection(items: tuple | set | frozenset) -> dict[str, Any]:
    tag = next(name for name, cls in _COLLECTIONS.items() if isinstance(items, cls))
    return {_TAG: tag, "items": [_lower(item) for item in (items if tag == "tuple" else sorted(items))]}


def _lower_tensor(value: Any, half: Any, bits: Any) -> dict[str, Any]:
    """Encode a tensor as an array. A bfloat16 tensor is encoded as its bits, since numpy has no bfloat16."""
    is_half = value.dtype == half
    return {
        _TAG: "bfloat16" if is_half else "tensor",
        "value": _lower_array((value.view(bits) if is_half else value).numpy()),
    }


def _lower_array(array: np.ndarray) -> dict[str, Any]:
    name = _dtype_name(array.dtype)
    if name not in _DTYPES:
        raise WireError(
            f"an array of dtype {array.dtype} does not travel; use one of {', '.join(sorted(_DTYPES))}"
        )
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data = (
        array.tobytes() if array.nbytes < _LARGE else np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    )
    return {_TAG: "array", "dtype": name, "shape": list(array.shape), "data": data}


@functools.cache
def _dtype_name(dtype: np.dtype) -> str:
    """Return the name of a dtype. The name is cached: numpy would build it each time, which takes longer than
    the rest of the work for a small array."""
    return dtype.name


def _at(arrays: memoryview, kind: int, place: memoryview) -> memoryview:
    """Return the bytes of an array of the second form.

    Args:
        arrays: the bytes of all arrays.
        kind, place: see `_PLACE`.
    """
    start, size = struct.unpack("<QQ", place)
    if kind != _PLACE or start + size > len(arrays):
        raise WireError("an array at a place that is not there")
    return arrays[start : start + size]


def _lift(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, list):
        return [_lift(item) for item in value]
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise WireError(f"a {type(value).__name__} of this content does not travel")
    if value.get(_TAG) == "array" and isinstance(value.get("data"), memoryview):
        return _array(**{key: item for key, item in value.items() if key != _TAG})
    fields = {key: _lift(item) for key, item in value.items() if key != _TAG}
    return _BUILDERS[value[_TAG]](**fields) if _TAG in value else fields


def _collection(cls: type, items: list) -> Any:
    if not isinstance(items, list):
        raise WireError(f"a {cls.__name__} without a list of items")
    return cls(items)


def _array(dtype: str, shape: list, data: bytes | memoryview) -> np.ndarray:
    if dtype not in _DTYPES:
        raise WireError(f"an array of dtype {dtype} does not travel")
    if not isinstance(shape, list) or not isinstance(data, bytes | memoryview) or min(shape, default=0) < 0:
        raise WireError("an array without a shape and bytes")
    if dtype == "bool" and bytes(data).strip(b"\0\1"):
        raise WireError("an array of truth values with other values than 0 and 1")
    array = np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).reshape(shape)
    return array if isinstance(data, memoryview) else array.copy()


def _tensor(value: np.ndarray) -> Any:
    import torch

    if not isinstance(value, np.ndarray) or value.flags.writeable:
        return torch.from_numpy(value)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(value)


def _bfloat16(value: np.ndarray) -> Any:
    import torch

    if not isinstance(value, np.ndarray) or value.dtype != np.int16:
        raise WireError("a tensor of bfloat16 without its bits")
    return _tensor(value).view(torch.bfloat16)


_BUILDERS: dict[str, Callable[..., Any]] = {
    **_CLASSES,
    **{name: functools.partial(_collection, cls) for name, cls in _COLLECTIONS.items()},
    "array": _array,
    "tensor": _tensor,
    "bfloat16": _bfloat16,
}
