"""R3: a checkpoint holds everything that decides the rest of the run.

A walk over all objects compares a run with a second run that continues from its checkpoint. Both must hold
the same values. `OTHERWISE` lists the allowed differences, with reasons.
"""

import functools
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import World
from object_graph import UnknownTypeError, fingerprints

from oat.config.load import load_config
from oat.loop import Run, restore, train
from oat.opening.open_run import open_run
from oat.resolve.resolve import resolve

pytestmark = pytest.mark.usefixtures("over_the_wire")

PROTOCOL = Path(__file__).parent.parent / "protocol"
ENSEMBLE = {"members": 2, "hidden": 4, "batch": 3, "steps": 2, "buffer": 5}

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {}),
    "dpo, a lagging sampler": ("dpo", {"learner.sync_every": 2, "checkpoint.every": 1}),
    "dpo, a buffer": ("dpo", {"learner.buffer": {"questions": 10, "clear_every": 3}, "algorithm.epochs": 2}),
    "grpo, a lagging sampler": (
        "grpo",
        {
            "learner.sync_every": 3,
            "algorithm.kl_coef": 0.1,
            "algorithm.kl_target": 1e-4,
            "algorithm.entropy": {"coef": 0.01, "target": 3.0},
            "algorithm.correction": {"form": "truncate"},
            "algorithm.rewards": {"normalise": "running"},
            "learner.schedule": "linear",
        },
    ),
    "grpo, without a wire": ("grpo", {"learner.sync_every": 2, "compute.serialise": False}),
    "a reference that follows, with an adapter": (
        "dpo",
        {
            "model.lora": {"rank": 2},
            "model.reference_update": {"mix": 0.3},
            "evaluation.slot": "reference",
            "learner.sync_every": 2,
        },
    ),
    "episodes of several turns": (
        "grpo",
        {
            "oracle": {"name": "environment"},
            "sampling.environment": f"{PROTOCOL / 'guessing.py'}:Waiting",
            "evaluation.oracle": "environment",
        },
    ),
    "ppo, whose policy waits": (
        "ppo",
        {
            "algorithm.end": "final_state",
            "algorithm.rewards": {"normalise": "running"},
            "learner.critic_only_steps": 3,
            "learner.critic_schedule": "linear",
        },
    ),
    "sft": ("sft", {"algorithm.threshold": 0.1, "algorithm.duplicates": "run"}),
    "a reward model": (
        "reward_model",
        {"algorithm.samples": 2, "algorithm.centring": 0.1, "evaluation": None},
    ),
    "an ensemble": (
        "dpo",
        {
            "explorer": {
                "name": "ensemble",
                "samples": 4,
                "model_labels": {"share": 0.5, "burn_in": 1},
                "ensemble": ENSEMBLE,
            },
            "algorithm.prompts": 6,
        },
    ),
}

OTHERWISE = {
    r"run\.(stop|evaluation\.trigger)\.(before|began|seconds)": (
        "a clock: the hours so far stand in the checkpoint, otherwise divided"
    ),
    r"run\.learner\.stopwatch\._begin": "a clock, for a metric of speed",
    r"run\.learner\.models\['\w+'\]\.work_counter\.flops": "counted for a metric of speed",
    r"run\.collector\.actor\.engine\._meters\[.*": "counted for metrics of speed; who reads them subtracts",
    r"run\..*\._?(standing|streams)\._known.*": "which file it is that this process has opened",
    r"run\.tracking\.told\.(untold|said.*|written.*)": (
        "what environment.json tells of the new process comes with its first row"
    ),
    r"run\.(ledger\.release\.self\.known|tracking\.told\.modules\.before).*": (
        "what earlier processes were made from, to refuse others"
    ),
    r"run\.collector\.prompts\._(turns|pools\[\d\]\._order)\[\d\]": (
        "a cache: the order of the prompts is a function of the seed"
    ),
    r"run\.(collector\.(actor|prompts\.fit)|tracking\.turns)\.renderer\._last\[.*": (
        "a cache: the prompt that was rendered last, and its tokens"
    ),
    r"run\.(collector\.(actor|prompts\.fit)|tracking\.turns)\.renderer\._tails.*": (
        "a cache: messages of an environment, and their tokens"
    ),
    r"run\.(collector\.(actor|prompts\.fit)|tracking\.turns)\.renderer\."
    r"(_joiner\._(added|contexts)|_decoder\._opens|_pieces)(\W.*)?": "a cache: ids of texts, texts of ids",
    r"run\.collector\.actor\.environment\._loop\._loop": (
        "the event loop of an environment, which begins with its first call"
    ),
    r"run\.collector\.actor\.engine\._versions\[#2\]": (
        "the slot `policy` of its own, which is loaded before every evaluation"
    ),
    r"run\.(weights|collector\.actor)\.versions\['policy'\]": "likewise",
    r"run\.learner\.trained\['(policy|critic)'\]\.optimiser\.param_groups\[\d\]\['lr'\]": (
        "set from the schedule before every optimiser step"
    ),
}
"""Patterns of paths that may differ between a run and its continuation, each with the reason why nothing
depends on the value."""


