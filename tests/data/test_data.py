"""Readers of prompts, and the checks of their records."""

import gzip
import json
import re
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from sources import RECORDS, read, write

from oat import wire
from oat.config.load import convert
from oat.config.settings import EvaluationConfig, OracleConfig, PromptsConfig, RenderConfig
from oat.data.prompts import Source
from oat.errors import ConfigError, DataError
from oat.types import Message

CHATS = [
    {
        "prompt": [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}],
        "answer": 2,
        "tags": ["a"],
        "more": {"x": 1.5},
    },
    {"prompt": [{"role": "user", "content": "2+2"}], "answer": None, "tags": [], "more": None},
]
FUNCTION = (
    "import json\n\ndef records():\n    with open({path!r}) as file:\n        yield from map(json.loads, "
    "file)\n"
)


def save_parquet(path, records):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def contents(prompts):
    return [prompt.messages[0].content for prompt in prompts]


def test_a_record_by_hand(tmp_path):
    path = write(
        tmp_path,
        [
            {"question": "2+2=", "answer": 4, "level": {"easy": True}},
            {
                "question": [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}],
                "answer": "2",
                "level": None,
            },
        ],
    )
    first, second = read(path, prompt_key="question", reference_key="answer")
    assert (first.row, first.occurrence, first.messages, first.reference) == (
        1,
        0,
        (Message("user", "2+2="),),
        "4",
    )
    assert first.columns == {"answer": 4, "level": {"easy": True}}
    assert (second.row, second.occurrence) == (2, 1)
    assert second.messages == (Message("system", "add"), Message("user", "1+1="))
    assert wire.roundtrip(first) == first
    assert read(path, prompt_key="question")[0].reference is None


def test_byte_order_mark_crlf_blank_lines_and_line_separators(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(
        "\ufeff".encode() + b'{"prompt": "a"}\r\n\r\n' + '{"prompt": "b\u2028c\u0085d"}'.encode()
    )
    assert [(prompt.row, prompt.messages[0].content) for prompt in read(path)] == [
        (1, "a"),
        (3, "b\u2028c\u0085d"),
    ]


MALFORMED = [
    (b'{"prompt": "a"', "invalid JSON"),
    (b'{"prompt": "a"} {"prompt": "b"}', "invalid JSON"),
    (b'\xef\xbb\xbf{"prompt": "a"}', "invalid JSON.*BOM"),
    (b'{"prompt": "a", "prompt": "b"}', "the field 'prompt' stands twice"),
    (b'{"prompt": "a", "x": [{"y": 1, "z": 2, "y": 1}]}', "the field 'y' stands twice"),
    (b'{"prompt": "a", "x": NaN}', "NaN is not JSON"),
    (b'{"prompt": "a", "x": 1e999}', "field 'x'.*too large"),
    (b'{"prompt": "a", "x": 18446744073709551616}', "field 'x'.*64 bits"),
    (b'{"prompt": "a", "x": -9223372036854775809}', "field 'x'.*64 bits"),
    (b"[" * 100_000, "invalid JSON"),
    (b'{"prompt": "a", "x": ' + b"[" * 200 + b"]" * 200 + b"}", "field 'x'.*nested deeper"),
    (b'["prompt"]', "expected a JSON object, got a list"),
    (b"null", "expected a JSON object, got null"),
    (b'{"promt": "a"}', "field 'prompt'.*did you mean `promt`"),
    (b'{"prompt": 5}', "field 'prompt': expected a string or a list of messages, got a number"),
    (b'{"prompt": null}', "got null"),
    (b'{"prompt": ""}', "got an empty message"),
    (b'{"prompt": " \\n "}', "got an empty message"),
    (b'{"prompt": []}', "got an empty list"),
    (b'{"prompt": ["a"]}', "message 1: expected .*got a string"),
    (b'{"prompt": [{"from": "human", "text": "a"}]}', "message 1: .*got the fields 'from', 'text'"),
    (b'{"prompt": [{"from": "person", "value": "a"}]}', "expected a role, got 'person'.*human"),
    (
        b'{"prompt": [{"role": "user", "content": "a", "value": "b"}]}',
        "write role and text in these two fields",
    ),
    (
        b'{"prompt": [{"role": "user", "content": "a", "weight": 1}]}',
        "expected weight 0, or 1 on an assistant's message, got 1 on user's",
    ),
    (b'{"prompt": [{"role": "user", "content": "a", "weight": 0.5}]}', "got 0.5"),
    (b'{"prompt": [{"role": "human", "content": "a"}]}', "expected a role, got 'human'"),
    (b'{"prompt": [{"role": ["user"], "content": "a"}]}', "expected a role"),
    (
        b'{"prompt": [{"role": "user", "content": {"text": "a"}}]}',
        "expected a string as content, got an object",
    ),
    (
        b'{"prompt": [{"role": "user", "content": ["a"]}]}',
        'message 1, part 1: expected {"type": "text", "text": ...}, got a string',
    ),
    (
        b'{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]}',
        "part 2: .*a part of the type 'image'; only",
    ),
    (
        b'{"prompt": [{"role": "user", "content": [{"type": "text"}]}]}',
        "message 1, part 1: expected .*, got an object",
    ),
    (b'{"prompt": [{"role": "user", "content": []}]}', "expected text, got an empty message"),
    (
        b'{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        "got assistant; end the prompt with",
    ),
    (b'{"prompt": "a\\ud800"}', r"field 'prompt'.*lone surrogate U\+D800"),
    (b'{"prompt": "a", "x": [{"\\udfff": 1}]}', r"field 'x'.*lone surrogate U\+DFFF"),
    (b'{"prompt": "a\\u0000b"}', "field 'prompt'.*NUL"),
    (b'{"prompt": "a\xff"}', "expected UTF-8, got byte 0xff at 13"),
]


@pytest.mark.parametrize(("line", "message"), MALFORMED)
def test_malformed_records(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message) as seen:
        read(path)
    assert str(seen.value).startswith(f"{path}:2: ")


def test_whole_numbers_up_to_64_bits(tmp_path):
    (prompt,) = read(write(tmp_path, [{"prompt": "a", "least": -(2**63), "most": 2**64 - 1}]))
    assert wire.roundtrip(prompt).columns == {"least": -(2**63), "most": 2**64 - 1}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a"}, r"field 'answer' \(prompts\.reference_key\): expected .*, got none; add the field"),
        ({"prompt": "a", "answer": None}, "field 'answer': expected a string or a number, got null"),
        ({"prompt": "a", "answer": True}, "got true or false"),
        ({"prompt": "a", "answer": ["4"]}, "got a list"),
    ],
)
def test_malformed_references(tmp_path, record, message):
    path = write(tmp_path, [{"prompt": "a", "answer": 4}, record])
    with pytest.raises(DataError, match=message) as seen:
        read(path, reference_key="answer")
    assert f"{path}:2" in str(seen.value)


