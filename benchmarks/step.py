"""One online step end to end against TRL's GRPO trainer: generate, reward, update, and the new weights in the engine.

    python benchmarks/step.py [--sizes 5M 50M] [--repetitions 3] [--peers PYTHON]

64 prompts of 16 to 64 tokens, 4 samples each, at most 128 new tokens, geometric lengths of mean about 32 (the end-of-text has probability 1 / 32);
GRPO without a reference, one step of AdamW at a learning rate at which lengths stay, float32, two threads. TRL generates with transformers, all 256
rows at once, and updates at its best micro-batch of some, found in one pass. Memory is the peak of a step beyond the level after imports. Sides
take turns; medians.
"""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from peers import THREADS, Side, in_turns, medians

sys.path.insert(0, str(Path(__file__).parent / "sides"))
from task import make_model

MICRO = {"5M": (8, 16, 32, 64), "50M": (8, 32), "tiny": (4, 8)}
"""Micro-batches, in rows, of which TRL gets its best."""
LOAD = {"prompt_count": 64, "samples": 4, "cap": 128}
MICRO_TOKENS = 2048


def compare(size: str, repetitions: int, peers: str | None, load: dict[str, int] = LOAD) -> dict[str, Any]:
    """One row of the table: samples a second, memory and padding by side, with settings and versions."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_model(size, Path(folder))
        ours = stack.enter_context(Side(sys.executable, "oat_side.py"))
        versions, settings = {"oat": ours.ask("open", model=folder, threads=THREADS)}, {"oat": {"micro_batch_tokens": MICRO_TOKENS, "max_rows": 256}}
        ours.ask("run", micro_tokens=MICRO_TOKENS, **load)
        ours.ask("step")
        sides = {"oat": (ours, {"verb": "step"})}
        if peers is not None:
            theirs = stack.enter_context(Side(peers, "trl_side.py"))
            versions["trl"] = theirs.ask("open", model=folder, threads=THREADS)
            tried = {}
            for micro in MICRO[size]:
                theirs.ask("train", micro=micro, **load)
                answer = theirs.ask("step")
                tried[micro] = answer["samples"] / answer["seconds"]
            best = max(tried, key=lambda micro: tried[micro])
            theirs.ask("train", micro=best, **load)
            settings["trl"] = {"per_device_train_batch_size": best, "tried": tried}
            sides["trl"] = (theirs, {"verb": "step"})
        answers = in_turns(sides, repetitions)
    parts = {name: median(answer["parts"][name] for answer in answers["oat"]) for name in ("sample", "learn")}
    measured = medians(answers, "samples", "peak_gb", "padding", "generation_padding")
    return {"size": size, **load, **measured, "parts": parts, "settings": settings, "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["5M", "50M"])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peers", help="python of an environment with trl")
    options = parser.parse_args()
    for size in options.sizes:
        print(json.dumps(compare(size, options.repetitions, options.peers)), flush=True)


if __name__ == "__main__":
    main()
