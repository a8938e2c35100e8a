"""The text in a lock file that names the process which works in a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oat.errors import ConfigError
from oat.opening.directory import locked
from oat.rundir.mark import named_holder


def test_a_signed_lock_names_its_process(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with locked(tmp_path) as hold:
        assert named_holder(lock) == ""
        hold.sign()
        named = rf"in use by another process: {os.getpid()} on .*; wait"
        with pytest.raises(ConfigError, match=named), locked(tmp_path):
            pass
        signed = lock.read_text()
    assert lock.read_text() == ""

    found = json.loads(signed)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    for change, is_named in (
        ({}, True),
        ({"pid": ended.pid}, False),  # a killed process, whose lock an earlier version of oat has now
        ({"started": "another", "pid": os.getpid()}, found["started"] is None),
        ({"host": "another", "pid": ended.pid}, True),
        ({"namespace": "another", "pid": ended.pid}, True),
        ({"pid": "none"}, False),
        *(({"pid": pid}, False) for pid in (0, -1, 10**30, float("inf"), True)),
        *(({name: {}}, False) for name in ("host", "program", "since")),
    ):
        lock.write_text(json.dumps(found | change))
        assert bool(named_holder(lock)) == is_named, change
    for text in ("", "[1]", "{", "\udcff", "[" * 4000):
        lock.write_bytes(text.encode(errors="surrogateescape"))
        assert named_holder(lock) == "", text


def test_a_secret_after_a_flag_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/oat", "train", "c.yaml", "--oracle.key", "secret"])
    with locked(tmp_path) as hold:
        hold.sign()
        assert "`oat train c.yaml`" in named_holder(tmp_path / "lock")
        assert "secret" not in (tmp_path / "lock").read_text()


def test_arguments_of_another_program_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (
        ["train.py", "secret"],
        ["-c", "secret"],
        ["-", "secret"],
        ["of/a/package/__main__.py", "secret"],
    ):
        monkeypatch.setattr(sys, "argv", words)
        with locked(tmp_path) as hold:
            hold.sign()
            assert str(os.getpid()) in named_holder(tmp_path / "lock")
            assert "secret" not in (tmp_path / "lock").read_text()


@pytest.mark.parametrize("text", ["precious", "", '{"pid": 1}', "[1]"])
def test_a_file_that_is_no_lock_of_ours_keeps_its_text(tmp_path: Path, text: str) -> None:
    """A lock may be a link to another file."""
    (tmp_path / "other").write_text(text)
    (tmp_path / "lock").symlink_to("other")
    with locked(tmp_path) as hold:
        hold.sign()
        named_holder(tmp_path / "lock")
    assert (tmp_path / "other").read_text() == text


def test_lines_of_a_hostile_lock_are_one_line(tmp_path: Path) -> None:
    with locked(tmp_path) as hold:
        hold.sign()
        found = json.loads((tmp_path / "lock").read_text())
        (tmp_path / "lock").write_text(json.dumps(found | {"since": "now\noat: all is well\x1b[2J"}))
        assert "\n" not in named_holder(tmp_path / "lock")
        assert "\x1b" not in named_holder(tmp_path / "lock")
