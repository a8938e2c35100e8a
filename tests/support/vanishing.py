"""Changes to a run directory while a run works with it."""

import shutil
from pathlib import Path


def moved(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("moved"))


def removed(run_dir: Path) -> None:
    shutil.copytree(run_dir, run_dir.with_name("moved"))
    while run_dir.exists():
        shutil.rmtree(run_dir, ignore_errors=True)  # the run may be removing its oldest checkpoint


def replaced(run_dir: Path) -> None:
    """Move the directory away, and put a copy with the same content in its place."""
    moved(run_dir)
    shutil.copytree(run_dir.with_name("moved"), run_dir)
