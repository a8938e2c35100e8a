"""The first pass over a source finds the same in one process and in many, and read from a cache."""

import csv
import datetime
import errno
import json
import os
import stat
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from fixtures import make_model, oat, write_jsonl

from oat.data import index
from oat.data import index as index_cache
from oat.data.fit import Fit
from oat.data.formats import Layout
from oat.data.index import Index
from oat.data.prompts import PromptSet, Source
from oat.errors import DataError, OatWarning
from oat.models.loading import load_tokenizer
from oat.text.renderer import Renderer

LONG = "x" * 100


@pytest.fixture
def renderer(tmp_path):
    make_model(tmp_path / "model")
    return Renderer(load_tokenizer(str(tmp_path / "model")), template=None)


def sums(count):
    """Return valid records. Every fourth prompt is longer, and some records have further columns."""
    return [
        {
            "prompt": f"{n}+{n}=" + "1" * (n % 4 == 0) * 9,
            "answer": str(2 * n),
            **({"level": n} if n % 5 == 0 else {}),
        }
        for n in range(count)
    ]


def written(tmp_path, kind, records):
    """Write the records to a file of one kind, and return its name."""
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text(
            "".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records),
            encoding="utf-8",
        )
    elif kind == "json":
        path.write_text(json.dumps(records), encoding="utf-8")
    elif kind == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["prompt", "answer", "level"])
            writer.writeheader()
            writer.writerows(records)
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=50)
    else:
        datasets.Dataset.from_list(records).save_to_disk(path)
    return str(path)


def opened(name, renderer, caches=(), *, skip=True, responses=(), **limits):
    return PromptSet(
        Source(name), Layout(responses=responses), Fit(renderer, **limits), skip=skip, caches=caches
    )


def told(found):
    return (
        found.index.plain,
        found.digest,
        found.notes,
        [found[number] for number in range(0, len(found), 17)],
    )


MALFORMED = [
    "{\n",
    '{"prompt": "' + "\\" + 'ud800"}\n',
    {"prompt": 2**70},
    {"prompt": "1", "n": 2**70},
    '{"prompt": "2", "n": 1e999}\n',
    '{"prompt": "3", "a": ' + "[" * 80 + "]" * 80 + "}\n",
    {"question": "4"},
    [],
]
"""Records that cannot be parsed, stored, sent to another process, or read in the others' format."""


@pytest.mark.sample("parquet", seconds=4.6)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_workers_find_what_one_process_finds(tmp_path, renderer, monkeypatch, kind):
    records = sums(300)
    if kind == "jsonl":
        records[100:100] = MALFORMED
        records[250:250] = MALFORMED
    else:
        records = [
            {**record, "day": datetime.date(2026, 1, 1) if n % 50 == 7 else None}
            for n, record in enumerate(records)
        ]
    name = written(tmp_path, kind, records)
    monkeypatch.setattr(index, "ALONE_S", 1e9)
    alone = told(opened(name, renderer, max_tokens=12, room=7))
    monkeypatch.setattr(index, "ALONE_S", -1.0)
    shared = []
    monkeypatch.setattr(
        index.Pass, "_share_out", lambda *args, real=index.Pass._share_out: (shared.append(True), real(*args))
    )
    assert told(opened(name, renderer, max_tokens=12, room=7)) == alone
    assert shared, "the pass went on in workers"
    assert alone[0]["skipped"] == (2 * len(MALFORMED) if kind == "jsonl" else 6)
    assert 0 < len(alone[0]["rows"]) // 8 < alone[0]["read"], "some are too long"
    assert alone[0]["over"] > 0
    if kind == "jsonl":
        messages = []
        for seconds in (1e9, -1.0):
            monkeypatch.setattr(index, "ALONE_S", seconds)
            with pytest.raises(DataError) as error:
                opened(name, renderer, skip=False)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
        assert messages[0].startswith(f"{name}:101: expected one complete JSON object")


@pytest.mark.slow(instead="test_workers_find_what_one_process_finds, for parquet", seconds=2.4)
def test_workers_cut_as_one_process_does(tmp_path, renderer, monkeypatch):
    name, found = written(tmp_path, "jsonl", sums(300)), []
    for seconds in (1e9, -1.0):
        monkeypatch.setattr(index, "ALONE_S", seconds)
        found.append(
            opened(name, renderer, responses=("answer",), room=12, too_long="cut_prompt_start").index
        )
    assert found[1].plain == found[0].plain
    assert (found[0].cut, found[0].longest, len(found[0])) == (75, 12, 300)


