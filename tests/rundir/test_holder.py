"""The text in a lock file that names the process which works in a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oat.build.directory import locked
from oat.errors import ConfigError
from oat.rundir.holder import named_holder


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
    ):
        lock.write_text(json.dumps(found | change))
        assert bool(named_holder(lock)) == is_named, change
    for text in ("", "[1]", "{", "\udcff"):
        lock.write_bytes(text.encode(errors="surrogateescape"))
        assert named_holder(lock) == "", text


def test_a_secret_after_a_flag_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/oat", "train", "c.yaml", "--oracle.key", "secret"])
    with locked(tmp_path) as hold:
        hold.sign()
        assert "`oat train c.yaml`" in named_holder(tmp_path / "lock")
        assert "secret" not in (tmp_path / "lock").read_text()
