"""Tensors of which this process has a shard (FSDP2), and all others."""

from collections.abc import Iterable

import torch


def is_shard(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a DTensor, of which each rank has a part."""
    return hasattr(tensor, "full_tensor")  # the import of its class takes long


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its elements. Of a shard, all ranks must ask for it, in the same order."""
    return tensor.full_tensor() if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor that this process has."""
    return tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def over_ranks(total: float, tensors: Iterable[torch.Tensor]) -> float:
    """Return the sum of a number over all ranks that have a part of these tensors; without shards, the number
    itself. All ranks must ask for it."""
    shards = [tensor for tensor in tensors if is_shard(tensor)]
    if not shards:
        return total
    import torch.distributed as dist

    summed = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(summed, group=shards[0].device_mesh.get_group())  # type: ignore[attr-defined]
    return float(summed)