@pytest.fixture
def read(monkeypatch):
    """Return a list that grows by one for each record that is read in full."""
    count = []
    real = index.Pass._enter
    monkeypatch.setattr(index.Pass, "_enter", lambda *args: (count.append(1), real(*args)))
    return count


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "saved"])
def test_what_was_read_is_remembered(tmp_path, renderer, monkeypatch, read, kind):
    monkeypatch.setattr(index_cache, "LARGE", 1)
    (tmp_path / "run").mkdir()
    name, caches = written(tmp_path, kind, sums(100)), [tmp_path / "run" / "indexes", tmp_path / "cache"]
    first = told(opened(name, renderer, caches))
    assert len(read) == 100
    assert told(opened(name, renderer, caches)) == first
    for file in caches[0].iterdir():
        file.unlink()
    assert told(opened(name, renderer, caches)) == first, "from the second folder"
    assert len(read) == 100, "none was read again"
    assert [
        caches[1].stat().st_mode & 0o777,
        *(file.stat().st_mode & 0o777 for file in caches[1].iterdir()),
    ] == [0o700, 0o600]


def test_a_changed_byte_is_noticed(tmp_path, renderer, monkeypatch, read):
    monkeypatch.setattr(index_cache, "LARGE", 1)
    name, caches = written(tmp_path, "jsonl", sums(100)), [tmp_path / "cache"]
    before = opened(name, renderer, caches)
    path, times = tmp_path / "data.jsonl", os.stat(name)
    path.write_text(path.read_text().replace("7+7=", "7-7="))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = opened(name, renderer, caches)
    assert len(read) == 200
    assert after[7].messages[0].content == "7-7="
    assert after.digest != before.digest


def test_whatever_decides_an_index_is_in_its_name(tmp_path, renderer, monkeypatch, read):
    monkeypatch.setattr(index_cache, "LARGE", 1)
    name, caches = written(tmp_path, "jsonl", sums(20)), [tmp_path / "cache"]
    make_model(tmp_path / "other", tokens=list("0123456789+-=#"))
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    chat, other = (
        Renderer(renderer.tokenizer, template=str(tmp_path / "t.jinja")),
        Renderer(load_tokenizer(str(tmp_path / "other")), template=None),
    )
    variants = [
        lambda: opened(name, renderer, caches),
        lambda: opened(name, other, caches),
        lambda: opened(name, chat, caches),
        lambda: opened(name, renderer, caches, max_tokens=9),
        lambda: opened(name, renderer, caches, room=9),
        lambda: opened(name, renderer, caches, responses=("answer",)),
        lambda: opened(name, renderer, caches, responses=("answer",), max_tokens=9),
        lambda: opened(
            name, renderer, caches, responses=("answer",), max_tokens=9, too_long="cut_prompt_start"
        ),
        lambda: PromptSet(Source(name), Layout(), Fit(renderer), max_prompts=20, skip=True, caches=caches),
        lambda: PromptSet(Source(name), Layout("answer"), Fit(renderer), skip=True, caches=caches),
    ]
    found = [told(open_()) for open_ in variants]
    assert len(read) == 20 * len(variants)
    assert [told(open_()) for open_ in variants] == found
    assert len(read) == 20 * len(variants), "each is remembered"
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}!{{ eos_token }}{% endfor %}")
    opened(name, Renderer(renderer.tokenizer, template=str(tmp_path / "t.jinja")), caches)
    assert len(read) == 20 * (len(variants) + 1), "the template's text counts, and not its name"


def test_damage_is_made_anew_and_open_folders_are_left_alone(tmp_path, renderer, monkeypatch, read):
    monkeypatch.setattr(index_cache, "LARGE", 1)
    name, cache = written(tmp_path, "jsonl", sums(50)), tmp_path / "cache"
    first = told(opened(name, renderer, [cache]))
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:-1], b"", whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]):
        file.write_bytes(damaged)
        assert told(opened(name, renderer, [cache])) == first
        assert file.read_bytes() == whole
    assert len(read) == 4 * 50
    cache.chmod(0o777)
    with pytest.warns(OatWarning, match=f"{cache}: others may write there"):
        assert told(opened(name, renderer, [cache])) == first
    assert len(read) == 5 * 50


