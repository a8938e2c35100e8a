"""The names and defaults of the settings of our algorithms and engines, which messages propose. This list is
made from their classes by `python tests/settings_page.py`, so that a message does not import them."""

from typing import Any

PART_FIELDS: dict[str, dict[str, Any]] = {
    "algorithm": {
        "prompts": 64,
        "samples": 2,
        "epochs": 1,
        "minibatches": 1,
        "ties": "mask",
        "abstentions": "mask",
        "beta": 0.1,
        "label_smoothing": 0.0,
        "ld_alpha": 1.0,
        "length_alpha": 0.0,
        "positive_lambda": 0.0,
        "sft_weight": 0.0,
        "normalize": "mean",
        "gamma_beta_ratio": 0.5,
        "loss": "sigmoid",
        "tau": 0.05,
        "form": "paired",
        "alpha": 5e-06,
        "threshold": 0.5,
        "lambda_desirable": 1.0,
        "lambda_undesirable": 1.0,
        "reduction": "sequence",
        "duplicates": "step",
        "advantage": "group_norm",
        "credit": "response",
        "turn_gamma": 1.0,
        "vine": ...,
        "vine.branches": 3,
        "vine.delimiter": "\n",
        "vine.most_steps": 8,
        "std_eps": 0.0001,
        "kl_reward_coef": 0.0,
        "kl_reward_estimator": "k1",
        "gamma": 1.0,
        "whiten": False,
        "whiten_over": "step",
        "advantage_clip": None,
        "old_from": "policy",
        "policy_loss": "clipped",
        "smooth": ...,
        "smooth.tau": 1.0,
        "smooth.negative_tau": 1.05,
        "smooth.power": 2.0,
        "smooth.decay": 3.0,
        "smooth.negative_power": 3.0,
        "smooth.negative_decay": 2.0,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "drift_coef": 0.0,
        "kl_coef": 0.0,
        "kl_estimator": "k3",
        "kl_unbiased": False,
        "kl_max_log_ratio": None,
        "kl_target": None,
        "kl_horizon": 10000,
        "target_kl": None,
        "rewards": ...,
        "rewards.sources": "sum",
        "rewards.source_weights": ...,
        "rewards.missing_end_penalty": 0.0,
        "rewards.missing_end": "length",
        "rewards.overlong_penalty": 0.0,
        "rewards.overlong_from": None,
        "rewards.overlong_to": None,
        "rewards.truncated": "keep",
        "rewards.scale": 1.0,
        "rewards.normalise": "none",
        "rewards.clip": None,
        "rewards.whiten": False,
        "rewards.flat_group_weight": None,
        "correction": ...,
        "correction.form": "none",
        "correction.level": "token",
        "correction.low": None,
        "correction.high": None,
        "correction.off_policy_bound": None,
        "entropy": ...,
        "entropy.coef": 0.0,
        "entropy.target": None,
        "entropy.step": 0.005,
        "entropy.highest": 1.0,
        "tokens": ...,
        "tokens.high_entropy_share": 1.0,
        "tokens.high_entropy_per": "step",
        "tokens.covariance_clip": 0.0,
        "tokens.covariance_low": 1.0,
        "tokens.covariance_high": 5.0,
        "tokens.covariance_kl": 0.0,
        "tokens.covariance_kl_coef": 1.0,
        "max_length": None,
        "lam": 0.95,
        "end": "last_token",
        "response_length": None,
        "value_coef": 1.0,
        "value_clip": 0.2,
        "centring": 0.0,
        "margin_key": None,
        "held_out": 0.0,
    },
    "engine": {
        "max_rows": 256,
        "cache_gb": 4.0,
        "deterministic": False,
        "dtype": "float32",
        "own_reference": False,
        "threads": None,
    },
}
"""For each section the names of its fields, with the default that most of the parts have; `...` is a section.
In a section that is null by default the fields have the defaults that they get if it is there."""

