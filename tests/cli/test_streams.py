"""What a command shows on a terminal or a pipe that is not UTF-8, or that is closed: escaped text, and no
traceback."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures import World, made_once, oat, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from questions import question

from oat.errors import escape_streams
from oat.oracles.isolated import Isolated

ANY = st.text(st.characters(), max_size=12)
"""Texts of all characters, surrogates included."""


class Streams:
    """Standard streams with an encoding of their own."""

    def __init__(self, patch: pytest.MonkeyPatch, encoding: str, typed: bytes = b""):
        self.files = {"stdin": io.BytesIO(typed), "stdout": io.BytesIO(), "stderr": io.BytesIO()}
        for name, file in self.files.items():
            patch.setattr(sys, name, io.TextIOWrapper(file, encoding=encoding, errors="strict"))

    def written(self, name: str) -> str:
        stream = getattr(sys, name)
        stream.flush()
        return self.files[name].getvalue().decode(stream.encoding)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    text=ANY,
    encoding=st.sampled_from(["ascii", "latin-1", "cp1252", "koi8-r", "utf-8", "utf-16-le", "gb18030"]),
)
def test_every_text_can_be_shown_and_json_stays_json(text: str, encoding: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        streams = Streams(patch, encoding)
        escape_streams()
        print(json.dumps([text], ensure_ascii=False))
        print(text, file=sys.stderr)
        sys.stderr.flush()
        assert json.loads(streams.written("stdout")) == json.loads(json.dumps([text]))


@pytest.fixture(scope="module")
def foreign(world: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world in a folder whose name is not ASCII, with such texts in its columns."""

    def make(folder: Path) -> None:
        inner = folder / "é – 😀"
        shutil.copytree(world.folder, inner)
        rows = [{"prompt": f"{a}+1=", "answer": "a", "note": "é – 😀"} for a in range(4)]
        write_jsonl(inner / "train.jsonl", rows)

    return World(made_once(tmp_path_factory, "foreign", make) / "é – 😀")


def test_every_command_on_a_terminal_of_ascii(
    foreign: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command that shows something ends as on a terminal of UTF-8."""
    run, home = tmp_path / "é" / "run", foreign.folder
    changes = {"stop.max_steps": 1, "algorithm.prompts": 2, "evaluation": None}
    config = foreign.config("grpo", tmp_path, changes)
    chatting = ("chat", home / "model", "--template", "none", "--max-new-tokens", 2)
    for words in (
        ("train", config, "--run_dir", run),
        ("train", config, "--run_dir", run, "--print-config"),
        ("check", config, "--run_dir", run),
        ("samples", run),
        ("ledger", run),
        ("ledger", run, "--check"),
        ("digest", run),
        ("export", run, tmp_path / "ü"),
        ("generate", run, "--prompts", home / "train.jsonl"),
        chatting,
    ):
        with monkeypatch.context() as patch:
            streams = Streams(patch, "ascii", b"1+1=\n")
            code, shown = oat(*words), streams.written("stdout") + streams.written("stderr")
        assert code == 0, (words, shown)
        if words[0] == "generate":
            rows = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
            assert [row["columns"]["note"] for row in rows] == ["é – 😀"] * 4
    for words in (("train", config, "--run_dir", run, "--learner.betas", "é"), ("samples", tmp_path / "ö")):
        with monkeypatch.context() as patch:
            streams = Streams(patch, "ascii")
            assert oat(*words) == 2
            assert streams.written("stderr")


@pytest.mark.parametrize("typed", ["1+é=\n".encode(), "1+é=\n".encode("latin-1")])
def test_what_is_typed_into_a_chat(foreign: World, monkeypatch: pytest.MonkeyPatch, typed: bytes) -> None:
    """A pipe is read as UTF-8, whatever the terminal; other bytes are refused with their line."""
    with monkeypatch.context() as patch:
        streams = Streams(patch, "ascii", typed)
        code = oat("chat", foreign.folder / "model", "--template", "none", "--max-new-tokens", 2)
        shown = streams.written("stderr")
    assert (code, "expected UTF-8" in shown) == (
        (0, False) if typed.isascii() or b"\xc3" in typed else (2, True)
    )


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exec {oat} --help | true; exit ${{PIPESTATUS[0]}}", {0, 141}),
        ("{oat} --help >&-", {0}),
        ("{oat} --help >/dev/full", {1}),
        ("{oat} nothing 2>&-", {2}),
        ("{oat} chat --help <&-", {0}),
    ],
)
def test_closed_streams_and_full_ones(command: str, code: set[int]) -> None:
    ours = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = command.format(oat=f"{sys.executable} -m oat")
    ours["PYTHONUNBUFFERED"] = ""
    ended = subprocess.run(
        ["bash", "-c", command], capture_output=True, env={**os.environ, **ours}, check=False
    )
    assert ended.returncode in code, ended.stderr
    assert b"Traceback" not in ended.stderr
    assert b"Exception ignored" not in ended.stderr


def test_a_function_in_a_worker_may_print_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "loud.py"
    file.write_text("def reward(completions):\n    print('\\u00e9')\n    return [1.0] * len(completions)\n")
    oracle = Isolated(f"{file}:reward", timeout_s=60.0)
    (ticket,) = oracle.submit([question(0, ["a"])])
    ((_, answer),) = oracle.collect([ticket], 60.0)
    oracle.close()
    assert answer.values == (1.0,)
