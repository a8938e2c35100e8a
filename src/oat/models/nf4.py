"""Frozen linear layers in four bits (QLoRA, arXiv:2305.14314, Section 3): NF4 in blocks of 64 weights, with
the blocks' scales in eight bits ("double quantisation"), 4.13 bits per weight.

bitsandbytes packs (quantises) and unpacks weights. The matrix product is ours. It unpacks the weights in the
precision of its input, and frees them after the product. The backward pass unpacks them again.

Departures:
1. The head and the embeddings stay unpacked, as in the paper's code. Layers whose class is a subclass of the
   linear layer stay unpacked too.
2. Weights are unpacked before every product, even if the input is a single row. A special kernel for decoding
   would round differently from learning.
3. The complete model is read and packed on the CPU before it moves to its device. The mean of the scales is
   rounded once (`math.fsum`). So packed weights have the same checksums on other machines, and with other
   numbers of threads. Exports and continued runs compare these checksums.

bitsandbytes' own layers are not used. They decode single rows by such a special kernel, and keep state that
our checks do not see. In our layers, packed weights and scales are parameters. So checksums, shared base
weights and the memory estimate include them.
"""

import logging
import math
import sys
from typing import Any

import torch
from torch import Tensor

from oat.errors import ConfigError
from oat.functional.products import linear
from oat.models.causal_lm import CausalLM, has_memory
from oat.models.linear import Linear

_BLOCK = 64
"""Number of weights that share a scale."""
_SCALES = 256
"""Number of blocks whose scales have one common scale, an entry of `scale_scales`."""


class Nf4Linear(torch.nn.Linear):
    """A linear layer whose weight is packed and frozen.

    Attributes:
        weight: (n / 2, 1) uint8, the n weights, two in each byte.
        scales: the scales of the blocks, in eight bits.
        scale_scales: the scales of `scales`.
        offset: the mean of the blocks' scales. It was subtracted from each scale before the scales were
            packed.
        code, scale_code: tables that map each code of `weight` and of `scales` to its value.
    """

    scales: torch.nn.Parameter
    scale_scales: torch.nn.Parameter
    offset: torch.nn.Parameter
    code: Tensor
    scale_code: Tensor

    def __init__(self, layer: torch.nn.Linear):
        torch.nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.dtype = layer.weight.dtype
        packed, codes = (
            _packed(layer.weight.detach()) if has_memory(layer.weight) else _outlined(layer.weight)
        )
        for name, tensor in packed.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.bias = layer.bias
        for name, tensor in codes.items():
            self.register_buffer(name, tensor, persistent=False)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the unpacked weight, (outputs, inputs), in `dtype`."""
        if not has_memory(self.scale_scales):
            return self.scale_scales.new_empty(self.out_features, self.in_features, dtype=dtype)
        functional = functional_of_bitsandbytes()
        of_scales = functional.QuantState(
            self.scale_scales, code=self.scale_code, blocksize=_SCALES, dtype=torch.float32
        )
        shape = torch.Size((self.out_features, self.in_features))
        options = {
            "shape": shape,
            "code": self.code,
            "blocksize": _BLOCK,
            "quant_type": "nf4",
            "dtype": dtype,
        }
        weight_OI: Tensor = functional.dequantize_4bit(
            self.weight, functional.QuantState(self.scales, offset=self.offset, state2=of_scales, **options)
        )
        return weight_OI

    def plain(self) -> Linear:
        """Return an ordinary layer with the unpacked weight."""
        with torch.device("meta"):
            layer = Linear(self.in_features, self.out_features, bias=False)
        layer.weight = torch.nn.Parameter(self.unpacked(self.dtype), requires_grad=False)
        layer.bias = self.bias
        return layer

    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        is_cast = device != "meta" and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_cast else input.dtype
        made: Tensor = _Product.apply(input.to(dtype), self)
        return made if self.bias is None else made + self.bias.to(dtype)


def _packed(weight_OI: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Pack a weight. The mean of the scales is made from their exact sum, so it does not depend on the number
    of threads.

    Returns:
        The packed weight with its scales, by name; and the tables that map each code to its value, by name.
    """
    functional = functional_of_bitsandbytes()
    packed, found = functional.quantize_4bit(
        weight_OI, blocksize=_BLOCK, compress_statistics=False, quant_type="nf4"
    )
    offset = found.absmax.new_tensor([math.fsum(found.absmax.tolist()) / found.absmax.numel()])
    scales, second = functional.quantize_blockwise(found.absmax - offset, blocksize=_SCALES)
    return {"weight": packed, "scales": scales, "scale_scales": second.absmax, "offset": offset}, {
        "code": found.code,
        "scale_code": second.code,
    }


