"""The wheel works alone: it needs no file of the project but `src/`. With the README's extras it plots."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_wheel_alone_runs_the_quickstart(tmp_path: Path) -> None:
    """The wheel runs the quickstart in a new environment without extras. The test needs a package index, as
    `make setup` does."""
    constraints = ["--constraint", str(ROOT / "constraints.txt")]

    def run(*command: str) -> str:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")
        }
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True, timeout=1200
        ).stdout

    run(sys.executable, "-m", "venv", "fresh")
    python = str(tmp_path / "fresh" / "bin" / "python")
    try:
        run(python, "-m", "pip", "install", "--quiet", *constraints, "torch")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no package index: {error.stderr[-300:]}")
    run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", str(ROOT))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", *constraints, str(wheel))
    assert "samples" in run(python, "-c", "from oat.config.peers.table import rows; print(rows())")
    said = run(str(tmp_path / "fresh" / "bin" / "oat"), "quickstart")
    assert re.search(r"^grpo +20480 +0\.\d+ -> 0\.[5-9]", said, re.MULTILINE), said
    assert "no plot, since matplotlib is missing" in said
    assert (tmp_path / "quickstart" / "models" / "dpo" / "README.md").exists()
    (typed,) = re.findall(r"`pip (install '[^`]*')`", (ROOT / "README.md").read_text(encoding="utf-8"))
    words = [word.replace(".", str(wheel), 1) for word in shlex.split(typed)]
    run(python, "-m", "pip", *words, "--quiet", *constraints)
    run(str(tmp_path / "fresh" / "bin" / "oat"), "plot", "quickstart/dpo", "--out", "plot.png")
    run(python, "-c", "import peft")
