"""The side of vLLM's build for the CPU, in this process. It uses vLLM's default prefix cache, which is warm,
and compiles the model if the machine has a compiler."""

import os
import shutil

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import time
from importlib.metadata import version
from typing import Any

from task import END, prompts, serve
from vllm import LLM, SamplingParams

held: dict[str, Any] = {}


def open_(model: str, dtype: str, threads: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(threads)
    settings = {
        "enforce_eager": shutil.which("g++") is None,
        "max_model_len": 256,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 16384,
    }
    held["llm"] = LLM(model=model, skip_tokenizer_init=True, dtype=dtype, **settings)
    versions = {
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "vllm-cpu": version("vllm-cpu"),
    }
    return {**versions, "settings": {**settings, "kv_cache_gib": 1}}


def generate(rows: int, prompt_count: int, samples: int, cap: int, seed: int) -> dict[str, Any]:
    vocabulary = held["llm"].llm_engine.model_config.get_vocab_size()
    settings = SamplingParams(
        n=samples, temperature=1.0, max_tokens=cap, logprobs=0, stop_token_ids=[END], detokenize=False
    )
    inputs = [{"prompt_token_ids": ids.tolist()} for ids in prompts(prompt_count, vocabulary)]
    begin = time.perf_counter()
    outputs = held["llm"].generate(inputs, settings, use_tqdm=False)
    return {
        "tokens": sum(len(one.token_ids) for output in outputs for one in output.outputs),
        "seconds": time.perf_counter() - begin,
    }


serve({"open": open_, "generate": generate})
