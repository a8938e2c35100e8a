"""Names of files that are no ASCII, in a locale whose names are ASCII."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from fixtures import World, oat

C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SCRIPT = """
import sys
from oat.cli.restart import read_in_utf8

read_in_utf8(None)
open(sys.argv[1], "w").close()
print(ascii(sys.argv[1]), sys.getfilesystemencoding(), sys.stdout.encoding, "caf\u00e9")
"""


def ran(words: list[str], settings: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[bytes]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, *words],
        env={**plain, **settings},
        cwd=folder,
        capture_output=True,
        check=False,
        timeout=600,
    )


@pytest.mark.parametrize(
    ("settings", "flags", "name"),
    [(C, [], "é"), ({"LC_ALL": "C.UTF-8"}, [], "é"), (C, ["-X", "utf8=0"], "e")],
)
def test_a_name_is_read_in_utf8(
    settings: dict[str, str], flags: list[str], name: str, tmp_path: Path
) -> None:
    """The standard output keeps its encoding. If UTF-8 mode is turned off for good, the program starts once
    more and goes on in ASCII."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = ran([*flags, "script.py", name], settings, tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout.decode().split()
    assert said[0] == ascii(name)
    assert (tmp_path / name).exists()
    assert said[1] == ("ascii" if flags else "utf-8")
    assert said[2] == ("ascii" if settings is C else "utf-8")
    assert said[3] == ("caf\\xe9" if settings is C else "café")


def test_a_name_that_is_no_utf8_is_one_message(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config("grpo", tmp_path)
    before = sorted(os.listdir(tmp_path))
    assert oat("train", config, "--run_dir", os.fsdecode(b"runs/\xe9")) == 2
    assert "is no text in UTF-8" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.slow(instead="test_a_name_is_read_in_utf8", seconds=12)
def test_a_run_goes_on_in_another_locale(world: World, tmp_path: Path) -> None:
    config = world.config("grpo", tmp_path, {"evaluation": None, "tracking.tensorboard": True})
    train = ["-m", "oat", "train", config.name, "--run_dir", "läufe/é"]
    for steps, settings in ((1, C), (2, {"LC_ALL": "C.UTF-8"}), (3, C)):
        done = ran([*train, "--stop.max_steps", str(steps)], settings, tmp_path)
        assert done.returncode == 0, done.stderr
    rows = (tmp_path / "läufe" / "é" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 1, 2, 3]
    assert os.listdir(tmp_path / "läufe") == ["é"]
    assert list((tmp_path / "läufe" / "é" / "tensorboard").iterdir())