@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf"])
def test_an_empty_file(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match="empty file"):
        read(path)


@pytest.mark.inventory(106)
@pytest.mark.parametrize("records", [RECORDS, CHATS], ids=["plain", "chat"])
def test_every_form_of_a_data_set_gives_the_same_prompts(tmp_path, records, cache):
    path = write(tmp_path, records)
    expected = read(path)
    table = datasets.Dataset.from_list(records)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(tmp_path / "splits")
    save_parquet(tmp_path / "data.parquet", records)
    (tmp_path / "folder").mkdir()
    save_parquet(tmp_path / "folder" / "train.parquet", records)
    (tmp_path / "mine.py").write_text(FUNCTION.format(path=str(path)), encoding="utf-8")
    (tmp_path / "array.json").write_text("\ufeff\n" + json.dumps(records, indent=1), encoding="utf-8")
    path.with_suffix(".json").write_bytes(path.read_bytes())
    for form in ("one", "splits", "data.parquet", "folder", "mine.py:records", "array.json", "data.json"):
        assert read(f"{tmp_path}/{form}") == expected, form
    assert read(records) == read(iter(records)) == read(tuple(records)) == read(lambda: records) == expected
    assert (
        read(table)
        == read(table.to_iterable_dataset())
        == read(datasets.DatasetDict(train=table))
        == expected
    )
    assert read({"train": records[1:], "test": records}, split="test") == expected
    assert read(tmp_path / "splits", split="test") == expected[:1]
    cache.joinpath("folder").rename(cache / "org___folder")
    assert read("org/folder") == read("org/folder@default") == read("org/folder", split="train") == expected


@pytest.mark.parametrize(
    "name", ["absent.jsonl", "absent.csv", "absent.parquet", "absent", "data/absent.jsonl"]
)
def test_a_file_that_is_not_there(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=f"{name}: expected a .* file, got .*No such file or directory; check the path"
    ):
        read(name)


def test_a_packed_file_says_what_it_is(tmp_path):
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}'))
    with pytest.raises(
        DataError, match=r"data\.jsonl\.gz: expected a file of records, got a packed one \(\.gz\); unpack it"
    ):
        read(path)


@pytest.mark.parametrize(
    ("name", "is_hinted"),
    [("squad", True), ("gsm8k@main", True), ("data/squad", False), ("absent.jsonl", False)],
)
def test_a_name_that_might_be_of_the_hub_is_told_how_those_look(tmp_path, monkeypatch, name, is_hinted):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    path = tmp_path / name if "/" in name else name
    with pytest.raises(DataError, match="check the path") as seen:
        read(path)
    assert (
        f"; a dataset of the hub is named with who owns it, as `org/{name}`" in str(seen.value)
    ) == is_hinted


@pytest.mark.usefixtures("cache")
def test_a_hub_data_set_without_a_network_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError,
        match=(
            r"no such file.*hf download --repo-type dataset org/name "
            r"--local-dir.*HF_HOME.*HF_HUB_OFFLINE=1"
        ),
    ):
        read("org/name@main")