def test_what_may_only_be_read_is_used(tmp_path, renderer, monkeypatch, read):
    monkeypatch.setattr(index_cache, "LARGE", 1)
    name, cache = written(tmp_path, "jsonl", sums(50)), tmp_path / "cache"
    first = told(opened(name, renderer, [cache]))

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(index_cache.os, "utime", refuse)
    assert told(opened(name, renderer, [cache])) == first
    assert len(read) == 50


def test_nobody_else_may_write_where_it_is_made(tmp_path, renderer, monkeypatch):
    """Only the user may read and write the cache, for any default rights of new folders. A link in the place
    of a new file is not written through."""
    monkeypatch.setattr(index_cache, "LARGE", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    name = written(tmp_path, "jsonl", sums(50))
    [folder] = index_cache.cache_folders()
    before = os.umask(0)
    try:
        opened(name, renderer, [folder])
    finally:
        os.umask(before)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder.parent, folder, *folder.iterdir())] == [
        0o700,
        0o700,
        0o600,
    ]
    (file,) = folder.iterdir()
    (other := tmp_path / "other").write_text("theirs")
    (folder / f".new-{os.getpid()}-{file.name}").symlink_to(other)
    file.unlink()
    opened(name, renderer, [folder])
    assert other.read_text() == "theirs"
    assert list(folder.iterdir()) == [file]


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert index_cache.cache_folders() == []


def test_a_cache_is_bounded(tmp_path, renderer, monkeypatch):
    monkeypatch.setattr(index_cache, "LARGE", 1)
    cache = tmp_path / "cache"
    sizes = []
    for n in range(4):
        path = write_jsonl(tmp_path / f"{n}.jsonl", sums(20))
        opened(str(path), renderer, [cache])
        sizes.append(max(file.stat().st_size for file in cache.iterdir()))
        monkeypatch.setattr(index_cache, "MAX_BYTES", 2 * sizes[0] + 100)
    assert len(list(cache.iterdir())) == 2


def test_functions_and_small_files_are_read_each_time(tmp_path, renderer, read):
    name, cache = written(tmp_path, "jsonl", sums(20)), tmp_path / "cache"
    (tmp_path / "mine.py").write_text('def records():\n    return [{"prompt": "1+1="}]\n')
    for source in (name, f"{tmp_path}/mine.py:records", sums(20)):
        before = len(read)
        for _ in range(2):
            PromptSet(Source(source), Layout(), Fit(renderer), caches=[cache])
        assert len(read) - before in (2, 40)
    assert not cache.exists()


def test_an_index_of_other_data_is_none():
    with pytest.raises(ValueError, match="one length"):
        Index.of({**Index().plain, "rows": bytes(8)})


def test_a_run_remembers(tmp_path, monkeypatch, capsys):
    """A run stores the result of its first pass over the data in the user's cache folder and in its own
    directory."""
    monkeypatch.setattr(index_cache, "LARGE", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    make_model(tmp_path / "model")
    name = written(tmp_path, "jsonl", sums(20))
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {tmp_path}/model}}\nprompts: {{path: {name}, reference_key: answer}}\n"
        "sampling: {max_new_tokens: 2}\noracle: {name: exact_match}\n"
        "algorithm: {name: grpo, prompts: 2, samples: 2}\nstop: {max_steps: 1}\n"
        f"run_dir: {tmp_path}/run\n"
    )
    assert oat("train", tmp_path / "run.yaml") == 0
    assert [
        len(list(folder.iterdir()))
        for folder in (tmp_path / "xdg" / "oat" / "indexes", tmp_path / "run" / "indexes")
    ] == [1, 1]
    (tmp_path / "data.jsonl").write_text((tmp_path / "data.jsonl").read_text().replace("7+7", "8+7"))
    assert oat("train", tmp_path / "run.yaml", "--stop.max_steps", 2) == 2
    assert "expected the prompts that the run began with, got others" in capsys.readouterr().err
