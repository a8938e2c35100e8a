"""What an outline (`oat.models.outline`) cannot do, and how its caller learns of it.

The code of some models reads values, and an outline has none. Torch also lacks some kernels for tensors
without memory, or has kernels that take fewer types than the real ones. So a pass through an outline may fail
where the model itself works. Such a failure says nothing about the model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oat.errors import OatError
from oat.models.causal_lm import has_memory

_GROUPED = {torch.ops.aten._grouped_mm.default} if hasattr(torch.ops.aten, "_grouped_mm") else set()


class NotOutlinedError(Exception):
    """An outline does not tell what was asked. Its text is the reason. No user sees it as an error: the
    caller goes on without an answer, or asks the model with its weights."""


@contextmanager
def outlining() -> Iterator[None]:
    """Turn every error of the body, which computes with outlines, into a `NotOutlinedError`. Our own errors,
    which refuse the model, stay as they are.

    Raises:
        NotOutlinedError: the body failed.
    """
    try:
        yield
    except (OatError, NotOutlinedError):
        raise
    except Exception as error:  # a model's code may raise anything where it finds no values
        raise NotOutlinedError(reason_of(error)) from error


def not_estimated(reason: str) -> str:
    """Return the text for people in place of an estimate of memory."""
    return f"memory not estimated: without its weights the model does not run ({reason})"


def reason_of(error: BaseException) -> str:
    """Return an error as one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:120]


class ShapesOnly(TorchDispatchMode):
    """A context in which `shaped` makes the results that it can make."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return shaped(func, args, kwargs or {})


def shaped(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call an operation of torch. If its tensors have no memory, and torch's kernel for such tensors takes
    fewer types than the real one, make the result from the shapes alone.

    This concerns the grouped product, with which transformers computes mixtures of experts: without memory,
    torch takes only bfloat16.
    """
    if func not in _GROUPED or has_memory(args[0]):
        return func(*args, **kwargs)
    first, second, *rest = args
    offsets = rest[0] if rest else kwargs.get("offs")
    if first.ndim == second.ndim == 2:
        assert offsets is not None, "two matrices are divided into groups by offsets"
        shape: tuple[int, ...] = (len(offsets), first.shape[0], second.shape[1])
    elif second.ndim == 2:
        shape = (first.shape[1], second.shape[1])
    else:
        shape = (*first.shape[:-1], second.shape[-1])
    return first.new_empty(shape, dtype=kwargs.get("out_dtype") or first.dtype)
