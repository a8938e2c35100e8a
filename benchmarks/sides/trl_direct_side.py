"""The side of TRL's DPO trainer, on recorded pairs."""

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from task import Memory, Paced, digest, pairs, serve, touch
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer

held: dict[str, Any] = {}


class Trainer(DPOTrainer):
    """A DPO trainer that takes the pairs in their order, and records the loss and the tokens of a step."""

    loss = 0.0
    positions = 0
    rows: list[list[int]]

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.positions += inputs["input_ids"].numel()
        self.rows += [
            ids[mask.bool()].tolist()
            for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ]
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.loss += float(loss)
        return loss


class Turns(TrainerCallback):
    def __init__(self, turn: Any):
        self.turn = turn

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.turn()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.turn()


def open_(model: str, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    held["model"] = model
    held["imported"] = Memory()
    return {"torch": torch.__version__, "transformers": version("transformers"), "trl": version("trl")}


def train(pair_count: int, steps: int, cap: int, mean: int, rate: float, micro: int) -> dict[str, Any]:
    """Begin to train. If a training is in progress, end it first. Return the seconds until all pairs are
    prepared, with the reference's log-probabilities.

    Args:
        pair_count: number of pairs per step.
        cap: largest number of tokens of a response.
        mean: mean number of tokens of a response.
        rate: learning rate.
        micro: number of pairs per forward pass.
    """
    if "paced" in held:
        held.pop("paced").close()
        held.pop("trainer")
    lm = AutoModelForCausalLM.from_pretrained(held["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(held["model"])
    touch(lm)
    config = DPOConfig(
        output_dir=str(Path(held["model"]) / "trl"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=pair_count // micro,
        precompute_ref_log_probs=True,
        max_length=None,
        beta=0.1,
        learning_rate=rate,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=steps,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    begin = time.perf_counter()
    dataset = Dataset.from_list(pairs(pair_count * steps, lm.config.vocab_size, mean=mean, cap=cap))
    trainer = Trainer(lm, args=config, train_dataset=dataset, processing_class=tokenizer)
    held.update(trainer=trainer, pair_count=pair_count)
    seconds = time.perf_counter() - begin

    def work(turn: Any) -> None:
        trainer.add_callback(Turns(turn))
        trainer.train()

    held["paced"] = Paced(work)
    return {"seconds": seconds}


def step(seed: int = 0) -> dict[str, Any]:
    trainer = held["trainer"]
    trainer.loss = 0.0
    trainer.positions = 0
    trainer.rows = []
    used = Memory()
    seconds = held["paced"].step()
    tokens = sum(map(len, trainer.rows))
    return {
        "seconds": seconds,
        "samples": held["pair_count"],
        "tokens": tokens,
        "padding": 1 - tokens / trainer.positions,
        "peak_gb": used.peak_above(held["imported"]),
        "loss": trainer.loss,
        "ids": digest(trainer.rows),
    }


serve({"open": open_, "train": train, "step": step})
