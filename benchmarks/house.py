"""The house in figures: what a small run enters and costs, and what the code is made of.

    python benchmarks/house.py [--tree DIR] [--repetitions 15] [--json] [--tests]

measures the `src/oat` of this checkout, or of another one (`--tree`), with the Python that runs this script.
So two commits are compared on one machine, without an environment for each. The script names nothing that
lies in a package of `oat`, but for `loop.fill` and `loop.learn`. Times are of the processor, on one thread,
and medians of `--repetitions` (cold starts: of a third of them).

The run is one step of online DPO: `oat train` with a Llama of two layers and 20 thousand random weights, 4
prompts, two responses of at most 4 tokens, a reward function in a file, and a checkpoint at its end.

*entered*: files of which at least one function runs (a lambda is one; module level, class bodies and
    comprehensions are none) in a fresh process, from the first import of `oat` to the end of the command.
    *before the first token*: those of which one runs before the engine's first `generate`.
    *with class bodies*: the same if bodies of classes and comprehensions count too, which an import runs.
    *from prompt to gradient*: from the beginning of the first `loop.fill` to the end of the first
    `loop.learn`.
*statements*: nodes of the kind `ast.stmt`, without docstrings. *lines of code*: lines on which a statement or
    its continuation lies, without docstrings, comments and blank lines.
*docstring words*: words of all docstrings, those of attributes too, as strings that stand alone.
*checks*: statements that do nothing but refuse. These are (1) a `raise` of `OatError` or of a class derived
    from it; (2) a call of a function that only refuses; (3) an `if`, `for`, `while`, `with` or `match` with
    such statements only, and before them assignments to names; an `if` counts by its body, and its `else` by
    itself; (4) functions all of whose statements are such, or that are declared to return an error or a
    `Check` (a rule between settings), or that only statements of these kinds name, such as those that write
    a message. Ranges in the annotation of a field are no statements. Their share is told of the statements
    and of the lines of code.
*private, called once*: functions and methods with one leading underscore whose name is defined once and read
    once in their file, as a share of all functions and methods.
*settings made*: how often the dataclass `DPOConfig` is made in a warm run, and all `*Config` together.
*where a warm run's time goes*: samples of the processor's time of as many further runs, by the frames that
    work: in yaml, in `models/outline*`, in the files that read, derive and check settings, and in those that
    load models, the first of these that is found; and by the loop's functions.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from house_code import measure_code

HERE = Path(__file__).resolve().parent
SIDE = HERE / "sides" / "house_side.py"
CONFIG = """\
model: {path: model}
prompts: {path: prompts.jsonl}
sampling: {max_new_tokens: 4}
oracle: {name: "reward.py:reward"}
algorithm: {name: dpo, prompts: 4}
learner: {learning_rate: 0.003}
compute: {threads: 1}
stop: {max_steps: 1}
"""
WRONG = CONFIG.replace("learning_rate", "lerning_rate")
REWARD = (
    "def reward(prompts, completions, **columns):\n    return [float(len(text)) for text in completions]\n"
)
MODEL = """
from pathlib import Path
from oat.testing.tiny import write_tiny_model
write_tiny_model(Path("model"), "0123+=ab")
"""


def make_inputs(folder: Path, tree: Path) -> None:
    """Write the model, the prompts, the reward function and two configurations into a folder."""
    _python(["-c", MODEL], folder, tree)
    lines = [json.dumps({"prompt": f"{a}+{b}="}) for a in range(4) for b in range(2)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, text in {"config.yaml": CONFIG, "wrong.yaml": WRONG, "reward.py": REWARD}.items():
        (folder / name).write_text(text, encoding="utf-8")


def measure_runs(tree: Path, repetitions: int) -> dict[str, Any]:
    """Return the figures of runs: files, times of the processor in ms, and settings made."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_inputs(folder, tree)
        entered, made, warm = (
            json.loads(_python([str(SIDE), *words], folder, tree))
            for words in (["entered"], ["made"], ["warm", str(repetitions)])
        )
        times = max(3, repetitions // 3)
        cold = {
            name: [_cold(["-m", "oat", *words], folder, tree, code) for _ in range(times)]
            for name, words, code in (
                ("help_ms", ["--help"], 0),
                ("wrong_setting_ms", ["train", "wrong.yaml"], 2),
            )
        }
    milliseconds = [1e3 * each for each in warm["seconds"]]
    return {
        "files_imported": len(entered["imported"]),
        "files_entered": len(entered["run"]),
        "files_before_first_token": len(entered["before"]),
        "files_entered_with_classes": len(entered["run, with classes"]),
        "files_before_with_classes": len(entered["before, with classes"]),
        "files_prompt_to_gradient": len(entered["between"]),
        "DPOConfig_made": made["DPOConfig"],
        "configs_made": sum(made["all"].values()),
        "configs_made_by_name": made["all"],
        "warm_step_ms": median(milliseconds),
        "warm_step_ms_range": [min(milliseconds), max(milliseconds)],
        "warm_work_ms": warm["work_ms"],
        "warm_parts_ms": warm["parts_ms"],
        **{name: median(found) for name, found in cold.items()},
        "entered": entered,
    }


def _python(words: Sequence[str], folder: Path, tree: Path) -> str:
    """Return what a fresh process with the tree's `oat` prints."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=_environment(tree),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"house: {words[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def _cold(words: Sequence[str], folder: Path, tree: Path, code: int) -> float:
    """Return the processor's time of a fresh process in ms."""
    before = _children_s()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=_environment(tree),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != code:
        raise SystemExit(f"house: {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return 1e3 * (_children_s() - before)


def _environment(tree: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_tests(tree: Path) -> dict[str, float]:
    """Run `make test` of the tree, which needs its own environment, and return its processor's seconds, with
    those of its children. Its output goes to stderr."""
    before = _children_s()
    done = subprocess.run(["make", "-C", str(tree), "test"], stdout=sys.stderr, check=False)
    return {"make_test_cpu_s": _children_s() - before, "make_test_exit_code": done.returncode}


ROWS: tuple[tuple[str, str, str], ...] = (
    ("files", "files of `src/oat`", ",d"),
    ("files_imported", "imported by a one-step run", ",d"),
    ("files_entered", "entered by a one-step run", ",d"),
    ("files_before_first_token", "of these before the first token", ",d"),
    ("files_entered_with_classes", "entered, with class bodies", ",d"),
    ("files_before_with_classes", "of these before the first token", ",d"),
    ("files_prompt_to_gradient", "entered from prompt to gradient", ",d"),
    ("lines", "lines", ",d"),
    ("lines_of_code", "lines of code", ",d"),
    ("statements", "statements", ",d"),
    ("docstring_words", "words of docstrings", ",d"),
    ("check_statements_share", "checks, of the statements", ".1%"),
    ("check_lines_share", "checks, of the lines of code", ".1%"),
    ("functions", "functions and methods", ",d"),
    ("private_called_once", "of these private and called once", ",d"),
    ("private_called_once_share", "their share", ".1%"),
    ("DPOConfig_made", "`DPOConfig` made in a run", ",d"),
    ("configs_made", "all `Config` made in a run", ",d"),
    ("warm_step_ms", "ms of a warm one-step run", ".0f"),
    ("help_ms", "ms of a cold `oat --help`", ".0f"),
    ("wrong_setting_ms", "ms of a wrong setting's message", ".0f"),
    ("make_test_cpu_s", "s of `make test`", ".0f"),
    ("make_test_exit_code", "its exit code", "d"),
)


def table(figures: Mapping[str, Any]) -> str:
    """Return the figures as a table of Markdown."""
    lines = ["| what | figure |", "| --- | ---: |"]
    for name, title, form in ROWS:
        if name in figures:
            shown = "unknown" if figures[name] is None else format(figures[name], form)
            lines.append(f"| {title} | {shown} |")
        if name == "warm_step_ms":
            lines += [f"| - {part} | {ms:.1f} |" for part, ms in figures.get("warm_work_ms", {}).items()]
            lines += [
                f"| - in `{part}` | {ms:.1f} |" for part, ms in figures.get("warm_parts_ms", {}).items()
            ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=HERE.parent, metavar="DIR", help="a checkout of oat")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--tests", action="store_true", help="also run the tree's `make test`")
    parser.add_argument("--json", action="store_true", help="print all figures, with the names of the files")
    options = parser.parse_args()
    tree = options.tree.resolve()
    figures = {**measure_code(tree / "src" / "oat"), **measure_runs(tree, options.repetitions)}
    if options.tests:
        figures |= measure_tests(tree)
    print(json.dumps(figures, indent=1) if options.json else table(figures))


if __name__ == "__main__":
    main()
