"""The learner's update, compared with TRL's GRPO trainer, on given responses of geometric lengths.

    python benchmarks/update.py [--sizes 5M 50M 150k] [--repetitions 3] [--peers PYTHON]

Load: each prompt has 16 to 64 tokens and 4 responses, of mean length 128 and at most 1,024 tokens. One GRPO
update is a forward pass, the loss and the entropy, a backward pass, and one step of AdamW, in float32, with
two threads and without a reference.

TRL gets the responses from its `rollout_func`, and only its work afterwards is timed. It pads all rows that
are generated together to one length; by default, these are all rows of a step. Fewer rows mean less padding,
and generation costs nothing here. So each micro-batch is tried with the fewest rows: one micro-batch or one
group. The best micro-batch is then tried with the default number of rows. The measurement is in a new
process.

Tokens are those of prompts and responses. Padding is the share of positions without a token; for `oat`, it is
also measured in attention. Memory is the peak of an update minus the level with loaded weights, so it has
moments, gradients and activations. The gradient norms of both sides show that they do the same work. The
sides take turns. Figures are medians.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from peers import THREADS, Side, best_of, in_turns, medians, spread

sys.path.insert(0, str(Path(__file__).parent / "sides"))
from task import make_model

MICRO = {"5M": (1, 2, 4, 8, 16), "50M": (1, 2, 4), "150k": (1, 2, 4), "tiny": (2, 4)}
"""Micro-batches, in rows, that are tried for TRL."""
PROMPTS = {"5M": 16, "50M": 8, "150k": 3, "tiny": 4}
MICRO_TOKENS = {"5M": 2048, "50M": 2048, "150k": 4096, "tiny": 2048}
LENGTHS = {"mean": 128, "cap": 1024}


def compare(
    size: str, repetitions: int, peers: str | None, lengths: dict[str, int] = LENGTHS
) -> dict[str, Any]:
    """Return one row of the table. It has the tokens per second, memory and padding of each side, with
    settings and versions."""
    load = {"prompt_count": PROMPTS[size], "samples": 4, **lengths}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_model(size, Path(folder))
        ours = stack.enter_context(Side(sys.executable, "oat_side.py"))
        versions = {"oat": ours.ask("open", model=folder, threads=THREADS)}
        settings: dict[str, dict[str, Any]] = {"oat": {"micro_batch_tokens": MICRO_TOKENS[size]}}
        ours.ask("learn", micro_tokens=MICRO_TOKENS[size], **load)
        norms = {"oat": ours.ask("update")["grad_norm"]}
        sides = {"oat": (ours, {"verb": "update"})}
        if peers is not None:
            best, settings["trl"] = _tuned(peers, folder, size, load)
            theirs = stack.enter_context(Side(peers, "trl_side.py"))
            versions["trl"] = theirs.ask("open", model=folder, threads=THREADS)
            theirs.ask("train", **best, **load)
            norms["trl"] = theirs.ask("step")["grad_norm"]
            sides["trl"] = (theirs, {"verb": "step"})
        answers = in_turns(sides, repetitions)
    if "trl" in answers:
        answers["trl"] = [{**answer, "seconds": answer["update_seconds"]} for answer in answers["trl"]]
    measured = medians(answers, "tokens", "update_gb", "padding")
    attention = {"oat": median(answer["attention_padding"] for answer in answers["oat"])}
    measured |= {"spread": spread(answers), "attention_padding": attention, "grad_norm": norms}
    return {"size": size, **load, **measured, "settings": settings, "versions": versions}


def _tuned(peers: str, folder: str, size: str, load: dict[str, int]) -> tuple[dict[str, int], dict[str, Any]]:
    """Return TRL's best micro-batch and number of rows padded together, and the settings with the rate of
    each number that was tried."""
    rows = load["prompt_count"] * load["samples"]
    with Side(peers, "trl_side.py") as side:
        side.ask("open", model=folder, threads=THREADS)

        side.ask("train", micro=1, **{**load, "prompt_count": 1})  # the first step of a process is slower
        side.ask("step")

        def attempt(micro: int, made: int) -> float:
            side.ask("train", micro=micro, made=made, **load)
            answer = side.ask("step")
            return answer["tokens"] / answer["update_seconds"]

        fewest = {micro: max(micro, load["samples"]) for micro in MICRO[size]}
        micro, tried = best_of(MICRO[size], lambda micro: attempt(micro, fewest[micro]))
        tried_made = {fewest[micro]: tried[micro], rows: attempt(micro, rows)}
    made = max(tried_made, key=lambda made: tried_made[made])
    settings = {
        "per_device_train_batch_size": micro,
        "tried": tried,
        "generation_batch_size": made,
        "tried_generation": tried_made,
    }
    return {"micro": micro, "made": made}, settings


def growth(size: str, repetitions: int, tokens: int = 8192, copies: Sequence[int] = (1, 8)) -> dict[str, Any]:
    """Measure the growth of an update's time with the size of its batch.

    Args:
        tokens: approximate number of tokens in the smallest batch.
        copies: numbers of copies of this batch that are joined to one batch.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_model(size, Path(folder))
        sides = {}
        for count in copies:
            side = stack.enter_context(Side(sys.executable, "oat_side.py"))
            versions = side.ask("open", model=folder, threads=THREADS)
            side.ask(
                "learn",
                prompt_count=tokens // 4 // 168,
                samples=4,
                micro_tokens=MICRO_TOKENS[size],
                copies=count,
                **LENGTHS,
            )
            found[str(count)] = side.ask("update")["tokens"]
            sides[str(count)] = (side, {"verb": "update"})
        answers = in_turns(sides, repetitions)
    seconds = {name: median(answer["seconds"] for answer in given) for name, given in answers.items()}
    settings = {"micro_batch_tokens": MICRO_TOKENS[size]}
    ratio = seconds[str(copies[-1])] / seconds[str(copies[0])]
    return {
        "size": size,
        "counts": found,
        "seconds": seconds,
        "ratio": ratio,
        "settings": {"oat": settings},
        "versions": {"oat": versions},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["5M", "50M", "150k"])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peers", help="python of an environment with trl")
    options = parser.parse_args()
    for size in options.sizes:
        print(json.dumps(compare(size, options.repetitions, options.peers)), flush=True)
    print(json.dumps(growth(options.sizes[0], options.repetitions)), flush=True)


if __name__ == "__main__":
    main()
