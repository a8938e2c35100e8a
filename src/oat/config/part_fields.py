"""The names of the settings of our algorithms and engines, which messages propose. This list is made from
their classes by `python tests/settings_page.py`, so that a message does not import them."""

PART_FIELDS = {
    "algorithm": (
        "prompts",
        "samples",
        "epochs",
        "minibatches",
        "ties",
        "abstentions",
        "beta",
        "label_smoothing",
        "ld_alpha",
        "length_alpha",
        "positive_lambda",
        "sft_weight",
        "normalize",
        "gamma_beta_ratio",
        "loss",
        "tau",
        "form",
        "alpha",
        "threshold",
        "lambda_desirable",
        "lambda_undesirable",
        "reduction",
        "duplicates",
        "advantage",
        "credit",
        "turn_gamma",
        "vine",
        "vine.branches",
        "vine.delimiter",
        "vine.most_steps",
        "std_eps",
        "kl_reward_coef",
        "kl_reward_estimator",
        "gamma",
        "whiten",
        "whiten_over",
        "advantage_clip",
        "old_from",
        "policy_loss",
        "smooth",
        "smooth.tau",
        "smooth.negative_tau",
        "smooth.power",
        "smooth.decay",
        "smooth.negative_power",
        "smooth.negative_decay",
        "clip_low",
        "clip_high",
        "dual_clip",
        "drift_coef",
        "kl_coef",
        "kl_estimator",
        "kl_unbiased",
        "kl_max_log_ratio",
        "kl_target",
        "kl_horizon",
        "target_kl",
        "rewards",
        "rewards.sources",
        "rewards.source_weights",
        "rewards.missing_end_penalty",
        "rewards.missing_end",
        "rewards.overlong_penalty",
        "rewards.overlong_from",
        "rewards.overlong_to",
        "rewards.truncated",
        "rewards.scale",
        "rewards.normalise",
        "rewards.clip",
        "rewards.whiten",
        "rewards.flat_group_weight",
        "correction",
        "correction.form",
        "correction.level",
        "correction.low",
        "correction.high",
        "correction.off_policy_bound",
        "entropy",
        "entropy.coef",
        "entropy.target",
        "entropy.step",
        "entropy.highest",
        "tokens",
        "tokens.high_entropy_share",
        "tokens.high_entropy_per",
        "tokens.covariance_clip",
        "tokens.covariance_low",
        "tokens.covariance_high",
        "tokens.covariance_kl",
        "tokens.covariance_kl_coef",
        "max_length",
        "lam",
        "end",
        "response_length",
        "value_coef",
        "value_clip",
        "centring",
        "margin_key",
        "held_out",
    ),
    "engine": (
        "max_rows",
        "cache_gb",
        "deterministic",
        "dtype",
        "own_reference",
        "threads",
    ),
}

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