OTHER_DEFAULTS: dict[str, dict[str, Any]] = {
    "simpo": {
        "beta": 2.0,
    },
    "bnf": {
        "normalize": "shorter",
    },
    "exo": {
        "label_smoothing": 0.001,
    },
    "cpo": {
        "sft_weight": 1.0,
    },
    "kto": {
        "samples": 1,
    },
    "sft": {
        "samples": 1,
        "threshold": None,
    },
    "grpo": {
        "prompts": 16,
        "samples": 8,
    },
    "dr_grpo": {
        "prompts": 16,
        "samples": 8,
        "advantage": "group_mean",
    },
    "rloo": {
        "prompts": 16,
        "samples": 8,
        "advantage": "leave_one_out",
        "reduction": "sequence_sum",
    },
    "reinforce_pp": {
        "prompts": 16,
        "samples": 1,
        "advantage": "none",
        "whiten": True,
        "reduction": "token",
    },
    "gspo": {
        "prompts": 16,
        "samples": 8,
        "policy_loss": "gspo",
        "clip_low": 0.0003,
        "clip_high": 0.0004,
    },
    "cispo": {
        "prompts": 16,
        "samples": 8,
        "policy_loss": "cispo",
        "clip_low": None,
        "clip_high": 4.0,
        "reduction": "token",
    },
    "cpgd": {
        "prompts": 16,
        "samples": 8,
        "advantage": "group_mean",
        "policy_loss": "cpgd",
        "drift_coef": 0.1,
    },
    "sapo": {
        "prompts": 16,
        "samples": 8,
        "policy_loss": "sapo",
    },
    "luspo": {
        "prompts": 16,
        "samples": 8,
        "policy_loss": "gspo",
        "clip_low": 0.002,
        "clip_high": 0.0025,
        "reduction": "sequence_sum",
    },
    "vespo": {
        "prompts": 16,
        "samples": 8,
        "policy_loss": "vespo",
        "reduction": "token",
    },
    "ppo": {
        "prompts": 16,
        "samples": 1,
        "advantage": "gae",
        "kl_reward_coef": 0.05,
        "whiten": True,
        "epochs": 4,
        "reduction": "token",
    },
    "frozen": {
        "prompts": 128,
    },
}
"""Defaults of single parts that are others."""

_READERS = (
    """prompts samples:
    dpo robust_dpo ipo slic simpo bnf exo nca apo_zero apo_down sppo_hard discopop aot orpo cpo xpo kto
    sft grpo dr_grpo rloo reinforce_pp gspo cispo cpgd sapo luspo vespo ppo frozen reward_model""",
    """epochs minibatches:
    dpo robust_dpo ipo slic simpo bnf exo nca apo_zero apo_down sppo_hard discopop aot orpo cpo xpo kto
    sft grpo dr_grpo rloo reinforce_pp gspo cispo cpgd sapo luspo vespo ppo reward_model""",
    """ties abstentions:
    dpo robust_dpo ipo slic simpo bnf exo nca apo_zero apo_down sppo_hard discopop aot orpo cpo xpo""",
    """beta:
    dpo robust_dpo ipo slic simpo exo nca apo_zero apo_down sppo_hard discopop aot orpo cpo xpo kto""",
    """label_smoothing:
    dpo robust_dpo simpo exo xpo""",
    """ld_alpha length_alpha positive_lambda:
    dpo robust_dpo xpo""",
    """sft_weight:
    dpo robust_dpo cpo xpo""",
    """normalize:
    ipo bnf""",
    """gamma_beta_ratio loss:
    simpo""",
    """tau:
    discopop""",
    """form:
    aot""",
    """alpha:
    xpo""",
    """threshold:
    kto sft""",
    """lambda_desirable lambda_undesirable:
    kto""",
    """reduction:
    sft grpo rloo reinforce_pp gspo cispo cpgd sapo luspo vespo ppo""",
    """duplicates:
    sft""",
    """advantage credit turn_gamma vine vine.branches vine.delimiter vine.most_steps std_eps kl_reward_coef
    kl_reward_estimator gamma whiten whiten_over advantage_clip old_from policy_loss smooth
    smooth.tau smooth.negative_tau smooth.power smooth.decay smooth.negative_power
    smooth.negative_decay clip_low clip_high dual_clip drift_coef kl_coef kl_estimator kl_unbiased
    kl_max_log_ratio kl_target kl_horizon target_kl rewards rewards.sources rewards.source_weights
    rewards.missing_end_penalty rewards.missing_end rewards.overlong_penalty rewards.overlong_from
    rewards.overlong_to rewards.truncated rewards.scale rewards.normalise rewards.clip
    rewards.whiten rewards.flat_group_weight correction correction.form correction.level
    correction.low correction.high correction.off_policy_bound entropy entropy.coef entropy.target
    entropy.step entropy.highest tokens tokens.high_entropy_share tokens.high_entropy_per
    tokens.covariance_clip tokens.covariance_low tokens.covariance_high tokens.covariance_kl
    tokens.covariance_kl_coef:
    grpo dr_grpo rloo reinforce_pp gspo cispo cpgd sapo luspo vespo ppo""",
    """max_length:
    dr_grpo""",
    """lam end response_length value_coef value_clip:
    ppo""",
    """centring margin_key held_out:
    reward_model""",
)

READERS = {
    field: tuple(algorithms.split())
    for fields, _, algorithms in (group.partition(":") for group in _READERS)
    for field in fields.split()
}
"""The algorithms that read each setting of the section `algorithm`."""
