"""The slicer of reasoning steps: by hand, against the predecessor's rules written out, and for any text."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oat.errors import ConfigError
from oat.oracles.slicing import GSM8K_ANSWER, slice_steps


def steps(text: str, **options: Any) -> list[str]:
    return [text[start:end] for start, end in pairwise(slice_steps(text, **options))]


@pytest.mark.inventory(119)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("a", ["a"]),
        ("a\nb", ["a", "\nb"]),
        ("a\n\nb\n", ["a", "\n", "\nb", "\n"]),
        ("\n \n a\nb", ["\n \n a", "\nb"]),
        (" \n\n", [" \n\n"]),
        ("a\nb\n#### 4", ["a", "\nb\n#### 4"]),
        ("a\nb\n\n \n#### 4\nc", ["a", "\nb\n\n \n#### 4\nc"]),
        ("\n#### 4", ["\n#### 4"]),
        (" \n\n#### 4", [" \n\n#### 4"]),
        ("a\n#### 1\nb\n#### 2", ["a", "\n#### 1", "\nb\n#### 2"]),
        ("a\n#### 1\n#### 2", ["a", "\n#### 1\n#### 2"]),
        ("a\n####4\nb", ["a", "\n####4", "\nb"]),
    ],
)
def test_by_hand(text: str, expected: list[str]) -> None:
    assert steps(text, answer_prefix=GSM8K_ANSWER) == expected


def test_without_a_prefix_an_answer_is_a_step() -> None:
    assert steps("a\nb\n#### 4") == ["a", "\nb", "\n#### 4"]
    assert steps("one. . two. ", delimiter=". ") == ["one", ". ", ". two", ". "]
    assert steps("aXXXb", delimiter="XX") == ["a", "XXXb"]


def slowly(text: str, delimiter: str, prefix: str | None) -> list[str]:
    """Return the steps as the rules of the predecessor say, by joining texts."""
    body, behind = text, ""
    if prefix is not None and prefix in text:
        parts = text.split(prefix)
        body, behind = prefix.join(parts[:-1]), prefix + parts[-1]
    lines = body.split(delimiter)
    is_blank = [not line.strip() for line in lines]
    if all(is_blank):
        return [text] if text else []
    first = is_blank.index(False)
    last = len(lines) - 1 - is_blank[::-1].index(False) if behind else len(lines) - 1
    if last > first:
        middle = lines[first + 1 : last]
        lines = [delimiter.join(lines[: first + 1]), *middle, delimiter.join(lines[last:])]
    else:
        lines = [body]
    found = [lines[0], *(delimiter + line for line in lines[1:])]
    found[-1] += behind
    return found


TEXTS = st.text("ab \n#4", max_size=14) | st.lists(
    st.sampled_from(["a", "\n", " ", GSM8K_ANSWER, "#### 4", "b\n"]), max_size=8
).map("".join)


@pytest.mark.inventory(119)
@given(TEXTS, st.sampled_from(["\n", "a", "\n\n"]), st.sampled_from([None, GSM8K_ANSWER, "#"]))
def test_slices_concatenate_to_the_text(text: str, delimiter: str, prefix: str | None) -> None:
    bounds = slice_steps(text, delimiter, prefix)
    assert bounds == sorted(set(bounds))
    found = steps(text, delimiter=delimiter, answer_prefix=prefix)
    assert "".join(found) == text
    assert found == slowly(text, delimiter, prefix)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None,), "`text` of slice_steps is None; give a text"),
        ((b"a",), "`text` of slice_steps is b'a'; give a text"),
        (("a", ""), "`delimiter` of slice_steps is ''; give a text of one or more"),
        (("a", None), "`delimiter` of slice_steps is None"),
        (("a", "\n", ""), "`answer_prefix` of slice_steps is ''"),
        (("a", "\n", 4), "`answer_prefix` of slice_steps is 4"),
    ],
)
def test_arguments_that_are_none(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        slice_steps(*arguments)
