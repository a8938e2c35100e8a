"""The quickstart with three seeds: what each run gains and what its control does; writes the table of docs/quickstart.md.

python benchmarks/quickstart.py [--out DIR]
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from oat.quickstart import configurations, quickstart

PAGE = Path(__file__).parent.parent / "docs" / "quickstart.md"
SEEDS = (0, 1, 2)
BEGIN, END = "<!-- seeds -->\n", "<!-- end of seeds -->"


def ends(out: Path, seed: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The first and the last row of metrics of each run of a quickstart, which is made where it is not there."""
    quickstart(out, seed)
    found = {}
    for name in configurations(out, seed):
        rows = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        found[name] = (rows[0], rows[-1])
    return found


def rows(seed: int, runs: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    lines = []
    for name, (start, end) in runs.items():
        cells = [name, str(seed), f"{end['oracle/queries']:,.0f}"]
        for metric in ("eval/sampled", "eval/greedy"):
            cells += [f"{start[metric]:.3f}", f"{end[metric]:.3f} [{end[metric + '_low']:.3f}, {end[metric + '_high']:.3f}]"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep the runs here, and go on with those that are there")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as scratch:
        lines = [line for seed in SEEDS for line in rows(seed, ends((out or Path(scratch)) / f"seed_{seed}", seed))]
    head = "| run | seed | oracle queries | sampled, start | sampled, end | greedy, start | greedy, end |\n" + "| --- " * 7 + "|\n"
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + head + "\n".join(sorted(lines)) + "\n" + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
