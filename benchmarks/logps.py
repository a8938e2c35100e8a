"""Log-probabilities and their gradients for a vocabulary of 150 thousand tokens, computed in two ways: with
the complete matrix of logits, and in chunks.

    python benchmarks/logps.py [--widths 256 1024] [--tokens 4096] [--repetitions 3]

The two ways take turns in one process. Figures are medians of seconds, and of memory without inputs and
gradients. The error is the norm of the difference between the two ways' gradients, divided by the norm of the
gradients from the complete matrix, for 512 tokens.
"""

import argparse
import json
import sys
from statistics import median
from typing import Any

from peers import THREADS, Side, in_turns

VOCABULARY = 150_000
ERROR_TOKENS = 512


def compare(
    width: int, tokens: int = 4096, repetitions: int = 3, vocabulary: int = VOCABULARY
) -> dict[str, Any]:
    """Return one row of the table, with seconds, memory and errors."""
    with Side(sys.executable, "logps_side.py") as side:
        shape = {"width": width, "vocabulary": vocabulary}
        errors = {
            dtype: side.ask("errors", **shape, tokens=min(tokens, ERROR_TOKENS), dtype=dtype)
            for dtype in ("float32", "float64")
        }
        versions = side.ask("open", **shape, tokens=tokens, threads=THREADS)
        ways = ("whole", "chunked")
        answers = in_turns({way: (side, {"verb": "run", "way": way}) for way in ways}, repetitions)
    measured = {
        name: {way: median(answer[name] for answer in answers[way]) for way in ways}
        for name in ("seconds", "extra_gb")
    }
    settings = {"oat": {"tokens": tokens, "chunk": versions.pop("chunk")}}
    return {**shape, **measured, "errors": errors, "settings": settings, "versions": {"oat": versions}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    for width in options.widths:
        print(json.dumps(compare(width, options.tokens, options.repetitions)), flush=True)


if __name__ == "__main__":
    main()
