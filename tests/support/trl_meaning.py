"""Random configurations of TRL's, and what TRL does with them.

The meaning is read from the source of TRL 1.16 (`trainer/*_config.py`, `trainer/*_trainer.py`) and of the
Trainer of transformers, not from our tables of names.
"""

import math
import random
from typing import Any

from oat.config.peers.theirs import CLASSES, fields_of

RECORDS = 70
NEVER = 1e30
"""A bound that no number reaches."""
RANDOM: dict[str, dict[str, list[Any]]] = {
    "": {
        "max_steps": [-1, 10, 101],
        "num_train_epochs": [1, 2.0, 0.5, 2.5],
        "learning_rate": [1e-6, 3e-5],
        "lr_scheduler_type": ["constant", "linear", "cosine", "constant_with_warmup"],
        "warmup_steps": [0, 7],
        "adam_beta1": [0.9, 0.8],
        "adam_beta2": [0.999, 0.95],
        "weight_decay": [0.0, 0.1],
        "max_grad_norm": [0.5, 1.0, 0.0],
        "bf16": [True, False, None],
        "seed": [42, 0],
        "save_strategy": ["steps", "no"],
        "save_steps": [100, 7],
        "eval_strategy": ["no"],
        "eval_steps": [50],
        "lora_alpha": [64],
        "logging_steps": [5],
        "gradient_checkpointing": [True, False],
    },
    "GRPOConfig": {
        "num_iterations": [1, 2],
        "temperature": [0.7, 1.0],
        "top_p": [0.9, 1.0],
        "top_k": [0, 40, None],
        "min_p": [None, 0.1],
        "max_completion_length": [256, 1024],
        "shuffle_dataset": [True, False],
        "beta": [0.0, 0.04, 0],
        "use_bias_correction_kl": [True, False],
        "loss_type": ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"],
        "epsilon": [0.1, 0.3],
        "epsilon_high": [None, 0.28],
        "delta": [None, 3.0],
        "importance_sampling_level": ["token", "sequence"],
        "scale_rewards": ["group", "batch", "none", True, False],
        "multi_objective_aggregation": ["sum_then_normalize", "normalize_then_sum"],
        "mask_truncated_completions": [True, False],
        "ref_model_sync_steps": [64],
        "ref_model_mixup_alpha": [0.5],
        "use_adaptive_entropy": [True, False],
        "entropy_coef": [0.0, 0.01],
        "entropy_target": [0.3],
        "entropy_coef_max": [0.5],
        "entropy_coef_delta": [0.01],
        "top_entropy_quantile": [0.2, 1.0],
        "off_policy_mask_threshold": [None, 0.5],
        "vllm_importance_sampling_correction": [True, False],
        "vllm_importance_sampling_clip_max": [2.0],
        "sapo_temperature_pos": [0.9],
        "vespo_k_pos": [2.5],
    },
    "DPOConfig": {
        "beta": [0.1, 0.3],
        "loss_type": [
            *(
                "sigmoid",
                "hinge",
                "ipo",
                "exo_pair",
                "nca_pair",
                "robust",
                "sppo_hard",
                "aot",
                "aot_unpaired",
            ),
            *("apo_zero", "apo_down", "discopop", "sft", ["sigmoid"], ["ipo"]),
        ],
        "label_smoothing": [0.1],
        "ld_alpha": [None, 0.5],
        "discopop_tau": [0.1],
        "max_length": [None, 512],
        "max_prompt_length": [128],
        "truncation_mode": ["keep_start", "keep_end"],
        "sync_ref_model": [True, False],
        "ref_model_sync_steps": [64],
        "ref_model_mixup_alpha": [0.5],
    },
    "RewardConfig": {"center_rewards_coefficient": [None, 0.01], "max_length": [None, 512]},
    "SFTConfig": {
        "max_length": [None, 512],
        "truncation_mode": ["keep_start", "keep_end"],
        "packing": [False],
        "loss_type": ["nll", "chunked_nll"],
        "shuffle_dataset": [True],
    },
}
"""For each of TRL's classes fields with plausible values; "": for all of them."""


