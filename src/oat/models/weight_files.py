"""Safetensors files: which of them a model has, and their headers, which say the names and the shapes of the
tensors."""

import json
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor

from oat.errors import ModelError
from oat.files import parse_json, seen

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
            found |= _tensors(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(
            f"the weights of {path} cannot be read ({file.name}: {reason}); give safetensors files as "
            "`save_pretrained` writes them"
        ) from error
    return found


def cached_files(path: str) -> list[Path]:
    """Return the safetensors files of a model in a directory, or of a hub model in the local cache. If there
    are none, or one of several is missing, return an empty list."""

    def find(name: str) -> Path | None:
        found = seen(path) / name if seen(path).is_dir() else try_to_load_from_cache(path, name)
        return Path(found) if isinstance(found, str | Path) and Path(found).is_file() else None

    single = find("model.safetensors")
    index = find("model.safetensors.index.json")
    if single is not None:
        return [single]
    if index is None:
        return []
    weight_map = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
    files = [find(name) for name in sorted(set(weight_map.values()))]
    return [file for file in files if file is not None] if None not in files else []


def tensors_of(files: list[Path]) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return, for each tensor of sound safetensors files, its file and its shape."""
    return {name: (file, tuple(t.shape)) for file in files for name, t in _tensors(file).items()}


def _tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file on `meta`.

    Raises:
        OSError, ValueError, KeyError, TypeError: the file cannot be read or is damaged.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(min(size, _LARGEST_HEADER)))
    header.pop("__metadata__", None)
    end = 8 + size + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if file.stat().st_size != end:
        raise ValueError(f"it has {file.stat().st_size} bytes, and its head says {end}")
    return {key: torch.empty(tensor["shape"], device="meta") for key, tensor in header.items()}
