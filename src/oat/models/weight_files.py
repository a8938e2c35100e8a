"""Safetensors files, by their heads."""

import json

import torch
from torch import Tensor

from oat.errors import ModelError
from oat.files import seen

_LARGEST_HEAD = 10**8
"""Bytes, as the format has it."""


def described(path: str) -> dict[str, Tensor]:
    """What the safetensors files of a directory hold, as tensors without memory; only the heads of the files
    are read.

    Raises:
        ModelError: there are none, or one is damaged.
    """
    folder = seen(path)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    file, found = single, dict[str, Tensor]()
    try:
        has_index = index.exists() and not single.exists()
        names = (
            sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if has_index
            else [single.name]
        )
        for file in (folder / name for name in names):
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                head = json.loads(stream.read(min(size, _LARGEST_HEAD)))
            head.pop("__metadata__", None)
            end = 8 + size + max((tensor["data_offsets"][1] for tensor in head.values()), default=0)
            if file.stat().st_size != end:
                raise ValueError(f"it has {file.stat().st_size} bytes, and its head says {end}")
            found |= {key: torch.empty(tensor["shape"], device="meta") for key, tensor in head.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(
            f"the weights of {path} cannot be read ({file.name}: {reason}); give safetensors files as "
            "`save_pretrained` writes them"
        ) from error
    return found
