"""The side of TRL's PPO trainer in `benchmarks/ppo.py`: complete steps with TRL's generation."""

import json
import time
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from task import RATE, Memory, Paced, serve, touch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

held: dict[str, Any] = {}
MOST_STEPS = 200


class Trainer(PPOTrainer):
    """A PPO trainer that keeps the metrics of its last step."""

    found: dict[str, float]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self.found = logs
        super().log(logs, *args, **kwargs)


class Turns(TrainerCallback):
    def __init__(self, turn: Any):
        self.turn = turn

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.turn()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.turn()


def open_(folder: str, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    held.update(folder=folder, imported=Memory())
    return {"torch": torch.__version__, "transformers": version("transformers"), "trl": version("trl")}


def train(prompt_count: int, samples: int, cap: int, micro: int, made: int) -> dict[str, Any]:
    """Begin to train. If a training is in progress, end it first.

    Args:
        prompt_count: number of different prompts of a step. TRL shuffles its data, so that this is the number
            of `oat`'s steps, and TRL's may differ. It computes every row, however many are equal.
        samples: number of responses per prompt.
        cap: largest number of tokens of a response.
        micro: number of rows per forward pass with a gradient.
        made: number of rows that are generated and scored together.
    """
    if "paced" in held:
        held.pop("paced").close()
        held.pop("trainer")
    folder, rows = Path(held["folder"]), prompt_count * samples
    tokenizer = AutoTokenizer.from_pretrained(folder / "start", padding_side="left")
    models = {
        name: kind.from_pretrained(folder / start, dtype=torch.float32)
        for name, kind, start in (
            ("model", AutoModelForCausalLM, "start"),
            ("ref_model", AutoModelForCausalLM, "start"),
            ("value_model", AutoModelForSequenceClassification, "judge"),
            ("reward_model", AutoModelForSequenceClassification, "judge"),
        )
    }
    for model in models.values():
        touch(model)
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    ids = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    trainer = Trainer(
        config_of(rows, cap, micro, made),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"input_ids": list(islice(cycle(ids), rows * MOST_STEPS))}),
        callbacks=[],
        **models,
    )
    held["trainer"] = trainer

    def work(turn: Any) -> None:
        trainer.add_callback(Turns(turn))
        trainer.train()

    held["paced"] = Paced(work)
    return {}


def config_of(rows: int, cap: int, micro: int, made: int) -> PPOConfig:
    """Return the trainer's configuration for steps with `rows` rows."""
    return PPOConfig(
        output_dir=f"{held['folder']}/trl",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        local_rollout_forward_batch_size=made,
        num_mini_batches=1,
        num_ppo_epochs=4,
        total_episodes=rows * MOST_STEPS,
        response_length=cap,
        stop_token="eos",
        temperature=1.0,
        kl_coef=0.05,
        vf_coef=1.0,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        num_sample_generations=0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def steps(count: int, seed: int = 0) -> dict[str, Any]:
    """Make steps, and return their seconds, with and without waits, memory, and what the last step
    measured."""
    used = Memory()
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        held["lengths"] = []
        held["paced"].step()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    found = held["trainer"].found
    return {
        "seconds": seconds,
        "cpu_s": cpu,
        "steps": count,
        "peak_gb": used.peak_above(held["imported"]),
        "length": float(torch.cat(held["lengths"]).float().mean()),
        "score": found["objective/scores"],
        "value_loss": found["loss/value_avg"],
        "kl": found["objective/kl"],
    }


def counted(stop: int, pad: int, responses: torch.Tensor) -> torch.Tensor:
    """Truncate responses as TRL does, and keep their lengths."""
    kept = truncate(stop, pad, responses)
    held["lengths"].append((kept != pad).sum(1))
    return kept


if __name__ == "__main__":
    truncate = ppo_trainer.truncate_response
    ppo_trainer.truncate_response = counted
    serve({"open": open_, "train": train, "steps": steps})
