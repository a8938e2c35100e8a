"""R19: each malformed record is an error that names the file, the line, the field, the expected value and the
found one. If the run skips malformed records, the record is left out and counted."""

import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from fixtures import World, oat

from oat import wire
from oat.data.formats import Layout
from oat.data.prompts import PromptSet, Source
from oat.errors import DataError

pytestmark = pytest.mark.fault("R19")

MESSAGES = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "2"}]
FORMATS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "prompt-only": ({"prompt": "1+1=", "answer": "2", "level": 3}, ()),
    "prompt-completion": ({"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}, ("completion",)),
    "preference": (
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "source": "me"},
        ("chosen", "rejected"),
    ),
    "preference with an implicit prompt": (
        {"chosen": MESSAGES, "rejected": [MESSAGES[0], {**MESSAGES[1], "content": "3"}]},
        ("chosen", "rejected"),
    ),
    "unpaired preference": ({"prompt": "1+1=", "completion": "2", "label": True}, ("completion",)),
    "language modelling": ({"messages": MESSAGES, "tools": []}, ("completion",)),
    "language modelling, plain text": ({"text": "one and one is two"}, ("completion",)),
}
READ = {"prompt", "completion", "chosen", "rejected", "messages", "text", "label"}
BOM = "\ufeff".encode()
LONG = 10 * 2**20
"""The size of a long line: 10 MiB."""


def cut(rng: random.Random, record: dict[str, Any]) -> bytes:
    text = json.dumps(record).encode()
    return text[: rng.randrange(1, len(text))]


def garbled(rng: random.Random, record: dict[str, Any]) -> bytes:
    """Insert a control character, a bracket or a quotation mark at a place where JSON allows none."""
    text = json.dumps(record)
    place = rng.choice([text.index(":"), text.index("{") + 1, len(text)])
    return (text[:place] + rng.choice(["\x01", "]", "}", "{", "'", "\\", "nul"]) + text[place:]).encode()


