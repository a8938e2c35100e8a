"""The side of `transformers.generate`. Rows are sorted by length and put into static batches, padded on the
left. Log-probabilities are computed from the returned logits."""

import time
from importlib.metadata import version
from typing import Any

import torch
from task import END, prompts, serve
from transformers import AutoModelForCausalLM

held: dict[str, Any] = {}


def open_(model: str, dtype: str, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    held["model"] = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    return {"torch": torch.__version__, "transformers": version("transformers")}


def generate(rows: int, prompt_count: int, samples: int, cap: int, seed: int) -> dict[str, Any]:
    model = held["model"]
    torch.manual_seed(seed)
    every = sorted(
        (ids for ids in prompts(prompt_count, model.config.vocab_size) for _ in range(samples)), key=len
    )
    tokens = 0
    begin = time.perf_counter()
    for start in range(0, len(every), rows):
        some = every[start : start + rows]
        width = max(map(len, some))
        ids = torch.zeros(len(some), width, dtype=torch.long)
        mask = torch.zeros(len(some), width, dtype=torch.long)
        for row, prompt in enumerate(some):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, width - len(prompt) :] = 1
        made = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=cap,
            do_sample=True,
            top_k=0,
            eos_token_id=END,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = made.sequences[:, width:]
        for column, logits in enumerate(made.logits):
            logits.float().log_softmax(-1).gather(1, new[:, column, None])
        ends = (new == END).long()
        tokens += int((ends.cumsum(1) - ends == 0).sum())
    return {"tokens": tokens, "seconds": time.perf_counter() - begin}


serve({"open": open_, "generate": generate})
