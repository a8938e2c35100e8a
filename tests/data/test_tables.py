"""Readers of tables: CSV, Parquet, and data sets that give arrays."""

import csv

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from sources import RECORDS, read, write

from oat.errors import DataError


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_dataset_that_gives_arrays_gives_plain_values(tmp_path, library):
    records = [{"prompt": f"{n}", "nums": [n, 2], "answer": 0.5 * n} for n in range(3)]
    table = datasets.Dataset.from_list(records).with_format(library)
    table.save_to_disk(tmp_path / "saved")
    expected = read(records)
    assert read(tmp_path / "saved") == read(table) == read({"train": table}) == expected


def test_csv_fields_of_any_length(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text(f'prompt,answer\n"{"x" * 200_000}",{"y" * 200_000}\n', encoding="utf-8")
    (prompt,) = read(path, reference_key="answer")
    assert (prompt.messages[0].content, prompt.reference) == ("x" * 200_000, "y" * 200_000)


@pytest.mark.inventory(106)
def test_csv_gives_the_same_prompts(tmp_path):
    path = tmp_path / "data.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["note", "prompt", "answer"])
        writer.writeheader()
        writer.writerows(RECORDS)
    expected = read(write(tmp_path, RECORDS), reference_key="answer")
    prompts = read(path, reference_key="answer")
    assert [(p.messages, p.reference, p.columns) for p in prompts] == [
        (p.messages, p.reference, p.columns) for p in expected
    ]
    assert [prompt.row for prompt in prompts] == [3, 5, 7, 9, 11], "the last line of each record"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,answer\na,b\nc\n", "csv:3: expected 2 values"),
        (b"prompt,answer\na,b,c\n", "csv:2: expected 2 values"),
        (b"prompt,x,prompt\na,b,c\n", "csv:1: expected column names that differ, got 'prompt' twice"),
        (b'prompt\na\n"b" c\nd\n', "csv:3: expected CSV in the record that begins here, got something else"),
        (b'prompt\na\n"b\nc\n', "csv:3: .*unexpected end of data"),
        (b'"prompt\na\n', "csv:1: .*unexpected end of data"),
        (
            b'prompt\n"a\r\nb"\n\xc3\xa9\xff\n' + b"c\n" * 10_000,
            "csv:4: expected UTF-8, got byte 0xff at 2; save the file as UTF-8",
        ),
        ("prompt\na\n".encode("utf-16"), "csv:1: expected UTF-8, got byte 0xff at 0"),
        (b"prompt\tanswer\na\tb\n", r"csv:1: .*TSV"),
        (b"prompt\tanswer, right\na\tb, c\n", r"csv:1: .*TSV"),
        (b'"prompt"\t"answer"\n"a"\t"b"\n', r"csv:1: .*TSV"),
        (b"prompt;answer\na;b\n", "csv:1: .*semicolons"),
        (b"prompt\n", "empty file"),
        (b"", "empty file"),
        (b"words\na\n", "csv:2: field 'prompt'.*got the columns 'words'.*valid: words"),
    ],
)
def test_malformed_csv(tmp_path, content, message):
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.parametrize(
    "name", ["data.tsv", "data.TSV", "data.tab", "data.txt", "data.jsonl", "data.json", "data"]
)
def test_a_tsv_file_is_named_as_such(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"prompt\tanswer\nwhat is 1+1?\t2\n")
    with pytest.raises(DataError, match="TSV"):
        read(path)


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.txt"])
@pytest.mark.parametrize(
    "content",
    [b'{"prompt": "a"}\r{"prompt": "b"}\r', b'\xef\xbb\xbf{"prompt": "a"}\r\r{"prompt": "b"}', b"a\rb\r"],
)
def test_lines_that_end_in_a_carriage_return_alone_are_named_as_such(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"carriage return alone \(CR\)"):
        read(path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_csv_file_may_have_any_line_ends(tmp_path, end):
    path = tmp_path / "data.csv"
    path.write_bytes(end.join(["prompt,answer", "a,1", '"b, c",2', ""]).encode())
    prompts = read(path)
    assert [(prompt.messages[0].content, prompt.columns["answer"]) for prompt in prompts] == [
        ("a", "1"),
        ("b, c", "2"),
    ]


def test_a_carriage_return_is_a_blank_of_json(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt":\r"a"}\r\n{"prompt":\t"b"}\n')
    assert [prompt.messages[0].content for prompt in read(path)] == ["a", "b"]


def test_a_parquet_file_that_is_none(tmp_path):
    path = tmp_path / "bad.parquet"
    path.write_bytes(b"PAR1" + b"\0" * 50 + b"PAR1")
    with pytest.raises(DataError, match=r"bad\.parquet: expected a Parquet file"):
        read(path)


def test_parquet_columns_of_one_name(tmp_path):
    path = tmp_path / "twice.parquet"
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"]), path)
    with pytest.raises(
        DataError,
        match=(
            r"^\S*twice\.parquet: expected column names that differ, got 'prompt' twice; rename the "
            r"columns$"
        ),
    ):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"prompt": "a"}, {"prompt": ""}]', r"array\.json: record 2: field 'prompt'"),
        (
            b'[{"prompt": "a"},\n {"prompt": "b"]',
            r"array\.json: expected one JSON array, got invalid JSON .*line 2",
        ),
        (b'[{"prompt": "a", "prompt": "b"}]', "the field 'prompt' stands twice"),
        (b'["a\xff"]', "expected UTF-8, got byte 0xff at 3"),
        (b"[]", "at least one record"),
        (b'{\n"prompt": "a"\n}', r"array\.json:1: expected one complete JSON object a line"),
    ],
)
def test_malformed_arrays(tmp_path, content, message):
    path = tmp_path / "array.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(path)
    with pytest.raises(DataError, match="expected a JSON file, got No such file"):
        read(tmp_path / "absent.json")
