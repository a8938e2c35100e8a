"""The identity of a model, its tokenizer and its adapter: the content of their files that decides what is
computed.

If a program saves the same content again, the identity stays equal. If a field of the content changes, the
identity changes. Weights are identified by samples, read as float32. If no sample changes, the identity stays
equal.

| section | content |
| --- | --- |
| `config.json` | each field that affects a computation, as transformers reads it, without dropout |
| `generation_config.json` | the ids that end a text; without such a file, those of `config.json` |
| `tokenizer.json` | vocabulary, merges, added tokens and every stage of the tokenizer, as loaded |
| `tokenizer_config.json` | the special tokens |
| `weights` | for each set of tensors whose names differ only in numbers: a checksum of samples |
| `adapter_config.json` | rank, scale and layers of an adapter |

A short value is kept as it is. A long value is kept as its hash, with its number of entries or characters. In
the section `weights`, `*` replaces the numbers in a name.
"""

import functools
import hashlib
import importlib.metadata
import json
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oat.errors import OatWarning
from oat.files import absolute, parse_json
from oat.models.adapter_files import WEIGHTS, described_adapter
from oat.models.beside import is_adapter_directory
from oat.models.loading import load_config, load_tokenizer
from oat.models.weight_files import cached_files, equal_tensors, tensors_of

Identity = dict[str, dict[str, Any]]
"""An identity: a dict of sections. Each section is a dict of values by field."""

_IRRELEVANT = {
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "initializer_range",
    "id2label",
    "label2id",
    "problem_type",
    "tokenizer_class",
    "bos_token_id",
    "eos_token_id",
}
"""Fields of a configuration that its identity leaves out. Most of them affect no computation. The ids that
end a text are in another section of the identity, `generation_config.json`."""
_ROPE = re.compile(r"^rope_(parameters|scaling)\.")
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens", "model")
_DROPOUT = "model.dropout"
"""A field of a tokenizer that does not count: it is switched off, and earlier versions recorded it."""
_MOST_ENTRIES = 64
"""A dict with more entries than this is not kept field by field, but as its number of entries and its
hash."""
_MOST_CHARACTERS = 200
"""Largest number of characters of a value, as JSON, that is kept as it is."""
_MOST_LINES = 5
"""Largest number of differences that a message lists."""
_SHOWN = 80
"""Largest number of characters of a value that a message shows."""
_SAMPLE = 1024
"""Number of elements that are sampled at each of three places of a tensor: its beginning, its middle and its
end."""
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def model_identity(config: Any) -> Identity:
    """Return the identity of a model without its weights: the fields of its configuration that affect a
    computation.

    Args:
        config: the model's configuration, an object of transformers.
    """
    fields = {_ROPE.sub("", name): value for name, value in _flat(_plain(config.to_dict()))}
    return {
        "config.json": {
            name: value
            for name, value in sorted(fields.items())
            if not _is_irrelevant(name.split("."), value)
        }
    }


def tokenizer_identity(tokenizer: Any) -> Identity:
    """Return the identity of a tokenizer. If the tokenizer has no backend of the library `tokenizers`, the
    identity has only its vocabulary and its special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts: dict[str, Any] = (
        json.loads(backend.to_str()) if backend is not None else {"model": {"vocab": tokenizer.get_vocab()}}
    )
    parts["added_tokens"] = {str(token.pop("content")): token for token in parts.get("added_tokens", [])}
    special = {
        **tokenizer.special_tokens_map,
        "split_special_tokens": getattr(tokenizer, "split_special_tokens", False),
    }
    return {
        "tokenizer.json": dict(_flat({name: parts[name] for name in _PARTS if name in parts})),
        "tokenizer_config.json": dict(_flat(_plain(special))),
    }


def weights_identity(path: str) -> Identity:
    """Return the identity of the weights of a model or an adapter in a directory, or of a hub model in the
    local cache. The identity is empty if there are no safetensors files, or if one of several is missing."""
    sums: dict[str, int] = {}
    for name, found in sorted(found for file in _weight_files(path) for found in _tensors(file)):
        group = re.sub(r"\d+", "*", name)
        sums[group] = zlib.crc32(f"{name} {found}".encode(), sums.get(group, 0))
    return {"weights": dict(sorted(sums.items()))} if sums else {}


def adapter_identity(path: str) -> Identity:
    """Return the identity of the adapter in a directory, from its configuration; weights are not read.

    Raises:
        ModelError: an error of `described_adapter`.
    """
    config, _ = described_adapter(path)
    return {
        "adapter_config.json": {"rank": config.rank, "alpha": config.alpha, "targets": _plain(config.targets)}
    }


def readers() -> dict[str, str]:
    """Return the versions of the libraries that read configurations and tokenizers."""
    return {name: _version(name) for name in ("transformers", "tokenizers")}


@functools.cache
def _version(name: str) -> str:
    return importlib.metadata.version(name)


def differences(
    before: Mapping[str, Mapping[str, Any]],
    now: Mapping[str, Mapping[str, Any]],
    *,
    same_readers: bool = True,
) -> list[str]:
    """Describe the differences of two identities: one line for each field that differs. Only sections that
    both identities have are compared.

    All differences of the weights make one line. Only tensors that both identities have are compared, since a
    program may leave out tensors that no model reads. If the identities have no tensor in common, this is a
    difference.

    Args:
        same_readers: True: both identities were read with the same versions of the libraries. False: a field
            that only one identity has is ignored, since one of the versions may not have the field.
    """
    lines = []
    for section in [name for name in before if name in now]:
        old, new = before[section], now[section]
        is_sampled = section == "weights"
        names = old.keys() & new.keys() if is_sampled or not same_readers else old.keys() | new.keys()
        names -= {_DROPOUT} if section == "tokenizer.json" else set()
        changed = [name for name in sorted(names) if old.get(name) != new.get(name)]
        if not is_sampled:
            lines += [f"{section}: {_change(old, new, name)}" for name in changed]
            continue
        changed = changed or ([] if names else ["every tensor"])
        if changed:
            lines.append(f"weights: {', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''} changed")
    return lines


def listed(lines: Sequence[str]) -> str:
    """Return lines of `differences` for a message, each on a line of its own. Many are counted."""
    more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "".join(f"\n  {line}" for line in [*lines[:_MOST_LINES], *more])


def are_same(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return True if two identities have the same sections and no differences."""
    return before.keys() == now.keys() and not differences(before, now)