def drawn(cls: str, draw: random.Random) -> dict[str, Any]:
    """Return a random configuration that TRL accepts."""
    given = {
        name: draw.choice(values)
        for name, values in {**RANDOM[""], **RANDOM[cls]}.items()
        if draw.random() < 0.35
    }
    passes = draw.choice([1, 2, 4])
    sizes = {"per_device_train_batch_size": draw.choice([2, 4, 8]), "gradient_accumulation_steps": passes}
    if cls == "GRPOConfig":
        times = draw.choice([1, 2, 4])
        responses = sizes["per_device_train_batch_size"] * passes * times
        by = draw.choice(["steps_per_generation", "generation_batch_size", ""]) if times > 1 else ""
        responses = responses if by else responses // times
        given |= {by: passes * times if by == "steps_per_generation" else responses} if by else {}
        given["num_generations"] = draw.choice([n for n in (2, 4, 8) if responses % n == 0])
        if given.get("loss_type") == "cispo" and "epsilon" in given:
            given |= {"epsilon": 3.0, "epsilon_high": draw.choice([None, 5.0])}
        if given.get("loss_type") in ("cispo", "sapo", "vespo", "luspo"):
            given.pop("delta", None)
        if given.get("beta"):
            given["sync_ref_model"] = draw.choice([True, False])
    elif "exo" in str(given.get("loss_type")):
        given["label_smoothing"] = 0.1
    given = {"learning_rate": 1e-5, "weight_decay": 0.0, "bf16": False, **given}
    if draw.random() < 0.7 or "steps_per_generation" in given or "generation_batch_size" in given:
        given |= sizes
    elif cls == "GRPOConfig":
        given["num_generations"] = 8
    return dict(draw.sample(list(given.items()), len(given)))


def with_defaults(cls: str, given: dict[str, Any]) -> dict[str, Any]:
    return {**{name: what["default"] for name, what in fields_of(cls).items()}, **given}


def shared(cls: str, given: dict[str, Any], steps: int, chunks: int) -> dict[str, Any]:
    """Return what TRL does with the fields that all configurations have.

    Args:
        steps: TRL's optimiser steps in a step of the run.
        chunks: steps of the run in one pass over the data.
    """
    trl = with_defaults(cls, given)
    by_steps, epochs = trl["max_steps"] > 0, trl["num_train_epochs"]
    ends = math.ceil(trl["max_steps"] / steps) if by_steps else None
    if not by_steps and epochs % 1:
        ends = math.ceil(math.ceil(epochs * chunks * steps) / steps)
    schedule = trl["lr_scheduler_type"]
    return {
        "stop.max_steps": ends,
        "prompts.epochs": None if by_steps or epochs % 1 else int(epochs),
        "learner.learning_rate": trl["learning_rate"],
        "learner.schedule": "constant" if schedule == "constant_with_warmup" else schedule,
        "learner.warmup_steps": trl["warmup_steps"],
        "learner.betas": [trl["adam_beta1"], trl["adam_beta2"]],
        "learner.weight_decay": trl["weight_decay"],
        "learner.max_grad_norm": trl["max_grad_norm"] or NEVER,
        "learner.autocast": None if trl["bf16"] is False else "bfloat16",
        "algorithm.epochs": trl.get("num_iterations", 1),
    }


