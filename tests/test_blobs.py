"""The bytes of a round's trajectories: what a segment may lack, and the bytes of older ledgers."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fixtures import make_group

from oat import wire
from oat.blobs import pack, unpack
from oat.errors import WireError
from oat.types import Group, KeptSets

BEGUN = Path(__file__).parents[0] / "begun" / "run" / "ledger.sqlite"


def with_segment(group: Group, **fields: object) -> Group:
    """Return the group with these fields in the model's segment of its first trajectory."""
    first, *others = group.trajectories
    context, response = first.segments
    changed = replace(first, segments=(context, replace(response, **fields)))
    return replace(group, trajectories=(changed, *others))


def ends(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_rewards_of_turns_and_ends_of_text_come_back() -> None:
    kept = KeptSets(ends(3, 4, 5), np.array([0, 1, 2, 3], dtype=np.int64))
    groups = [
        with_segment(make_group(0, "aaa", "b"), reward=-0.5),
        with_segment(make_group(1, "abc", "de"), text_ends=ends(1, 1, 3), reward=0.0, kept=kept),
        with_segment(make_group(2, "ab"), text_ends=ends(0, 2)),
        make_group(3, "x"),
    ]
    data = pack(groups)
    assert wire.encode(unpack(data)) == wire.encode(groups)
    assert pack(unpack(data)) == data


def test_a_round_without_them_has_the_bytes_that_it_always_had() -> None:
    with closing(sqlite3.connect(f"file:{BEGUN}?immutable=1", uri=True)) as database:
        blobs = [data for (data,) in database.execute("SELECT data FROM blobs")]
    assert len(blobs) == 16
    for data in blobs:
        groups = unpack(data)
        segments = [s for group in groups for t in group.trajectories for s in t.segments]
        assert {(segment.text_ends, segment.reward) for segment in segments} == {(None, None)}
        assert pack(groups) == data


@pytest.mark.parametrize("wrong", [np.array([1, 2], dtype=np.int64), np.array([[1, 2]], dtype=np.int32)])
def test_ends_of_another_kind_are_refused(wrong: np.ndarray) -> None:
    with pytest.raises(WireError, match="flat int32"):
        pack([with_segment(make_group(0, "ab"), text_ends=wrong)])


def test_a_round_that_was_cut_is_refused() -> None:
    content = wire.decode(pack([with_segment(make_group(0, "ab"), text_ends=ends(1, 2), reward=1.0)]))
    for damaged in (
        {**content, "arrays": {**content["arrays"], "text_ends": ends(1)}},
        {**content, "arrays": {k: v for k, v in content["arrays"].items() if k != "text_ends"}},
    ):
        with pytest.raises(WireError, match="no round of trajectories"):
            unpack(wire.encode(damaged))
