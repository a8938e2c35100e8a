"""The side of `oat` in `benchmarks/ppo.py`: complete steps of PPO with a critic, a reference and a reward
model."""

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from paced_run import paced_run
from short_oat_side import start
from task import RATE, Memory, serve, text
from task import prompts as random_prompts

from oat.models.loading import load_config as load_model_config

held: dict[str, Any] = {}


def prompts(folder: str, count: int) -> dict[str, Any]:
    """Write random prompts for the model in a folder."""
    vocabulary = load_model_config(f"{folder}/start").vocab_size
    lines = [json.dumps({"prompt": text(ids)}) + "\n" for ids in random_prompts(count, vocabulary)]
    (Path(folder) / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    return {}


def open_(folder: str, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    held.update(folder=folder, threads=threads, imported=Memory())
    return {"oat": version("oat-align"), "torch": torch.__version__, "transformers": version("transformers")}


def train_(prompt_count: int, samples: int, cap: int, micro: dict[str, int]) -> dict[str, Any]:
    """Begin a run on the start, the judge and the prompts in the folder. It waits before its first step.

    Args:
        prompt_count: number of prompts of a step.
        samples: number of responses per prompt.
        cap: largest number of tokens of a response.
        micro: the setting of the learner's micro-batches.
    """
    folder, threads = held["folder"], held["threads"]
    file = Path(folder) / "run.yaml"
    file.write_text(
        f"""
run_dir: {folder}/run
model: {{path: {folder}/start, critic: {folder}/judge}}
prompts: {{path: {folder}/train.jsonl}}
render: {{special_tokens: drop}}
sampling: {{max_new_tokens: {cap}}}
engine: {{max_rows: {min(256, prompt_count * samples)}, threads: {threads}}}
oracle: {{name: reward_model, path: {folder}/judge}}
algorithm: {{name: ppo, prompts: {prompt_count}, samples: {samples}, end: final_state}}
learner: {{learning_rate: {RATE}, {", ".join(f"{name}: {value}" for name, value in micro.items())}}}
checkpoint: {{every: 1000}}
compute: {{threads: {threads}}}
stop: {{max_steps: 1000}}
""",
        encoding="utf-8",
    )
    metrics, paced = paced_run(file)
    held.update(metrics=metrics, paced=paced)
    return {}


def steps(count: int, seed: int = 0) -> dict[str, Any]:
    """Make steps, and return their seconds, those of parts, memory, and what the last step measured."""
    used = Memory()
    begin, cpu = time.perf_counter(), time.process_time()
    parts = {"sample": 0.0, "learn": 0.0}
    for _ in range(count):
        held["paced"].step()
        parts = {name: parts[name] + held["metrics"][f"time/{name}_s"] for name in parts}
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    metrics = held["metrics"]
    return {
        "seconds": seconds,
        "cpu_s": cpu,
        "steps": count,
        "parts": parts,
        "peak_gb": used.peak_above(held["imported"]),
        "length": metrics["response/length"],
        "score": metrics["reward/mean"],
        "value_loss": metrics["loss/value"],
        "kl": metrics["kl/response"],
    }


if __name__ == "__main__":
    serve({"start": start, "prompts": prompts, "open": open_, "train": train_, "steps": steps})
