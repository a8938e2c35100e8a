"""The side of `oat` in `benchmarks/short.py`: GRPO on the quickstart's task, one step for each question."""

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from paced_run import paced_run
from task import serve

from oat.quickstart import make_start

held: dict[str, Any] = {}


def start(folder: str) -> dict[str, Any]:
    """Make the quickstart's start and prompts in a folder."""
    make_start(Path(folder), seed=0)
    return {}


def train_(folder: str, threads: int, micro: int, samples: int = 8, prompts: int = 64) -> dict[str, Any]:
    """Begin a run in the folder of `start`. It waits before its first step."""
    torch.set_num_threads(threads)
    file = Path(folder) / "run.yaml"
    file.write_text(
        f"""
run_dir: {folder}/run
model: {{path: {folder}/start}}
prompts: {{path: {folder}/train.jsonl, reference_key: answer}}
sampling: {{max_new_tokens: 4}}
engine: {{max_rows: {prompts * samples}, threads: {threads}}}
oracle: {{name: exact_match, repeats: 0}}
algorithm: {{name: grpo, prompts: {prompts}, samples: {samples}}}
learner: {{learning_rate: 2.0e-5, micro_batch_size: {micro}}}
checkpoint: {{every: 1000}}
compute: {{threads: {threads}}}
stop: {{max_steps: 1000}}
""",
        encoding="utf-8",
    )
    metrics, paced = paced_run(file)
    held.update(metrics=metrics, paced=paced)
    return {"oat": version("oat-align"), "torch": torch.__version__}


def steps(count: int, seed: int = 0) -> dict[str, Any]:
    """Make steps, and return their seconds, with and without waits, and those of two parts of a step."""
    begin, cpu = time.perf_counter(), time.process_time()
    parts = {"sample": 0.0, "learn": 0.0}
    for _ in range(count):
        held["paced"].step()
        parts = {name: parts[name] + held["metrics"][f"time/{name}_s"] for name in parts}
    cpu_s = time.process_time() - cpu
    return {"seconds": time.perf_counter() - begin, "cpu_s": cpu_s, "steps": count, "parts": parts}


if __name__ == "__main__":
    serve({"start": start, "train": train_, "steps": steps})
