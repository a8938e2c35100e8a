"""Offline DPO on recorded pairs, compared with TRL's DPO trainer. Both make complete steps from texts, and
their losses are compared.

    python benchmarks/direct.py [--sizes 5M 50M] [--steps 20] [--peers PYTHON]

Load: each prompt has 16 to 64 tokens and two responses, of geometric lengths with mean 128 and at most 1,024
tokens. Settings: beta 0.1, one step of AdamW per batch of new pairs, float32, two threads.

* `oat`: a run of `oat train` with recorded responses. Its steps include reading, rendering, ledger, reference
  and update.
* TRL: it computes the reference's log-probabilities of all pairs before the first step
  (`precompute_ref_log_probs`). These seconds are reported and are not part of its steps, which favours TRL.
  Its trainer switches `padding_free` off, so it pads. Its best micro-batch, in pairs, is searched first with
  runs of two steps. The measurement is in a new process.

Both sides take the same batches in the same order, in turns, step by step. Figures are medians over the
steps. `same_ids` is true if all token ids were equal. `loss_gap` is the greatest difference between the two
losses of a step. Memory is the highest peak of a step minus the level after imports, so it includes the
models.
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
"""Micro-batches, in pairs, that are tried for TRL."""
PAIRS = {"5M": 16, "50M": 8, "tiny": 4}
"""Number of pairs per step."""
MICRO_TOKENS = {"5M": 1024, "50M": 512, "tiny": 1024}
RATE = 1e-5
"""Learning rate. The loss changes visibly within 20 steps, and AdamW does not amplify rounding."""
LENGTHS = {"mean": 128, "cap": 1024}


def compare(size: str, steps: int, peers: str | None, lengths: dict[str, int] = LENGTHS) -> dict[str, Any]:
    """Return one row of the table. It has the pairs per second, padding, memory and losses of each side, with
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
    """Return TRL's fastest micro-batch, in pairs, and TRL's settings with the pairs per second of each
    micro-batch that was tried."""
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
