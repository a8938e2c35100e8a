"""Steps of GRPO at the quickstart's size, compared with TRL's: a model of 0.66M weights, 64 prompts of 7
tokens, 8 samples each, at most 4 new tokens, and a rule as reward.

    python benchmarks/short.py --peers PYTHON [--repetitions 5] [--steps 20]

Both sides begin with the quickstart's start, and learn the same task without a reference, with one step of
AdamW, in float32. TRL's best micro-batch is searched first. The sides take turns of `--steps` steps; the
first steps of each side are not counted. Figures are medians over the turns, in seconds per step: of the
clock, and of the processor (without waits, such as for the disk).
"""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from statistics import median
from typing import Any

from peers import THREADS, Side, in_turns, rate, spread

MICRO = (32, 128, 256, 512)
"""Micro-batches, in rows, that are tried for TRL."""
WARM_UP = 2
TRIED = 3
"""Steps of a trial."""


def compare(
    repetitions: int, steps: int, peers: str | None, shape: dict[str, int], made: str | None = None
) -> dict[str, Any]:
    """Return one row of figures.

    Args:
        shape: `prompts` and `samples`; empty: those of the quickstart.
        made: a folder with a start and prompts; None: they are made, which takes half a minute.
    """
    with ExitStack() as stack:
        ours = stack.enter_context(Side(sys.executable, "short_oat_side.py"))
        folder = made or stack.enter_context(tempfile.TemporaryDirectory())
        if made is None:
            ours.ask("start", folder=folder)
        rows = shape.get("prompts", 64) * shape.get("samples", 8)
        versions = {"oat": ours.ask("train", folder=folder, threads=THREADS, micro=rows, **shape)}
        settings: dict[str, Any] = {"oat": {"micro_batch_size": rows}}
        sides = {"oat": (ours, {"verb": "steps", "count": steps})}
        if peers is not None:
            theirs = stack.enter_context(Side(peers, "short_trl_side.py"))

            def begin(micro: int) -> dict[str, Any]:
                made = theirs.ask("train", folder=folder, threads=THREADS, micro=micro, **shape)
                theirs.ask("steps", count=WARM_UP)
                return made

            def attempt(micro: int) -> float:
                begin(micro)
                return rate([theirs.ask("steps", count=TRIED)], "steps")

            tried = {micro: attempt(micro) for micro in MICRO if micro <= rows}
            micro = max(tried, key=tried.__getitem__)
            versions["trl"] = begin(micro)
            settings["trl"] = {"per_device_train_batch_size": micro, "tried": tried}
            sides["trl"] = (theirs, {"verb": "steps", "count": steps})
        ours.ask("steps", count=WARM_UP)
        answers = in_turns(sides, repetitions)
    return {
        "threads": THREADS,
        "seconds": {side: median(a["seconds"] / a["steps"] for a in each) for side, each in answers.items()},
        "cpu_s": {side: median(a["cpu_s"] / a["steps"] for a in each) for side, each in answers.items()},
        "spread": spread(answers, "steps"),
        "parts": {
            name: median(answer["parts"][name] / answer["steps"] for answer in answers["oat"])
            for name in ("sample", "learn")
        },
        "settings": settings,
        "versions": versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--peers", help="python of an environment with trl")
    options = parser.parse_args()
    print(json.dumps(compare(options.repetitions, options.steps, options.peers, {})), flush=True)


if __name__ == "__main__":
    main()
