"""Branches: further responses that go on from within a sampled response, at the ends of its steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from oat.text.renderer import Renderer
from oat.types import Branching, Completion, Group, KeptSets, Segment, Trajectory


@dataclass(frozen=True, eq=False)
class State:
    """A place from which branches are sampled.

    Attributes:
        group: index of the group.
        sample: index, in the group, of the first response that passes through the state.
        size: number of tokens of this response before the state; at least 1.
    """

    group: int
    sample: int
    size: int


def states_of(groups: Sequence[Group], branching: Branching, renderer: Renderer) -> list[State]:
    """Return the states from which branches are sampled, group after group, in the order of responses and of
    tokens. A state that several responses of a group share is returned once."""
    found = []
    for number, group in enumerate(groups):
        known: set[bytes] = set()
        for sample, row in enumerate(group.trajectories):
            ids = row.completion
            for size in step_sizes(row, branching, renderer):
                if (start := ids[:size].tobytes()) not in known:
                    known.add(start)
                    found.append(State(number, sample, size))
    return found


def step_sizes(row: Trajectory, branching: Branching, renderer: Renderer) -> list[int]:
    """Return the number of tokens of a response before the beginning of each of its steps but the first,
    ascending.

    A step begins with the first token after the one that completes a delimiter. A token that has the end of a
    delimiter and more belongs to the step before. Steps beyond `most_steps` belong to the last one.
    """
    ends = delimiter_ends(row.text, branching.delimiter)
    if not ends:
        return []
    text_ends = renderer.text_ends(row.completion, row.segments[0].ids)
    sizes = dict.fromkeys((np.searchsorted(text_ends, ends) + 1).tolist())
    is_inner = [size for size in sizes if text_ends[size - 1] < len(row.text)]
    return is_inner[: branching.most_steps - 1]


def delimiter_ends(text: str, delimiter: str) -> list[int]:
    """Return the number of characters before each step of a text but the first, ascending. No step is blank:
    delimiters with nothing but white space before them belong to the step before or, at the beginning, to the
    first step."""
    ends: list[int] = []
    start = 0
    while (place := text.find(delimiter, start)) >= 0:
        is_blank = not text[start:place].strip()
        start = place + len(delimiter)
        if not is_blank:
            ends.append(start)
        elif ends:
            ends[-1] = start
    return [end for end in ends if text[end:].replace(delimiter, "").strip()]


def branch(parent: Trajectory, size: int, completion: Completion, renderer: Renderer) -> Trajectory:
    """Return the trajectory of a branch. Its response is the first `size` tokens of the parent's, which may
    not be trained, followed by the completion."""
    prompt, begun = parent.segments
    new = len(completion.ids)

    def joined(name: str, rest: np.ndarray) -> np.ndarray:
        return np.concatenate([getattr(begun, name)[:size], rest])

    ids = joined("ids", completion.ids)
    response = Segment(
        "model",
        ids,
        mask=np.arange(size + new) >= size,
        versions=joined("versions", np.full(new, completion.version, dtype=np.int32)),
        raw_logps=joined("raw_logps", completion.raw_logps),
        sampled_logps=joined("sampled_logps", completion.sampled_logps),
        kept=_joined_sets(begun.kept, size, completion.kept),
        text_ends=None if begun.text_ends is None else renderer.text_ends(ids, prompt.ids),
    )
    return replace(
        parent,
        segments=(prompt, response),
        finish_reason=completion.finish_reason,
        text=renderer.text(ids, prompt.ids),
    )


def _joined_sets(begun: KeptSets | None, size: int, rest: KeptSets | None) -> KeptSets | None:
    if begun is None or rest is None:
        return None
    cut = begun.offsets[size]
    return KeptSets(
        np.concatenate([begun.ids[:cut], rest.ids]),
        np.concatenate([begun.offsets[: size + 1], cut + rest.offsets[1:]]),
    )