def exceptions(path: str) -> list[str]:
    """Return the patterns that a path matches. A wire between two boxes does not count as a part of the
    path."""
    return [pattern for pattern in OTHERWISE if re.fullmatch(pattern, path.replace("._box", ""))]


Mutate = Callable[[pytest.MonkeyPatch], None]


@dataclass
class Walked:
    """Fingerprints by step, of the first run (`run`) and of its continuation from the checkpoint of step 2
    (`again`)."""

    run: dict[int, dict[str, str]] = field(default_factory=dict)
    again: dict[int, dict[str, str]] = field(default_factory=dict)

    def all_differences(self, step: int) -> list[str]:
        one, other = self.run[step], self.again[step]
        return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))

    def differences(self, step: int) -> list[str]:
        """Return the paths that differ and match no reviewed pattern."""
        return [path for path in self.all_differences(step) if not exceptions(path)]

    def explained(self, step: int) -> list[str]:
        return [
            f"{path}: {self.run[step].get(path)}, and {self.again[step].get(path)}"
            for path in self.differences(step)
        ]


def everything(run: Run) -> dict[str, str]:
    """Return the fingerprints of a run and of the global generators of torch and numpy, which no part may
    use. Python's global generator is left out, since the run-time checks of types use it."""
    own = {"torch": torch.default_generator, "numpy": np.random.mtrand._rand}
    return {**fingerprints(run), **fingerprints(own, "generators")}


def walk(config: Path, run_dir: Path, drop: str | None = None) -> Walked:
    """Train to the end; then restore the directory as it was at step 2, and train again from there.

    Args:
        drop: a part that is left out of the checkpoints.
    """
    walked, aside = Walked(), run_dir.with_name("aside")

    def opened() -> Any:
        torch.manual_seed(0)
        np.random.seed(0)
        return open_run(resolve(*load_config(config)))

    with opened() as run:
        run.parts.pop(drop, None)

        def first(step: int, _: Any) -> None:
            run.checkpoints.wait()
            if step == 2:
                subprocess.run(["cp", "-r", run_dir, aside], check=True)
            if step in (2, 4):
                walked.run[step] = everything(run)

        train(run, first)
    shutil.rmtree(run_dir)
    aside.rename(run_dir)
    with opened() as again:
        again.parts.pop(drop, None)
        step, row = restore(again)
        assert (step, row) == (2, None)
        again.tracking.open(step)
        walked.again[2] = everything(again)

        def second(step: int, _: Any) -> None:
            again.checkpoints.wait()
            if step == 4:
                walked.again[4] = everything(again)

        train(again, second)
    return walked


@pytest.fixture(scope="module")
def walks(
    world: World, tmp_path_factory: pytest.TempPathFactory, over_the_wire: bool
) -> Callable[[str], Walked]:
    """Return a function that gives the walk of a run of `RUNS`. Each is made once."""

    @functools.cache
    def walk_of(name: str) -> Walked:
        algorithm, changes = RUNS[name]
        folder = tmp_path_factory.mktemp("walk")
        return walk(world.config(algorithm, folder, {"evaluation.every": 1, **changes}), folder / algorithm)

    return walk_of


@pytest.mark.slow(instead="test_a_checkpoint_holds_all_state", seconds=14.0)
def test_every_exception_is_needed(walks: Callable[[str], Walked]) -> None:
    needed = {
        pattern for name in RUNS for path in walks(name).all_differences(2) for pattern in exceptions(path)
    }
    assert needed == set(OTHERWISE)


@pytest.mark.sample(
    "*-grpo, without a wire",
    "*-episodes of several turns",
    "*-ppo, whose policy waits",
    "*-a reward model",
    "*-dpo, a buffer",
    "*-a reference that follows, with an adapter",
    seconds=5.8,
)
@pytest.mark.fault("R3")
@pytest.mark.inventory(114)
@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_holds_all_state(
    walks: Callable[[str], Walked], figure: Callable[[str], None], name: str
) -> None:
    walked = walks(name)
    for step in (2, 4):
        assert walked.explained(step) == []
    assert len(walked.run[2]) > 1000
    moved = sum(walked.run[2].get(path) != value for path, value in walked.run[4].items())
    assert moved > 20
    total = len(walked.run[2])
    figure(f"{total:,} of {total:,} values of the state equal after a restart from a checkpoint")
    figure(f"{moved:,} of {total:,} values of the state change in two more steps")


