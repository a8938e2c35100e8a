"""Make the golden runs: `python tests/golden/make.py`.

    model/, prompts.jsonl   a tiny Llama and its data
    dpo/, grpo/             config.yaml and the ledger of twenty steps each; everything a replay needs
    golden.json             loss and gradient norm of those steps, with a measure of the machine that
                            computed them (tests/support/last_digits.py)

Existing files are kept. To compute the numbers with a new torch, remove golden.json and run the command
again. To make a new run, remove its folder too.
"""

import json
import os
import shutil
import sqlite3
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
import yaml

HERE = Path(__file__).parent
STEPS = 20
NUMBERS = ("loss/total", "optim/grad_norm")
REWARD = """
def reward(prompts, completions, **columns):
    return [text.count("a") + 0.3 * text.count("b") - 0.1 * len(text) for text in completions]
"""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dpo": {"name": "dpo", "prompts": 3, "samples": 2},
    "grpo": {
        "name": "grpo",
        "prompts": 2,
        "samples": 3,
        "kl_coef": 0.1,
        "epochs": 2,
        "minibatches": 2,
        "reduction": "token",
    },
}


def config(algorithm: str) -> dict[str, Any]:
    """Return a configuration whose paths are relative to a copy of this folder."""
    return {
        "run_dir": algorithm,
        "model": {"path": "model"},
        "prompts": {"path": "prompts.jsonl"},
        "sampling": {"max_new_tokens": 4},
        "oracle": {"name": "oracle.py:reward"},
        "algorithm": ALGORITHMS[algorithm],
        "learner": {"learning_rate": 0.003},
        "checkpoint": {"every": STEPS},
        "tracking": {"samples": 0, "keep_trajectories": True},
        "compute": {"threads": 1},
        "stop": {"max_steps": STEPS},
    }


def train(file: str) -> None:
    from oat.cli import main

    assert main(["train", file]) == 0


def numbers(run_dir: Path) -> dict[str, list[float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {name: [row[name] for row in rows[1:]] for name in NUMBERS}


def make_run(algorithm: str) -> None:
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch):
        shutil.copytree(HERE / "model", "model")
        shutil.copy(HERE / "prompts.jsonl", "prompts.jsonl")
        Path("oracle.py").write_text(REWARD, encoding="utf-8")
        Path("run.yaml").write_text(yaml.safe_dump(config(algorithm)), encoding="utf-8")
        train("run.yaml")
        database = sqlite3.connect(Path(algorithm) / "ledger.sqlite", isolation_level=None)
        for statement in ("PRAGMA wal_checkpoint(TRUNCATE)", "PRAGMA journal_mode = DELETE", "VACUUM"):
            database.execute(statement)
        database.close()
        (HERE / algorithm).mkdir()
        for name in ("config.yaml", "ledger.sqlite"):
            shutil.copy(Path(algorithm) / name, HERE / algorithm / name)
        shutil.copytree(Path(algorithm) / "ledger.trajectories", HERE / algorithm / "ledger.trajectories")


def replay(
    algorithm: str, folder: Path, changes: dict[str, dict[str, Any]] | None = None
) -> dict[str, list[float]]:
    """Copy this folder's committed files to `folder`, train there, and return the numbers.

    Args:
        changes: other values of the run's configuration, by section.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(HERE / "model", folder / "model")
    for name in ("prompts.jsonl", "oracle.py"):
        shutil.copy(HERE / name, folder / name)
    shutil.copytree(HERE / algorithm, folder / algorithm)
    file = folder / algorithm / "config.yaml"
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    for section, values in (changes or {}).items():
        tree[section] |= values
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    with chdir(folder):
        train(f"{algorithm}/config.yaml")
    return numbers(folder / algorithm)


def main() -> None:
    sys.path.insert(0, str(HERE.parent / "support"))
    from fixtures import make_model, write_jsonl
    from last_digits import machine

    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    torch.set_num_threads(1)
    if not (HERE / "model").exists():
        make_model(HERE / "model")
        write_jsonl(HERE / "prompts.jsonl", [{"prompt": f"{a}+{b}="} for a in range(5) for b in range(2)])
    golden: dict[str, Any] = {"machine": machine()}
    for algorithm in ALGORITHMS:
        if not (HERE / algorithm).exists():
            make_run(algorithm)
        with tempfile.TemporaryDirectory() as scratch:
            golden[algorithm] = replay(algorithm, Path(scratch))
    (HERE / "golden.json").write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
