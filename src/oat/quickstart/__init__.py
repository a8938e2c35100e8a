"""The quickstart: a tiny model learns sums from a poor teacher, and two online alignments improve it, each
beside a control with permuted rewards.

    start     a Llama of 0.66 million parameters learns two-digit sums from a teacher's demonstrations; 75 of
              100 demonstrations lack the carry
    dpo       aligns the start online; a rule oracle says which of 2 responses to each prompt is better
    grpo      aligns the start online; a rule oracle scores 8 responses to each prompt
    controls  repeat both alignments with rewards that are permuted over the responses of each step, so
              their accuracy cannot rise through feedback

Each run is an ordinary `oat train CONFIG.yaml` in a process of its own. Its configuration is written next to
the run directory, and users may copy it.

Both algorithms keep the policy closer to the start than usual (beta is 1 in DPO, and GRPO has a KL term). The
reason is the controls. The start gives high probability both to the answer with the carry and to the answer
without it. With permuted rewards, a free policy would drift at random to one of the two answers, and the
accuracy of the controls would change.
"""

import argparse
import importlib.util
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from oat.errors import ConfigError
from oat.files import appearing, saying_what_is_free, write_atomically
from oat.quickstart.control import PermutedRewards
from oat.rundir.checkpoint_files import place_of, pointed

__all__ = ["PermutedRewards", "configurations", "quickstart"]

SEED = 0
MAX_STEPS = 40
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dpo": {"name": "dpo", "prompts": 256, "samples": 2, "beta": 1.0},
    "grpo": {"name": "grpo", "prompts": 64, "samples": 8, "kl_coef": 0.4},
}
ORACLES = {"": "exact_match", "-control": "oat.quickstart:PermutedRewards"}
_MARKER = "README.txt"
_MADE_BY = "Made by `oat quickstart"
"""The beginning of the marker."""
_NEW = re.compile(r"\.new-[0-9a-f]{16}\.txt")
"""Names of markers that are not complete (`oat.files.appearing`)."""
_PLACES = {
    "start": "the start: model and tokenizer",
    "models": "the aligned models, for AutoModelForCausalLM.from_pretrained",
    "quickstart.png": "the plot",
    "*.jsonl": "prompts with right answers, to train on and held out; demonstrations of the start",
    "*.yaml": "the runs' configurations: oat train CONFIG.yaml",
    "*/metrics.jsonl": "the runs' numbers, one line a step",
    "*.log": "the runs' output",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="quickstart", metavar="DIR")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the data, the start model and the runs"
    )


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    return quickstart(Path(arguments.out), arguments.seed)


def quickstart(out: Path, seed: int = SEED) -> int:
    """Run the quickstart in the folder `out`, or continue an earlier call with the same seed. Print the
    progress, the results and a list of the files.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: `out` holds something other than a quickstart, or another configuration of a run.
        ChildError: a run failed.
    """
    places = _claim(out)
    runs = configurations(out, seed)
    for name, tree in runs.items():
        refuse_changed(out / f"{name}.yaml", _text(tree))
    what = (
        "a tiny model that learns sums from a poor teacher, then DPO and GRPO beside their controls, two "
        "at a time"
    )
    print(f"oat quickstart: {what}; a few minutes, all of it in {out}", flush=True)
    from oat.commands.export import export_run
    from oat.quickstart.processes import interrupted_by_sigterm, run_all
    from oat.quickstart.report import plot, read_curve, table

    began = time.monotonic()
    with interrupted_by_sigterm(), _saying_saved(out, list(runs)):
        if not (out / "start").exists():
            make_start(out, seed)
        left = [name for name, tree in runs.items() if not _is_done(out, name, tree)]
        for name in left:
            write_atomically(out / f"{name}.yaml", _text(runs[name]))
        train = {name: [sys.executable, "-m", "oat", "train", str(out / f"{name}.yaml")] for name in left}
        run_all(train, out, at_a_time=2, report=lambda name, seconds: _say(name, seconds, out / name))
        for name in ALGORITHMS:
            export_run(out / name, out / "models" / name)
    curves = {name: read_curve(out / name) for name in runs}
    if importlib.util.find_spec("matplotlib") is not None:
        plot(curves, out / "quickstart.png")
    else:
        print(
            "oat quickstart: no plot, since matplotlib is missing: pip install 'oat-align[plot]', and the "
            "same command draws it",
            flush=True,
        )
    print(f"\naccuracy on held-out sums, at the start -> at the end\n{table(curves)}\n\n{places}", flush=True)
    _say("quickstart", time.monotonic() - began, out)
    return 0


@contextmanager
def _saying_saved(out: Path, names: Sequence[str]) -> Iterator[None]:
    """Add a note to an interrupt within this context: which steps of the runs are saved."""
    try:
        yield
    except KeyboardInterrupt as end:
        end.add_note("the same command goes on from what is saved")
        for name in names:
            if steps := pointed(out / name / "checkpoints")[0]:
                end.add_note(f"{name} is saved after step {place_of(steps[-1])[0]}")
        raise


