"""A tool gets what its annotations say, or the model reads an error."""

import collections.abc as abc
import datetime
import decimal
import enum
import json
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    TypedDict,
    TypeVar,
    Union,
)

import annotated_types
import msgspec
import pydantic
import pytest
from beartype.door import is_bearable
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.environments.arguments import converted, is_possible
from oat.environments.tools import Tools
from oat.text.call_forms import Written


class Colour(enum.Enum):
    RED = "red"
    ONE = 1


@dataclass
class Point:
    x: int
    y: float = 0.0
    near: "list[Point]" = field(default_factory=list)


class Place(TypedDict):
    name: str
    size: NotRequired[int]


class Pair(NamedTuple):
    first: int
    second: str = "b"


class Item(msgspec.Struct):
    name: str
    count: int = 1


class Model(pydantic.BaseModel):
    a: int


@dataclass(frozen=True)
class Listed:
    a: Any


@dataclass
class Scaled:
    x: int
    scale: InitVar[int] = 1
    plain: InitVar = None

    def __post_init__(self, scale: int, plain: Any) -> None:
        self.x *= scale


@dataclass
class Own:
    x: int

    def __init__(self, y: int) -> None:
        self.x = y


class Exits(pydantic.BaseModel):
    a: int

    def model_post_init(self, context: Any) -> None:
        raise SystemExit(self.a)


class Unhashed(NamedTuple):
    a: Any

    def __hash__(self) -> int:
        raise RuntimeError("no hash")


Metres = NewType("Metres", float)
Small = Annotated[int, annotated_types.Interval(ge=0, lt=5)]
Age = NewType("Age", Small)  # type: ignore[valid-newtype]
Number = TypeVar("Number", int, float)
Bounded = TypeVar("Bounded", bound=Point)
T = TypeVar("T")


@dataclass
class Box(Generic[T]):
    held: T
    more: "list[T]" = field(default_factory=list)


class Boxed(Box[int]):
    pass


@pydantic.dataclasses.dataclass
class Checked:
    a: int
    b: Annotated[str, pydantic.Field(max_length=1)] = "b"


class Outer(pydantic.BaseModel):
    inner: list[Model] = []
    named: dict[str, Model] = {}
    x: int = pydantic.Field(0, alias="y")
    of: Checked | None = None


class Root(pydantic.RootModel[list[int]]):
    pass


class Kept(pydantic.BaseModel):
    model_config = {"extra": "allow"}
    a: int


class Grid(enum.Enum):
    P = (1, 2)


@dataclass
class Endless:
    next: "Endless"


@dataclass
class Chain:
    next: "Chain | None" = None
    all: "list[Chain]" = field(default_factory=list)


UNION = Union[int, str]  # noqa: UP007
ANNOTATIONS: list[Any] = [
    *(int, float, bool, str, None, Any, object, list, dict, bytes, datetime.date, decimal.Decimal),
    *(list[int], list[list[str]], dict[str, int], dict[int, str], dict[str, list[float]]),
    *(int | None, UNION, float | None, list[int] | int, Literal["a", 1, None]),
    *(tuple[int, str], tuple[int, ...], set[str], frozenset[int]),
    *(abc.Sequence[int], abc.Mapping[str, float], abc.Iterable[str]),
    *(Colour, Point, Place, Pair, Item, Model, list[Point], Point | int, Point | Place, Metres),
    *(Annotated[int, "a note"], Annotated[int, msgspec.Meta(ge=2)]),
    *(set, frozenset, abc.Set, abc.MutableSet, set[Any], frozenset[Any], set[tuple], set[tuple[Any, ...]]),
    *(dict[tuple[int, int], int], dict[Any, Any], dict[tuple[Any, ...], int], set[int | list[int]]),
    *(set[Listed], dict[Listed, int], set[Item], set[Unhashed], set[object], set[frozenset[Any]]),
    *(
        Scaled,
        Own,
        Exits,
        Unhashed,
        datetime.timedelta,
        datetime.datetime,
        Annotated[list[Any], msgspec.Meta()],
    ),
    *(Age, Box[int], Boxed, Box[Box[str]], Checked, Outer, Root, Kept, Chain, Literal[Colour.RED]),
    *(Annotated[list[Model], msgspec.Meta(max_length=1)], Annotated[Colour, msgspec.Meta(title="c")]),
    *(Annotated[list[Point], annotated_types.Len(1, 2)], Annotated[int | None, pydantic.Field(ge=0)]),
    *(Annotated[abc.Iterable[int], annotated_types.MinLen(1)], Annotated[str, pydantic.Field(title="s")]),
]
TEXTS = ("", "a", "1", "2.0", "red", "null", "true", "[1]", '{"x": 1}', "b", "2020-01-02", "nan", "inf")
NAMES = ("x", "y", "near", "name", "size", "a", "1")

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.5, 1.0, -2.0, 1e300, 10**30])
    | st.sampled_from(TEXTS),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from(NAMES), part, max_size=3),
    max_leaves=5,
)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(VALUES)
def test_what_a_tool_gets_is_of_the_annotated_type(value: Any) -> None:
    """Each annotation, and any value of JSON: the value is converted to what beartype knows as the type, or
    refused by a ValueError. Text as models write it without quotes, too."""
    for annotation in ANNOTATIONS:
        for given_value in (
            value,
            Written(json.dumps(value)),
            Written(value if isinstance(value, str) else ""),
        ):
            try:
                got = converted(given_value, annotation)
            except ValueError:
                continue
            assert is_bearable(got, annotation), (given_value, annotation, got)
            assert not isinstance(got, Written)


