"""Compare what `oat check --time` tells with the steps of the run, and the suggested settings with the
defaults.

    python benchmarks/check_time.py CONFIG [--section.field value ...]

The run is trained twice for six steps in a temporary directory: as it is, and with the settings that the
check suggests. Steps 2 to 6 count. The oracle is asked. Take a quiet machine, and leave OMP_NUM_THREADS
unset.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 6


def main() -> None:
    config, *flags = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        end = ["--stop.max_steps", str(STEPS)]
        here = [*flags, "--run_dir", f"{scratch}/run", *end]
        checked = oat("check", config, "--time", "--json", *here)
        rows = json.loads(checked)["rows"]
        told = {row["name"].removeprefix("time of "): row["number"] for row in rows}
        suggested = [row["setting"] for row in rows if row["name"] == "a step is faster"]
        oat("train", config, *here)
        steps, evaluations = measured(Path(scratch) / "run")
        print(f"{'':14}  {'told, s':>20}  {'measured, s':>20}  told / measured")
        line("a step", told, steps)
        if evaluations:
            line("an evaluation", told, evaluations)
        if not suggested:
            print("no setting is suggested")
            return
        faster = [word for setting in suggested for each in setting.split(", ") for word in flag(each)]
        oat("train", config, *flags, *faster, "--run_dir", f"{scratch}/faster", *end)
        others, _ = measured(Path(scratch) / "faster")
        factor = next(row["number"] for row in reversed(rows) if row["name"] == "a step is faster")
        print(f"with {' '.join(faster)}")
        gained = statistics.mean(steps) / statistics.mean(others)
        print(f"a step is {gained:.2f} times as fast; {factor:.2f} were told")


def oat(*words: str) -> str:
    """Run a command, and return what it prints."""
    print(f"oat {' '.join(words)}", file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-m", "oat", *words], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def flag(setting: str) -> tuple[str, str]:
    """Return a setting such as "compute.threads: 2" as words of a command line."""
    name, value = setting.split(": ")
    return f"--{name}", value


def measured(run: Path) -> tuple[list[float], list[float]]:
    """Return the seconds of steps 2 to 6, and of the evaluations but the first."""
    rows = [json.loads(each) for each in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluations = [row["time/evaluate_s"] for row in rows[1:] if "time/evaluate_s" in row]
    return [row["time/step_s"] for row in rows[2:]], evaluations


def line(name: str, told: dict[str, float], seconds: list[float]) -> None:
    """Print what was told of a part of the run, with its spread, beside what was measured."""
    mean = statistics.mean(seconds)
    spreads = [
        f"{middle:.2f} ({least:.2f} to {most:.2f})"
        for middle, least, most in (
            (told[name], told[f"{name}, least"], told[f"{name}, most"]),
            (mean, min(seconds), max(seconds)),
        )
    ]
    print(f"{name:14}  {spreads[0]:>20}  {spreads[1]:>20}  {told[name] / mean:.2f}")


if __name__ == "__main__":
    main()
