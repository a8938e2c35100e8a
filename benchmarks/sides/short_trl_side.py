"""The side of TRL in `benchmarks/short.py`: GRPO on the quickstart's task, one step for each question."""

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from task import Paced, serve
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

held: dict[str, Any] = {}


class Turns(TrainerCallback):
    def __init__(self, turn: Any):
        self.turn = turn

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.turn()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.turn()


def train(folder: str, threads: int, micro: int, samples: int = 8, prompts: int = 64) -> dict[str, Any]:
    """Begin to train on the start and the prompts in a folder. If a training is in progress, end it first.

    Args:
        micro: number of rows per forward pass.
    """
    torch.set_num_threads(threads)
    if "paced" in held:
        held.pop("paced").close()
    lines = (Path(folder) / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = prompts * samples
    config = GRPOConfig(
        output_dir=f"{folder}/trl",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        generation_batch_size=rows,
        num_generations=samples,
        max_completion_length=4,
        temperature=1.0,
        top_k=0,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        max_steps=1000,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(f"{folder}/start", dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(f"{folder}/start"),
        reward_funcs=rewards,
    )

    def work(turn: Any) -> None:
        trainer.add_callback(Turns(turn))
        trainer.train()

    held["paced"] = Paced(work)
    return {"torch": torch.__version__, "trl": version("trl")}


def rewards(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def steps(count: int, seed: int = 0) -> dict[str, Any]:
    """Make steps, and return their seconds, with and without waits."""
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        held["paced"].step()
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_s": time.process_time() - cpu,
        "steps": count,
    }


if __name__ == "__main__":
    serve({"train": train, "steps": steps})
