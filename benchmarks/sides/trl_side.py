"""The side of TRL's GRPO trainer: complete steps with TRL's generation, or updates on given responses."""

import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from task import RATE, Memory, Paced, prompts, ragged, reward, serve, text, touch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

held: dict[str, Any] = {}


class Trainer(GRPOTrainer):
    """A GRPO trainer that counts the positions of generation and of the update's forward passes, and the
    seconds until the responses of a step are prepared."""

    positions = tokens = made_positions = made_tokens = 0
    preparing = grad_norm = 0.0

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.made_positions += len(prompt_ids) * (max(map(len, prompt_ids)) + max(map(len, completion_ids)))
        self.made_tokens += sum(map(len, prompt_ids)) + sum(map(len, completion_ids))
        return completion_ids, logprobs

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        begin = time.perf_counter()
        inputs = super()._prepare_inputs(generation_batch)
        self.preparing += time.perf_counter() - begin
        return inputs

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.positions += input_ids.numel()
        self.tokens += int(attention_mask.sum())
        return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kwargs)

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self.grad_norm = float(norm)
        return norm


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


def train(
    prompt_count: int, samples: int, cap: int, micro: int, made: int | None = None, mean: int | None = None
) -> dict[str, Any]:
    """Begin to train. If a training is in progress, end it first.

    Args:
        samples: number of responses per prompt.
        cap: largest number of tokens of a response.
        micro: number of rows per forward pass.
        made: number of rows that are generated together and padded to one length; None: all rows of a step,
            the trainer's default.
        mean: mean number of tokens of given responses with geometric lengths; None: TRL generates the
            responses.
    """
    if "paced" in held:
        held.pop("paced").close()
        held.pop("trainer")
    lm = AutoModelForCausalLM.from_pretrained(held["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(held["model"])
    touch(lm)
    held["loaded"] = Memory()
    vocabulary = lm.config.vocab_size
    inputs = prompts(prompt_count, vocabulary)
    rollout = None
    if mean is not None:
        responses = ragged(prompt_count * samples, vocabulary, mean=mean, cap=cap)
        given = {
            text(ids): responses[number * samples : (number + 1) * samples]
            for number, ids in enumerate(inputs)
        }
        rollout = rollout_of(given, tokenizer)
    kinds: dict[str, Any] = {
        "args": config_of(prompt_count * samples, samples, cap, micro, made),
        "train_dataset": Dataset.from_dict({"prompt": list(dict.fromkeys(map(text, inputs)))}),
        "processing_class": tokenizer,
        "reward_funcs": rewards,
    }
    trainer = Trainer(lm, **kinds, rollout_func=rollout)
    held["trainer"] = trainer

    def work(turn: Any) -> None:
        trainer.add_callback(Turns(turn))
        trainer.train()

    held["paced"] = Paced(work)
    return {}


def rollout_of(given: dict[str, list[np.ndarray]], tokenizer: Any) -> Callable[..., dict[str, Any]]:
    """Return a `rollout_func` for TRL. It answers the repetitions of a prompt with the given responses in a
    cycle."""

    def rollout(asked: list[str], trainer: Any) -> dict[str, Any]:
        chosen = [given[prompt][place % len(given[prompt])].tolist() for place, prompt in enumerate(asked)]
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in asked],
            "completion_ids": chosen,
            "logprobs": [[-8.0] * len(one) for one in chosen],
        }

    return rollout


def config_of(rows: int, samples: int, cap: int, micro: int, made: int | None) -> GRPOConfig:
    """Return the trainer's configuration for steps with `rows` rows."""
    return GRPOConfig(
        output_dir=str(Path(held["model"]) / "trl"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        generation_batch_size=made or rows,
        num_generations=samples,
        max_completion_length=cap,
        temperature=1.0,
        top_k=0,
        learning_rate=RATE,
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
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def step(seed: int = 0) -> dict[str, Any]:
    trainer = held["trainer"]
    trainer.preparing = 0.0
    trainer.positions = 0
    trainer.tokens = 0
    trainer.made_positions = 0
    trainer.made_tokens = 0
    used = Memory()
    seconds = held["paced"].step()
    rows = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    return {
        "seconds": seconds,
        "update_seconds": seconds - trainer.preparing,
        "samples": rows,
        "tokens": trainer.tokens,
        "padding": 1 - trainer.tokens / trainer.positions,
        "generation_padding": 1 - trainer.made_tokens / max(1, trainer.made_positions),
        "update_gb": used.peak_above(held["loaded"]),
        "peak_gb": used.peak_above(held["imported"]),
        "grad_norm": trainer.grad_norm,
    }


def rewards(completions: list[str], **columns: Any) -> list[float]:
    return [reward(completion) for completion in completions]


serve({"open": open_, "train": train, "step": step})
