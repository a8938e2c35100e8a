"""One complete online step, compared with TRL's GRPO trainer: generation, rewards, update, and loading of the
new weights into the engine.

    python benchmarks/step.py [--sizes 5M 50M] [--repetitions 3] [--peers PYTHON]

Load: 64 prompts (16 for the size 50M) of 16 to 64 tokens, 4 samples per prompt, at most 128 new tokens. The
end-of-text has probability 1 / 32, so lengths are geometric with mean about 32. Algorithm: GRPO without a
reference, one step of AdamW, float32, two threads. The learning rate is so small that the lengths do not
change.

TRL generates with transformers. Its best settings are searched first, in two stages: the micro-batch of the
update, with a quarter of the prompts; then the number of rows that are generated together (64 or all rows),
with all prompts. The measurement is in a new process.

Memory is the peak of a step minus the level after imports. The sides take turns. Figures are medians.
"""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from peers import THREADS, Side, best_of, in_turns, medians, rate, spread

sys.path.insert(0, str(Path(__file__).parent / "sides"))
from task import make_model

MICRO = {"5M": (1, 4, 16, 64), "50M": (1, 2, 4, 8), "tiny": (2, 4)}
"""Micro-batches, in rows, that are tried for TRL."""
MADE = {"5M": (64, 256), "50M": (64,), "tiny": (8,)}
"""Numbers of rows generated together that are tried for TRL."""
PROMPTS = {"5M": 64, "50M": 16, "tiny": 2}
LOAD = {"samples": 4, "cap": 128}
MICRO_TOKENS = 512
"""Tokens of a micro-batch of `oat`. The number is small to save memory. For the size 5M, the update takes a
fifth longer than with 1,024 tokens."""


def compare(size: str, repetitions: int, peers: str | None, limits: dict[str, int] = LOAD) -> dict[str, Any]:
    """Return one row of the table. It has the samples per second, memory and padding of each side, with
    settings and versions."""
    load = {"prompt_count": PROMPTS[size], **limits}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_model(size, Path(folder))
        ours = stack.enter_context(Side(sys.executable, "oat_side.py"))
        versions = {"oat": ours.ask("open", model=folder, threads=THREADS)}
        settings = {"oat": {"micro_batch_tokens": MICRO_TOKENS, "max_rows": 256}}
        ours.ask("run", micro_tokens=MICRO_TOKENS, **load)
        ours.ask("step")
        sides = {"oat": (ours, {"verb": "step"})}
        if peers is not None:
            best, settings["trl"] = _tuned(peers, folder, size, load)
            theirs = stack.enter_context(Side(peers, "trl_side.py"))
            versions["trl"] = theirs.ask("open", model=folder, threads=THREADS)
            theirs.ask("train", **best, **load)
            theirs.ask("step")
            sides["trl"] = (theirs, {"verb": "step"})
        answers = in_turns(sides, repetitions)
    parts = {name: median(answer["parts"][name] for answer in answers["oat"]) for name in ("sample", "learn")}
    measured = medians(answers, "samples", "peak_gb", "padding", "generation_padding")
    return {
        "size": size,
        **load,
        **measured,
        "spread": spread(answers, "samples"),
        "parts": parts,
        "settings": settings,
        "versions": versions,
    }


def _tuned(peers: str, folder: str, size: str, load: dict[str, int]) -> tuple[dict[str, int], dict[str, Any]]:
    """Return TRL's best micro-batch and number of rows generated together, and the settings with the samples
    per second of each number that was tried."""
    rows = load["prompt_count"] * load["samples"]
    fewer = {**load, "prompt_count": max(1, load["prompt_count"] // 4)}
    with Side(peers, "trl_side.py") as side:
        side.ask("open", model=folder, threads=THREADS)

        side.ask("train", micro=1, **{**load, "prompt_count": 1})  # the first step of a process is slower
        side.ask("step")

        def attempt(load: dict[str, int], micro: int, made: int | None) -> float:
            side.ask("train", micro=micro, made=made, **load)
            return rate([side.ask("step")], "samples")

        most = fewer["prompt_count"] * fewer["samples"]
        micro, tried = best_of(
            [micro for micro in MICRO[size] if micro <= most], lambda micro: attempt(fewer, micro, None)
        )
        sizes = [made for made in MADE[size] if made <= rows and made % micro == 0]
        made, tried_made = (
            best_of(sizes, lambda made: attempt(load, micro, made)) if len(sizes) > 1 else (rows, {})
        )
    settings = {
        "per_device_train_batch_size": micro,
        "tried": tried,
        "generation_batch_size": made,
        "tried_generation": tried_made or "none",
    }
    return {"micro": micro, "made": made}, settings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["5M", "50M"])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peers", help="python of an environment with trl")
    options = parser.parse_args()
    for size in options.sizes:
        print(json.dumps(compare(size, options.repetitions, options.peers)), flush=True)


if __name__ == "__main__":
    main()