def counter(patch: pytest.MonkeyPatch) -> None:
    """Patch an objective so that it counts its calls and saves the count nowhere."""
    from oat.algorithms.direct import DPO

    prepare = DPO.prepare

    def counting(self: Any, *arguments: Any) -> Any:
        self.hidden = getattr(self, "hidden", 0) + 1
        return prepare(self, *arguments)

    patch.setattr(DPO, "prepare", counting)


def closure(patch: pytest.MonkeyPatch) -> None:
    """Patch a method so that its closure holds a generator that is drawn from."""
    from oat.rollout.actor import Actor

    sample, generator = Actor.sample, np.random.default_rng(0)

    def drawing(self: Any, *arguments: Any, **kwargs: Any) -> Any:
        generator.random()
        return sample(self, *arguments, **kwargs)

    patch.setattr(Actor, "sample", drawing)


def of_a_class(patch: pytest.MonkeyPatch) -> None:
    """Patch a class so that a list of the class grows."""
    from oat.collector import Collector

    fill, seen = Collector.fill, []  # type: ignore[var-annotated]
    patch.setattr(Collector, "seen", seen, raising=False)

    def remembering(self: Any, step: int, *arguments: Any) -> Any:
        self.seen.append(step)
        return fill(self, step, *arguments)

    patch.setattr(Collector, "fill", remembering)


def of_the_process(patch: pytest.MonkeyPatch) -> None:
    """Patch the learner so that it draws from torch's global generator."""
    from oat.learner.learner import Learner

    update = Learner.update

    def drawing(self: Any, *arguments: Any) -> Any:
        torch.rand(1)
        return update(self, *arguments)

    patch.setattr(Learner, "update", drawing)


@pytest.mark.sample("*closure*", seconds=2.2)
@pytest.mark.fault("R3")
@pytest.mark.parametrize(
    ("mutate", "path"),
    [
        (counter, r"run\.objectives\[0\]\.hidden"),
        (closure, r".*\.sample\.closure\.generator"),
        (of_a_class, r".*\.seen\[\d\]"),
        (of_the_process, r"generators\['torch'\]"),
    ],
)
def test_hidden_state_is_found(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figure: Callable[[str], None],
    mutate: Mutate,
    path: str,
) -> None:
    mutate(monkeypatch)
    walked = walk(world.config("dpo", tmp_path, {"evaluation": None}), tmp_path / "dpo")
    assert any(re.fullmatch(path, found) for found in walked.differences(2)), walked.explained(2)
    figure("1 of 1 states hidden from checkpoints detected")


@pytest.mark.sample("*-learner", seconds=2.9)
@pytest.mark.fault("R3")
@pytest.mark.parametrize("part", ["learner", "weights", "prompts", "ensemble"])
def test_a_part_left_out_is_found(
    world: World, tmp_path: Path, figure: Callable[[str], None], part: str
) -> None:
    algorithm, changes = RUNS["an ensemble"]
    config = world.config(algorithm, tmp_path, {"evaluation": None, "learner.sync_every": 3, **changes})
    assert walk(config, tmp_path / algorithm, drop=part).differences(2)
    figure("1 of 1 parts left out of a checkpoint detected")


def test_the_walk_looks_everywhere() -> None:
    """The walk sees slots, closures, defaults and containers, and reports an object of which it cannot see
    the inside."""

    class Slotted:
        __slots__ = ("inner",)

    slotted, count = Slotted(), [0]
    slotted.inner = {"a": [torch.ones(2), np.zeros(1)], id(count): {1, 2}}

    def counting(step: int = 3) -> int:
        return count[0] + step

    root = {"slots": slotted, "function": counting, "method": [7].append, "again": slotted}
    before = fingerprints(root)
    assert before["run['again']"] == "is run['slots']"
    count[0] += 1
    slotted.inner["a"][0][1] += 1
    slotted.inner[id(count)].add(3)
    root["method"](8)
    after = fingerprints(root)
    moved = {path for path in after if before.get(path) != after[path]}
    assert moved == {
        "run['slots'].inner['a'][0]",
        "run['slots'].inner[#1]",
        "run['function'].closure.count[0]",
        "run['method'].self[1]",
    }
    with pytest.raises(UnknownTypeError, match=r"run\[0\]: a builtins.list_iterator cannot be looked into"):
        fingerprints([iter([1])])
