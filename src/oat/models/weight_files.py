"""Safetensors files: which of them a model has, and their headers, which say the names and the shapes of the
tensors.

Which tensor of a model's files fills which tensor of the module.

Transformers renames tensors of files: it adds or removes the prefix of the backbone, brings old names up to
date, and puts the experts of a layer together. So two tensors of different names may fill the same place, and
transformers then takes one of them without a word. Here they are found by transformers' own rules.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from oat.errors import ModelError, warn
from oat.files import absolute, parse_json
from oat.models.beside import ADAPTER
from oat.models.ensemble import WEIGHTS as ENSEMBLE_WEIGHTS

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of numbers by their names in safetensors. Weights of other types are quantised."""
_PATTERNS = (
    "*.safetensors",
    "*.gguf",
    "pytorch_model*.bin",
    "value_head*.bin",
    "tf_model*.h5",
    "flax_model*.msgpack",
    "rust_model*.ot",
    "consolidated*.pth",
)
"""Names of files of weights."""
_FLOATS = set(_DTYPES.values())
_LARGEST_HEADER = 10**8
"""Largest number of bytes of a header that the format allows."""


def described(path: str) -> dict[str, Tensor]:
    """Return the tensors in the safetensors files of a directory, by name. They are on `meta`: only their
    shapes are set, and only the headers of the files are read. A warning names weights of the folder that are
    not the model's.

    Raises:
        ModelError: there are no such files, or one of them is damaged; it is not clear which files are meant;
            or weights are quantised.
    """
    folder = absolute(path)
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    file = single
    found = dict[str, Tensor]()
    apart = next(folder.glob("shard-*-model-*-of-*.safetensors"), None)
    if apart is not None:  # transformers would read these, and not the others
        raise ModelError(
            f"{path} holds a model in the parts of several processes ({apart.name}), which are not read; "
            "give a folder with model.safetensors"
        )
    try:
        names = [single.name]
        others = _others(folder)
        if not single.exists() and not index.exists():
            found_too = f", and {_listed(others)} is not read" if others else ""
            raise ValueError(f"it is not there{found_too}")
        if index.exists():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            _refuse_places(path, names, has_single=single.exists())
        for file in (folder / name for name in names):
            tensors = _tensors(file)
            _refuse_tensors(path, file.name, tensors, found)
            found |= tensors
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(
            f"the weights of {path} cannot be read ({file.name}: {reason}); give safetensors files as "
            "`save_pretrained` writes them"
        ) from error
    unread = [name for name in others if name not in names]
    if unread:
        warn(
            f"{path} holds more weights than those of the model ({names[0]}), which are not read: "
            f"{_listed(unread)}"
        )
    return found