PLAIN: list[Any] = [
    *(list[int], list[str], list[float], list[bool], dict[str, int], dict[str, str], list[list[int]], int),
    *(list[list[str]], dict[str, list[int]], dict[str, list[str]], list[dict[str, str]], str, None),
]
STRICT = [(member, pydantic.TypeAdapter(member)) for member in PLAIN]


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.permutations(STRICT), VALUES)
def test_of_a_union_a_value_stays_what_it_is(members: list[Any], value: Any) -> None:
    """If pydantic, which converts nothing here, reads a value as a member, no other member changes it. Nor is
    a field of an object changed, if another class takes it as it is."""
    texts = ["007", "1e3", "true", "1.10", "null"]
    for each in (value, texts, [texts], dict.fromkeys(NAMES, "01"), {"a": texts}, [{"a": "0"}], "01"):
        for _, adapter in members:
            with suppress(pydantic.ValidationError):
                if repr(adapter.validate_json(json.dumps(each), strict=True)) == repr(each):
                    assert repr(converted(each, Union[tuple(one for one, _ in members)])) == repr(each)  # noqa: UP007


@pytest.mark.parametrize("annotation", ANNOTATIONS, ids=str)
def test_every_annotation_is_possible(annotation: Any) -> None:
    assert is_possible(annotation)


@pytest.mark.parametrize(
    "annotation",
    [
        *(type, abc.Callable, complex, list[complex], range, dict[str, type]),
        *(set[list[int]], frozenset[dict[str, int]], abc.Set[Point], set[Place], set[tuple[int, list[int]]]),
        *(dict[list[int], int], dict[str, set[Model]], set[set[int] | abc.Sequence[int]], set[abc.Set[int]]),
        *(
            range | None,
            set[list[int]] | None,
            Literal[b"a"],
            Literal[Grid.P],
            Grid,
            enum.Enum("Empty", []),
            datetime.tzinfo,
            Endless,
            Box[type],
        ),
    ],
    ids=str,
)
def test_what_no_json_can_be_is_not(annotation: Any) -> None:
    assert not is_possible(annotation)