def not_utf8(rng: random.Random, record: dict[str, Any]) -> bytes:
    text = json.dumps(record).encode()
    place = rng.randrange(len(text))
    return (
        text[:place]
        + rng.choice([b"\xff", b"\xc3(", b"\xe2\x82", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"])
        + text[place:]
    )


def wrong_type(rng: random.Random, record: dict[str, Any]) -> bytes:
    name = rng.choice(sorted(READ & record.keys()))
    wrong = rng.choice(
        [
            None,
            5,
            -0.5,
            [],
            {},
            [1],
            ["a"],
            {"a": 1},
            [[]],
            [None],
            [{"role": "user"}],
            [{"content": "a"}],
            [{"role": 5, "content": "a"}],
        ]
    )
    return json.dumps({**record, name: 2 if name == "label" and wrong is None else wrong}).encode()


def missing(rng: random.Random, record: dict[str, Any]) -> bytes:
    gone = rng.choice(sorted((READ - {"label"}) & record.keys()))
    return json.dumps({name: value for name, value in record.items() if name != gone}).encode()


def unstorable(rng: random.Random, record: dict[str, Any]) -> bytes:
    """Add a field with a lone surrogate, a NUL, a number that is not finite or beyond 64 bits, or a value
    that is nested too deep."""
    bad = rng.choice(
        [
            '"a\\ud800"',
            '"\\udc00b"',
            '"a\\u0000"',
            "1e999",
            "-1e400",
            "NaN",
            "Infinity",
            str(2**64),
            "1" * 5000,
            "[" * 70 + "]" * 70,
        ]
    )
    extra = rng.choice(['"x": %s', '"x": [%s]', '"x": {"y": %s}']) % bad
    return f"{json.dumps(record)[:-1]}, {extra}}}".encode()


def twice(rng: random.Random, record: dict[str, Any]) -> bytes:
    name = rng.choice(sorted(record))
    return f'{json.dumps(record)[:-1]}, "{name}": {json.dumps(record[name])}}}'.encode()


def marks(rng: random.Random, record: dict[str, Any]) -> bytes:
    """Return a line with a raw NUL, with a byte-order mark, with two records, or in UTF-16."""
    text = json.dumps(record).encode()
    return rng.choice(
        [
            b"\0" + text,
            text + b"\0",
            BOM + text,
            text + b"\r" + text,
            text.replace(b": ", b":\0", 1),
            b"\xff\xfe" + text,
        ]
    )


def no_object(rng: random.Random, record: dict[str, Any]) -> bytes:
    return json.dumps(rng.choice([None, 5, "text", [record], [], True])).encode()


KINDS: tuple[Callable[[random.Random, dict[str, Any]], bytes], ...] = (
    cut, garbled, not_utf8, wrong_type, missing, unstorable, twice, marks, no_object,
)  # fmt: skip
NAMED = (wrong_type, missing)
"""Mistakes of a field; the message names the field."""


def malformed(count: int, seed: int) -> Iterator[tuple[str, Callable[..., bytes], bytes]]:
    """Yield `count` malformed lines, each as the format of its file, the kind of mistake, and the line."""
    rng = random.Random(seed)
    names = sorted(FORMATS)
    for number in range(count):
        form, kind = names[number % len(names)], KINDS[number // len(names) % len(KINDS)]
        yield form, kind, kind(rng, FORMATS[form][0])


def opened(path: Path, form: str, *, skip: bool = False) -> PromptSet:
    return PromptSet(Source(path), Layout(responses=FORMATS[form][1]), skip=skip)


def assert_says(message: str, place: str, kind: Callable[..., bytes], form: str) -> None:
    assert message.startswith(f"{place}: "), message
    assert "expected " in message, message
    assert ", got " in message, message
    assert "\n" not in message, message
    assert len(message.removeprefix(place)) < 1000, message
    if kind in NAMED:
        assert "field" in message, message
        assert any(repr(name) in message for name in FORMATS[form][0]), message


def check_stop(folder: Path, count: int, seed: int) -> int:
    """Open files of one good and one malformed record. Return the number of files whose error says what it
    should."""
    path, said = folder / "one.jsonl", 0
    for form, kind, line in malformed(count, seed):
        path.write_bytes(json.dumps(FORMATS[form][0]).encode() + b"\r\n" + line + b"\n")
        try:
            found = opened(path, form)
        except DataError as error:
            assert_says(str(error), f"{path}:2", kind, form)
            said += 1
        else:
            pytest.fail(f"{kind.__name__} of {form} is accepted: {line[:200]!r} gives {found[1]}")
    return said


def check_skip(folder: Path, count: int, seed: int) -> int:
    """Open files of good and malformed records in skip mode. Return the number of records that were left out
    and counted."""
    skipped = 0
    for form in sorted(FORMATS):
        lines = [line for name, _, line in malformed(count, seed) if name == form]
        good = json.dumps(FORMATS[form][0]).encode()
        path = folder / "many.jsonl"
        path.write_bytes(
            BOM
            + b"\r\n".join(part for line in lines for part in (line.replace(b"\r", b""), good, b""))
            + b"\n"
        )
        found = opened(path, form, skip=True)
        assert found.index.read == len(found) == len(lines), form
        assert [prompt.row for prompt in found] == [3 * number + 2 for number in range(len(lines))], form
        assert f"{path}: {found.index.skipped} malformed records are left out: {path}:1: " in found.notes[-1]
        skipped += found.index.skipped
    return skipped


def test_malformed_records(tmp_path: Path, figure: Callable[[str], None]) -> None:
    count = 630
    figure(
        f"{check_stop(tmp_path, count, 0):,} of {count:,} malformed records give an error that names file, "
        "line, what was expected and what was found"
    )
    figure(
        f"{check_skip(tmp_path, count, 1):,} of {count:,} malformed records are skipped and counted "
        "with `on_bad_record: skip`"
    )


@pytest.mark.large
@pytest.mark.parametrize("part", range(10))
def test_10_000_malformed_records(tmp_path: Path, figure: Callable[[str], None], part: int) -> None:
    count = 1000
    figure(
        f"{check_stop(tmp_path, count, 10 + part):,} of {count:,} malformed records give an error that "
        "names file, line, what was expected and what was found"
    )
    figure(
        f"{check_skip(tmp_path, count, 10 + part):,} of {count:,} malformed records are skipped and "
        "counted with `on_bad_record: skip`"
    )


def flipped(count: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(count):
        text = bytearray(json.dumps(FORMATS[rng.choice(sorted(FORMATS))][0]).encode())
        for _ in range(rng.randrange(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        yield bytes(text).replace(b"\n", b" ").replace(b"\r", b" ")


def test_records_with_any_bytes_changed_are_sound_or_an_error(tmp_path: Path) -> None:
    accepted, messages = 0, []
    path = tmp_path / "one.jsonl"
    for line in flipped(600, 0):
        path.write_bytes(line + b"\n")
        try:
            found = PromptSet(Source(path), Layout())
        except DataError as error:
            messages.append(str(error))
        else:
            accepted += 1
            assert wire.roundtrip(found[0]) == found[0]
    assert 0 < accepted < 600
    assert all(message.startswith(f"{path}:") for message in messages)


@pytest.mark.sample("an open text", seconds=1.4)
@pytest.mark.parametrize(
    "end", [b"", b"}", b'"', b"\xff"], ids=["an open text", "a bracket", "an open object", "no UTF-8"]
)
def test_a_line_of_10_mb(tmp_path: Path, end: bytes, figure: Callable[[str], None]) -> None:
    path = tmp_path / "long.jsonl"
    good = b'{"prompt": "a", "x": "' + b"y" * LONG + b'"}'
    path.write_bytes(
        b'{"prompt": "a"}\n' + b'{"prompt": "a", "x": "' + b"y" * LONG + end + b"\n" + good + b"\n"
    )
    with pytest.raises(DataError) as seen:
        opened(path, "prompt-only")
    assert_says(str(seen.value), f"{path}:2", cut, "prompt-only")
    found = opened(path, "prompt-only", skip=True)
    assert (found.index.skipped, [prompt.row for prompt in found], len(found[1].columns["x"])) == (
        1,
        [1, 3],
        LONG,
    )
    name = tmp_path / "name.jsonl"
    name.write_bytes(b'{"' + b"n" * LONG + b'": 1}\n')
    with pytest.raises(DataError) as seen:
        opened(name, "prompt-only")
    assert_says(str(seen.value), f"{name}:1", missing, "prompt-only")
    figure("a line of 10 MB gives a record or one error")


def test_cut_parquet(tmp_path: Path, figure: Callable[[str], None]) -> None:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": f"{n}+1="} for n in range(3000)]), buffer, row_group_size=1000
    )
    whole, path = buffer.getvalue(), tmp_path / "cut.parquet"
    places = [*range(0, len(whole), max(1, len(whole) // 100)), len(whole) - 1]
    for place in places:
        path.write_bytes(whole[:place])
        for skip in (False, True):
            with pytest.raises(DataError) as seen:
                opened(path, "prompt-only", skip=skip)
            assert_says(str(seen.value), str(path), cut, "prompt-only")
    path.write_bytes(whole)
    assert len(opened(path, "prompt-only")) == 3000
    figure(f"{len(places):,} of {len(places):,} truncated Parquet files give an error that names the file")


CSV = [
    b"c\n",
    b"a,b,c\n",
    b'"b" c,d\n',
    b"\xff,b\n",
    b"a\0,b\n",
    b",b\n",
    b'"a"b",c\n',
]


def test_malformed_csv_is_left_out_and_counted(tmp_path: Path) -> None:
    path, good = tmp_path / "bad.csv", b'"two\nlines",b\r\n'
    path.write_bytes(BOM + b"prompt,answer\n" + b"".join(bad + good for bad in CSV))
    found = opened(path, "prompt-only", skip=True)
    assert found.index.skipped == len(CSV)
    assert [prompt.row for prompt in found] == [3 * number + 4 for number in range(len(CSV))]
    assert [prompt.messages[0].content for prompt in found] == ["two\nlines"] * len(CSV)
    path.write_bytes(b'prompt,answer\na,b\n"open,b\nc,d\n')
    found = opened(path, "prompt-only", skip=True)
    assert (found.index.skipped, len(found)) == (1, 1), (
        "a quotation mark that is never closed swallows the rest"
    )


@pytest.mark.parametrize("section", ["prompts", "evaluation"])
def test_a_run_stops_or_skips(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str
) -> None:
    path = tmp_path / "bad.jsonl"
    good = [json.dumps({"prompt": f"{n}+1=", "answer": "a"}) for n in range(8)]
    path.write_text(
        "\n".join(
            [
                good[0],
                "{",
                *good[1:],
                '{"prompt": 5, "answer": "a"}',
                '{"answer": "a"}',
                '{"prompt": "1"}',
                "[]",
            ]
        ),
        encoding="utf-8",
    )
    config = world.config("grpo", tmp_path, {f"{section}.path": str(path), "stop.max_steps": 2})
    assert oat("train", config) == 2
    shown = capsys.readouterr()
    assert f"{path}:2: expected one complete JSON object a line, got invalid JSON" in shown.err
    assert "Traceback" not in shown.err + shown.out
    assert not list((tmp_path / "grpo").glob("metrics.jsonl"))
    assert oat("train", config, "--prompts.on_bad_record", "skip") == 0
    first = json.loads((tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["prompts/skipped"] == 5
    assert (
        f"oat train: {path}: 5 malformed records are left out: {path}:2: expected one complete"
        in capsys.readouterr().out
    )


def test_nothing_but_malformed_records(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"{\n" * 4)
    with pytest.raises(
        DataError,
        match=(
            rf"^{path}: expected well-formed records, got 4 malformed ones and no other; the first: "
            rf"{path}:1: expected one"
        ),
    ):
        opened(path, "prompt-only", skip=True)
