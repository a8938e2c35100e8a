"""`oat bench`: measure how fast this machine reads and computes, and derive the limits of a model's speed; or
compare rules of exploration in the laboratory (`oat.laboratory.report`)."""

import argparse
import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oat.commands.interruptible import say_loading

if TYPE_CHECKING:
    from oat.hardware.roofline import Cost

_DTYPES = ("float32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="PATH", help="also compute the limits of this model, a directory or a hub id"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print bytes, operations and tokens per second as one JSON object",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="[explore]")
    explore = kinds.add_parser(
        "explore",
        help="compare rules of exploration in small worlds, without a language model",
    )
    _add_of_explore(explore)


def _add_of_explore(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rules",
        nargs="+",
        metavar="RULE",
        help="names of rules, or your own as path/to/file.py:function; by default all of oat's rules",
    )
    parser.add_argument("--worlds", nargs="+", metavar="WORLD", help="by default all (docs/exploration.md)")
    parser.add_argument(
        "--agents", nargs="+", metavar="AGENT", help="`ideal`, `ensemble`, or both, which is the default"
    )
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="default: 20")
    parser.add_argument(
        "--policy",
        nargs="+",
        type=float,
        metavar="SHARE",
        help="let a policy learn too; the agent itself labels a pair of these shares of the prompts",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes; default: 1")
    parser.add_argument("--out", default="runs/laboratory", metavar="DIR", help="default: runs/laboratory")


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    say_loading(arguments.model or "")
    if arguments.kind == "explore":
        from oat.laboratory.report import bench_explore

        print(
            bench_explore(
                Path(arguments.out),
                rules=arguments.rules,
                worlds=arguments.worlds,
                agents=arguments.agents,
                seeds=arguments.seeds,
                shares=arguments.policy or (),
                jobs=arguments.jobs,
            )
        )
        return 0
    found = bench(arguments.model)
    print(json.dumps(found) if arguments.json else table(found))
    return 0


def bench(model: str | None) -> dict[str, Any]:
    """Measure how fast the CPU is with each number of threads that a run may choose. If torch can use a GPU,
    measure the GPU too.

    Args:
        model: a directory or hub id of a model whose limits are computed too; None: no model.

    Returns:
        A dict with three keys:
        * "machine": processor, number of cores, GPU, and version of torch.
        * "rates": a list with one dict for each device and number of threads. It has "device", "threads",
          "bandwidth" in bytes per second and, by the name of each precision, the rate of matrix products in
          operations per second.
        * "model": the model's path and its limits (`_limits`), computed from the last entry of "rates"; None
          if no model was given.

    Raises:
        ModelError: the model cannot be loaded.
    """
    import torch

    from oat.hardware.memory import keep_few_kernels
    from oat.hardware.roofline import bandwidth, cost_of, matrix_rate
    from oat.hardware.threads import candidates
    from oat.models.loading import load_lm

    keep_few_kernels()
    cost = None if model is None else cost_of(load_lm(model))
    places = [("cpu", threads) for threads in candidates(0)]
    if torch.cuda.is_available():
        places.append(("cuda", places[-1][1]))
    rates = []
    for device, threads in places:
        matrix = {name: matrix_rate(device, threads, getattr(torch, name)) for name in _DTYPES}
        rates.append(
            {"device": device, "threads": threads, "bandwidth": bandwidth(device, threads), **matrix}
        )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "gpu": gpu, "torch": torch.__version__},
        "rates": rates,
        "model": None if cost is None else {"path": model, **_limits(cost, *places[-1])},
    }


def _limits(cost: "Cost", device: str, threads: int) -> dict[str, Any]:
    """Return the highest speeds that a model can reach. The costs of attention and of the KV cache are not
    counted.

    Returns:
        A dict with "elements", the number of elements in the model's matrices, and, by the name of each
        precision, a dict with:
        * "bytes": bytes of the weights;
        * "decode_one_row": tokens per second if one row is decoded;
        * "decode": tokens per second if enough rows are decoded together;
        * "compute_bound_rows": smallest number of rows with which a decoding step takes at least as long to
          compute as to read the weights;
        * "update": tokens per second of an update in which every token is trained.
    """
    import torch

    from oat.hardware.roofline import rates_of

    limits: dict[str, Any] = {"elements": cost.backbone + cost.head}
    for name in _DTYPES:
        own = replace(cost, dtype=getattr(torch, name))
        rates = rates_of(torch.device(device), threads, own)
        read_s = own.weight_bytes / rates.bandwidth
        row_s = own.flops(1, 0, 1) / rates.matrix
        limits[name] = {
            "bytes": own.weight_bytes,
            "decode_one_row": 1 / max(read_s, row_s),
            "decode": 1 / row_s,
            "compute_bound_rows": math.ceil(read_s / row_s),
            "update": rates.matrix / own.flops(1, 0, 1, learning=True),
        }
    return limits


def table(found: Mapping[str, Any]) -> str:
    """Return the result of `bench` as tables for people."""
    machine = found["machine"]
    model = found["model"]
    last = found["rates"][-1]
    gpu = machine["gpu"] or "none"
    lines = [f"{machine['cpu']}, {machine['cores']} cores; GPU: {gpu}; torch {machine['torch']}", ""]
    head = ["device", "threads", "read GB/s", *(f"{name} GFLOP/s" for name in _DTYPES)]
    lines += _columns(
        head,
        [
            [r["device"], r["threads"], *(f"{r[name] / 1e9:.1f}" for name in ("bandwidth", *_DTYPES))]
            for r in found["rates"]
        ],
    )
    if model is not None:
        size = f"{model['elements'] / 1e6:.2f} million elements in matrices"
        where = f"on {last['device']}, threads: {last['threads']}"
        lines += ["", f"{model['path']}, {size}; tokens a second {where}, at most:", ""]
        head = [
            "precision",
            "weights MB",
            "decode, 1 row",
            "decode, many rows",
            "bound by compute from rows",
            "update",
        ]
        names = ("decode_one_row", "decode", "compute_bound_rows", "update")
        lines += _columns(
            head,
            [
                [n, f"{model[n]['bytes'] / 1e6:.1f}", *(f"{model[n][name]:.0f}" for name in names)]
                for n in _DTYPES
            ],
        )
    return "\n".join(lines)


def _columns(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(head))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def _cpu_name() -> str:
    """Return the processor's name from Linux's /proc/cpuinfo. If there is none, return the processor's
    architecture."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()
