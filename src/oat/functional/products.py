"""Matrix products in float32 on a CPU, by oneDNN if it is faster than MKL. Without this module, torch would
use MKL.

On processors that are not Intel's, MKL does not use the 512-bit instructions. oneDNN, which torch includes
for half precision, uses them. On a Zen 5 oneDNN does twice the operations per second, at 1.4 to 2.6 times the
rounding error (docs/performance.md).

* The choice between the two depends on the processor, on torch's build and settings, and on the precision and
  size of the product. It never depends on a measurement. So a run that is continued on the same machine
  rounds as before.
* oneDNN makes a kernel for every shape of a product, in half precision too. A run keeps only some of them
  (`oat.hardware.memory.keep_few_kernels`). The engine rounds its shapes up, since it would otherwise have a
  new shape at almost every call.
"""

import functools
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_LEAST = 2**21
"""Least number of multiplications in a product for which oneDNN is called. In a smaller product the call
costs more time than it saves."""
_BLOCK = 2**20
"""Number of elements of a product that `add_product` adds at a time. They fit into the processor's cache."""
_MANY = 1024
"""`_of_weight` computes the transposed gradient if there are at least this many rows of inputs, and the
weight has more outputs than inputs."""


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, (..., O). It may have no second derivatives.

    Args:
        x: (..., I).
        weight_OI: in any memory layout.
    """
    is_plain = x.ndim > 1 and (
        bias_O is None or (bias_O.dtype == torch.float32 and bias_O.shape == weight_OI.shape[:1])
    )
    if not (is_plain and _by_onednn(x, weight_OI)):
        return F.linear(x, weight_OI, bias_O)
    tensors = (x, weight_OI) if bias_O is None else (x, weight_OI, bias_O)
    x_NI = x.flatten(0, -2)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        made: Tensor = _Linear.apply(x_NI, weight_OI, bias_O)
    else:
        made = _onednn(x_NI, weight_OI, bias_O)
    return made.view(*x.shape[:-1], -1)


def product(a_NI: Tensor, b_OI: Tensor) -> Tensor:
    """Return `a @ b.T`, (N, O), of two matrices in any memory layout. A result that oneDNN computes cannot be
    differentiated."""
    return _onednn(a_NI, b_OI) if _by_onednn(a_NI, b_OI) else a_NI @ b_OI.T


def add_product(to_NO: Tensor, a_NI: Tensor, b_OI: Tensor) -> None:
    """Add `a @ b.T` to the matrix `to_NO`, in place."""
    if _by_onednn(a_NI, b_OI):
        size = max(1, _BLOCK // to_NO.shape[1])
        for start in range(0, len(to_NO), size):
            to_NO[start : start + size] += _onednn(a_NI[start : start + size], b_OI)
    elif a_NI.dtype == to_NO.dtype:
        to_NO.addmm_(a_NI, b_OI.T)
    else:
        to_NO += (a_NI @ b_OI.T).to(to_NO.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        to_x, to_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x_NI if to_weight else None, weight_OI if to_x else None)
        return _onednn(x_NI, weight_OI, bias_O)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope_NO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_NI, weight_OI = ctx.saved_tensors
        slope_NO = slope_NO.contiguous()
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            _onednn(slope_NO, weight_OI.T) if to_x else None,
            _of_weight(slope_NO, x_NI) if to_weight else None,
            slope_NO.sum(0) if to_bias else None,
        )


def _of_weight(slope_NO: Tensor, x_NI: Tensor) -> Tensor:
    """Return the gradient of a layer's weight, (O, I). It is computed from the gradient of the layer's
    outputs and from the layer's inputs."""
    if len(x_NI) >= _MANY and slope_NO.shape[1] > x_NI.shape[1]:
        return _onednn(x_NI.T, slope_NO.T).T
    return _onednn(slope_NO.T, x_NI.T)


def _onednn(a_NI: Tensor, b_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(
        a_NI, b_OI, None if bias_O is None else bias_O.contiguous(), "none", [], ""
    )
    return made


def _by_onednn(a: Tensor, b_OI: Tensor) -> bool:
    return bool(
        a.dtype == b_OI.dtype == torch.float32
        and a.device.type == "cpu"
        and b_OI.ndim == 2
        and a.shape[-1] == b_OI.shape[1]
        and a.numel() * len(b_OI) >= _LEAST
        and _is_faster()
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled("cpu")
    )


@functools.cache
def _is_faster() -> bool:
    """Return True if torch has MKL and the processor has 512-bit instructions that MKL does not use."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "GenuineIntel" not in _vendor()
    )


def _vendor() -> str:
    """Return the vendor of the processor as the system names it; "" if the system does not report it."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line for line in lines if line.startswith("vendor_id")), "")
    return platform.processor()
