"""The side of `oat`."""

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from task import END, RATE, Memory, Paced, digest, pairs, prompts, ragged, reward, serve, text, touch

from oat.algorithms.base import Objective
from oat.algorithms.group import GRPO, GRPOConfig
from oat.config.load import load_config
from oat.engines.torch import TorchEngine
from oat.learner.learner import Learner
from oat.learner.models import LanguageModel
from oat.learner.optimiser import OptimiserSettings
from oat.loop import train
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_lm
from oat.opening.open_run import open_run
from oat.resolve.resolve import resolve
from oat.seeds import Seeds
from oat.types import (
    Answer,
    Batch,
    Feedback,
    Group,
    Item,
    Key,
    Message,
    Prompt,
    Question,
    Request,
    Sampling,
    Segment,
    Trajectory,
)

held: dict[str, Any] = {}
REWARDS = """
from task import reward


def rewards(prompts, completions, **columns):
    return [reward(completion) for completion in completions]
"""


class LearnedCounter:
    """A counter for passes with a gradient. It counts the positions that matrix products and attention
    compute, and the tokens among these positions. It also keeps the rows of every update."""

    def __init__(self) -> None:
        self.clear()
        self.hidden = CausalLM.hidden
        self.attend = F.scaled_dot_product_attention
        self.update = Learner.update
        CausalLM.hidden = lambda lm, *args, **kwargs: self._hidden(lm, *args, **kwargs)
        F.scaled_dot_product_attention = self._attend
        Learner.update = lambda learner, objective, batch: self._update(learner, objective, batch)

    def clear(self) -> None:
        self.positions = self.tokens = self.attended = self.attending = 0
        self.rows: list[np.ndarray] = []

    @property
    def padding(self) -> dict[str, float]:
        """The shares of positions without a token, in matrix products and in attention."""
        return {
            "padding": 1 - self.tokens / self.positions,
            "attention_padding": 1 - self.attending / self.attended,
        }

    def _update(self, learner: Learner, objective: Objective, batch: Batch) -> dict[str, float]:
        self.rows += [row.ids for row in batch.rows]
        return self.update(learner, objective, batch)

    def _hidden(self, lm: CausalLM, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            tokens = sum(span.stop - span.start for span in kwargs["layout"].spans)
            config = lm.module.config
            self.positions += input_ids.numel()
            self.tokens += tokens
            self.attending += tokens * config.num_attention_heads * config.num_hidden_layers
        return self.hidden(lm, input_ids, **kwargs)

    def _attend(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.attended += query.shape[:-1].numel()
        return self.attend(query, *args, **kwargs)


learned = LearnedCounter()


def open_(model: str, threads: int, dtype: str = "float32") -> dict[str, Any]:
    torch.set_num_threads(threads)
    held.clear()
    held.update(model=model, dtype=dtype, imported=Memory())
    return {"oat": version("oat-align"), "torch": torch.__version__, "transformers": version("transformers")}


def generate(rows: int, prompt_count: int, samples: int, cap: int, seed: int) -> dict[str, Any]:
    """Generate tokens with their raw and sampled log-probabilities, with the engine of a run. Return the
    measurements."""
    if held.get("rows") != rows:
        lm = load_lm(held["model"], dtype=held["dtype"])
        held["engine"] = TorchEngine(
            {"sampler": lm}, num_tokens=lm.vocab_rows, stop_ids=[END], decode=lambda ids: "", max_rows=rows
        )
        held["rows"] = rows
        held["vocabulary"] = lm.vocab_rows
    keys = Seeds(seed)
    requests = [
        Request(ids.astype(np.int32), Sampling(cap), keys.key("bench", number, sample))
        for number, ids in enumerate(prompts(prompt_count, held["vocabulary"]))
        for sample in range(samples)
    ]
    engine = held["engine"]
    before = engine.work()
    begin = time.perf_counter()
    tokens = sum(len(completion.ids) for completion in engine.generate(requests, "sampler"))
    seconds = time.perf_counter() - begin
    work = engine.work().since(before)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "padding": work.padded_keys / work.keys,
        "least_s": work.least_s,
    }


def learn(
    prompt_count: int, samples: int, cap: int, mean: int, micro_tokens: int, copies: int = 1
) -> dict[str, Any]:
    """Make a learner, and the batch that GRPO prepares of given responses with geometric lengths.

    Args:
        copies: number of times that the prompts and responses are in the batch.
    """
    lm = load_lm(held["model"])
    touch(lm.module)
    held["loaded"] = Memory()
    learner = Learner(
        {"policy": LanguageModel(lm, num_tokens=lm.vocab_rows)},
        {"policy": OptimiserSettings(RATE, max_grad_norm=1.0)},
        micro_batch_size=None,
        micro_batch_tokens=micro_tokens,
        seeds=Seeds(0),
    )
    responses = ragged(prompt_count * samples, lm.vocab_rows, mean=mean, cap=cap)
    items = []
    for number, ids in enumerate(prompts(prompt_count, lm.vocab_rows) * copies):
        first = number % prompt_count * samples
        rows = tuple(_trajectory(ids, response) for response in responses[first : first + samples])
        group = Group(Prompt(number, number, (Message("user", text(ids)),)), rows)
        key = Key("train", 0, 0, number)
        scores = tuple(reward(row.text) for row in rows)
        items.append(
            Item(
                group,
                Question.about(group, key, "score", tuple(range(samples))),
                Answer(key, scores, ("ok",) * samples, samples),
                None,
            )
        )
    objective = GRPO(GRPOConfig(prompt_count * copies, samples))
    batch = objective.prepare(
        Feedback(0, tuple(items), len(items) * samples), learner.forward, np.random.default_rng(0)
    )
    held.update(learner=learner, objective=objective, batch=batch)
    return {}


def update(seed: int = 0) -> dict[str, Any]:
    """Make one update with the batch, and return the measurements. In `tokens`, a prompt that several rows
    share counts once per row."""
    learned.clear()
    used = Memory()
    begin = time.perf_counter()
    metrics = held["learner"].update(held["objective"], held["batch"])
    return {
        "seconds": time.perf_counter() - begin,
        "tokens": sum(len(row.ids) for row in held["batch"].rows),
        **learned.padding,
        "update_gb": used.peak_above(held["loaded"]),
        "peak_gb": used.peak_above(held["imported"]),
        "grad_norm": metrics["optim/grad_norm"],
    }


def run(prompt_count: int, samples: int, cap: int, micro_tokens: int) -> dict[str, Any]:
    """Start a run of `oat train` with GRPO. The run waits after row 0, until `step` is called."""
    folder = Path(held["model"])
    vocabulary = load_lm(held["model"]).vocab_rows
    lines = [f'{{"prompt": "{text(ids)}"}}\n' for ids in prompts(prompt_count, vocabulary)]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    held["samples"] = prompt_count * samples
    _begin(f"""
prompts: {{path: {folder / "prompts.jsonl"}, shuffle: false}}
sampling: {{max_new_tokens: {cap}}}
engine: {{max_rows: 256, threads: {torch.get_num_threads()}}}
oracle: {{name: "{folder / "rewards.py"}:rewards"}}
algorithm: {{name: grpo, prompts: {prompt_count}, samples: {samples}}}
learner: {{learning_rate: {RATE}, micro_batch_tokens: {micro_tokens}}}
stop: {{max_steps: 1000}}
""")
    return {}


def direct(
    pair_count: int, steps: int, cap: int, mean: int, rate: float, micro_tokens: int
) -> dict[str, Any]:
    """Start a run of DPO on recorded pairs. The run waits after row 0, until `step` is called."""
    folder = Path(held["model"])
    records = pairs(pair_count * steps, load_lm(held["model"]).vocab_rows, mean=mean, cap=cap)
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
    )
    held["samples"] = pair_count
    _begin(f"""
prompts: {{path: {folder / "pairs.jsonl"}, shuffle: false}}
sampling: {{max_new_tokens: {cap}}}
oracle: {{name: recorded}}
algorithm: {{name: dpo, prompts: {pair_count}, beta: 0.1}}
learner: {{learning_rate: {rate}, micro_batch_tokens: {micro_tokens}}}
stop: {{max_steps: {steps}}}
""")
    return {}