@pytest.mark.usefixtures("cache")
def test_directories_that_hold_no_data_set(tmp_path):
    with pytest.raises(DataError, match="a folder of data files, got neither"):
        read(tmp_path)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match="expected a dataset that was saved"):
        read(tmp_path)


def test_splits_that_are_none(tmp_path):
    table = datasets.Dataset.from_list(RECORDS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(test=table, validation=table).save_to_disk(tmp_path / "two")
    with pytest.raises(DataError, match=r"expected the split 'train', got none; .*valid: test, validation"):
        read(tmp_path / "two")
    with pytest.raises(DataError, match="did you mean `validation`"):
        read(tmp_path / "two", split="validatoin")
    assert contents(read(tmp_path / "two", split="validation")) == [record["prompt"] for record in RECORDS], (
        "without a split `train`"
    )
    with pytest.raises(DataError, match=r"^records: expected the split 'train', got none; .*valid: test"):
        read({"test": RECORDS})
    with pytest.raises(DataError, match="remove `split: test`"):
        read(tmp_path / "one", split="test")
    for other in (write(tmp_path, RECORDS), RECORDS):
        with pytest.raises(DataError, match="expected a dataset, which has splits"):
            read(other, split="test")


@pytest.mark.parametrize(("module", "name"), [("datasets", "org/name"), ("pyarrow.parquet", "data.parquet")])
def test_a_missing_library_is_named(tmp_path, monkeypatch, module, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        DataError, match=rf"{name}: reading it needs the library .*pip install 'oat-align\[data\]'"
    ):
        read(name)


def test_a_library_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.__version__", "3.6.0")
    with pytest.raises(DataError, match=r"datasets 3\.6\.0 may run code"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "def records():\n    yield {'prompt': 'a'}\n    yield 1 / 0",
            r"raised ZeroDivisionError: division by zero \(line 3 of mine\.py\); give an iterable of records",
        ),
        ("def records(n):\n    return []", "raised TypeError"),
        ("def records():\n    return 5", "raised TypeError"),
        ("records = [{'prompt': 'a'}]", "raised TypeError: 'list' object is not callable"),
        ("def records():\n    return []", "expected at least one record"),
        (
            "def records():\n    return [{'prompt': 'a'}, {'promt': 'a'}]",
            "records:2: field 'prompt'.*did you mean `promt`",
        ),
    ],
)
def test_functions_that_give_no_records(tmp_path, body, message):
    path = tmp_path / "mine.py"
    path.write_text(body, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read(f"{path}:records")
    with pytest.raises(ConfigError, match="did you mean `records`"):
        read(f"{path}:record")


def broken():
    yield {"prompt": "a"}
    raise RuntimeError("the disk is gone")


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (broken(), r"records raised RuntimeError: the disk is gone \(line \d+ of test_data\.py\)"),
        (broken, "records raised RuntimeError: the disk is gone"),
        (
            lambda n: [],
            (
                "records raised TypeError: .*; give an iterable of records, or a function without arguments "
                "that returns one"
            ),
        ),
        (5, "records raised TypeError"),
        ([], "expected at least one record"),
    ],
)
def test_python_that_gives_no_records(records, message):
    with pytest.raises(DataError, match=message):
        read(records)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("text", "expected a JSON object, got a string"),
        ({"prompt": "a", "x": {1, 2}}, "field 'x': .*got a value of the type set"),
        ({"prompt": "a", "x": [{"y": b"1"}]}, "field 'x': .*got a value of the type bytes"),
        ({"prompt": "a", "x": float("nan")}, "field 'x': .*not finite"),
        ({"prompt": "a", 5: "x"}, "field 5: .*a name that is no text"),
        ({"prompt": "a", "x": {5: "x"}}, "field 'x': .*a name that is no text"),
        ({"prompt": b"a"}, "field 'prompt': .*type bytes"),
    ],
)
def test_what_python_could_hand_over_and_a_run_cannot_store(record, message):
    with pytest.raises(DataError, match=f"records:2: {message}"):
        read([{"prompt": "fine"}, record])


def test_the_first_records_and_no_more_are_read(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\nthis is not JSON\n')
    assert contents(read(path, max_prompts=2)) == ["a", "b"]
    endless = tmp_path / "mine.py"
    endless.write_text(
        "import itertools\n\ndef records():\n    return ({'prompt': str(n)} for n in itertools.count())\n"
    )
    assert contents(read(f"{endless}:records", max_prompts=3)) == ["0", "1", "2"]
    with pytest.raises(DataError, match=f"{path}:4"):
        read(path, max_prompts=3)


def test_the_settings_that_the_page_shows_exist():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)]
    sections = {
        "prompts": PromptsConfig,
        "evaluation": EvaluationConfig,
        "render": RenderConfig,
        "oracle": OracleConfig,
    }
    assert {section for block in blocks for section in block} == set(sections)
    for block in blocks:
        for section, fields in block.items():
            convert(sections[section], fields, (section,), {})


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_gives_no_share(weight):
    with pytest.raises(DataError, match=r"a\.jsonl: a weight of"):
        Source("a.jsonl", weight=weight)
