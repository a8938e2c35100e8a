"""Descriptions of safetensors files, read from their headers."""

import json

import torch
from torch import Tensor

from oat.errors import ModelError
from oat.files import seen

_LARGEST_HEADER = 10**8
"""Largest number of bytes of a header that the format allows."""


def described(path: str) -> dict[str, Tensor]:
    """Return the tensors in the safetensors files of a directory, by name. They are on `meta`: only their
    shapes are set, and only the headers of the files are read.

    Raises:
        ModelError: there are no such files, or one of them is damaged.
    """
    folder = seen(path)
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    file = single
    found = dict[str, Tensor]()
    try:
        names = [single.name]
        if index.exists() and not single.exists():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        for file in (folder / name for name in names):
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(size, _LARGEST_HEADER)))
            header.pop("__metadata__", None)
            end = 8 + size + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
            if file.stat().st_size != end:
                raise ValueError(f"it has {file.stat().st_size} bytes, and its head says {end}")
            found |= {key: torch.empty(tensor["shape"], device="meta") for key, tensor in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(
            f"the weights of {path} cannot be read ({file.name}: {reason}); give safetensors files as "
            "`save_pretrained` writes them"
        ) from error
    return found
