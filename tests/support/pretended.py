"""A simulated GPU for machines without one. It is ordinary memory with a mark, and an operation on marked and
unmarked tensors is an error.

A marked tensor reports the device `cuda:0`. Marked tensors come from `.to(...)`, from factories with that
device, and from operations on marked tensors. `.cpu()` and `.to("cpu")` remove the mark. As on a real device,
an operation may also take single numbers, copies, and indices from the CPU.

A run with it shows that every tensor is on the right device. It says nothing about kernels, memory and speed;
tests/test_gpu.py tests these.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda", 0)
_ANYWHERE = {
    "aten::copy_",
    "aten::_to_copy",
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
}


class MixedDevicesError(AssertionError):
    """An operation has tensors on the device and tensors on the CPU."""


class _Marks:
    """The place of each memory address: True on the device, False on the CPU, None unknown. A tensor without
    memory has an unknown place."""

    def __init__(self) -> None:
        self.places: dict[int, bool | None] = {}

    def of(self, tensor: torch.Tensor) -> bool | None:
        return self.places.get(_address(tensor), False if tensor.numel() else None)

    def put(self, tensor: torch.Tensor, place: bool | None) -> torch.Tensor:
        address = _address(tensor)
        self.places.pop(address, None)
        if address and place is not False:
            self.places[address] = place
            with torch._C.DisableTorchFunction():
                weakref.finalize(tensor.untyped_storage(), self.places.pop, address, None)
        return tensor


def _address(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage().data_ptr()


class _Move(torch.autograd.Function):
    """A copy to the device or back. Its gradient is copied in the opposite direction."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, marks: _Marks, place: bool, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.marks, ctx.before = marks, (marks.of(tensor), tensor.dtype)
        return marks.put(tensor.detach().to(dtype, copy=True), place)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        place, dtype = ctx.before
        return ctx.marks.put(gradients[0].to(dtype, copy=True), place), None, None, None


class _Operations(TorchDispatchMode):
    """Intercepts every operation: refuses a mixture of places, and marks the result."""

    def __init__(self, marks: _Marks):
        super().__init__()
        self.marks, self.on_device = marks, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places, name = [self.marks.of(tensor) for tensor in given], func._schema.name
        if True in places:
            self.on_device += 1
            strangers = [
                tensor for tensor, place in zip(given, places, strict=True) if place is False and tensor.ndim
            ]
            if strangers and name not in _ANYWHERE:
                raise MixedDevicesError(
                    f"{name} of {[(tuple(t.shape), place) for t, place in zip(given, places, strict=True)]}"
                )
        place = True if True in places else None if None in places and name != "aten::_to_copy" else False
        before = {_address(tensor) for tensor in given}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and _address(leaf) not in before:
                self.marks.put(leaf, place)
        return made


class _Functions(TorchFunctionMode):
    """Answers Python code that asks a tensor for its device."""

    def __init__(self, marks: _Marks):
        super().__init__()
        self.marks = marks

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func == torch.Tensor.device.__get__ and self.marks.of(args[0]) is True:
            return DEVICE
        if func == torch.Tensor.is_cuda.__get__:
            return self.marks.of(args[0]) is True
        if func is torch.Tensor.numpy and self.marks.of(args[0]) is True:
            raise MixedDevicesError("numpy() of a tensor on the device")
        if func is torch.Tensor.cpu:
            return self._moved(args[0], False, args[0].dtype)
        if func is torch.Tensor.to:
            return self._to(args[0], *args[1:], **options)
        if func is torch.Tensor.backward:
            return self._backward(args[0])
        if options.get("device") is not None and torch.device(options["device"]).type == "cuda":
            return self.marks.put(func(*args, **{**options, "device": "cpu"}), True)
        return func(*args, **options)

    def _to(self, tensor: torch.Tensor, *where: Any, copy: bool = False, **options: Any) -> torch.Tensor:
        device, dtype, *_ = torch._C._nn._parse_to(*where, **options)
        if device is not None and (device.type == "cuda") != (self.marks.of(tensor) is True):
            return self._moved(tensor, device.type == "cuda", dtype or tensor.dtype)
        return tensor.to(dtype or tensor.dtype, copy=copy)

    def _moved(self, tensor: torch.Tensor, place: bool, dtype: torch.dtype) -> torch.Tensor:
        if (self.marks.of(tensor) is True) == place:
            return tensor
        moved: torch.Tensor = _Move.apply(tensor, self.marks, place, dtype)
        return moved

    def _backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass in this mode, so that its Python code is intercepted too."""
        with self:
            torch.autograd.graph._engine_run_backward(
                (loss,),
                (torch.ones_like(loss),),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )


@contextmanager
def pretended_gpu() -> Iterator[_Operations]:
    """Let `compute.profile: gpu` use the simulated device within the context. Yields the counter of
    operations on it."""
    import oat.assemble.models

    device_of = oat.assemble.models.device_of
    synchronize, set_device = torch.cuda.synchronize, torch.cuda.set_device
    marks = _Marks()
    operations = _Operations(marks)
    oat.assemble.models.device_of = lambda profile: DEVICE if profile == "gpu" else device_of(profile)
    torch.cuda.synchronize = torch.cuda.set_device = lambda device=None: None
    try:
        with _Functions(marks), operations:
            yield operations
    finally:
        oat.assemble.models.device_of = device_of
        torch.cuda.synchronize, torch.cuda.set_device = synchronize, set_device