def _outlined(weight_OI: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Do for a weight of an outline what `_packed` does for a loaded weight; the returned tensors have no
    memory."""
    functional_of_bitsandbytes()
    scales = -(-weight_OI.numel() // _BLOCK)
    shapes = {
        "weight": (-(-weight_OI.numel() // 2), 1),
        "scales": (scales,),
        "scale_scales": (-(-scales // _SCALES),),
        "offset": (1,),
    }
    dtypes = {"weight": torch.uint8, "scales": torch.uint8}
    parts = {
        name: weight_OI.new_empty(shape, dtype=dtypes.get(name, torch.float32))
        for name, shape in shapes.items()
    }
    return parts, {
        name: weight_OI.new_empty(size, dtype=torch.float32)
        for name, size in {"code": 16, "scale_code": 256}.items()
    }


class _Product(torch.autograd.Function):
    """Computes x @ weight.T. Only the layer, with its packed weight, is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.unpacked(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return linear(slope.contiguous(), ctx.layer.unpacked(slope.dtype).T), None


def quantize(lm: CausalLM, device: torch.device | str) -> None:
    """Pack the model's linear layers one after another, then move the model to `device`. The head stays
    unpacked, and so does every layer whose class is a subclass of `Linear`. Callers load the model on the
    CPU, so that packing gives the same numbers for an export, or for a run that continues on another device.

    Raises:
        ConfigError: bitsandbytes is not installed, or cannot pack weights on this machine; or the model has
            no linear layer besides its head.
    """
    head = lm.module.get_output_embeddings()
    places = [
        (parent, name) for parent, name in _places(lm.module, Linear) if getattr(parent, name) is not head
    ]
    if not places:
        raise ConfigError(
            f"model.quantize: a {lm.model_type} has no linear layer besides its head; leave it out"
        )
    try:
        for parent, name in places:
            setattr(parent, name, Nf4Linear(getattr(parent, name)))
        lm.module.to(device)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.quantize is nf4, and bitsandbytes cannot pack weights here ({reason}); leave it out"
        ) from error


def dequantize(lm: CausalLM) -> None:
    """Replace every packed layer by an ordinary layer."""
    for parent, name in _places(lm.module, Nf4Linear):
        setattr(parent, name, getattr(parent, name).plain())


def is_packed(lm: CausalLM) -> bool:
    """Return True if layers of a model are packed."""
    return bool(_places(lm.module, Nf4Linear))


def count(lm: CausalLM) -> dict[str, int]:
    """Return the number of weights in each of the model's parameters, by name. For a packed weight, the
    number before packing is returned; for its scales, 0."""
    packed = [module for module in lm.module.modules() if isinstance(module, Nf4Linear)]
    counts = {
        id(scale): 0 for module in packed for scale in (module.scales, module.scale_scales, module.offset)
    }
    counts |= {id(module.weight): module.in_features * module.out_features for module in packed}
    return {
        name: counts.get(id(parameter), parameter.numel()) for name, parameter in lm.module.named_parameters()
    }


def shapes(module: torch.nn.Module) -> dict[str, torch.Size]:
    """Return the shape of each tensor of a module's state, by name. A packed weight has its shape before
    packing, and its scales are left out."""
    found = {name: tensor.shape for name, tensor in module.state_dict().items()}
    for place, layer in module.named_modules():
        if isinstance(layer, Nf4Linear):
            for scale in ("scales", "scale_scales", "offset"):
                del found[f"{place}.{scale}"]
            found[f"{place}.weight"] = torch.Size((layer.out_features, layer.in_features))
    return found


def _places(module: torch.nn.Module, kind: type[torch.nn.Module]) -> list[tuple[torch.nn.Module, str]]:
    """Return the layers whose class is exactly `kind`: for each, its parent module and its name within the
    parent."""
    return [
        (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is kind
    ]


def functional_of_bitsandbytes() -> Any:
    """Import bitsandbytes and return its module `functional`.

    If the package `kernels` is installed, bitsandbytes' import fetches compiled code from the hub on some
    processors. So this function hides that package during the import.

    Raises:
        ConfigError: bitsandbytes is not installed, or cannot be imported.
    """
    if "bitsandbytes" not in sys.modules:
        fetcher = sys.modules.get("kernels")
        sys.modules["kernels"] = None  # type: ignore[assignment]
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        try:
            import bitsandbytes  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            sys.modules.pop("bitsandbytes", None)
            raise ConfigError(
                f"model.quantize needs bitsandbytes ({error}): pip install 'oat-align[quantize]', or leave "
                "it out"
            ) from None
        finally:
            del sys.modules["kernels"]
            if fetcher is not None:
                sys.modules["kernels"] = fetcher
    from bitsandbytes import functional

    return functional