def _others(folder: Path) -> list[str]:
    """Return the names of all files of weights in a folder, also those that other programs read. The weights
    of an ensemble, and of an adapter with its description, have loaders of their own."""
    own = {ENSEMBLE_WEIGHTS, *(("adapter_model.safetensors",) if (folder / ADAPTER).is_file() else ())}
    return sorted(
        {file.name for pattern in _PATTERNS for file in folder.glob(pattern) if file.is_file()} - own
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _refuse_places(path: str, names: list[str], *, has_single: bool) -> None:
    """Refuse an index that names files outside of the model's folder, or other files than a single one that
    stands there too.

    Raises:
        ModelError: it does.
    """
    outside = next((name for name in names if Path(name).name != name), None)
    if outside is not None:
        raise ModelError(
            f"the model.safetensors.index.json of {path} names {outside!r}, which is not in this folder; "
            "give a folder with all of the model's files"
        )
    if has_single and names != ["model.safetensors"]:
        raise ModelError(
            f"{path} holds a model.safetensors, and a model.safetensors.index.json that names other files "
            f"({names[0]}): nobody can tell which of them is the model; remove the others"
        )


def _refuse_tensors(path: str, name: str, new: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Refuse a file that has tensors of an earlier file again, or quantised weights.

    Raises:
        ModelError: it has.
    """
    again = sorted(new.keys() & before.keys())
    if again:
        raise ModelError(
            f"the files of {path} have `{again[0]}` twice, the second time in {name}; give the files that "
            "belong together"
        )
    packed = [
        tensor
        for tensor, value in new.items()
        if tensor.endswith((".weight", ".bias")) and value.dtype not in _FLOATS
    ]
    if packed:
        raise ModelError(
            f"the weights of {path} are quantised (`{packed[0]}` in {name} is {new[packed[0]].dtype}); give "
            "the model with unquantised weights"
        )


def are_equal(path: str, one: str, other: str) -> bool:
    """Return True if two tensors of a model's files have equal values, or if one of them is not there."""
    held = tensors_of(cached_files(path))
    if one not in held or other not in held:
        return True
    return equal_tensors((held[one][0], one), (held[other][0], other))


def equal_tensors(one: tuple[Path, str], other: tuple[Path, str]) -> bool:
    """Return True if two tensors, given by file and name, have the same shape and equal values."""
    values = []
    with unset_fake_temporarily(), torch.device("cpu"):
        for place, name in (one, other):
            with safe_open(place, "pt") as file:
                values.append(file.get_tensor(name))
        first, second = values
        wide = torch.promote_types(first.dtype, second.dtype)
        return torch.equal(first.to(wide), second.to(wide))


def cached_files(path: str) -> list[Path]:
    """Return the safetensors files of a model in a directory, or of a hub model in the local cache. If there
    are none, or one of several is missing, return an empty list."""

    def find(name: str) -> Path | None:
        found = absolute(path) / name if absolute(path).is_dir() else try_to_load_from_cache(path, name)
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
    return {
        key: torch.empty(tensor["shape"], dtype=_DTYPES.get(tensor["dtype"], torch.uint8), device="meta")
        for key, tensor in header.items()
    }


class Source(NamedTuple):
    """A tensor of the files that fills a tensor of the module, alone or as one piece of it.

    Attributes:
        name: its name in the files.
        converter: number of the rule that puts it together with others; -1: it fills the place alone.
        piece: which piece of the place it is; empty for the whole.
    """

    name: str
    converter: int
    piece: str


def refuse_two_sources(module: Any, path: str) -> None:
    """Refuse files in which two tensors of different values fill the same tensor of a module.

    Args:
        module: the module that was made from the files; it may be without values.
        path: a directory, or a hub model in the local cache.

    Raises:
        ModelError: there are such tensors.
    """
    places: dict[str, list[Source]] = {}
    for place, source in _sources(module, tensors_of(cached_files(path))):
        places.setdefault(place, []).append(source)
    wrong = [
        (place, pair) for place, found in places.items() for pair in _rivals(found) if not _agree(path, *pair)
    ]
    if wrong:
        place, (one, other) = wrong[0]
        raise ModelError(
            f"the files of {path} have two tensors for `{place}`, `{one.name}` and `{other.name}`, which "
            f"differ, and so for {len({place for place, _ in wrong})} tensors of the model: nobody can tell "
            "which are meant; remove those that do not belong to it"
        )


def _sources(module: Any, names: Iterable[str]) -> Iterator[tuple[str, Source]]:
    """Yield the name of a tensor of the module, and a tensor of the files that fills it."""
    rules = get_model_conversion_mapping(module)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    number_of = {
        pattern: number for number, rule in enumerate(converters) for pattern in rule.source_patterns
    }
    own, prefix = module.state_dict(), module.base_model_prefix
    for name in sorted(names, key=dot_natural_key):  # some rules depend on the order
        place, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if place not in own and name in own:
            place, pattern = rename_source_key(name, [], [], prefix, own)
        if place not in own:
            continue
        if pattern is None:
            yield place, Source(name, -1, "")
            continue
        rule = converters[number_of[pattern]]
        piece = rename_source_key(name, renamings, [])[0].removeprefix(f"{prefix}.")
        first, *others = rule.target_patterns
        for other in {place, *(place.replace(first, other) for other in others)}:
            yield other, Source(name, number_of[pattern], piece)


def _rivals(sources: list[Source]) -> Iterator[tuple[Source, Source]]:
    """Yield pairs of sources of one place of which only one can be used."""
    for number, one in enumerate(sources):
        for other in sources[:number]:
            if one.converter != other.converter or one.piece == other.piece:
                yield other, one


def _agree(path: str, one: Source, other: Source) -> bool:
    return one.converter == other.converter and are_equal(path, one.name, other.name)