def hold_same(first: str, second: str) -> bool:
    """Return True if two directories hold the same model and tokenizer: equal values of every tensor, equal
    ids that end a text, equal chat templates, and no other difference that affects what is computed. If one
    of the two cannot be read, return False."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OatWarning)  # who loads the model is told
            return _all_of(first) == _all_of(second) and _equal_tensors(first, second)
    except (OSError, ValueError, AttributeError):
        return False


def _all_of(path: str) -> list[Any]:
    tokenizer, ends = load_tokenizer(path), None
    settings = absolute(path) / "generation_config.json"
    if settings.exists():
        ends = parse_json(settings.read_text(encoding="utf-8")).get("eos_token_id")
    return [model_identity(load_config(path)), tokenizer_identity(tokenizer), tokenizer.chat_template, ends]


def _equal_tensors(first: str, second: str) -> bool:
    held = [tensors_of(cached_files(path)) for path in (first, second)]
    return held[0].keys() == held[1].keys() and all(
        equal_tensors((held[0][name][0], name), (held[1][name][0], name)) for name in held[0]
    )


def hash_of(text: str) -> str:
    """Return the first 16 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _is_irrelevant(name: Sequence[str], value: Any) -> bool:
    # `oat.models.loading` sets dropout to 0 in every model; a jitter of 0 is the default of most models
    is_noise = isinstance(value, float) and ("drop" in name[-1] or ("jitter" in name[-1] and not value))
    return is_noise or bool(_IRRELEVANT & set(name)) or name[-1].startswith("_")


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each leaf in a tree of dicts. A long value is replaced by its
    size and its hash."""
    for name, value in tree.items():
        if isinstance(value, dict) and 0 < len(value) <= _MOST_ENTRIES:
            yield from _flat(value, f"{prefix}{name}.")
        elif len(text := json.dumps(value, sort_keys=True)) > _MOST_CHARACTERS:
            is_tree = isinstance(value, list | dict)
            size = f"{len(value):,} entries" if is_tree else f"{len(text):,} characters"
            yield f"{prefix}{name}", f"{size}, {hash_of(text)}"
        else:
            yield f"{prefix}{name}", value


def _plain(value: Any) -> Any:
    """Convert a value to the types of JSON."""
    return json.loads(json.dumps(value, default=str))


def _change(old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> str:
    return "its text" if name == "text" else f"{name} was {_shown(old, name)} and is {_shown(new, name)}"


def _shown(fields: Mapping[str, Any], name: str) -> str:
    text = json.dumps(fields[name], ensure_ascii=False) if name in fields else "not there"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _weight_files(path: str) -> list[Path]:
    """Return the safetensors files of a model on this machine, or the weights file of an adapter. An
    adapter's file is returned even if it is missing."""
    return [absolute(path) / WEIGHTS] if is_adapter_directory(path) else cached_files(path)


def _tensors(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the name of each tensor of a file, and a checksum of the tensor's shape and samples. If the file
    is damaged, the iteration ends without an error; loading the model then raises one."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = parse_json(stream.read(size))
            header.pop("__metadata__", None)
            for name, tensor in sorted(header.items(), key=lambda entry: entry[1]["data_offsets"]):
                begin, end = tensor["data_offsets"]
                count = int(np.prod(tensor["shape"], dtype=np.int64))
                width = (end - begin) // max(1, count)
                total = zlib.crc32(str(tensor["shape"]).encode())
                for first in sorted({0, max(0, count // 2), max(0, count - _SAMPLE)}):
                    stream.seek(8 + size + begin + first * width)
                    sample = stream.read(min(_SAMPLE, count - first) * width)
                    total = zlib.crc32(_in_float32(sample, tensor["dtype"]), total)
                yield name, total
    except (OSError, ValueError, KeyError, TypeError):
        return


def _in_float32(data: bytes, kind: str) -> bytes:
    """Convert floating-point numbers to float32. A model then keeps its identity when it is saved in a wider
    type. Other numbers stay as they are.

    Args:
        data: the numbers' bytes, as in the file.
        kind: name of their type in safetensors.
    """
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).tobytes()
    return np.frombuffer(data, _FLOATS[kind]).astype("<f4").tobytes() if kind in _FLOATS else data
