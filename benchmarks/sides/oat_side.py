"""The side of `oat`."""

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from task import END, Memory, Paced, prompts, ragged, serve, text

from oat.algorithms.group import GRPO, GRPOConfig
from oat.build import resolve
from oat.config import load_config
from oat.engines.torch import TorchEngine
from oat.learner.learner import Learner
from oat.learner.models import LanguageModel
from oat.learner.optim import OptimiserSettings
from oat.lm import load_lm
from oat.loop import train
from oat.rundir import open_run
from oat.seeds import Seeds
from oat.types import Batch, Request, Sampling, Segment, Trajectory

held: dict[str, Any] = {}
RATE = 1e-7
"""The weights, and with them the lengths of responses, stay what they are."""


def open_(model: str, threads: int, dtype: str = "float32") -> dict[str, Any]:
    torch.set_num_threads(threads)
    held.clear()
    held.update(model=model, dtype=dtype, imported=Memory())
    return {"oat": version("oat-align"), "torch": torch.__version__, "transformers": version("transformers")}


def generate(rows: int, prompt_count: int, samples: int, cap: int, seed: int) -> dict[str, Any]:
    """Tokens with their raw and sampled log-probabilities, through the engine as a run uses it."""
    if held.get("rows") != rows:
        lm = load_lm(held["model"], dtype=held["dtype"])
        held["engine"] = TorchEngine({"sampler": lm}, num_tokens=lm.vocab_rows, stop_ids=[END], decode=lambda ids: "", max_rows=rows)
        held["rows"], held["vocabulary"] = rows, lm.vocab_rows
    keys = Seeds(seed)
    requests = [
        Request(ids.astype(np.int32), Sampling(cap), keys.key("bench", number, sample))
        for number, ids in enumerate(prompts(prompt_count, held["vocabulary"]))
        for sample in range(samples)
    ]
    engine = held["engine"]
    least, begin = engine.work().least_s, time.perf_counter()
    tokens = sum(len(completion.ids) for completion in engine.generate(requests, "sampler"))
    seconds = time.perf_counter() - begin
    return {"tokens": tokens, "seconds": seconds, "padding": engine.padding, "least_s": engine.work().least_s - least}


def learn(prompt_count: int, samples: int, cap: int, mean: int, micro_tokens: int, count: int | None = None) -> dict[str, Any]:
    """A learner, and a batch of responses that are given, of geometric lengths.

    Args:
        count: responses of the batch, of all that there are; None: all.
    """
    lm = load_lm(held["model"])
    learner = Learner(
        {"policy": LanguageModel(lm, num_tokens=lm.vocab_rows)},
        {"policy": OptimiserSettings(RATE)},
        micro_batch_size=None,
        micro_batch_tokens=micro_tokens,
        max_grad_norm=1.0,
        seeds=Seeds(0),
    )
    responses = ragged(prompt_count * samples, lm.vocab_rows, mean=mean, cap=cap)[:count]
    inputs = prompts(prompt_count, lm.vocab_rows)
    rows = tuple(_trajectory(inputs[number // samples], ids) for number, ids in enumerate(responses))
    generator = torch.Generator().manual_seed(0)
    columns = {
        "advantages_N": torch.randn(len(rows), generator=generator),
        "old_logps_K": torch.full((sum(map(len, responses)),), -8.0),
    }
    units = np.arange(len(rows))
    held.update(learner=learner, objective=GRPO(GRPOConfig(prompt_count, samples)))
    held["batch"] = Batch(rows, units, units // samples, columns)
    return {}


def update(seed: int = 0) -> dict[str, Any]:
    """One update of the batch; its tokens, a common prompt counted with every row."""
    used, begin = Memory(), time.perf_counter()
    metrics = held["learner"].update(held["objective"], held["batch"])
    seconds = time.perf_counter() - begin
    tokens = sum(len(row.ids) for row in held["batch"].rows)
    return {"tokens": tokens, "seconds": seconds, "update_gb": used.gb, "padding": 0.0, "grad_norm": metrics["optim/grad_norm"]}


def run(prompt_count: int, samples: int, cap: int, micro_tokens: int) -> dict[str, Any]:
    """A run of `oat train`, which waits after row 0."""
    folder = Path(held["model"])
    vocabulary = load_lm(held["model"]).vocab_rows
    lines = [f'{{"prompt": "{text(ids)}"}}\n' for ids in prompts(prompt_count, vocabulary)]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "reward.py").write_text(
        "def reward(prompts, completions, **columns):\n    return [len(text) % 7 / 7 for text in completions]\n", encoding="utf-8"
    )
    (folder / "run.yaml").write_text(
        f"""
run_dir: {folder / "run"}
model: {{path: {folder}}}
prompts: {{path: {folder / "prompts.jsonl"}, shuffle: false}}
sampling: {{max_new_tokens: {cap}}}
engine: {{max_rows: 256, threads: {torch.get_num_threads()}}}
oracle: {{name: "{folder / "reward.py"}:reward"}}
algorithm: {{name: grpo, prompts: {prompt_count}, samples: {samples}}}
learner: {{learning_rate: {RATE}, micro_batch_tokens: {micro_tokens}}}
checkpoint: {{every: 1000}}
compute: {{threads: {torch.get_num_threads()}}}
stop: {{max_steps: 1000}}
""",
        encoding="utf-8",
    )
    config, origins = load_config(folder / "run.yaml")
    metrics: dict[str, float] = {}

    def work(turn: Any) -> None:
        with open_run(resolve(config, origins), origins) as opened:
            held["engine"] = opened.collector.actor.engine

            def report(number: int, values: dict[str, float]) -> None:
                metrics.clear()
                metrics.update(values)
                turn()

            train(opened, report)

    held.update(samples=prompt_count * samples, metrics=metrics, paced=Paced(work))
    return {}


def step(seed: int = 0) -> dict[str, Any]:
    """One step of the run."""
    used = Memory()
    seconds = held["paced"].step()
    metrics = held["metrics"]
    return {
        "seconds": seconds,
        "samples": held["samples"],
        "tokens": metrics["response/length"] * held["samples"],
        "peak_gb": used.gb + (used.before - held["imported"].before) / 1e9,
        "padding": 0.0,
        "generation_padding": held["engine"].padding,
        "parts": {name: metrics[f"time/{name}_s"] for name in ("sample", "learn")},
    }


def _trajectory(prompt: np.ndarray, response: np.ndarray) -> Trajectory:
    count = len(response)
    logps = np.full(count, -8.0, dtype=np.float32)
    segment = Segment("model", response.astype(np.int32), np.ones(count, dtype=bool), np.zeros(count, dtype=np.int32), logps, logps)
    return Trajectory("sampler", (Segment("context", prompt.astype(np.int32)), segment), "stop", "")


serve({"open": open_, "generate": generate, "learn": learn, "update": update, "run": run, "step": step})