def _begin(config: str) -> None:
    """Start a run in this process. It makes one step for each call of `step`."""
    file = Path(held["model"]) / "run.yaml"
    common = f"run_dir: {file.parent / 'run'}\nmodel: {{path: {file.parent}}}\ncheckpoint: {{every: 1000}}\n"
    file.write_text(f"{common}compute: {{threads: {torch.get_num_threads()}}}\n{config}", encoding="utf-8")
    given, origins = load_config(file)
    metrics: dict[str, float] = {}

    def work(turn: Any) -> None:
        with open_run(resolve(given, origins)) as opened:

            def report(number: int, values: dict[str, float]) -> None:
                metrics.clear()
                metrics.update(values)
                turn()

            train(opened, report)

    held.update(metrics=metrics, paced=Paced(work))


def step(seed: int = 0) -> dict[str, Any]:
    """Make one step of the run, and return the measurements."""
    learned.clear()
    used = Memory()
    seconds = held["paced"].step()
    metrics = held["metrics"]
    return {
        "seconds": seconds,
        "samples": held["samples"],
        "tokens": metrics["response/length"] * held["samples"],
        **learned.padding,
        "generation_padding": metrics.get("roofline/padded_keys", 0.0),
        "peak_gb": used.peak_above(held["imported"]),
        "loss": metrics["loss/total"],
        "ids": digest(learned.rows),
        "parts": {name: metrics[f"time/{name}_s"] for name in ("sample", "learn")},
    }


def _trajectory(prompt: np.ndarray, response: np.ndarray) -> Trajectory:
    count = len(response)
    logps = np.full(count, -8.0, dtype=np.float32)
    segment = Segment(
        "model",
        response.astype(np.int32),
        np.ones(count, dtype=bool),
        np.zeros(count, dtype=np.int32),
        logps,
        logps,
    )
    return Trajectory(
        "sampler", (Segment("context", prompt.astype(np.int32)), segment), "stop", text(response)
    )


serve(
    {
        "open": open_,
        "generate": generate,
        "learn": learn,
        "update": update,
        "run": run,
        "direct": direct,
        "step": step,
    }
)
