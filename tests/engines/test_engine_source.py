"""The engine's tests also pass with engines that are made of model sources, in a process that cannot import
the learner (`tests/support/source_engines.py`)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = {
    "load": "test_engine_load.py",
    "torch": "test_engine_torch.py",
    "paged": "test_engine_paged.py",
    "turns": "test_engine_turns.py",
    "equal rows": "test_equal_rows.py",
    "features": "test_features.py",
}


@pytest.mark.slow(
    instead="tests/runtime/test_processes.py::test_a_run_with_actors_is_the_local_run", seconds=10.5
)
@pytest.mark.parametrize("name", FILES)
def test_the_tests_pass_without_a_learner(name: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--noconftest",
        "-p",
        "source_engines",
        "-p",
        "no:cacheprovider",
    ]
    ended = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-m", "not slow", str(TESTS / "engines" / FILES[name])],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS / "support"), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", ended.stdout)
    assert int(passed) > 3
