"""Generalised advantage estimates of 4,096 rows of 2,048 tokens, beside `torch.cumsum` on the same tensor,
which is about the least that a sum over each row can cost.

    python benchmarks/gae.py [--rows 4096] [--tokens 2048] [--repetitions 3]

The two sides take turns in one process. In a turn, each side computes several times, and its shortest time
counts: both take milliseconds, and other work of the machine only adds to them. Figures are medians over
turns. The rows are equally long, or have gaps: stretches of 64 tokens that are not trained, as in episodes of
several turns. Tokens in gaps are not in the tensors at all.

An error is the largest difference from a loop in float64, divided by the largest absolute estimate or by 1,
over discounts gamma * lambda from 0 to 1 (in gamma alone, and in lambda alone).
"""

import argparse
import json
import sys
from statistics import median
from typing import Any

from peers import THREADS, Side, in_turns

GAPS = {"equal": 0.0, "with gaps": 0.3}
"""Share of the stretches that are gaps, for each kind of rows."""


def compare(kind: str, repetitions: int, rows: int = 4096, tokens: int = 2048) -> dict[str, Any]:
    """Return one row of the table, with seconds, memory and errors."""
    with Side(sys.executable, "gae_side.py") as side:
        versions = side.ask("open", rows=rows, tokens=tokens, gaps=GAPS[kind], threads=THREADS)
        errors = {dtype: side.ask("errors", dtype=dtype)["error"] for dtype in ("float32", "float64")}
        ways = ("gae", "cumsum")
        answers = in_turns({way: (side, {"verb": "run", "way": way}) for way in ways}, repetitions)
    measured = {
        name: {way: median(answer[name] for answer in answers[way]) for way in ways}
        for name in ("seconds", "extra_gb")
    }
    ratios = [
        ours["seconds"] / theirs["seconds"]
        for ours, theirs in zip(answers["gae"], answers["cumsum"], strict=True)
    ]
    return {
        **measured,
        "ratio": measured["seconds"]["gae"] / measured["seconds"]["cumsum"],
        "spread": (min(ratios), max(ratios)),
        "errors": errors,
        "settings": {"oat": {"rows": rows, "tokens": versions.pop("tokens")}},
        "versions": {"oat": versions},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    for kind in GAPS:
        found = compare(kind, options.repetitions, options.rows, options.tokens)
        print(json.dumps({"rows": kind, **found}), flush=True)


if __name__ == "__main__":
    main()
