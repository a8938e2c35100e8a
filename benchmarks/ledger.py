"""The cost of the ledger and the checkpoints: their share of a run's time, answers per second, and the time
to open a large ledger.

    python benchmarks/ledger.py [--rows 1000000]

share     the time of the ledger and the checkpoints, divided by the time of a run. The run has the data and
          the model of the quickstart (with random weights), GRPO, 50 steps, and a checkpoint every 10 steps.
          The time of the ledger and the checkpoints is that of `Ledger.ask`, `take_feedback` and `drop`, of
          `Checkpoints.save` and `wait`, and of forcing metrics to disk, without the oracle's time.
rate      questions per second that are asked, answered and taken, in rounds of 64. The oracle answers
          immediately.
opening   seconds to open a ledger with --rows questions, all answered and taken.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from oat.assemble.run import build
from oat.config.load import load_config
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.loop import train
from oat.models.loading import save_lm
from oat.oracles.callables import CallableOracle
from oat.quickstart import configurations
from oat.quickstart.task import build_model, build_task, build_tokenizer
from oat.resolve.resolve import resolve
from oat.seeds import Seeds
from oat.types import Group, Key, Message, Prompt, Question, Segment, Trajectory

STEPS = 50
ROUND = 64


class Watch:
    """A measurement of the seconds in methods. The time of a watched method that another watched method calls
    counts only for the inner method.

    Attributes:
        seconds: seconds by the name that was given to a method; several methods may share a name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    def watch(self, box: Any, method: str, name: str) -> None:
        original = getattr(box, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                whole = time.perf_counter() - began
                inner = self._inner.pop()
                self.seconds[name] = self.seconds.get(name, 0.0) + whole - inner
                self._inner[-1] += whole

        setattr(box, method, timed)


def share(folder: Path, steps: int = STEPS, held_out: int | None = None) -> dict[str, float]:
    """Return the seconds of a run, of its ledger, of its checkpoints and of its oracle, and the share of
    ledger and checkpoints.

    Args:
        held_out: number of prompts in an evaluation; None: all.
    """
    tokenizer = build_tokenizer()
    build_task(0).write(folder)
    save_lm(build_model(tokenizer, 0), tokenizer, str(folder / "start"))
    tree = configurations(folder)["grpo"] | {"checkpoint": {"every": 10}, "stop": {"max_steps": steps}}
    tree["engine"] |= {"threads": 1}
    tree["evaluation"] |= {"max_prompts": held_out}
    (folder / "grpo.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    run = build(resolve(*load_config(folder / "grpo.yaml")))
    watch = Watch()
    watch.watch(run.ledger, "ask", "ledger")
    watch.watch(run.ledger, "take_feedback", "ledger")
    watch.watch(run.ledger, "drop", "ledger")
    watch.watch(run.checkpoints, "save", "checkpoints")
    watch.watch(run.checkpoints, "wait", "checkpoints")
    watch.watch(run.tracking, "flush", "checkpoints")
    for oracle in run.ledger.oracles.values():  # type: ignore[attr-defined]
        watch.watch(oracle, "submit", "oracle")
        watch.watch(oracle, "collect", "oracle")
    began = time.perf_counter()
    train(run, lambda step, values: None)
    seconds = time.perf_counter() - began
    run.ledger.close()
    spent = watch.seconds["ledger"] + watch.seconds["checkpoints"]
    return {"run": seconds, **watch.seconds, "share": spent / seconds}


def rate(folder: Path, rounds: int = 100) -> float:
    """Return the number of questions per second that are asked, answered and taken, in rounds of 64."""
    ledger = _ledger(folder / "rate.sqlite")
    prepared = [_round(step) for step in range(rounds)]
    began = time.perf_counter()
    for step, (groups, questions) in enumerate(prepared):
        ledger.ask(step, 0, groups, questions)
        assert len(ledger.take_feedback(step, ROUND).items) == ROUND
    seconds = time.perf_counter() - began
    ledger.close()
    return rounds * ROUND / seconds


def opening(folder: Path, rows: int) -> float:
    """Return the seconds to open a ledger with `rows` questions, all answered and taken."""
    path = folder / "large.sqlite"
    size = min(rows, 10_000)
    ledger = _ledger(path)
    ledger.store.db.execute("PRAGMA synchronous = OFF")  # these rows need not survive a crash
    for step in range(rows // size):
        ledger.ask(step, 0, *_round(step, size))
        ledger.take_feedback(step, size)
    ledger.close()
    began = time.perf_counter()
    ledger = _ledger(path)
    seconds = time.perf_counter() - began
    assert ledger.asked(rows // size, 0) == rows
    ledger.close()
    return seconds


def _ledger(path: Path) -> Ledger:
    oracle = CallableOracle(lambda prompts, completions: [0.5] * len(prompts), "o")
    return Ledger(Store(path), {"o": oracle}, Seeds(0), labels="threshold", deadline_s=60.0)


def _round(step: int, size: int = ROUND) -> tuple[list[Group], list[Question]]:
    """Return `size` groups with one response each, and a question about each response. A response has eight
    tokens and a text that no other response has."""
    groups, questions = [], []
    ids = np.arange(8, dtype=np.int32)
    logps = np.full(8, -1.0, dtype=np.float32)
    response = Segment("model", ids, np.ones(8, dtype=bool), np.full(8, step, dtype=np.int32), logps, logps)
    for number in range(size):
        occurrence = step * size + number
        trajectory = Trajectory(
            "sampler", (Segment("context", ids), response), "stop", f"response {occurrence}"
        )
        group = Group(Prompt(number + 1, occurrence, (Message("user", f"prompt {number}"),)), (trajectory,))
        groups.append(group)
        questions.append(Question.about(group, Key("train", step, 0, occurrence), "score", (0,), "o"))
    return groups, questions


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the ledger that is opened")
    rows = parser.parse_args().rows
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        found = share(folder)
        parts = ", ".join(f"{name} {found[name]:.2f} s" for name in ("ledger", "checkpoints", "oracle"))
        print(
            f"share    {found['share']:.1%} of a run of {found['run']:.1f} s (at most 5%): {parts}",
            flush=True,
        )
        print(f"rate     {rate(folder):,.0f} answers a second (at least 5,000)", flush=True)
        print(f"opening  {opening(folder, rows):.2f} s with {rows:,} rows (at most 1)", flush=True)


if __name__ == "__main__":
    main()
