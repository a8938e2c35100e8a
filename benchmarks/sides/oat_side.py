"""The side of `oat`."""

import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from task import END, prompts, serve

from oat.engines.torch import TorchEngine
from oat.lm import load_lm
from oat.seeds import Seeds
from oat.types import Request, Sampling

held: dict[str, Any] = {}


def open_(model: str, dtype: str, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    held["lm"] = load_lm(model, dtype=dtype)
    return {"oat": version("oat-align"), "torch": torch.__version__, "transformers": version("transformers")}


def generate(rows: int, prompt_count: int, samples: int, cap: int, seed: int) -> dict[str, Any]:
    """Tokens with their raw and sampled log-probabilities, through the engine as a run uses it."""
    lm = held["lm"]
    if held.get("rows") != rows:
        held["engine"], held["rows"] = (
            TorchEngine({"sampler": lm}, num_tokens=lm.vocab_rows, stop_ids=[END], decode=lambda ids: "", max_rows=rows),
            rows,
        )
    keys = Seeds(seed)
    requests = [
        Request(ids.astype(np.int32), Sampling(cap), keys.key("bench", number, sample))
        for number, ids in enumerate(prompts(prompt_count, lm.vocab_rows))
        for sample in range(samples)
    ]
    begin = time.perf_counter()
    tokens = sum(len(completion.ids) for completion in held["engine"].generate(requests, "sampler"))
    return {"tokens": tokens, "seconds": time.perf_counter() - begin, "padding": held["engine"].padding}


serve({"open": open_, "generate": generate})
