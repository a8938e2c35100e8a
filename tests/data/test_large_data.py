"""Data that do not fit in memory are read when they are needed, and must then be unchanged."""

import csv
import errno
import json
import os
import resource
import threading
import time
import tracemalloc

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from fixtures import forked, make_model, write_jsonl

from oat.data.formats import Layout
from oat.data.prompts import Prompts, PromptSet, Source, read_prompts
from oat.errors import DataError
from oat.models.loading import load_tokenizer
from oat.seeds import Seeds
from oat.text.renderer import Renderer

RECORDS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(5)]
FUNCTION = (
    "import json\n\ndef records():\n    with open({path!r}) as file:\n        yield from map(json.loads, "
    "file)\n"
)


def large(path, size):
    """Write a file of about `size` bytes with records of 10 kB, whose prompts have 10 characters. Return the
    number of records."""
    count = size // 10_000
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            file.write(json.dumps({"prompt": f"{number:09}=", "text": f"{number % 10}" * 9950}) + "\n")
    return count


def take(path, renderer, count):
    prompts = Prompts(path, renderer, Seeds(0))
    assert prompts.size == count
    taken = [prompt.row for _ in range(20) for prompt in prompts.take(50)]
    assert len(set(taken)) == min(1000, count)


@pytest.fixture
def renderer(tmp_path):
    make_model(tmp_path / "model")
    return Renderer(load_tokenizer(str(tmp_path / "model")), template=None)


@pytest.mark.sample("data.jsonl", seconds=15.6)
@pytest.mark.parametrize("name", ["data.jsonl", "data.csv", "data.parquet", "saved", "mine.py:records"])
def test_records_do_not_stay_in_memory(tmp_path, renderer, name):
    count = large(tmp_path / "data.jsonl", 20_000_000)
    records = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    if name == "saved":
        datasets.Dataset.from_list(records).save_to_disk(tmp_path / name)
    elif name == "data.csv":
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "text"])
            writer.writeheader()
            writer.writerows(records)
    elif name == "data.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / name, row_group_size=100)
    elif name == "mine.py:records":
        (tmp_path / "mine.py").write_text(
            FUNCTION.format(path=str(tmp_path / "data.jsonl")), encoding="utf-8"
        )
    take(f"{tmp_path}/{name}", renderer, count)  # libraries are imported, and caches warm
    del records

    def most():
        """Return the largest traced memory of a pass, which includes that of other threads."""
        tracemalloc.start()
        try:
            take(f"{tmp_path}/{name}", renderer, count)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert any(most() < 3 * 10**6 for _ in range(3)), "of 20 MB"


@pytest.mark.slow
def test_a_file_of_a_gigabyte(tmp_path, renderer, capsys):
    count = large(tmp_path / "data.jsonl", 10**9)

    def most():
        """Return 1 if resident memory grows by more than 100 MB, otherwise 0."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        take(tmp_path / "data.jsonl", renderer, count)
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        print(f"{count} records, 1 GB: {grown / 1e6:.0f} MB more, {time.perf_counter() - start:.0f} s")
        return int(grown > 100 * 10**6)

    log = tmp_path / "log"
    assert forked(most, log) == 0, log.read_text()
    with capsys.disabled():
        print(log.read_text().strip())


def test_data_that_change_under_a_run_are_an_error(tmp_path, renderer):
    path = write_jsonl(tmp_path / "data.jsonl", [{"prompt": f"{n}"} for n in range(4)])
    prompts = Prompts(path, renderer, Seeds(0), shuffle=False)
    path.write_text(path.read_text() + '{"prompt": "9"}\n')
    assert [prompt.messages[0].content for prompt in prompts.take(2)] == ["0", "1"], (
        "what is behind the records changes none"
    )
    path.write_text(path.read_text().replace("2", "7"))
    with pytest.raises(
        DataError,
        match=(
            rf"{path}:3: expected the record that stood there when this was opened, got another; put the "
            r"data "
            r"back"
        ),
    ):
        prompts.take(1)
    path.write_text("{")
    with pytest.raises(DataError, match=rf"{path}:3: expected one complete JSON object"):
        prompts.take(1)
    records = [{"prompt": "1"}, {"prompt": "2"}]
    prompts = Prompts(records, renderer, Seeds(0), shuffle=False)
    records[0]["prompt"] = "3"
    with pytest.raises(DataError, match="records:1: expected the record"):
        prompts.take(1)


def test_a_copy_that_has_no_room_says_so(tmp_path, monkeypatch):
    def full(**options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(
        DataError,
        match=(
            r"^records: expected room for a copy of it in \S+, got No space left on device; make room, or "
            r"give it as JSONL"
        ),
    ):
        read_prompts(Source(iter(RECORDS)))


def test_the_copy_lies_in_the_folder_and_leaves_nothing(tmp_path):
    found = PromptSet(Source(iter(RECORDS)), Layout(), folder=tmp_path)
    assert os.fstat(found._reader._file.fileno()).st_dev == tmp_path.stat().st_dev
    assert list(tmp_path.iterdir()) == []
    assert list(found) == read_prompts(Source(RECORDS))


def test_a_pipe_is_read_once(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    text = "".join(json.dumps(record) + "\n" for record in RECORDS)
    writer = threading.Thread(target=path.write_text, args=(text,))
    writer.start()
    assert read_prompts(Source(path)) == read_prompts(Source(RECORDS))
    writer.join()
