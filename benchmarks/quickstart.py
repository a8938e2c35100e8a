"""Checks that every run of the quickstart gains accuracy, and that the accuracy of every control hardly
changes, with several seeds and with different floating-point rounding.

    python benchmarks/quickstart.py --out DIR
        measures the cells that DIR lacks, one after another, and writes the page's tables
    python benchmarks/quickstart.py --out DIR --tables
        writes the tables of docs/quickstart.md from the cells that DIR has
    python benchmarks/quickstart.py --out DIR --cell SEED --environment NAME
        measures one cell

A cell is one seed in one environment: the start, both runs and both controls, in one process with one thread
of torch. Its measurements are written to DIR/SEED_NAME.json, and its runs are kept in DIR/SEED_NAME. An
environment changes the rounding: torch's kernels use fewer vector instructions (`avx2` and `default`, the
values of ATEN_CPU_CAPABILITY), or oneDNN's kernels are off. Exit code 0: all requested cells are within the
bounds.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from oat.cli import main as oat
from oat.commands.digest import digest_run
from oat.quickstart import configurations, make_start

PAGE = Path(__file__).parent.parent / "docs" / "quickstart.md"
SEEDS = (0, 1, 2, 3, 4)
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "as is": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "oneDNN off": {},
}
LEAST_SAMPLED = 0.3
LEAST_GREEDY = 0.5
MOST_CONTROL = 0.05
METRICS = ("eval/sampled", "eval/greedy")
Cell = Mapping[str, Any]
"""The measurements of a cell: seed, environment, torch's vector instructions, and, for each run, the digest
of the weights and values of the first and last row of metrics."""


def measure(out: Path, seed: int, environment: str) -> Cell:
    """Make the start and the runs of a seed in this process, and return the measurements. The environment
    variables of `environment` must be set already."""
    if environment == "oneDNN off":
        torch.backends.mkldnn.set_flags(False)
    began = time.monotonic()
    folder = out / _name(seed, environment)
    runs = {}
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "start").exists():
        make_start(folder, seed)
    for name, tree in configurations(folder, seed).items():
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        if oat(["train", str(file)]) != 0:
            raise SystemExit(f"quickstart: {file} failed")
        runs[name] = {"digest": digest_run(folder / name), **ends(folder / name)}
    made = {
        "seed": seed,
        "environment": environment,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }
    return {**made, "seconds": time.monotonic() - began, "runs": runs}


def ends(run_dir: Path) -> dict[str, dict[str, float]]:
    """Return the evaluation and the number of queries from the first and the last row of a run's metrics."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = ("oracle/queries", *(metric + suffix for metric in METRICS for suffix in ("", "_low", "_high")))
    return {
        when: {key: row[key] for key in kept if key in row}
        for when, row in (("start", rows[0]), ("end", rows[-1]))
    }


def gains(run: Mapping[str, Mapping[str, float]]) -> tuple[float, float]:
    """Return a run's gain in sampled and in greedy accuracy."""
    sampled, greedy = (run["end"][metric] - run["start"][metric] for metric in METRICS)
    return sampled, greedy


def misses(cell: Cell) -> list[str]:
    """Return one line of text per run of a cell that is out of bounds."""
    found = []
    for name, run in cell["runs"].items():
        sampled, greedy = gains(run)
        is_control = name.endswith("-control")
        within = (
            max(abs(sampled), abs(greedy)) <= MOST_CONTROL
            if is_control
            else sampled >= LEAST_SAMPLED and greedy >= LEAST_GREEDY
        )
        if not within:
            found.append(
                f"seed {cell['seed']}, {cell['environment']}, {name}: sampled {sampled:+.3f}, greedy "
                f"{greedy:+.3f}"
            )
    return found


def read_cells(out: Path) -> list[Cell]:
    """Read the cells that exist, ordered by environment and seed."""
    files = (out / f"{_name(seed, environment)}.json" for environment in ENVIRONMENTS for seed in SEEDS)
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]


def tables(cells: Sequence[Cell]) -> str:
    """Return two tables as text. The first has each run of each seed in the environment "as is". The second
    has the gains of runs and controls in each environment."""
    head = (
        "| run | seed | oracle queries | sampled, start | sampled, end | greedy, start | greedy, end |\n"
        + "| --- " * 7
        + "|"
    )
    lines = [
        head,
        *sorted(line for cell in cells if cell["environment"] == "as is" for line in _rows(cell)),
        "",
    ]
    lines += [
        "| environment | run | seeds | sampled, start | sampled, gain | greedy, start | greedy, gain |",
        "| --- " * 7 + "|",
    ]
    for environment in ENVIRONMENTS:
        own = [cell for cell in cells if cell["environment"] == environment]
        for name in own[0]["runs"] if own else ():
            runs = [cell["runs"][name] for cell in own]
            shown = []
            for index, metric in enumerate(METRICS):
                shown += [
                    _span([run["start"][metric] for run in runs], ""),
                    _span([gains(run)[index] for run in runs], "+"),
                ]
            seeds = ", ".join(str(cell["seed"]) for cell in own)
            lines.append(f"| {environment} | {name} | {seeds} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def write_tables(cells: Sequence[Cell], page: Path) -> None:
    """Write the tables between the two comments that mark their place in a page."""
    begin = "<!-- cells -->\n"
    end = "<!-- end of cells -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(before + begin + tables(cells) + end + rest.split(end)[1], encoding="utf-8")


def _rows(cell: Cell) -> Iterator[str]:
    for name, run in cell["runs"].items():
        start, end = run["start"], run["end"]
        shown = [name, str(cell["seed"]), f"{end['oracle/queries']:,.0f}"]
        for metric in METRICS:
            shown += [
                f"{start[metric]:.3f}",
                f"{end[metric]:.3f} [{end[metric + '_low']:.3f}, {end[metric + '_high']:.3f}]",
            ]
        yield "| " + " | ".join(shown) + " |"


def _span(values: Sequence[float], sign: str) -> str:
    return f"{min(values):{sign}.3f} to {max(values):{sign}.3f}"


def _name(seed: int, environment: str) -> str:
    return f"{seed}_{environment.replace(' ', '_')}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="keep the cells and their runs here, and continue those that exist",
    )
    parser.add_argument("--cell", type=int, metavar="SEED", help="this seed's cell only, in this process")
    parser.add_argument("--environment", choices=ENVIRONMENTS, default="as is")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if arguments.cell is not None:
        cells = [measure(out, arguments.cell, arguments.environment)]
        (out / f"{_name(arguments.cell, arguments.environment)}.json").write_text(
            json.dumps(cells[0], indent=1), encoding="utf-8"
        )
    else:
        for environment, variables in ENVIRONMENTS.items():
            for seed in () if arguments.tables else SEEDS:
                if not (out / f"{_name(seed, environment)}.json").exists():
                    command = [
                        sys.executable,
                        __file__,
                        "--out",
                        str(out),
                        "--cell",
                        str(seed),
                        "--environment",
                        environment,
                    ]
                    subprocess.run(
                        command, env={**os.environ, "OMP_NUM_THREADS": "1", **variables}, check=False
                    )
        cells = read_cells(out)
        write_tables(cells, PAGE)
    outside = [line for cell in cells for line in misses(cell)]
    print(f"{len(cells)} cells; out of bounds: {'; '.join(outside) or 'none'}", flush=True)
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
