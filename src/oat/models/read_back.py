"""Comparison of an exported model, as transformers reads it back, with the model that was to be written.

`facts` notes what is to be written: name, shape, type and checksum of every tensor, and the results of one
pass over a few fixed ids. Then the caller writes the model and frees it, so only one model is in memory at a
time. `compare` reads the files back. Both passes use our matrix products, so only what differs in weights or
configuration makes them differ.

A tensor that reads back differently is looked up in the files, under its own name and the names that share
its memory. If it is right there, transformers reads it wrongly, and the export is right. (The `Youtu` of
transformers 5.23 sets the row of the padding id to 0.) If it is not, it is lost.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open

from oat.errors import described
from oat.models.linear import use_fast_matmul

_IDS = 16
_MOST_GAP, _MOST_GAP_IN_HALF = 1e-3, 0.05
"""The largest difference of results that counts as rounding, in float32 and in 16-bit types."""
_ROOM = 1.1
"""The memory that reading takes, as a multiple of the bytes of the tensors."""


class Print(NamedTuple):
    """What is compared of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sum: int


@dataclass(frozen=True)
class Facts:
    """What is compared of a model.

    Attributes:
        prints: by the tensors' names.
        aliases: for each name, the names of the tensors in the same memory, itself included.
        results: (T, V) log-probabilities, or (1, L) scores, in float32; None: there was no pass.
        no_pass: why there was none; empty otherwise.
        bytes: bytes of the model.
        most_gap: the largest difference of results that counts as rounding.
    """

    prints: dict[str, Print]
    aliases: dict[str, list[str]]
    results: torch.Tensor | None
    no_pass: str
    bytes: int
    most_gap: float


@dataclass(frozen=True)
class Compared:
    """The result of a comparison.

    Attributes:
        count: number of tensors that were compared.
        total: number of tensors of the model.
        lost: what is wrong with tensors that the files do not hold as they were; empty: nothing.
        misread: by name, the largest difference of elements of a tensor that transformers reads otherwise
            than the files hold it.
        gap: largest difference of the results of the passes; None: they were not compared.
        no_pass: why they were not; empty otherwise.
        most_gap: see `Facts`.
    """

    count: int
    total: int
    lost: list[str] = field(default_factory=list)
    misread: dict[str, float] = field(default_factory=dict)
    gap: float | None = None
    no_pass: str = ""
    most_gap: float = _MOST_GAP

    @property
    def is_other(self) -> bool:
        """True if the passes differ by more than rounding."""
        return self.gap is not None and not self.gap <= self.most_gap


def facts(module: Any, tensors: Mapping[str, torch.Tensor] | None = None, *, no_pass: str = "") -> Facts:
    """Note what is compared of a model in evaluation mode.

    Args:
        module: a module of transformers with logits.
        tensors: the tensors that are written; None: those of its state.
        no_pass: a reason for which there shall be no pass.
    """
    state = module.state_dict()
    tensors = state if tensors is None else tensors
    places: dict[tuple[int, int], list[str]] = {}
    for name, tensor in tensors.items():
        places.setdefault((tensor.data_ptr(), tensor.numel()), []).append(name)
    results = None
    if not no_pass:
        results, no_pass = _pass(module)
    is_half = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in state.values())
    return Facts(
        {name: _print(tensor) for name, tensor in tensors.items()},
        {name: names for names in places.values() for name in names},
        results,
        no_pass,
        sum(tensor.nbytes for tensor in state.values()),
        _MOST_GAP_IN_HALF if is_half else _MOST_GAP,
    )


def compare(
    before: Facts,
    files: Sequence[Path],
    load: Callable[[], tuple[Any, Mapping[str, torch.Tensor]]] | None,
    free_bytes: int | None,
) -> Compared:
    """Compare a model that was written with what was to be written. If it does not fit into memory, compare
    only the tensors that have the same names in the files.

    Args:
        files: the safetensors files that were written.
        load: function that reads the model, and returns its module and its tensors by name; None: it is not
            read.
        free_bytes: memory that is free; None: unknown.

    Raises:
        Exception: `load` raised it, or a file cannot be read.
    """
    needed = int(_ROOM * before.bytes)
    if load is not None and free_bytes is not None and free_bytes < needed:
        no_pass = f"reading it takes {needed:,} bytes of memory, and {free_bytes:,} are free"
        return _of_files(before, files, no_pass)
    if load is None:
        return _of_files(before, files, before.no_pass)
    module, tensors = load()
    found = {name: _print(tensor) for name, tensor in tensors.items()}
    differ = [
        name for name in sorted({**before.prints, **found}) if before.prints.get(name) != found.get(name)
    ]
    lost, misread = _judged(before, files, differ, tensors)
    gap, no_pass = None, before.no_pass
    if before.results is not None:
        use_fast_matmul(module)
        results, no_pass = _pass(module.eval())
        gap = None if results is None else _gap(before.results, results)
    return Compared(len(found), len(before.prints), lost, misread, gap, no_pass, before.most_gap)


def _of_files(before: Facts, files: Sequence[Path], no_pass: str) -> Compared:
    held = {name: _print(tensor) for name, tensor in _tensors(files)}
    known = [name for name in before.prints if not held.keys().isdisjoint(before.aliases[name])]
    lost = [
        f"{name} is another one in the files"
        for name in known
        if all(held.get(alias, before.prints[name]) != before.prints[name] for alias in before.aliases[name])
    ]
    return Compared(len(known), len(before.prints), lost, no_pass=no_pass, most_gap=before.most_gap)


def _judged(
    before: Facts, files: Sequence[Path], differ: Sequence[str], read: Mapping[str, torch.Tensor]
) -> tuple[list[str], dict[str, float]]:
    """Return what is lost of the tensors that differ, and which of them transformers reads wrongly (see
    `Compared`)."""
    wanted = {alias for name in differ for alias in before.aliases.get(name, ())}
    right = {
        name: tensor
        for name, tensor in _tensors(files, wanted)
        if name in before.prints and _print(tensor) == before.prints[name]
    }
    lost, misread = [], {}
    for name in differ:
        held = [right[alias] for alias in before.aliases.get(name, ()) if alias in right]
        if name not in before.prints:
            lost.append(f"{name} is not of the model")
        elif name not in read:
            lost.append(f"{name} is missing")
        elif not held or read[name].shape != held[0].shape:
            lost.append(f"{name} is another one")
        else:
            misread[name] = float((read[name].float() - held[0].float()).abs().max())
    return lost, misread


def _tensors(files: Sequence[Path], names: set[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                if names is None or name in names:
                    yield name, file.get_tensor(name)


def _print(tensor: torch.Tensor) -> Print:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return Print(tuple(tensor.shape), tensor.dtype, zlib.crc32(data))


def _pass(module: Any) -> tuple[torch.Tensor | None, str]:
    """Return the results of a pass, and why there are none."""
    rows = len(module.get_input_embeddings().weight)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, rows, (1, _IDS)))
    try:
        with torch.no_grad():
            logits = module(input_ids=ids.to(next(module.parameters()).device)).logits[0].float().cpu()
    except Exception as error:  # a model may want more than ids
        return None, described(error)
    return (logits.log_softmax(-1) if logits.ndim == 2 and len(logits) == _IDS else logits), ""


def _gap(first: torch.Tensor, second: torch.Tensor) -> float:
    is_same = (first == second) | (first.isnan() & second.isnan())
    return float(torch.where(is_same, 0.0, (first - second).abs()).max())
