"""A folder with everything that a run needs, and a method that writes a configuration of it."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from fixtures import forked, make_model, oat, write_jsonl

from oat.commands.digest import digest_run

HERE = Path(__file__).parent
LOGIT_ROWS = 24
"""Rows of the logits. They are more than the tokenizer has tokens, as in most published models."""


@dataclass(frozen=True)
class Bench:
    """A folder with `model`, `reference` (other weights) and `train.jsonl`."""

    folder: Path

    def config(self, file: Path, **sections: Any) -> Path:
        """Write the YAML file of a run whose directory is beside it. `sections` replace the shared ones."""
        tree = {
            "run_dir": str(file.with_suffix("")),
            "seed": 3,
            "model": {"path": str(self.folder / "model"), "reference": str(self.folder / "reference")},
            "prompts": {"path": str(self.folder / "train.jsonl")},
            "render": {"special_tokens": "drop"},  # the random model often writes its padding token
            "sampling": {"max_new_tokens": 5},
            "compute": {"threads": 1},
            "tracking": {"keep_trajectories": True},
            **sections,
        }
        file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        return file


def assert_a_kill_changes_nothing(
    config: Path, run: Path, folder: Path, arm: Callable[[], None], *flags: str
) -> None:
    """Make the run again with `arm`, which kills it, and continue it by the same command. Its digest must
    equal that of `run`."""
    other, log = folder / "run", folder / "log"

    def die() -> int:
        arm()
        return oat("train", config, "--run_dir", other, *flags)

    assert forked(die, log) == -signal.SIGKILL, log.read_text()
    assert oat("train", config, "--run_dir", other, *flags) == 0
    assert digest_run(other) == digest_run(run)


def make_bench(folder: Path) -> Bench:
    """Make two tiny models, and prompts of several lengths."""
    for seed, name in enumerate(("model", "reference")):
        make_model(folder / name, hidden=16, layers=2, seed=seed)
        _sharpen(folder / name)
    write_jsonl(folder / "train.jsonl", [{"prompt": f"{a}+{b}="} for a in (1, 22, 303) for b in range(8)])
    return Bench(folder)


@torch.no_grad()
def _sharpen(folder: Path) -> None:
    """Scale the weights up, so that responses differ and some end early. Add logit rows that belong to no
    token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(LOGIT_ROWS, mean_resizing=False)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.mul_(6)
    model.save_pretrained(folder)
