"""What a program says of a run directory by its own commands, and what it leaves there.

The program that began the run and today's are both asked by this file, so it knows commands and files, and no
module of theirs."""

import hashlib
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

CLOCKED = ("time/", "roofline/")
"""Beginnings of the names of metrics that depend on clocks."""


def oat(*arguments: object) -> str:
    """Run a command line in this process; returns what it prints."""
    from oat.cli import main

    printed = io.StringIO()
    with redirect_stdout(printed):
        code = main([str(argument) for argument in arguments])
    assert code == 0, f"oat {' '.join(map(str, arguments))}: exit code {code}\n{printed.getvalue()}"
    return printed.getvalue()


def of_begun(run_dir: Path, out: Path) -> dict[str, Any]:
    """What the commands say of a run, in plain JSON; they compute nothing, so machines do not differ.

    Args:
        out: where its model is exported to.
    """
    oat("export", run_dir, out)
    oat("ledger", run_dir, "--check", "--export", out / "answers.jsonl")
    return {
        "digest": dict(line.split() for line in oat("digest", run_dir).splitlines()),
        "exported": sums(load_file(out / "model.safetensors")),
        "ledger": [line.rsplit(maxsplit=1)[0] for line in oat("ledger", run_dir).splitlines()],  # no seconds
        "answers": read_lines(out / "answers.jsonl"),
    }


def of_continued(run_dir: Path, out: Path) -> dict[str, Any]:
    """The same of a run at its end, with what stands in its files."""
    newest = (
        run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    )
    state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    state["stop"], state["evaluation"]["seconds"] = sorted(state["stop"]), len(state["evaluation"]["seconds"])
    rows = [without_clocks(row) for row in read_lines(run_dir / "metrics.jsonl")]
    assert without_clocks(state.pop("metrics")) == {k: v for k, v in rows[-1].items() if k != "step"}
    return {
        **of_begun(run_dir, out),
        "checkpoints": sorted(path.name for path in newest.parent.iterdir()),
        "tensors": sums(load_file(newest / "tensors.safetensors")),
        "state": state,
        "rows": rows,
        "files": {
            str(file.relative_to(run_dir)): {
                "lines": len(read_lines(file)),
                "sha256": sha256(file.read_bytes()),
            }
            for file in [run_dir / "samples.jsonl", *sorted((run_dir / "evaluations").iterdir())]
        },
    }


def without_clocks(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith(CLOCKED)}


def sums(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """By name the beginning of a checksum of a tensor's bytes; and its norm, for machines whose last digits
    are others."""
    return {
        name: {
            "shape": list(tensor.shape),
            "sha256": sha256(tensor.contiguous().numpy().tobytes()),
            "norm": float(tensor.double().norm()),
        }
        for name, tensor in sorted(tensors.items())
    }


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