@pytest.mark.parametrize(
    ("value", "annotation", "wanted"),
    [
        (3, float, 3.0),
        (2.0, int, 2),
        ("3", int, 3),
        (" 3 ", int, 3),
        ("2.5", float, 2.5),
        ("[1, 2]", list[int], [1, 2]),
        (["1", 2.0], list[int], [1, 2]),
        ("true", bool, True),
        ("3", int | str, "3"),
        (3, int | str, 3),
        (1.0, int | float, 1.0),
        (1, float | int, 1),
        (None, int | None, None),
        ("1", Any, "1"),
        ({"1": "a"}, dict[int, str], {1: "a"}),
        ([1, "a"], tuple[int, str], (1, "a")),
        ({"x": 1, "near": [{"x": "2"}]}, Point, Point(1, 0.0, [Point(2)])),
        ({"first": 1}, Pair, Pair(1)),
        ({"x": 2, "scale": "3", "plain": []}, Scaled, Scaled(6)),
        ({"y": 2}, Own, Own(2)),
        ({"[1, 2]": 3}, dict[tuple[int, int], int], {(1, 2): 3}),
        ([{"a": 1}], set[Listed], {Listed(1)}),
        ([1, "c"], Pair, Pair(1, "c")),
        ("red", Colour, Colour.RED),
        (1, Colour, Colour.ONE),
        ({"a": 1}, Model, Model(a=1)),
        ({"name": "a"}, Point | Place, {"name": "a"}),
        ({"held": "1", "more": [2.0]}, Box[int], Box(1, [2])),
        ({"held": "1"}, Boxed, Boxed(1)),
        ({"held": {"held": 1, "more": []}}, Box[Box[float]], Box(Box(1.0))),
        ({"a": "3"}, Checked, Checked(3)),
        ("3", Number, 3),
        ({"x": "1"}, Bounded, Point(1)),
        ("red", Literal[Colour.RED], Colour.RED),
        ("4", Age, 4),
        (" a", Annotated[str, pydantic.StringConstraints(strip_whitespace=True)], "a"),
        (None, Annotated[int | None, pydantic.Field(ge=0)], None),
        ([1], Annotated[abc.Iterable[int], annotated_types.MinLen(1)], [1]),
        ({"a": "1", "b": True}, Kept, Kept(a=1, b=True)),  # type: ignore[call-arg]
        (["1"], list[int] | set[str], {"1"}),
        ({"a": "01"}, Model | Listed, Listed("01")),
        ({"x": 1, "y": "2"}, Point | dict[str, float], {"x": 1.0, "y": 2.0}),
        ({"y": 1, "inner": [{"a": 2}]}, Outer, Outer(y=1, inner=[Model(a=2)])),
        ({"next": {"all": [{}]}}, Chain, Chain(Chain(None, [Chain()]))),
        (Written("3"), str, "3"),
        (Written("3"), int, 3),
        (Written("3"), int | str, 3),
        (Written("3"), Any, 3),
        (Written("a"), Any, "a"),
        (Written('"a"'), str, '"a"'),
        (Written('"a"'), str | None, '"a"'),
        (Written("True"), bool, True),
        (Written("[1, 'two']"), list[Any], [1, "two"]),
        (Written("None"), str | None, None),
    ],
)
def test_what_is_converted(value: Any, annotation: Any, wanted: Any) -> None:
    got = converted(value, annotation)
    assert (got, type(got)) == (wanted, type(wanted))


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (True, int),
        (True, float),
        (1, bool),
        (0, None),
        (2.5, int),
        (10**400, float),
        ("", int),
        ("nan", float),
        ("1e999", float),
        ("abc", list[int]),
        (None, int),
        (3, str),
        ([1, None], list[int]),
        ([1], tuple[int, str]),
        ([1, "a", 2], Pair),
        ({"1": 1, "01": 2}, dict[int, int]),
        ({"x": 1, "z": 2}, Point),
        ({"y": 1}, Point),
        ({"size": 1}, Place),
        ({"name": "a", "more": 1}, Place),
        (True, Colour),
        ("blue", Colour),
        (True, Literal[1]),
        ("x", int | bool),
        (1, Annotated[int, msgspec.Meta(ge=2)]),
        ({"a": "b"}, Model),
        ([["a"], ["b"]], set),
        ([{"name": "a"}], set[Any]),
        ([[1, [2]]], frozenset[tuple]),
        ([{"a": []}], set[Listed]),
        ([{"a": 1}], set[Unhashed]),
        ({"[[1]]": 1}, dict[tuple[Any, ...], int]),
        ({"x": 1, "scale": "a"}, Scaled),
        ({"x": 1}, Own),
        ({"a": 1}, Exits),
        (1e300, datetime.timedelta),
        (5, Small),
        (-1, Age),
        (-1, list[Small]),
        (5, Literal[Colour.RED]),
        ("abc", Box[int]),
        ({"held": "abc"}, Box[int]),
        ({"held": 1, "more": ["b"]}, Boxed),
        ("abc", Number),
        ({"z": 1}, Bounded),
        ({"a": 1, "c": 1}, Checked),
        ({"a": 1, "b": "bb"}, Checked),
        (99, Annotated[int, pydantic.Field(le=10)]),
        ("b", Annotated[str, pydantic.Field(pattern="^a")]),
        ([], Annotated[list[Point], annotated_types.Len(1, 2)]),
        ([{"a": 1}, {"a": 2}], Annotated[list[Model], msgspec.Meta(max_length=1)]),
        ("a", Annotated[str, annotated_types.Predicate(str.isupper)]),
        ({"a": True}, Model),
        ({"a": 1, "b": 2}, Model),
        ({"inner": [{"a": 1, "b": 2}]}, Outer),
        ({"named": {"a": {"a": False}}}, Outer),
        ({"x": 1}, Outer),
        ({"of": {"a": 1, "c": 1}}, Outer),
        ([True], Root),
    ],
)
def test_what_is_refused(value: Any, annotation: Any) -> None:
    with pytest.raises(ValueError):
        converted(value, annotation)


@dataclass
class Broken:
    x: int

    def __post_init__(self) -> None:
        raise KeyError({"b", "a"})


def test_the_model_is_told_what_is_wrong() -> None:
    """A constructor that raises, a missing argument, and a value of another type. A null for a default of
    None is no fault."""

    def total(numbers: list[int], start: int = None, *, kind: Literal["sum", "max"] = "sum") -> str:  # noqa: RUF013
        return f"{numbers} {start} {kind}"

    def made(thing: Broken) -> str:
        return "made"

    told = Tools([total, made])

    def said(name: str, **arguments: Any) -> str:
        answered = told.answer(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")
        assert answered is not None
        assert answered.broken == 0
        return answered.message.content

    assert said("total", numbers="[1, 2]", start=None) == "[1, 2] None sum"
    for arguments, words in (
        ({"numbers": "one"}, "numbers is 'one'"),
        ({"numbers": [1, None]}, "None is no int"),
        ({"numbers": None}, "numbers is None"),
        ({"numbers": [], "start": "x"}, "start is 'x'"),
        ({"numbers": [], "kind": "min"}, "kind is 'min'"),
        ({}, "numbers"),
    ):
        text = said("total", **arguments)
        assert text.startswith("error: ")
        assert words in text
        assert "numbers: list[int]" in text
    assert said("made", thing={"x": 1}).startswith("error: thing is {'x': 1}")