def group(given: dict[str, Any]) -> dict[str, Any]:
    """Return what GRPOTrainer does."""
    trl = with_defaults("GRPOConfig", given)
    rows, accumulated = trl["per_device_train_batch_size"], trl["gradient_accumulation_steps"]
    generated = trl["generation_batch_size"]
    passes = trl["steps_per_generation"] or (generated // rows if generated else accumulated)
    generated = generated or rows * passes
    minibatches = passes // accumulated
    steps = minibatches * trl["num_iterations"]
    prompts = generated // trl["num_generations"]
    loss, beta = trl["loss_type"], trl["beta"]
    is_clipped = loss not in ("cispo", "sapo", "vespo")
    by_token = trl["importance_sampling_level"] == "token"
    high = trl["epsilon"] if trl["epsilon_high"] is None else trl["epsilon_high"]
    scaled = {True: "group", False: "none"}.get(trl["scale_rewards"], trl["scale_rewards"])
    own = trl["multi_objective_aggregation"] == "normalize_then_sum"
    follows = trl["sync_ref_model"] and beta
    adapts = trl["use_adaptive_entropy"]
    meaning = {
        **shared("GRPOConfig", given, steps, RECORDS // prompts),
        "algorithm.name": loss if loss not in ("grpo", "dapo", "bnpo") else "grpo",
        "algorithm.prompts": prompts,
        "algorithm.samples": trl["num_generations"],
        "algorithm.minibatches": minibatches,
        "algorithm.policy_loss": (loss if not is_clipped else "clipped" if by_token else "gspo"),
        "algorithm.rewards.sources": "group" if own else "sum",
        "algorithm.whiten": own,
        "algorithm.advantage": "none"
        if own
        else {"group": "group_norm", "batch": "batch_norm", "none": "group_mean"}[scaled],
        "algorithm.rewards.truncated": "mask" if trl["mask_truncated_completions"] else "keep",
        "algorithm.kl_coef": beta,
        "algorithm.kl_reward_coef": 0,
        "algorithm.kl_estimator": "k3",
        "algorithm.kl_unbiased": bool(beta and trl["use_bias_correction_kl"]),
        "algorithm.entropy.coef": trl["entropy_coef"],
        "algorithm.entropy.target": trl["entropy_target"] if adapts else None,
        "algorithm.tokens.high_entropy_share": trl["top_entropy_quantile"],
        "algorithm.correction.form": "none",
        "algorithm.correction.off_policy_bound": trl["off_policy_mask_threshold"],
        "model.reference_update.every": math.ceil(trl["ref_model_sync_steps"] / steps) if follows else None,
        "model.reference_update.mix": trl["ref_model_mixup_alpha"] if follows else None,
        "sampling.max_new_tokens": trl["max_completion_length"],
        "sampling.temperature": trl["temperature"],
        "sampling.top_p": trl["top_p"],
        "sampling.top_k": trl["top_k"] or 0,
        "sampling.min_p": trl["min_p"] or 0.0,
        "prompts.shuffle": trl["shuffle_dataset"],
        "prompts.max_tokens": None,
    }
    return {**meaning, **of_loss(trl, loss, high)}


def of_loss(trl: dict[str, Any], loss: str, high: float) -> dict[str, Any]:
    """Return what GRPOTrainer does that depends on the loss and on other switches.

    Args:
        high: the upper bound of the ratio, or of its excess.
    """
    meaning: dict[str, Any] = {}
    is_clipped = loss not in ("cispo", "sapo", "vespo")
    by_token = trl["importance_sampling_level"] == "token"
    if loss != "dr_grpo":
        sums = {"grpo": "sequence", "sapo": "sequence", "luspo": "sequence_sum"}
        meaning["algorithm.reduction"] = sums.get(loss, "token")
    if is_clipped:
        meaning |= {"algorithm.clip_low": trl["epsilon"], "algorithm.clip_high": high}
        meaning |= {"algorithm.dual_clip": trl["delta"] if by_token else None}
    if loss == "cispo" and high > 1:
        meaning |= {"algorithm.clip_low": None, "algorithm.clip_high": high - 1}
    if loss == "sapo":
        meaning["algorithm.smooth.tau"] = trl["sapo_temperature_pos"]
    if loss == "vespo":
        meaning["algorithm.smooth.power"] = trl["vespo_k_pos"]
    if trl["use_adaptive_entropy"]:
        meaning["algorithm.entropy.highest"] = trl["entropy_coef_max"]
        meaning["algorithm.entropy.step"] = trl["entropy_coef_delta"]
    return meaning


NAMES = {"sigmoid": "dpo", "hinge": "slic", "exo_pair": "exo", "nca_pair": "nca", "robust": "robust_dpo"}
NAMES |= {"aot_unpaired": "aot"}


def recorded(cls: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return what the trainers do that learn from recorded responses."""
    trl = with_defaults(cls, given)
    rows = trl["per_device_train_batch_size"] * trl["gradient_accumulation_steps"]
    meaning = {
        **shared(cls, given, 1, math.ceil(RECORDS / rows)),
        "algorithm.name": CLASSES[cls],
        "algorithm.prompts": rows,
        "algorithm.minibatches": 1,
        "prompts.max_tokens": trl["max_length"],
    }
    if trl["max_length"] is not None:
        cuts = {"keep_start": "cut_response_end", "keep_end": "cut_prompt_start", "": "leave_out"}
        meaning["prompts.too_long"] = cuts[trl.get("truncation_mode", "")]
    if cls == "RewardConfig":
        return {**meaning, "algorithm.centring": trl["center_rewards_coefficient"] or 0.0}
    if cls == "SFTConfig":
        return {**meaning, "algorithm.reduction": "token"}
    loss = trl["loss_type"] if isinstance(trl["loss_type"], str) else trl["loss_type"][0]
    meaning["algorithm.name"] = NAMES.get(loss, loss)
    if loss == "sft":
        return {**meaning, "algorithm.reduction": "token", "prompts.responses": ["chosen", "rejected"]}
    meaning["algorithm.beta"] = trl["beta"]
    if loss in ("sigmoid", "robust", "exo_pair"):
        meaning["algorithm.label_smoothing"] = 0.0 if loss == "sigmoid" else trl["label_smoothing"]
    if loss in ("sigmoid", "robust"):
        meaning["algorithm.ld_alpha"] = 1.0 if trl["ld_alpha"] is None else trl["ld_alpha"]
    if loss.startswith("aot"):
        meaning["algorithm.form"] = "unpaired" if loss == "aot_unpaired" else "paired"
    if loss == "discopop":
        meaning["algorithm.tau"] = trl["discopop_tau"]
    if loss == "ipo":
        meaning["algorithm.normalize"] = "mean"
    follows = trl["sync_ref_model"]
    meaning["model.reference_update.every"] = trl["ref_model_sync_steps"] if follows else None
    meaning["model.reference_update.mix"] = trl["ref_model_mixup_alpha"] if follows else None
    return meaning
