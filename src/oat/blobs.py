"""Encodes the trajectories of a round as bytes. All arrays of one kind are joined before they are encoded,
which is faster than encoding them one by one."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from oat import wire
from oat.errors import WireError
from oat.types import Group, KeptSets, Message, Prompt, Segment, Trajectory

_COLUMNS = {
    "ids": np.int32,
    "mask": np.bool_,
    "versions": np.int32,
    "raw_logps": np.float32,
    "sampled_logps": np.float32,
}
"""The arrays of a segment, with one value per token. All except `ids` may be missing."""
_KEPT, _TEXT_ENDS, _REWARD = (1 << bit for bit in range(len(_COLUMNS), len(_COLUMNS) + 3))
"""The bits for kept sets, `text_ends` and a reward of a segment. Old ledgers have only the first of them. The
bytes have no place for `text_ends`, or for rewards, if no segment of the round has any."""


def pack(groups: Sequence[Group], *, with_features: bool = False) -> bytes:
    """Encode the groups of a round.

    Args:
        with_features: True: encode `Trajectory.features` too.

    Raises:
        WireError: a value in a group cannot be encoded; see `oat.wire`.
    """
    prompts = [group.prompt for group in groups]
    trajectories = [t for group in groups for t in group.trajectories]
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    parts: tuple[list[np.ndarray], ...] = tuple([] for _ in _COLUMNS)
    there = [_sort(segment, parts) for segment in segments]
    kept = [segment.kept for segment in segments if segment.kept is not None]
    plain = {
        "prompts": [
            (p.row, p.occurrence, [m.parts for m in p.messages], p.reference, *[True] * p.is_chat)
            for p in prompts
        ],
        "groups": [len(group.trajectories) for group in groups],
        "trajectories": [
            (t.slot, t.finish_reason, t.text, t.temperature, t.reward, len(t.segments)) for t in trajectories
        ],
        "segments": [(s.author, len(s.ids), bits) for s, bits in zip(segments, there, strict=True)],
        "kept": [len(sets.ids) for sets in kept],
    }
    if any(bits & _REWARD for bits in there):
        plain["rewards"] = [segment.reward for segment in segments if segment.reward is not None]
    try:
        text = msgspec.msgpack.encode(plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(
            f"a round does not travel ({error}); send 64-bit numbers and Unicode strings"
        ) from error
    arrays = {
        name: _end_to_end(each, dtype) for (name, dtype), each in zip(_COLUMNS.items(), parts, strict=True)
    }
    if any(bits & _TEXT_ENDS for bits in there):
        ends = [segment.text_ends for segment in segments if segment.text_ends is not None]
        arrays["text_ends"] = _end_to_end(ends, np.int32)
    arrays["kept_ids"] = _end_to_end([sets.ids.astype(np.int32, copy=False) for sets in kept], np.int32)
    arrays["kept_offsets"] = _end_to_end(
        [sets.offsets.astype(np.int64, copy=False) for sets in kept], np.int64
    )
    features = {"features": [t.features for t in trajectories]} if with_features else {}
    columns = [prompt.columns for prompt in prompts]
    return wire.encode({"plain": text, "columns": columns, "arrays": arrays, **features})


def unpack(data: bytes) -> list[Group]:
    """Decode the groups of a round. The bytes come from `pack` or, in older ledgers, from `wire.encode`.

    Raises:
        WireError: the bytes come from neither function, or are damaged.
    """
    found = wire.decode(data)
    if isinstance(found, list):
        return found
    try:
        plain, arrays = msgspec.msgpack.decode(found["plain"]), found["arrays"]
        segments = _segments(plain, arrays)
        features = found.get("features", [None] * len(plain["trajectories"]))
        trajectories = iter(
            [
                Trajectory(slot, _next(segments, n), why, text, temp, r, own)
                for (slot, why, text, temp, r, n), own in zip(plain["trajectories"], features, strict=True)
            ]
        )
        prompts = [
            Prompt(
                row,
                occurrence,
                tuple(Message(*message) for message in messages),
                reference,
                columns,
                *is_chat,
            )
            for (row, occurrence, messages, reference, *is_chat), columns in zip(
                plain["prompts"], found["columns"], strict=True
            )
        ]
        return [
            Group(prompt, _next(trajectories, number))
            for prompt, number in zip(prompts, plain["groups"], strict=True)
        ]
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise WireError(
            f"these bytes are no round of trajectories ({error}); they were cut or made by another program"
        ) from error


def _sort(s: Segment, parts: tuple[list[np.ndarray], ...]) -> int:
    """Append each array of a segment to its list in `parts`. The lists are in the order of `_COLUMNS`.

    Returns:
        What the segment has, as bits: bit i for array i of `_COLUMNS`, then `_KEPT`, `_TEXT_ENDS` and
        `_REWARD`.
    """
    bits = 0 if s.kept is None else _KEPT
    bits |= 0 if s.text_ends is None else _TEXT_ENDS
    bits |= 0 if s.reward is None else _REWARD
    for bit, part in enumerate((s.ids, s.mask, s.versions, s.raw_logps, s.sampled_logps)):
        if part is not None:
            parts[bit].append(part)
            bits |= 1 << bit
    return bits


def _end_to_end(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    try:
        whole = np.concatenate(parts, dtype=dtype, casting="no") if parts else np.zeros(0, dtype)
    except (TypeError, ValueError):
        whole = None
    if whole is None or whole.ndim != 1:
        raise WireError(
            f"a round has an array that is not flat {np.dtype(dtype).name}; make it as oat.types says"
        )
    return whole


def _segments(plain: dict[str, Any], arrays: dict[str, np.ndarray]) -> Iterator[Segment]:
    kept_sizes, rewards = iter(plain["kept"]), iter(plain.get("rewards", ()))
    ends = dict.fromkeys([*arrays], 0)

    def cut(name: str, size: int) -> np.ndarray:
        ends[name] += size
        if ends[name] > len(arrays[name]):
            raise ValueError(f"{name} has {len(arrays[name])} values")
        return arrays[name][ends[name] - size : ends[name]]

    for author, size, there in plain["segments"]:
        values: dict[str, Any] = {
            name: cut(name, size) if there & 1 << bit else None for bit, name in enumerate(_COLUMNS)
        }
        kept = (
            KeptSets(cut("kept_ids", next(kept_sizes)), cut("kept_offsets", size + 1))
            if there & _KEPT
            else None
        )
        text_ends = cut("text_ends", size) if there & _TEXT_ENDS else None
        reward = _next(rewards, 1)[0] if there & _REWARD else None
        yield Segment(author, kept=kept, text_ends=text_ends, reward=reward, **values)


def _next(values: Iterator[Any], number: int) -> tuple[Any, ...]:
    found = tuple(islice(values, number))
    if len(found) != number:
        raise ValueError("fewer than there should be")
    return found
