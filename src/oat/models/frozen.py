"""The tensors of a model that are not trained (`model.frozen`), by name.

A name may have `*`, which stands for any characters. A tensor with several names, such as tied embeddings, is
frozen if one of its names matches.
"""

import json
import zlib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch

from oat.errors import ConfigError, did_you_mean
from oat.models.causal_lm import CausalLM

EVERY = "*"


def freeze(lm: CausalLM, patterns: Sequence[str]) -> None:
    """Make the tensors that match a pattern frozen: `lm.trainable` leaves them out.

    Raises:
        ConfigError: a pattern matches no tensor, or all tensors are frozen.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in lm.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    every = [name for found in names.values() for name in found]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in every):
            raise ConfigError(
                f"model.frozen: a {lm.model_type} has no tensor {pattern!r}; {did_you_mean(pattern, every)}"
            )
    # the first name is the one under which a tied tensor stands in checkpoints
    frozen = [
        found[0]
        for found in names.values()
        if any(fnmatchcase(name, pattern) for name in found for pattern in patterns)
    ]
    if len(frozen) == len(names):
        raise ConfigError(
            "model.frozen: it leaves no tensor of the model that learns; leave some out, or set model.lora, "
            "which trains an adapter beside frozen weights"
        )
    lm.frozen = frozenset(frozen)


def frozen_checksum(module: torch.nn.Module, moving: Iterable[torch.Tensor]) -> int:
    """Return a checksum of all tensors of a module except those in `moving`. It identifies the base model of
    an adapter, and the reference of a run."""
    moves = set(map(id, moving))
    sums = [
        (name, zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data))
        for name, tensor in sorted(module.state_dict(keep_vars=True).items())
        if id(tensor) not in moves
    ]
    return zlib.crc32(json.dumps(sums).encode())


def frozen_in(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of a module that need no gradient. Instead of all names within a
    part of the module, return one pattern."""
    module = getattr(module, "_orig_mod", module)  # which torch.compile wraps
    return tuple(_patterns(module, "", set())) if any(True for _ in module.parameters()) else ()


def _patterns(module: torch.nn.Module, prefix: str, seen: set[int]) -> list[str]:
    """Return the patterns of a part of a module.

    Args:
        prefix: the part's name, with a dot at its end; "" for the whole module.
        seen: addresses of the parameters that parts before this one have.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if len(parameters) > 1 and not any(parameter.requires_grad for parameter in parameters.values()):
        seen |= {id(parameter) for parameter in parameters.values()}
        return [f"{prefix}{EVERY}"]
    found = []
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.requires_grad and id(parameter) not in seen:
            found.append(f"{prefix}{name}")
        seen.add(id(parameter))
    for name, part in module.named_children():
        found += _patterns(part, f"{prefix}{name}.", seen)
    return found


def counted(lm: CausalLM) -> str:
    """Return, for people, how many tensors of a model are frozen; empty if none is."""
    if not lm.frozen:
        return ""
    sizes = {name: parameter.numel() for name, parameter in lm.module.named_parameters()}
    numbers = sum(sizes[name] for name in lm.frozen) / 1e6, sum(sizes.values()) / 1e6
    return (
        f"{len(lm.frozen)} of {len(sizes)} tensors, {numbers[0]:.3g} of {numbers[1]:.3g} million parameters"
    )
