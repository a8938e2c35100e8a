"""Offline DPO on recorded pairs against TRL's DPO trainer: whole steps of both, from texts, with the same
loss at each.

    python benchmarks/direct.py [--sizes 5M 50M] [--steps 20] [--peers PYTHON]

Prompts have 16 to 64 tokens, and two responses each, of geometric lengths with mean 128 and at most 1,024
tokens. Settings: beta 0.1, one step of AdamW on each batch of new pairs, float32, two threads. TRL computes
the reference's log-probabilities of all pairs beforehand (`precompute_ref_log_probs`). These seconds are
reported and are not part of its steps, while `oat` computes them in each step. TRL has no attention without
padding here, because its trainer switches `padding_free` off. Its best micro-batch, in pairs, is therefore
found in one pass, on two first batches. The side of `oat` is a run of `oat train` with recorded responses:
its steps include reading, rendering, ledger, reference and update.

Both sides take the same batches in the same order. `same_ids` says whether they were the same token by token,
and `loss_gap` is the greatest difference between the losses of a step. Memory is the highest peak of a step
beyond the level after imports, models included. TRL is measured in a fresh process that tried no other
settings. Sides take turns, step by step; figures are medians.

TRL's steps are timed without the pass that computes the reference, so the ratio is the lowest of all fair
ones. The losses of both are compared in the same run, which shows that the work is the same.
"""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peers import THREADS, Side, best_of, in_turns, medians, rate, spread

sys.path.insert(0, str(Path(__file__).parent / "sides"))
from task import make_model

MICRO = {"5M": (1, 2, 4), "50M": (1, 2, 4), "tiny": (1, 2)}
"""Micro-batches, in pairs, from which TRL's best is chosen."""
PAIRS = {"5M": 16, "50M": 8, "tiny": 4}
"""Pairs a step."""
MICRO_TOKENS = {"5M": 1024, "50M": 512, "tiny": 1024}
RATE = 1e-5
"""High enough that the loss moves within 20 steps, low enough that AdamW does not amplify rounding."""
LENGTHS = {"mean": 128, "cap": 1024}


def compare(size: str, steps: int, peers: str | None, lengths: dict[str, int] = LENGTHS) -> dict[str, Any]:
    """Return one row of the table: samples (pairs) a second, padding, memory and losses by side, with
    settings and versions."""
    load = {"pair_count": PAIRS[size], "steps": steps, "rate": RATE, **lengths}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_model(size, Path(folder))
        ours = stack.enter_context(Side(sys.executable, "oat_side.py"))
        versions: dict[str, Any] = {"oat": ours.ask("open", model=folder, threads=THREADS)}
        settings: dict[str, dict[str, Any]] = {"oat": {"micro_batch_tokens": MICRO_TOKENS[size]}}
        ours.ask("direct", micro_tokens=MICRO_TOKENS[size], **load)
        sides = {"oat": (ours, {"verb": "step"})}
        prepared = 0.0
        if peers is not None:
            micro, settings["trl"] = _tuned(peers, folder, size, load)
            theirs = stack.enter_context(Side(peers, "trl_direct_side.py"))
            versions["trl"] = theirs.ask("open", model=folder, threads=THREADS)
            prepared = theirs.ask("train", micro=micro, **load)["seconds"]
            sides["trl"] = (theirs, {"verb": "step"})
        answers = in_turns(sides, steps)
    row = {
        "size": size,
        **load,
        **medians(answers, "samples", "padding"),
        "spread": spread(answers, "samples"),
        "prepared_s": prepared,
    }
    row["peak_gb"] = {side: max(answer["peak_gb"] for answer in given) for side, given in answers.items()}
    losses = {side: [answer["loss"] for answer in given] for side, given in answers.items()}
    if peers is not None:
        row["same_ids"] = [answer["ids"] for answer in answers["oat"]] == [
            answer["ids"] for answer in answers["trl"]
        ]
        row["loss_gap"] = max(
            abs(ours - theirs) for ours, theirs in zip(losses["oat"], losses["trl"], strict=True)
        )
    return {**row, "losses": losses, "settings": settings, "versions": versions}


def _tuned(peers: str, folder: str, size: str, load: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return TRL's fastest micro-batch, in pairs; and all that were tried, with the rate of a second step."""
    with Side(peers, "trl_direct_side.py") as side:
        side.ask("open", model=folder, threads=THREADS)

        def attempt(micro: int) -> float:
            side.ask("train", micro=micro, **{**load, "steps": 2})
            side.ask("step")
            return rate([side.ask("step")], "samples")

        micro, tried = best_of(MICRO[size], attempt)
    return micro, {"per_device_train_batch_size": micro, "tried": tried, "precompute_ref_log_probs": True}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["5M", "50M"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--peers", help="python of an environment with trl")
    options = parser.parse_args()
    for size in options.sizes:
        print(json.dumps(compare(size, options.steps, options.peers)), flush=True)


if __name__ == "__main__":
    main()