def make_start(out: Path, seed: int) -> None:
    """Write the data into the folder `out`, train the start model on one thread, and write it there. The
    model's folder appears when all its files are written."""
    import torch

    from oat.models.loading import save_lm
    from oat.quickstart.task import BATCH, build_model, build_task, build_tokenizer, supervise
    from oat.reports.progress import counted

    _say("start", None, out / "start")
    began = time.monotonic()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        task = build_task(seed)
        tokenizer = build_tokenizer()
        lm = build_model(tokenizer, seed)
        task.write(out)
        with counted(
            "oat quickstart: start, supervised learning", len(task.demonstrations) // BATCH
        ) as count:
            supervise(lm, tokenizer, task.demonstrations, report=lambda step, loss: count(step))
    finally:
        torch.set_num_threads(threads)
    with saying_what_is_free(out / "start"), tempfile.TemporaryDirectory(dir=out) as scratch:
        save_lm(lm, tokenizer, os.path.join(scratch, "start"))
        os.replace(os.path.join(scratch, "start"), out / "start")
    _say("start", time.monotonic() - began, out / "start")


def configurations(out: Path, seed: int = SEED) -> dict[str, dict[str, Any]]:
    """Return the configurations of the four runs by name, as plain data that `oat train` reads from YAML.

    Args:
        out: the folder of the quickstart.
    """
    return {
        name + suffix: {
            "run_dir": str(out / (name + suffix)),
            "seed": seed,
            "model": {"path": str(out / "start")},
            "prompts": {"path": str(out / "train.jsonl"), "reference_key": "answer"},
            "sampling": {"max_new_tokens": 4},
            "engine": {"name": "torch", "max_rows": 512},
            "oracle": {"name": oracle, "repeats": 0},
            "algorithm": algorithm,
            "learner": {
                "learning_rate": 2e-5,
                "schedule": "linear",
                "warmup_steps": 5,
                "micro_batch_size": 512,
            },
            "evaluation": {"path": str(out / "heldout.jsonl"), "every": 10, "samples": 4, "intervals": True},
            "checkpoint": {"every": 20},
            "compute": {"threads": 1},
            "stop": {"max_steps": MAX_STEPS},
        }
        for name, algorithm in ALGORITHMS.items()
        for suffix, oracle in ORACLES.items()
    }


def _claim(out: Path) -> str:
    """Write a list of the quickstart's files into the folder's README.txt, and return the list. The file
    marks the folder as a quickstart's.

    Raises:
        ConfigError: the folder holds something other than a quickstart.
    """
    width = max(map(len, _PLACES)) + len(str(out)) + 3
    places = "".join(f"{out / name!s:<{width}}{what}\n" for name, what in _PLACES.items())
    if os.path.lexists(out) and not _is_ours(out):
        raise ConfigError(
            f"{out}: holds something else than a quickstart; give an empty or a new folder with --out"
        )
    out.mkdir(parents=True, exist_ok=True)
    heading = f"{_MADE_BY} --out {out}`, which continues what is unfinished here."
    if not (out / _MARKER).exists():
        with appearing(out / _MARKER, "--out") as new:
            new.write_text(f"{heading}\n\n{places}", encoding="utf-8")
    return places


def _is_ours(out: Path) -> bool:
    """Return True if `out` is a folder that `oat quickstart` made, or an empty folder. A marker that a kill
    cut off counts as nothing."""
    if not out.is_dir():
        return False
    marker = out / _MARKER
    if marker.is_file():
        return marker.read_bytes().startswith(_MADE_BY.encode())
    return all(
        _NEW.fullmatch(file.name) and file.is_file() and _is_beginning(file.read_bytes())
        for file in out.iterdir()
    )


def _is_beginning(text: bytes) -> bool:
    return text[: len(_MADE_BY)] == _MADE_BY.encode()[: len(text)]


def refuse_changed(file: Path, text: str) -> None:
    """Refuse to replace a file that has something else than this command would write.

    Raises:
        ConfigError: it has.
    """
    if os.path.lexists(file) and not (file.is_file() and file.read_bytes() == text.encode()):
        raise ConfigError(
            f"{file}: is not what this command writes, so somebody has changed it, or it is of another seed, "
            "folder or version; move it away, or give another --out"
        )


def _is_done(out: Path, name: str, tree: Mapping[str, Any]) -> bool:
    """Return True, and print a line, if an earlier call finished a run with this configuration."""
    file = out / f"{name}.yaml"
    is_same = file.exists() and file.read_bytes() == _text(tree).encode()
    is_done = is_same and (out / name / "checkpoints" / f"step_{MAX_STEPS:08d}").exists()
    if is_done:
        print(f"oat quickstart: {name} was done before", flush=True)
    return is_done


def _text(tree: Mapping[str, Any]) -> str:
    return yaml.safe_dump(tree, sort_keys=False)


def _say(name: str, seconds: float | None, place: Path) -> None:
    print(
        f"oat quickstart: {name} "
        + (
            f"begins; its steps are in {place}.log"
            if seconds is None
            else f"is done after {seconds:.0f} s, in {place}"
        ),
        flush=True,
    )
