"""The seconds until the data of a run are ready, and the memory that this takes. The data are opened twice:
the first time they are read, checked and rendered; the second time the stored index is used.

    python benchmarks/large_data.py [--prompts 1000000] [--pairs 100000] [--model DIR]

prompts   JSON lines of about 75 bytes, with nine words, a number and an answer.
pairs     preferences with a number after each prompt. By default, they are random texts: 80 words for the
          prompt and 250 for each response. With --records FILE, they are the records of FILE in a cycle (JSON
          lines with prompt, chosen, rejected).

A new process opens each file with the code of a run and the tokenizer of DIR. By default, the tokenizer is a
byte-level one that this program makes.
"""

import argparse
import itertools
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEXT = (
    "once upon a time there was little girl named Lily who loved to play in the garden with her dog and "
    "they found something shiny"
)
WORDS = TEXT.split()
PAIR = ("chosen", "rejected")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--records", type=Path)
    parser.add_argument("--open", nargs=3, metavar=("FILE", "KIND", "CACHE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.open is not None:
        open_(*given.open, str(given.model))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or make_tokenizer(Path(folder) / "tokenizer")
        for kind, count in (("prompts", given.prompts), ("pairs", given.pairs)):
            file = Path(folder) / f"{kind}.jsonl"
            with file.open("w", encoding="utf-8") as out:
                for record in itertools.islice(make_records(kind, given.records), count):
                    out.write(json.dumps(record) + "\n")
            print(f"{count:,} {kind}, {file.stat().st_size / 1e6:,.0f} MB", flush=True)
            command = [sys.executable, __file__, "--model", model, "--open", file, kind]
            for _ in range(2):
                subprocess.run([*command, Path(folder) / "cache"], check=True)


def make_records(kind: str, records: Path | None) -> Iterator[dict[str, Any]]:
    """Yield records of the kind "prompts" or "pairs", without end."""
    draw = random.Random(0)
    lines = (
        []
        if records is None
        else [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    )
    for number in itertools.count():
        if kind == "prompts":
            yield {"prompt": f"{' '.join(draw.choices(WORDS, k=9))} {number}", "answer": str(number)}
        elif lines:
            record = lines[number % len(lines)]
            yield {**record, "prompt": f"{record['prompt']} {number}"}
        else:
            texts = [" ".join(draw.choices(WORDS, k=size)) for size in (80, 250, 250)]
            yield {"prompt": f"{texts[0]} {number}", **dict(zip(PAIR, texts[1:], strict=True))}


def make_tokenizer(folder: Path) -> Path:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    built = ByteLevelBPETokenizer()
    built.train_from_iterator([" ".join(WORDS)] * 50, vocab_size=2000, show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=built._tokenizer, eos_token="<eos>").save_pretrained(folder)
    return folder


def open_(file: str, kind: str, cache: str, model: str) -> None:
    """Open the data in the way of a run, and print the seconds and the memory."""
    from oat.data.prompts import Prompts
    from oat.models.loading import load_tokenizer
    from oat.seeds import Seeds
    from oat.text.renderer import Renderer

    renderer = Renderer(load_tokenizer(model), template=None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    prompts = Prompts(
        file, renderer, Seeds(0), responses=PAIR if kind == "pairs" else (), caches=[Path(cache)]
    )
    seconds = time.perf_counter() - begin
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    self, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    processor = sum(each.ru_utime + each.ru_stime for each in (self, children))
    print(
        f"  {prompts.size:,} ready after {seconds:.1f} s ({processor:.0f} s of all processors), "
        f"{grown:.0f} MB more",
        flush=True,
    )


if __name__ == "__main__":
    main()
