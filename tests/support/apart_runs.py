"""Runs whose work is done by several processes. Each must be the local run, whatever happens to a process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fixtures import Finished, oat
from kills import books

from oat.commands.digest import digest_run

STEPS = 6
BITWISE: dict[str, Any] = {
    "engine.deterministic": True,
    "engine.threads": 1,
    "stop.max_steps": STEPS,
}
ACTORS: dict[str, Any] = {"compute.runtime": "processes", "compute.actors": 2, "compute.actor_cpus": 0.5}
ON_RAY = {**ACTORS, "compute.runtime": "ray"}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "an ensemble": (
        "dpo",
        {"explorer": {"name": "ensemble", "samples": 4, "ensemble": {"members": 2, "hidden": 4}}},
    ),
    "a lagging sampler": ("grpo", {"learner.sync_every": 2}),
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "ppo": ("ppo", {}),
    "rft": ("sft", {"algorithm": {"name": "sft", "prompts": 4, "samples": 4, "threshold": 0.1}}),
    "xpo": ("xpo", {"algorithm": {"name": "xpo", "prompts": 4}}),
    "a reward model": (
        "reward_model",
        {"algorithm": {"name": "reward_model", "prompts": 4, "samples": 2}, "evaluation": None},
    ),
    "dpo": ("dpo", {"learner.sync_every": 2, "learner.weights_proof": "probe"}),
    "kto": ("kto", {"algorithm": {"name": "kto", "prompts": 4}}),
    "vine": (
        "grpo",
        {"algorithm.advantage": "vine", "algorithm.vine": {"branches": 2, "delimiter": "a", "most_steps": 2}},
    ),
    "an ensemble": RUNS["an ensemble"],
}
"""A run of each family of algorithms."""


@dataclass(frozen=True)
class Pair:
    """A local run, and a run on several processes that must equal it.

    Attributes:
        config: that of the second run.
    """

    local: Path
    config: Path
    run_dir: Path

    def train(self) -> int:
        """Make the second run, or continue it, and return the exit code."""
        return oat("train", self.config)

    @property
    def is_equal(self) -> bool:
        """True if the second run has the digests of the local one."""
        return digest_run(self.run_dir) == digest_run(self.local)

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint; 0 if there is none, since no step was done."""
        pointer = self.run_dir / "checkpoints" / "latest"
        return int(pointer.read_text().strip().removeprefix("step_")) if pointer.exists() else 0

    @property
    def rows(self) -> int:
        """The number of rows of metrics. Row n describes the run after n steps."""
        metrics = self.run_dir / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def note_books(self, copies: Path, figure: Callable[[str], None]) -> None:
        """Compare the ledgers: every rollout was asked about, answered and learned from once."""
        local, own = books(self.local, copies / "local", STEPS), books(self.run_dir, copies / "own", STEPS)
        lost = len({*local.trained} - {*own.trained}) + len(local.answers.keys() - own.answers.keys())
        twice = len(own.trained) - len({*own.trained})
        figure(f"{lost + twice:,} of {len(local.trained):,} rollouts lost or learned twice")
        assert (own.answers.keys(), own.trained) == (local.answers.keys(), local.trained)


def pair(
    finished: Finished, name: str, folder: Path, changes: Mapping[str, Any], own: Mapping[str, Any] = ACTORS
) -> Pair:
    """Return a run of `RUNS` and its local one.

    Args:
        folder: gets the configuration and the run directory of the second run.
        changes: settings of both.
        own: settings of the second run alone.
    """
    recipe, others = RUNS[name]
    both = {**BITWISE, **others, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    config = finished.world.config(recipe, folder, {**both, **own})
    return Pair(finished.only_read(recipe, both), config, folder / recipe)
