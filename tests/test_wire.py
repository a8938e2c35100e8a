import dataclasses
import datetime
import math
import struct

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oat import types
from oat.errors import WireError
from oat.runtime.local import over_wire
from oat.wire import decode, encode, encode_parts, roundtrip

CLASSES = [cls for cls in vars(types).values() if isinstance(cls, type) and dataclasses.is_dataclass(cls)]
pack = msgspec.msgpack.encode


def equal(a, b):
    """Return True if both are equal in type and content, field by field. NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return (
            a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        )
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if dataclasses.is_dataclass(a):
        return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


KEPT = types.KeptSets(np.array([3, 5, 3], dtype=np.int32), np.array([0, 2, 3], dtype=np.int64))
IDS, LOGPS = np.array([4, 3], dtype=np.int32), np.array([-0.5, -1e4], dtype=np.float32)


def segments(kept, ids, logps):
    """Return three segments: of a prompt, of a response, and one without tokens."""
    context = types.Segment("context", np.array([9, 8, 7], dtype=np.int32))
    model = types.Segment(
        "model", ids, np.array([True, False]), np.array([2, 2], dtype=np.int32), logps, logps - 1, kept
    )
    empty = types.Segment(
        "model",
        ids[:0],
        np.zeros(0, dtype=bool),
        ids[:0],
        logps[:0],
        logps[:0],
        types.KeptSets(ids[:0], np.zeros(1, dtype=np.int64)),
    )
    return context, model, empty


def examples():
    """Return at least one value of every type of `oat.types`, filled and with empty arrays."""
    prompt = types.Prompt(
        1,
        0,
        (types.Message("user", "naïve 🌾\0"),),
        "42",
        {"level": 3, "tags": ["a", None], "weight": 0.5, "nested": {"x": (1,)}},
    )
    sampling = types.Sampling(8, 0.7, 5, 0.9, 0.1, ("\n\n",), True)
    kept, ids, logps = KEPT, IDS, LOGPS
    context, model, empty = segments(kept, ids, logps)
    trajectories = (
        types.Trajectory("sampler", (context, model), "stop", "text", 0.7),
        types.Trajectory("sampler", (context, empty), "length", ""),
        types.Trajectory(
            "sampler", (context, dataclasses.replace(model, text_ends=ids, reward=-0.5)), "stop", "text"
        ),
    )
    group = types.Group(prompt, trajectories)
    key = types.Key("train", 3, 1, 17, 2)
    question = types.Question(key, "compare", prompt.messages, ("a", "b"), (0, 1), None, {"c": 1}, "rule")
    answer = types.Answer(key, (math.nan, 0.25), ("failed", "ok"), 2, 0.1, "rule", 1.5)
    item = types.Item(group, question, answer, 1)
    unpriced = types.Item(types.Group(prompt, ()), question, answer, None)
    asked = [types.Request(ids, sampling, 2**64 - 1), group, key, question]
    return [
        *[prompt.messages[0], prompt, sampling, kept, context, model, empty, *trajectories, *asked],
        types.Completion(3, ids, logps, logps, kept, "aborted", 5),
        types.Completion(3, ids[:0], logps[:0], logps[:0], None, "stop", 5),
        types.Work(2.5, 0.25, 80, 3),
        types.Price(3, 70, 0.25),
        types.Spent(types.Price(3, 70, 0.25), types.Price(1)),
        *[
            answer,
            item,
            unpriced,
            types.Feedback(4, (item, unpriced), 9),
            types.Feedback(0, (), 0),
            types.Plan(4, {"sampler": 2}, 4),
            types.Plan(4, {"sampler": 2}, 4, types.Branching(3, "\n", 8)),
            types.Branching(3, "\n", 8),
        ],
        types.Requires("compare", frozenset({"sampler", "reference"}), frozenset(), True),
        types.Shipment("sampler", 3, ("lm_head.weight",)),
        types.Probe(np.array([1, 2], np.int32), np.array([-1.5], np.float32), 1e-4),
        types.Bucket("sampler", 3, {"lm_head.weight": torch.ones(2)}, {"lm_head.weight": 2**32 - 1}),
        types.Receipt("sampler", 3, {"lm_head.weight": 2**32 - 1}),
        types.Batch(
            trajectories,
            np.array([0, 0]),
            np.array([0, 0]),
            {"advantages_N": torch.tensor([1.0, -1.0])},
            2,
            1,
            {"reward/mean": 0.5},
        ),
        *(types.Loss(torch.tensor([1.0, 2.0]), "token", 0.5, 128.0), types.Loss(torch.zeros(0), "pair")),
        types.Opening("<think>\n", ("<think>",)),
    ]


def test_every_type_has_an_example():
    assert {type(value) for value in examples()} == set(CLASSES)


@pytest.mark.parametrize("value", examples(), ids=lambda value: type(value).__name__)
def test_types_round_trip(value):
    assert equal(roundtrip(value), value)
    assert encode(roundtrip(value)) == encode(value)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint8", "int16", "int32", "int64", "uint32", "uint64", "float16", "float32", "float64"],
)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (3, 0, 2)])
def test_arrays_and_tensors_round_trip(dtype, shape):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    assert equal(roundtrip(array), array)
    assert equal(roundtrip(torch.from_numpy(array)), torch.from_numpy(array))
    roundtrip(array)[...] = 1  # writable


def test_bfloat16_round_trips_by_its_bits():
    tensor = torch.tensor([[1.0, -0.0, 1e-30], [torch.inf, torch.nan, 3.14159]]).bfloat16()
    for value in (tensor, tensor.T, tensor[0, 0], tensor[:0]):
        found = roundtrip(value)
        assert (found.dtype, found.shape) == (torch.bfloat16, value.shape)
        assert torch.equal(found.view(torch.int16), value.view(torch.int16))


def test_arrays_of_any_layout():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert equal(roundtrip(array.T), array.T)
    assert equal(roundtrip(array[::2, ::-1]), array[::2, ::-1])
    assert equal(roundtrip(array.astype(">f4")), array)
    assert equal(roundtrip(torch.from_numpy(array).T), torch.from_numpy(array).T)
    assert equal(roundtrip(torch.nn.Parameter(torch.ones(2))), torch.ones(2))
    special = np.array([math.nan, math.inf, -math.inf, -0.0, 5e-324])
    assert roundtrip(special).tobytes() == special.tobytes()


LARGE = [
    np.arange(5000, dtype=np.int64).reshape(2, -1),
    np.ones((3, 5000), dtype=bool),
    np.zeros((0, 9), dtype=np.float32),
]


def joined(value):
    return b"".join(encode_parts(value))


@pytest.mark.parametrize("value", [*examples(), *LARGE, 3], ids=lambda value: type(value).__name__)
def test_parts_round_trip(value):
    assert equal(decode(joined(value)), value)
    assert encode(decode(joined(value))) == encode(value)


def test_large_arrays_are_parts_that_are_not_copied():
    """They are writable only if the bytes are."""
    array, half = np.arange(3000.0), torch.arange(5001.0).bfloat16()
    sent = {"a": array, "b": half, "c": torch.from_numpy(array[::2]), "d": array[:5]}
    parts = encode_parts(sent)
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in parts if len(part))
    data = bytearray(b"".join(parts))
    found, read = decode(data), decode(bytes(data))
    assert equal(found, sent)
    assert equal(read, sent)
    found["a"][0] = 5
    assert decode(data)["a"][0] == 5
    assert [found[name].flags.writeable for name in "ad"] == [True, True]
    assert [read[name].flags.writeable for name in "ad"] == [False, True]


@pytest.mark.parametrize("name", ["a" * length for length in (1, 2, 30, 63, 64)])
def test_large_arrays_begin_at_multiples_of_64_bytes(name):
    arrays = [np.arange(1025, dtype=np.float32), np.ones(5000, dtype=np.int8), np.arange(2000.0)]
    data = joined({name: arrays})
    base = np.frombuffer(data, np.uint8).ctypes.data
    assert [(array.ctypes.data - base) % 64 for array in decode(data)[name]] == [0, 0, 0]


def test_numpy_scalars_become_numbers():
    assert equal(
        roundtrip([np.float64(0.5), np.float32(0.5), np.int32(3), np.bool_(True), np.str_("a")]),
        [0.5, 0.5, 3, True, "a"],
    )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text().filter(lambda key: key != "!"), inner)
        | st.sets(st.text())
    ),
    max_leaves=10,
)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(VALUES)
def test_plain_values_round_trip(value):
    assert equal(roundtrip(value), value)


class Stranger:
    pass


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        Stranger(),
        [{"a": Stranger()}],
        Stranger,
        len,
        object(),
        1j,
        2**64,
        -(2**63) - 1,
        "\ud800",
        {"\udfff": 1},
        {1: 2},
        {"!": "tuple"},
        {1, "a"},
        bytearray(b"a"),
        datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
        np.datetime64("2020-01-01"),
        np.array([Stranger()]),
        np.array(["a"]),
        np.zeros(1, dtype=[("a", "i4")]),
        np.zeros(1, dtype=complex),
        torch.zeros(1, dtype=torch.complex64),
        torch.zeros(2, 2).to_sparse(),
        torch.float32,
        torch.nn.Linear(1, 1),
        deep(100_000),
        types.Message("user", "\ud800"),
        types.Message("user", Stranger()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_does_not_travel(value):
    with pytest.raises(WireError, match="travel"):
        encode(value)


def test_a_value_inside_itself():
    value = []
    value.append(value)
    with pytest.raises(WireError):
        encode(value)


def test_a_class_of_the_same_name_is_a_stranger():
    imposter = dataclasses.make_dataclass("Message", ["role", "content"])
    with pytest.raises(WireError, match="Message"):
        encode(imposter("user", "text"))


ARRAY = {"!": "array", "dtype": "float32", "shape": [1], "data": b"abcd"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pack(1) + b"\x00",
        b"\xa1\xff",
        b"\x91" * 100_000 + b"\xc0",
        b"\x81\xa1a" * 100_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xd4\x05\x00",
        pack(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)),
        b"\x81\x01\x02",
        b"\x81\x91\x01\x02",
        b"\x81\x80\x02",
        pack({"!": "Unknown"}),
        pack({"!": None}),
        pack({"!": 3}),
        pack({"!": ["tuple"]}),
        pack({"!": "__import__", "name": "os"}),
        pack({"!": "Message", "role": "user"}),
        pack({"!": "Message", "role": "user", "content": "x", "more": 1}),
        pack({"!": "Key", "self": 1}),
        pack({"!": "tuple"}),
        pack({"!": "tuple", "items": "ab"}),
        pack({"!": "tuple", "items": {"a": 1}}),
        pack({"!": "tuple", "items": [], "cls": 1}),
        pack({"!": "set", "items": [[]]}),
        pack({"!": "frozenset", "items": None}),
        *[
            pack({**ARRAY, **change})
            for change in (
                {"dtype": "object"},
                {"dtype": "O"},
                {"dtype": "complex64"},
                {"dtype": "datetime64[s]"},
                {"dtype": ["float32"]},
                {"dtype": None},
                {"shape": [2]},
                {"shape": [-1]},
                {"shape": [2**64 - 1]},
                {"shape": [0, 2**62]},
                {"shape": [1.0]},
                {"shape": [None]},
                {"shape": [[1]]},
                {"shape": [1] * 100},
                {"shape": None},
                {"shape": "1"},
                {"shape": 1},
                {"data": b"abc"},
                {"data": b""},
                {"data": "abcd"},
                {"data": [97] * 4},
                {"data": None},
                {"data": {**ARRAY}},
                {"dtype": "bool", "data": b"\x02"},
                {"extra": 1},
            )
        ],
        pack({"!": "array", "dtype": "float32", "shape": [1]}),
        pack({"!": "tensor", "value": 1}),
        pack({"!": "tensor"}),
        pack({"!": "tensor", "value": {"!": "tensor", "value": ARRAY}}),
        pack({"!": "bfloat16", "value": ARRAY}),
        pack({"!": "bfloat16", "value": 1}),
    ],
)
def test_hostile_bytes(data):
    with pytest.raises(WireError, match="not an encoded value"):
        decode(data)


def in_parts(head, arrays=b"", size=None):
    return b"\xc1oatpart" + struct.pack("<Q", len(head) if size is None else size) + head + arrays


def at(start, size, kind=1):
    return msgspec.msgpack.Ext(kind, struct.pack("<QQ", start, size))


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1oatpart",
        in_parts(b"", size=2**63),
        in_parts(pack({**ARRAY, "data": at(0, 4)}), b"abc"),
        in_parts(pack({**ARRAY, "data": at(2**64 - 1, 4)}), b"abcd"),
        in_parts(pack({**ARRAY, "data": at(0, 4, kind=5)}), b"abcd"),
        in_parts(pack({**ARRAY, "data": msgspec.msgpack.Ext(1, b"abc")}), b"abcd"),
        in_parts(pack({**ARRAY, "data": at(0, 3)}), b"abcd"),
        in_parts(pack({**ARRAY, "dtype": "bool", "data": at(0, 1)}), b"\x02"),
        in_parts(pack({**ARRAY, "dtype": "object", "data": at(0, 4)}), b"abcd"),
        in_parts(pack({**ARRAY, "data": at(0, 4), "extra": 1}), b"abcd"),
        in_parts(pack(at(0, 4)), b"abcd"),
        in_parts(pack([at(0, 4)]), b"abcd"),
        in_parts(pack({"a": at(0, 4)}), b"abcd"),
        in_parts(pack({"!": "tensor", "value": at(0, 4)}), b"abcd"),
        pack({**ARRAY, "data": at(0, 4)}) + b"abcd",
        pack({**ARRAY, "data": at(0, 4)}),
    ],
)
def test_hostile_parts(data):
    with pytest.raises(WireError):
        decode(data)


def test_not_bytes():
    for data in (None, "text", 3, []):
        with pytest.raises(WireError):
            decode(data)


def test_every_cut_is_found():
    data = encode(examples()[-5])
    for end in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:end])


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=64), min_size=20, max_size=20))
def test_random_bytes_are_a_value_or_a_wire_error(many):
    for data in many:
        try:
            encode(decode(data))
        except WireError:
            continue


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=40, max_size=40))
def test_flipped_bytes_are_a_value_or_a_wire_error(changes):
    data = encode(
        types.Batch((), np.array([0, 1]), np.array([True]), {"x_N": torch.ones(2)}, metrics={"a": 0.5})
    )
    for place, byte in changes:
        changed = bytearray(data)
        changed[place % len(data)] = byte
        try:
            decode(bytes(changed))
        except WireError:
            continue


def test_an_objective_does_not_travel_and_the_learner_has_its_own():
    """An attribute that `prepare` sets in the objective of one side is missing on the other side, at every
    call."""

    class Objective:
        left = 0

    class Learner:
        def update(self, objective, batch):
            objective.left += 1
            return {"left": objective.left, "rows": len(batch)}

    mine = Objective()
    mine.left = 5
    apart = over_wire(Learner(), own=[Objective()])
    assert [apart.update(mine, [1, 2]) for _ in range(2)] == [{"left": 1, "rows": 2}] * 2
    assert mine.left == 5
